"""Encoder–decoders against the equations in plain torch, and the visible tokens."""

import pytest
import torch
import torch.nn.functional as F

from megasparse.model.build import build_model
from megasparse.ops.random import RngContext
from tests.helpers.comparing import error, gradients
from tests.helpers.models import attention, padded_pairs, random_tokens, small_pair, training_draws
from tests.helpers.peak_memory import PeakMemory

S = 40


class Equations:
    """The reversible encoder–decoder with full attention and learned positions, from its definition: every layer one
    after the other in plain torch, in the weights' own precision."""

    def __init__(self, weights, heads):
        self.weights, self.heads = weights, heads

    def __call__(self, source, target, padding):
        w, real = self.weights, source != padding
        x = w["encoder.embedding.weight" if "encoder.embedding.weight" in w else "embedding.weight"][source]
        x1 = x2 = e = x + w["encoder.embedding.positions.table"][: source.shape[1]]
        for layer in range(2):
            name = f"encoder.blocks.{layer}"
            x1 = x1 + self.attention(f"{name}.attention", x2, None, real[:, None, None])
            x2 = x2 + self.feed_forward(f"{name}.feed_forward", x1)
        memory = self.norm("encoder.norm", (x1 + x2 - e) / 2)

        before = w["embedding.weight"][target[:, :-1]]
        x = torch.cat([w["embedding.start"].expand(len(target), 1, -1), before], dim=1)
        x1 = x2 = e = x + w["embedding.positions.table"][: target.shape[1]]
        earlier = torch.ones(target.shape[1], target.shape[1], dtype=torch.bool).tril()
        for layer in range(3):
            name = f"blocks.{layer}"
            y1 = x1 + self.attention(f"{name}.attention", x2, None, earlier)
            y2 = x2 + self.attention(f"{name}.cross_attention", y1, memory, real[:, None, None])
            z1 = y1 + self.feed_forward(f"{name}.feed_forward", y2)
            x1, x2 = y2, z1
        predicted, scale = target != padding, 1.0
        if "head.weight" in w:
            x = torch.cat([x1, x2 - e], dim=-1)
        else:
            x, scale = (x1 + x2 - e) / 2, x1.shape[-1] ** -0.5
        x = F.layer_norm(x, x.shape[-1:], w["head.norm_weight"], w["head.norm_bias"], 1e-5)
        logits = scale * x @ w.get("head.weight", w["embedding.weight"]).T
        return F.cross_entropy(logits[predicted], target[predicted])

    def norm(self, name, x):
        return F.layer_norm(x, x.shape[-1:], self.weights[f"{name}.weight"], self.weights[f"{name}.bias"], 1e-5)

    def attention(self, name, x, memory, seen):
        x = self.norm(f"{name}.norm", x)
        memory = x if memory is None else memory
        given = {"query": x, "key": memory, "value": memory}
        q, k, v = ((y @ self.weights[f"{name}.attention.{part}.weight"].T) for part, y in given.items())
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in (q, k, v))
        score = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        out = score.masked_fill(~seen, -torch.inf).softmax(-1) @ v
        return out.transpose(1, 2).flatten(2) @ self.weights[f"{name}.attention.output.weight"].T

    def feed_forward(self, name, x):
        w = {part: self.weights[f"{name}.feed_forward.{part}"] for part in ("up", "up_bias", "down", "down_bias")}
        hidden = F.relu(self.norm(f"{name}.norm", x) @ w["up"].T + w["up_bias"])
        return hidden @ w["down"].T + w["down_bias"]


@pytest.mark.parametrize(("shared", "tied"), [(True, False), (False, False), (True, True)])
def test_loss_and_gradients_equal_the_equations(shared, tied):
    positions = {"kind": "learned"}
    source = {"positions": positions, "attention": attention("full"), "shared_embedding": shared}
    model = build_model(small_pair(("full",), positions=positions, source=source, tied_embeddings=tied), 0)
    for bias in (p for p in model.parameters() if p.dim() == 1):
        torch.nn.init.normal_(bias, mean=bias.mean().item(), std=0.1, generator=torch.Generator().manual_seed(1))
    tokens = padded_pairs(3, 30)
    loss, ours = gradients(model, tokens)
    weights = {name: p.detach().double().requires_grad_() for name, p in model.named_parameters()}
    exact = Equations(weights, heads=2)(tokens[:, :S], tokens[:, S:], 258)
    exact.backward()
    assert loss.item() == pytest.approx(exact.item(), rel=1e-6)
    assert ours.keys() == weights.keys() and len(weights["encoder.embedding.positions.table"]) == S
    assert error(ours, {name: w.grad for name, w in weights.items()}) < 1e-5


