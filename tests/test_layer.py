"""A layer and functions for models of your own: against the definitions, and the examples of their page."""

import copy
import gc
import re
from functools import partial

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import megasparse
from megasparse import functional
from megasparse.attention.contract import AttentionInputs
from megasparse.attention.heads import merge_heads, split_heads
from megasparse.config.attention import MECHANISMS
from megasparse.errors import ConfigError
from megasparse.ops import opaque
from megasparse.ops.bucketed_attention import BucketedAttentionSpec, Window
from megasparse.ops.hash_table_attention import HashTableAttentionSpec
from megasparse.ops.random import EVALUATION_STEP, derive, rotations
from tests.attention import test_ngram
from tests.helpers import definitions
from tests.helpers.cases import together
from tests.helpers.comparing import assert_same_with_gradients, softmax_over
from tests.helpers.models import known_tokens
from tests.helpers.run_ranks import ROOT, run_ranks

PAGE = (ROOT / "docs/reference/one-layer.md").read_text(encoding="utf-8")
EXAMPLES = {
    f"{section.splitlines()[0]} {number}": code
    for section in PAGE.split("\n## ")[1:]
    for number, code in enumerate(re.findall("```python\n(.*?)```", section, re.S))
}
ON_RANKS = ("DDP 0", "FSDP2 0")
AVERAGES = torch.__version__ >= torch.torch_version.TorchVersion("2.10")
"""FSDP2 of torch 2.7 asks Gloo for means, and gets sums."""
LENGTH, HEADS, DIM = test_ngram.LENGTH, 2, 8
SCALE = DIM**-0.5


def run_example(name):
    names = {}
    exec(EXAMPLES[name], names)
    return names