def test_gradients_equal_stored_activations():
    ours, stored = (build_model(small_pair(dropout=0.1, activations=kind), 0) for kind in ("reversible", "stored"))
    tokens = padded_pairs(3, 100)
    (loss, a), (exact_loss, b) = gradients(ours, tokens), gradients(stored, tokens)
    assert loss == exact_loss
    assert a.keys() == b.keys() == dict(ours.named_parameters()).keys()
    assert error(a, b) < 1e-5


@pytest.mark.parametrize("activations", ["checkpoint", "checkpoint_cpu"])
def test_checkpointed_ordinary_blocks_are_as_stored_ones(activations):
    settings = dict(blocks="ordinary", dropout=0.1, tied_embeddings=True)
    ours, stored = (build_model(small_pair(**settings, activations=kind), 0) for kind in (activations, "stored"))
    tokens = padded_pairs(2, 50)
    assert error(gradients(ours, tokens)[1], gradients(stored, tokens)[1]) < 1e-6


def test_both_stacks_add_their_auxiliary_losses_and_statistics():
    lha = attention("lha", lha={"utility": "sampled"})
    config = small_pair(attention=lha, source={"attention": lha})
    tokens = padded_pairs(2, 50)
    model = build_model(config, 0)
    _, statistics = model(tokens, training_draws(2))
    names = {name for name in statistics if name.startswith("attention/lha/")}
    assert names and names <= {n.removeprefix("encoder/") for n in statistics if n.startswith("encoder/")}
    hashes = {n: g for n, g in gradients(model, tokens)[1].items() if "mechanisms.lha" in n}
    assert {n.split(".")[0] for n in hashes} == {"blocks", "encoder"}
    assert all(gradient.abs().max() > 0 for gradient in hashes.values()), "only the auxiliary loss trains a hash"


def test_a_sketch_of_the_encoder_learns_the_tokens_of_the_target():
    """Predicted tokens move their loss; padding of the target, and the source's own tokens as targets, do not."""
    bird = attention("smart_bird", smart_bird={"keys": 5, "objective": "answer"})
    model = build_model(small_pair(("full",), source={"attention": bird}), 0)
    tokens = padded_pairs(2, 50)
    sketch = {n: g for n, g in gradients(model, tokens)[1].items() if "mechanisms.smart_bird" in n}
    assert sketch and all(gradient.abs().max() > 0 for gradient in sketch.values())

    def loss(tokens):
        return model(tokens, training_draws(2))[1]["encoder/attention/smart_bird/sketch_loss"]

    shuffled, other = tokens.clone(), tokens.clone()
    shuffled[:, S : S + 40] = tokens[:, S : S + 40].flip(1)  # the same words in another order
    other[:, S] = (tokens[:, S] + 1) % 256
    torch.testing.assert_close(loss(shuffled), loss(tokens))
    assert (loss(other) - loss(tokens)).abs() > 1e-4
    more = torch.cat([tokens, torch.full((2, 6), 258)], dim=1)
    torch.testing.assert_close(loss(more), loss(tokens))


def test_the_encoder_draws_for_itself(monkeypatch):
    model = build_model(small_pair(("full",), dropout=0.5, source={"attention": attention("full")}), 0)
    kept = []
    for block in (model.layers[0], model.encoder.layers[0]):

        def noted(stream, out, rng, add=block.attention.add):
            kept.append(add(torch.zeros_like(stream), torch.ones_like(out), rng) != 0)
            return add(stream, out, rng)

        monkeypatch.setattr(block.attention, "add", noted)
    with torch.no_grad():
        model(random_tokens(1, 2 * S), training_draws(1))
    assert kept[0].shape == kept[1].shape and 0.3 < (kept[0] == kept[1]).float().mean() < 0.7


def nats(model, tokens):
    return model.token_scores(tokens, RngContext.evaluation(7, len(tokens))).nats[:, S:]