@pytest.mark.parametrize("name", [name for name in EXAMPLES if name not in ON_RANKS])
def test_an_example_of_the_page_runs(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert len(EXAMPLES[name].splitlines()) <= 12
    run_example(name)


def on_rank(name):
    return {key: x.tolist() for key, x in run_example(name)["weights"].items()}


@pytest.mark.parametrize("name", ON_RANKS[: 1 + AVERAGES])
def test_two_ranks_train_as_one_process(name):
    torch.manual_seed(0)
    layer = megasparse.AttentionLayer("lsh", 64, heads=4, max_length=1024)
    x = torch.cat([torch.randn(2, 256, 64, generator=torch.Generator().manual_seed(rank)) for rank in range(2)])
    layer(x).square().mean().backward()
    torch.optim.SGD(layer.parameters(), lr=0.1).step()
    for weights in run_ranks(on_rank, name=name):
        assert weights.keys() == layer.state_dict().keys()
        for key, weight in layer.state_dict().items():
            torch.testing.assert_close(torch.tensor(weights[key]), weight)


def lsh(q, k, v, spec, masks):
    """Attend as defined, in the buckets argmax [xR; -xR] of 2 rounds."""
    shared = k is None
    key = derive(7, EVALUATION_STEP, 0, "lsh rotation")
    drawn = rotations(key, range(HEADS), 2, DIM, [8], torch.device("cpu")).double()  # (H, R, D, 4)
    products = [torch.einsum("bhld,hrdn->bhrln", x.detach(), drawn) for x in (q, q if shared else k)]
    codes = [torch.cat([x, -x], dim=-1).argmax(-1) for x in products]
    k = definitions.unit_keys(q)[1] if shared else k
    return definitions.bucketed_attention(q, k, v, codes[0] if shared else tuple(codes), spec, **masks)[0]


def lha(q, k, v, weights, spec, masks):
    """Attend as defined, in the buckets of H_Q(q) + H_K(k), or without a causal mask of H_Q(q) and H_K(k)."""
    scores = []
    for x, side in ((q, "query"), (k, "key")):
        first, bias, second, last = (
            weights[f"hash.{side}_{name}"] for name in ("weight1", "bias1", "weight2", "bias2")
        )
        hidden = torch.relu(x.detach() @ first + bias.view(HEADS, 1, -1))
        scores.append(hidden @ second + last.view(HEADS, 1, -1))
    joint = sum(scores).argmax(-1)[:, :, None]
    codes = joint if spec.causal else tuple(score.argmax(-1)[:, :, None] for score in scores)
    return definitions.bucketed_attention(q, k, v, codes, spec, **masks)[0]


def sketched(q, k, v, weights, visible, count):
    """Attend to the `count` visible keys of each head with the largest products of its sketch, in steps of 1/256; to
    earlier ones of equal keys."""
    parts = [x.detach() @ weights[f"{name}.weight"].view(HEADS, -1, DIM).mT for x, name in ((q, "query"), (k, "key"))]
    score = (parts[0] @ parts[1].mT / parts[0].shape[-1] ** 0.5 * 256).round() - torch.arange(LENGTH) / LENGTH
    score = score.masked_fill(~visible, -torch.inf)
    chosen = torch.zeros_like(score).scatter(-1, score.topk(count).indices, 1.0).bool() & visible
    return softmax_over(q @ k.mT * SCALE, chosen, v)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("masks", test_ngram.MASKS.values(), ids=test_ngram.MASKS)
def test_functions_equal_their_definitions_with_gradients_in_float64(masks, causal):
    q, k, v = test_ngram.heads()[:3]
    mask, segments = masks.get("key_mask"), masks.get("segments")
    options = {"attn_mask": mask, "is_causal": causal, "seed": 7}
    if segments is not None:
        first = torch.tensor([0, 17, 34]).repeat_interleave(torch.tensor([17, 17, 16]))
        options["position_ids"] = (torch.arange(LENGTH) - first).expand(2, -1)
    real = torch.ones(2, LENGTH, dtype=torch.bool) if mask is None else mask
    numbers = torch.zeros(2, LENGTH, dtype=torch.long) if segments is None else segments
    visible = (numbers[:, :, None] == numbers[:, None]) & real[:, :, None] & real[:, None]
    visible = (visible.tril() if causal else visible)[:, None].expand(-1, HEADS, -1, -1)

    def band(**rule):
        return BucketedAttentionSpec(Window("band", 6), causal, **rule)

    def unit(x):
        return torch.nn.functional.normalize(x, dim=-1)

    def yoso(q, k, v):
        spec = HashTableAttentionSpec(3, causal)
        return unit(definitions.expected_attention(unit(q), unit(k), v, spec, mask, segments)[0])

    generator = torch.Generator().manual_seed(3)
    parameters = {}
    for kind, settings in (("lha", {"chunk": 6}), ("smart_bird", {"sketch": "heads", "keys": 5})):
        layer = megasparse.AttentionLayer(kind, 16, HEADS, LENGTH, seed=0, **settings)
        named = layer.mechanisms[kind].named_parameters()
        parameters[kind] = {n: torch.randn(p.shape, generator=generator, dtype=torch.float64) for n, p in named}
    window = BucketedAttentionSpec(Window("chunk", 7, ahead=not causal), causal, SCALE, exclude_self=False)
    separate, shared = band(scale=SCALE, exclude_self=False), band()
    local = functional.local_attention
    cases = [
        (functional.full_attention, {}, lambda q, k, v: softmax_over(q @ k.mT * SCALE, visible, v)),
        (functional.full_attention, {"scale": 0.5}, lambda q, k, v: softmax_over(q @ k.mT * 0.5, visible, v)),
        (local, {"chunk": 7}, lambda q, k, v: definitions.bucketed_attention(q, k, v, None, window, **masks)[0]),
        (functional.lsh_attention, {"chunk": 6, "buckets": 8}, lambda q, k, v: lsh(q, k, v, separate, masks)),
        (functional.yoso_attention, {"expectation": True, "code_bits": 3}, yoso),
        (
            lambda *args, **kwargs: functional.lha_attention(*args, parameters["lha"], **kwargs)[0],
            {"chunk": 6},
            lambda q, k, v: lha(q, k, v, parameters["lha"], separate, masks),
        ),
        (
            lambda *args, **kwargs: functional.smart_bird_attention(*args, parameters["smart_bird"], **kwargs)[0],
            {"keys": 5},
            lambda q, k, v: sketched(q, k, v, parameters["smart_bird"], visible, 5),
        ),
    ]
    if causal:
        tokens, made = known_tokens(2, LENGTH), test_ngram.mechanism(1, 3).double()
        torch.nn.init.zeros_(made.bias.bias)
        rule = {"lengths": [1, 3], "chunk": test_ngram.CHUNK, "window": test_ngram.WINDOW, "max_length": 1 << 20}
        cases.append(
            (
                lambda *args, **kwargs: functional.ngram_attention(*args, tokens, **kwargs),
                rule,
                lambda q, k, v: test_ngram.defined(AttentionInputs(q, k, v, mask, segments, True), tokens, made),
            )
        )
    for function, settings, definition in cases:
        ours = partial(function, **options, **settings)
        assert_same_with_gradients(ours, definition, [q, k, v])
    assert_same_with_gradients(
        lambda q, v: functional.lsh_attention(q, None, v, chunk=6, buckets=8, **options),
        lambda q, v: lsh(q, None, v, shared, masks),
        [q, v],
    )


def test_a_layer_is_its_projections_around_the_function():
    layer = megasparse.AttentionLayer("lsh", 24, 4, 64, head_dim=8, key_heads=2, chunk=8, shared_qk=False, seed=3)
    layer.double().eval()

    def definition(x):
        q, k, v = (split_heads(part(x), 8) for part in (layer.query, layer.key, layer.value))
        settings = {"chunk": 8, "max_length": 64, "seed": 3, "is_causal": True, "enable_gqa": True}
        return layer.output(merge_heads(functional.lsh_attention(q, k, v, **settings)))

    x = torch.randn(2, 50, 24, dtype=torch.float64)
    assert_same_with_gradients(layer, definition, [x], [*layer.parameters()])


def test_packed_documents_are_attended_to_as_separate_sequences():
    """With rotary positions, which hashes depend on."""
    for kind in ("lsh", "lha", "full"):
        layer = megasparse.AttentionLayer(kind, 32, 2, 128, rope_theta=100.0).double().eval()
        x = torch.randn(1, 90, 32, dtype=torch.float64)
        out = layer(x, cu_seqlens=torch.tensor([0, 40, 90]))
        parts = [layer(x[:, part]) for part in (slice(0, 40), slice(40, 90))]
        torch.testing.assert_close(out, torch.cat(parts, 1))


def test_the_step_is_counted_by_backward_passes_saved_and_set(tmp_path):
    torch.manual_seed(0)
    layer = megasparse.AttentionLayer("lsh", 32, 2, 128, chunk=8)
    x = torch.randn(2, 90, 32)
    first, second = layer(x), layer(x)
    assert torch.equal(first, second) and layer.step == 0
    first.sum().backward()
    third = layer(x)
    assert layer.step == 1 and not torch.equal(first, third)
    loaded = megasparse.AttentionLayer("lsh", 32, 2, 128, chunk=8)
    loaded.load_state_dict(layer.state_dict())
    assert torch.equal(loaded(x), third) and torch.equal(copy.deepcopy(layer)(x), third)
    loaded.step = 0
    assert torch.equal(loaded(x), first) and loaded.draws.tolist() == [layer.seed, 0]
    layer.eval()(x).sum().backward()
    assert layer.step == 1 and torch.equal(layer(x), loaded.eval()(x))
    assert layer.state_dict().keys() == {"query.weight", "value.weight", "output.weight", "draws"}


@together("kind", ["lsh", "routing"])
def test_a_saved_layer_trains_on_bit_for_bit(kind, tmp_path):
    x = torch.randn(6, 2, 90, 32)

    def train(layer, steps):
        optimizer, losses = torch.optim.SGD(layer.parameters(), lr=0.1), []
        for step in steps:
            optimizer.zero_grad()
            losses.append(loss := layer(x[step]).square().mean())
            loss.backward()
            optimizer.step()
        return [loss.item() for loss in losses]

    whole, stopped, new, used = (megasparse.AttentionLayer(kind, 32, 2, 128, chunk=8, seed=3) for _ in range(4))
    losses, first = train(whole, range(6)), train(stopped, range(3))
    torch.save(stopped.state_dict(), tmp_path / "layer.pt")
    train(used, range(2))
    for layer in (new, used):
        layer.load_state_dict(torch.load(tmp_path / "layer.pt", weights_only=True))
        assert losses == first + train(layer, range(3, 6))
    assert losses == first + train(stopped, range(3, 6))


@together("reentrant, compiled", [(True, False), (False, False), (False, True)])
def test_recomputation_uses_the_draws_of_its_forward_pass(reentrant, compiled):
    """Also of two passes whose gradients are computed together, and after other steps."""
    gradients = []
    for recomputed in (True, False):
        layer = megasparse.AttentionLayer("lsh", 32, 2, 128, chunk=8, dropout=0.2, seed=5)
        x = torch.randn(2, 90, 32, generator=torch.Generator().manual_seed(1)).requires_grad_()

        def run(x, layer=layer, recomputed=recomputed):
            return checkpoint(layer, x, use_reentrant=reentrant) if recomputed else layer(x)

        if compiled and recomputed:
            run = torch.compile(run, backend="aot_eager", fullgraph=True)
        for _ in range(2):
            run(run(x)).square().sum().backward()
        assert layer.step == 1
        gradients.append([x.grad, *(weight.grad for weight in layer.parameters())])
    for ours, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize(
    "kind",
    [pytest.param(x, marks=() if x in ("lsh", "lha", "ngram") else pytest.mark.slow) for x in MECHANISMS],
)
def test_a_compiled_block_is_one_graph_with_the_same_bits(kind):
    """Also under autocast, and with the draws of each step."""
    torch.compiler.reset()  # this function is compiled for all mechanisms, but for at most 8 cases
    causal = kind not in ("smyrf", "linformer", "linear", "synthesizer", "sinkhorn", "clustered")
    layer, norm = megasparse.AttentionLayer(kind, 16, 2, 64, causal=causal, seed=0), torch.nn.LayerNorm(16)
    tokens = known_tokens(2, 48) if kind == "ngram" else None

    def block(x):
        return x + layer(norm(x), tokens=tokens)

    results = []
    for run in (block, torch.compile(block, backend="aot_eager", fullgraph=True)):
        layer.step, layer._differentiated = 0, False
        for step in range(2):
            x = torch.randn(2, 48, 16, generator=torch.Generator().manual_seed(1)).requires_grad_()
            with torch.autocast("cpu", torch.bfloat16, enabled=step > 0):
                loss = run(x).float().square().mean() + layer.auxiliary_loss
            grads = torch.autograd.grad(loss, [x, *layer.parameters(), *norm.parameters()], materialize_grads=True)
            results.append([loss.detach(), *grads])
    assert layer.step == 1
    for eager, compiled in zip(results[:2], results[2:], strict=True):
        assert all(map(torch.equal, eager, compiled))


def test_compiled_layers_share_a_graph():
    """More layers and lengths than torch.compile compiles a function for; copied layers have their own weights."""
    layers = [megasparse.AttentionLayer("lsh", 16, 2, 64, chunk=8, seed=seed) for seed in range(9)]
    layers.append(copy.deepcopy(layers[0]))
    torch.nn.init.zeros_(layers[-1].output.weight)
    run = torch.compile(lambda layer, x: layer(x), backend="eager", fullgraph=True)
    for length in (40, 48):
        x = torch.randn(1, length, 16)
        for layer in layers:
            assert torch.equal(run(layer, x), layer(x))
    assert not run(layers[-1], x).any() and run(layers[0], x).any()


def test_recorded_passes_of_compiled_layers_are_freed():
    layer = megasparse.AttentionLayer("local", 16, 2, 64, chunk=8)
    run = torch.compile(lambda x: layer(x), backend="aot_eager", fullgraph=True)
    x = torch.randn(1, 48, 16)
    out = run(x)
    assert len(opaque._graphs) == 1
    del out
    gc.collect()
    assert not opaque._graphs
    out = run(x).sum()
    out.backward(retain_graph=True)
    assert not opaque._graphs
    with pytest.raises(RuntimeError, match="call backward once"):
        out.backward()


def test_compiled_functions_are_one_graph_with_the_same_bits():
    layer = megasparse.AttentionLayer("lha", 16, 2, 64, chunk=8, seed=0)
    mask = torch.arange(48) < torch.tensor([[48], [30]])

    def attend(q, k, v, step):
        q = functional.lsh_attention(q, None, v, mask, 0.1, is_causal=True, chunk=8, seed=3, step=step)
        q = q + functional.local_attention(q, k[:, :1], v[:, :1], chunk=8, scale=0.3, enable_gqa=True)
        parameters = dict(layer.mechanisms["lha"].named_parameters())
        return functional.lha_attention(q, k, v, parameters, chunk=8, max_length=64, step=step)

    results = []
    for run in (attend, torch.compile(attend, backend="aot_eager", fullgraph=True)):
        for step in (*range(9), None):  # more steps than torch.compile compiles a function for
            leaves = [
                *torch.randn(3, 2, 2, 48, 8, generator=torch.Generator().manual_seed(1)).requires_grad_().unbind()
            ]
            out, auxiliary = run(*leaves, step)
            assert (auxiliary is None) == (step is None)
            loss = out.square().mean() + (0.0 if auxiliary is None else auxiliary)
            results.append([out.detach(), loss.detach(), *torch.autograd.grad(loss, leaves)])
    for eager, compiled in zip(results[:10], results[10:], strict=True):
        assert all(map(torch.equal, eager, compiled))
    assert not torch.equal(results[0][0], results[1][0])


def test_mistakes_are_named_in_one_line():
    layer, x = megasparse.AttentionLayer("lsh", 32, 2, 64, chunk=8), torch.zeros(2, 50, 32)
    q = torch.zeros(1, 2, 50, 16)
    build = megasparse.AttentionLayer
    for call, message in (
        (lambda: build("lhs", 32, 2, 64), 'mechanism: unknown: "lhs". Did you mean "lsh"?'),
        (lambda: build("lsh", 32, 2, 64, chunks=8), 'chunks: unknown key (its value is 8). Did you mean "chunk"?'),
        (lambda: build("lsh", 32, 3, 64), "heads: 3 heads do not divide d_model = 32. Set heads to a divisor"),
        (lambda: build("ngram", 32, 2, 64, causal=False), 'mechanism: "ngram" cannot see both ways'),
        (lambda: build("ngram", 32, 2, 64)(x), "tokens: None, but ngram reads token ids"),
        (lambda: build("smart_bird", 32, 2, 64, objective="token"), 'objective: "token" is not a target'),
        (lambda: layer(torch.zeros(2, 65, 32)), "x has shape (2, 65, 32): give (batch, 64 or less, 32)"),
        (lambda: layer(x[:0]), "x has shape (0, 50, 32), without tokens: give one row of one token or more"),
        (lambda: layer(x[:, :0]), "x has shape (2, 0, 32), without tokens: give one row of one token or more"),
        (lambda: layer(x, torch.ones(2, 50)), "mask contains 1: give 0 for real tokens"),
        (lambda: layer(x, torch.ones(2, 1, 50, 50)), "mask of shape (2, 1, 50, 50) is not a padding mask"),
        (lambda: layer(x, cu_seqlens=torch.tensor([0, 50])), "cu_seqlens go from 0 to 50 for 2 x 50 tokens"),
        (lambda: layer(x, position_ids=torch.zeros(3, 50)), "position_ids of shape (3, 50): give (2, 50)"),
        (lambda: functional.lsh_attention(q, q[:, :1], q[:, :1]), "give (B, H, L, D) each; with enable_gqa=True"),
        (lambda: functional.lsh_attention(q, None, q, scale=1.0), "scale = 1.0 is given, but key = None"),
        (lambda: functional.lsh_attention(q, q, q, shared_qk=True), "shared_qk: true, but key is not None"),
        (lambda: functional.full_attention(q, q, q, max_length=49), "50 tokens are more than max_length = 49"),
        (lambda: functional.lha_attention(q, q, q, {}), "parameters: lha with these settings has ['hash.key_bias1'"),
        (lambda: functional.yoso_attention(q, q, q, convolution=3), "Add or remove convolution.weight"),
        (lambda: functional.ngram_attention(q, q, q, torch.zeros(50)), "tokens of shape (50,): give (1, 50)"),
        (lambda: functional.smart_bird_attention(q, q, q, {}, sketch="attention"), 'Set it to "heads"'),
    ):
        with pytest.raises((ConfigError, ValueError), match=re.escape(message)) as error:
            call()
        assert "\n" not in str(error.value)