def test_a_token_attends_to_the_whole_source_and_not_to_its_future():
    model = build_model(small_pair(attention=attention("full"), source={"attention": attention("local")}), 0)
    tokens = random_tokens(1, S + 30)
    before = nats(model, tokens)
    for t in (1, 10, 29):
        changed = tokens.clone()
        changed[0, S + t] = (tokens[0, S + t] + 1) % 256
        assert torch.equal(nats(model, changed)[:, :t], before[:, :t])
        assert t == 29 or (nats(model, changed)[:, t + 1 :] != before[:, t + 1 :]).all()
    for s in range(0, S, 3):
        changed = tokens.clone()
        changed[0, s] = (tokens[0, s] + 1) % 256
        assert ((nats(model, changed) - before).abs() > 1e-6).float().mean() > 0.9


def test_padding_is_seen_by_nothing_and_not_told():
    model = build_model(small_pair(), 0)
    tokens = padded_pairs(3, 30)
    scores = model.token_scores(tokens, RngContext.evaluation(7, 3))
    assert torch.equal(scores.scored[:, S:], tokens[:, S:] != 258) and not scores.scored[:, :S].any()
    assert model.count_scored(tokens) == scores.scored.sum()
    other = model.embedding.weight.data
    other[258] += 1.0
    again = model.token_scores(tokens, RngContext.evaluation(7, 3))
    assert torch.equal(again.nats[scores.scored], scores.nats[scores.scored])
    short = tokens[2:, S:]  # a source whose padding is not there at all
    memory = model.encode(tokens[2:, : S - 6], seed=7)
    logits = model.prefill(short[:, :4], model.new_cache(1, seed=7, memory=memory))
    assert (-logits.log_softmax(-1)[0, short[0, 4]] - scores.nats[2, S + 4]).abs() < 1e-4


def test_a_source_of_nothing_but_padding_is_seen_as_nothing():
    model, tokens = build_model(small_pair(), 0), padded_pairs(2, 30)
    tokens[1, :S] = 258
    assert all(gradient.isfinite().all() for gradient in gradients(model, tokens)[1].values())


@pytest.mark.parametrize(("blocks", "prompt"), [("reversible", 0), ("reversible", 20), ("ordinary", 0)])
def test_cached_decoding_is_the_whole_sequence(blocks, prompt):
    activations = "reversible" if blocks == "reversible" else "stored"
    config = small_pair(blocks=blocks, activations=activations, source={"attention": attention("lsh")})
    model = build_model(config, 3)
    tokens = padded_pairs(3, 60)
    tokens[:, S:] = random_tokens(3, 60)
    whole = model.token_scores(tokens, RngContext.evaluation(7, 3, rounds=3)).nats[:, S + prompt :]
    target = tokens[:, S:]
    cache = model.new_cache(3, seed=7, rounds=3, memory=model.encode(tokens[:, :S], seed=7, rounds=3))
    logits = [model.prefill(target[:, :prompt], cache)]
    logits += [model.decode(target[:, t], cache) for t in range(prompt, 40)]
    cache.select(torch.tensor([2, 2]))  # now both go on as the third one does
    logits = [x[2:] for x in logits] + [model.decode(target[[2, 2], t], cache)[1:] for t in range(40, 59)]
    decoded = -torch.stack(logits, 1).log_softmax(-1).gather(-1, target[2:, prompt:, None]).squeeze(-1)
    assert (decoded - whole[2:]).abs().max() < 1e-4


def test_activations_do_not_grow_with_the_depth_of_either_stack():
    def peak(layers, activations):
        positions, layer = {"kind": "none"}, attention("local", local={"chunk": 32})
        source = {"length": 512, "layers": layers, "attention": layer}
        config = small_pair(attention=layer, layers=layers, d_model=64, max_length=512, positions=positions,
                            activations=activations, source=source)  # fmt: skip
        model = build_model(config, 0)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        with PeakMemory() as memory:
            model(random_tokens(1, 1024), training_draws(1))[0].backward()
        return memory.peak

    two = peak(2, "reversible")
    assert peak(8, "reversible") < 1.1 * two < 0.6 * peak(8, "stored")


def test_initial_streams_do_not_grow_with_the_branches():
    model = build_model(small_pair(("full",), layers=12, max_length=128), 0)
    own, encoder = model.blocks[0].cross_attention.attention.output, model.encoder.blocks[0].attention.attention.output
    assert own.weight.std().item() == pytest.approx((32 * 3 * 12) ** -0.5, rel=0.1)
    assert encoder.weight.std().item() == pytest.approx((32 * 2 * 2) ** -0.5, rel=0.1)
    assert model.encoder.embedding.positions is not model.embedding.positions
