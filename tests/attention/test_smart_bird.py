"""Smart Bird: the selected keys in training and in evaluation, and the objectives of the sketch."""

import pytest
import torch
import torch.nn.functional as F

import megasparse.attention.smart_bird as sketch_objectives
from megasparse.attention.contract import AttentionContext, AttentionInputs, RecomputeCache, Targets
from megasparse.errors import ConfigError
from megasparse.model.build import build_model
from megasparse.ops.positions import sinusoids
from megasparse.ops.random import EVALUATION_STEP, RngContext
from tests.helpers.comparing import assert_same_with_gradients, decoded_nats, softmax_over
from tests.helpers.definitions import best_keys as defined
from tests.helpers.definitions import gathered_attention as gathered
from tests.helpers.definitions import sketched_weights
from tests.helpers.models import Single, named, random_tokens, randomise, small, training_draws

LABELS = Targets(torch.tensor([2, 0]), None)


def pooled(**settings):
    """Learns the label of a sequence, or according to `settings`."""
    single = Single("smart_bird", False, settings=settings or {"objective": "pooled", "labels": 3})
    randomise(single.mechanism, 0.5)
    return single


def words(length, counted=None):
    return Targets(random_tokens(2, length, seed=9), counted)


def index_of(single, inputs, **arguments):
    """The keys that were chosen."""
    recompute = RecomputeCache()
    single(*inputs, recompute=recompute, **arguments)
    recompute.replay()
    return recompute.keep(lambda: None)


@pytest.mark.parametrize("causal", [True, False])
def test_evaluation_attends_to_the_k_largest_weights_of_the_sketch(causal):
    single = Single("smart_bird", causal)
    single.mechanism.double()
    x, q, k, v = single.inputs(40, dtype=torch.float64)
    x = x / 4
    alpha, seen = sketched_weights(single.mechanism.query(x), single.mechanism.key(x), causal=causal, rounded=True)
    index = defined(alpha, seen, 6, sampling="inverse_log_squared", uniform=None)
    expected, _ = gathered(q, k, v, index, scale=16**-0.5)
    torch.testing.assert_close(single(x, q, k, v).out, expected)


def test_the_tiny_transformer_reads_only_tokens_and_positions():
    """Eq. 1 by torch's Transformer layer; positions restart with each document."""
    single = Single("smart_bird transformer", False)
    m = single.mechanism.double()
    x, *heads = single.inputs(30, dtype=torch.float64)
    tokens = random_tokens(2, 30)
    targets = words(30)
    loss = single(x, *heads, training=True, targets=targets, tokens=tokens).statistics["sketch_loss"]
    layer = torch.nn.TransformerEncoderLayer(4, 1, 16, 0.0, batch_first=True, dtype=torch.float64)
    layer.self_attn.in_proj_bias.data.zero_()
    layer.self_attn.in_proj_weight.data.copy_(torch.cat([m.query.weight, m.key.weight, m.value.weight]))
    layer.self_attn.out_proj.load_state_dict({"weight": m.layer.merge.weight, "bias": torch.zeros(4)})
    layer.linear1.load_state_dict({"weight": m.layer.hidden.weight, "bias": torch.zeros(16)})
    layer.linear2.load_state_dict({"weight": m.layer.back.weight, "bias": torch.zeros(4)})
    for number, norm in enumerate((layer.norm1, layer.norm2)):
        norm.load_state_dict({"weight": m.layer.scales[number], "bias": m.layer.shifts[number]})
    h = layer(m.embedding.weight[tokens] + sinusoids(0, 30, 4).double())
    logits = h @ m.objective.weight.T + m.objective.bias
    torch.testing.assert_close(loss, F.cross_entropy(logits.transpose(1, 2), targets.values), rtol=1e-6, atol=1e-6)
    other = single(x + 1, *heads, training=True, targets=targets, tokens=tokens).statistics["sketch_loss"]
    assert torch.equal(loss, other)
    segments = torch.tensor([0] * 11 + [1] * 19).expand(2, -1)
    mask = (torch.arange(30) != 14).expand(2, -1)
    given = []
    m.embedding.register_forward_pre_hook(lambda _, read: given.append(read[1]))
    single(x, *heads, tokens=tokens, key_mask=mask, segments=segments)
    numbers = given[0][0].tolist()
    assert numbers[:14] == [*range(11), 0, 1, 2] and numbers[15:] == list(range(3, 18))
    with pytest.raises(ConfigError, match="embeds tokens, but this model has none"):
        m(x, AttentionInputs(*heads, None, None, False), AttentionContext(0, training_draws(2)))


@pytest.mark.parametrize(
    "local,sinks,causal,masked",  # every pair of values
    [
        (True, 0, True, True),
        (True, 0, False, False),
        (False, 3, True, False),
        (False, 3, False, True),
        (True, 3, True, True),
        (True, 3, False, False),
    ],
)
def test_a_window_and_sinks_are_in_the_softmax_of_the_chosen_keys_once(causal, masked, local, sinks):
    length, chunk = 50, 8
    single = Single("smart_bird", causal)
    joined = Single("smart_bird", causal, settings={"local": local, "chunk": chunk, "sinks": sinks})
    x, *heads = single.inputs(length, dtype=torch.float64)
    real = torch.rand(2, length, generator=torch.Generator().manual_seed(2)) > (0.3 if masked else -1.0)
    document = torch.tensor([0] * 2 + [1] * 18 + [2] * 30 if masked else [0] * length).expand(2, -1)
    masks = {"key_mask": real, "segments": document} if masked else {}
    index = index_of(single, [x, *heads], training=True, **masks).long()
    seen = torch.zeros(2, 2, length, length + 1, dtype=torch.bool).scatter_(3, index.where(index >= 0, length), True)
    for b in range(2):
        number = real[b].cumsum(0) - 1
        for i in real[b].nonzero().flatten():
            own = (real[b] & (document[b] == document[b, i])).nonzero().flatten()
            visible = own[own <= i] if causal else own
            chunks = (number[i] // chunk - number[visible] // chunk).abs()
            seen[b, :, i, visible[chunks <= 1] if local else []] = True
            seen[b, :, i, own[:sinks][own[:sinks] <= i] if causal else own[:sinks]] = True
    assert_same_with_gradients(
        lambda *heads: joined(x, *heads, training=True, **masks).out,
        lambda q, k, v: softmax_over(0.25 * q @ k.transpose(-1, -2), seen[..., :length] & real[:, None, :, None], v),
        heads,
    )


def test_training_draws_by_head_and_step_and_evaluation_nothing_or_at_its_own_step():
    single = Single("smart_bird", True)
    inputs = single.inputs(60)
    first, later = (index_of(single, inputs, training=True, step=step) for step in (1, 2))
    assert first.dtype == torch.int32 and first.shape == (2, 2, 60, 6)
    assert not torch.equal(first, later) and not torch.equal(first[:, 0], first[:, 1])
    assert torch.equal(index_of(single, inputs, training=True, step=1), first)
    assert single(*inputs, training=True)[1:3] == (None, {})  # no objective without targets
    best, top_k = index_of(single, inputs), Single("smart_bird top_k", True)
    assert best.shape == (2, 1, 60, 6) and torch.equal(best, index_of(top_k, inputs, training=True, step=5))
    chance = Single("smart_bird random", True)
    fixed = index_of(chance, inputs)
    assert torch.equal(index_of(chance, inputs), fixed) and not torch.equal(fixed[:, 0], fixed[:, 1])
    drawn = index_of(Single("smart_bird draws", True), inputs)
    assert torch.equal(drawn, index_of(single, inputs, training=True, step=EVALUATION_STEP))
    for index in (first, fixed, drawn):
        assert (index <= torch.arange(60)[:, None]).all()
        assert ((index >= 0).sum(-1) == torch.arange(1, 61).clamp(max=6)).all()


def test_the_objective_of_each_token_is_its_cross_entropy(monkeypatch):
    monkeypatch.setattr(sketch_objectives, "_LOGIT_ELEMENTS", 2 * 256 * 7)
    single = Single("smart_bird", True)
    m = single.mechanism.double()
    x, *heads = single.inputs(30, dtype=torch.float64)
    counted = torch.rand(2, 30, generator=torch.Generator().manual_seed(1)) > 0.4
    mask = torch.arange(30).expand(2, -1) < torch.tensor([[30], [20]])
    targets = words(30, counted)
    targets.values[~mask] = -100  # what padding is to be does not matter
    result = single(x, *heads, training=True, targets=targets, key_mask=mask)
    alpha, _ = sketched_weights(m.query(x), m.key(x), causal=True, key_mask=mask)
    h = alpha @ m.value(x)
    logits = h @ m.objective.weight.T + m.objective.bias
    expected = F.cross_entropy(logits[counted & mask], targets.values[counted & mask])
    torch.testing.assert_close(result.auxiliary_loss, expected / 3)  # three layers have it
    torch.testing.assert_close(result.statistics["sketch_loss"], expected.detach())
    ours, exact = (torch.autograd.grad(y, list(m.parameters())) for y in (result.auxiliary_loss, expected / 3))
    for a, b in zip(ours, exact, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def pooled_logits(m, x):
    """Logits of a label or of an answer's tokens, (B, V)."""
    alpha, _ = sketched_weights(m.query(x), m.key(x), causal=False)
    h = alpha @ m.value(x)
    share = torch.softmax((h * m.objective.pool).sum(-1, keepdim=True), dim=1)
    return (share * h).sum(1) @ m.objective.weight.T + m.objective.bias


def test_the_pooled_objective_equals_the_label_or_scored_tokens_and_padding_is_not_pooled():
    values, counted = torch.tensor([[7, 9, 7], [250, 3, -100]]), torch.tensor([[True, True, True], [True, True, False]])
    answer = Targets(values, counted, answer=True)
    cases = (
        (pooled(objective="answer"), answer, [0, 0, 0, 1, 1], values[counted]),
        (pooled(), LABELS, [0, 1], LABELS[0]),
    )
    for single, targets, rows, expected in cases:
        m = single.mechanism.double()
        x, *heads = single.inputs(30, dtype=torch.float64)
        loss = single(x, *heads, training=True, targets=targets).statistics["sketch_loss"]
        torch.testing.assert_close(loss, F.cross_entropy(pooled_logits(m, x)[rows], expected))
    longer = [F.pad(t, (0, 0, 0, 5), value=1e4) for t in (x, *heads)]
    mask = (torch.arange(35) < 30).expand(2, -1)
    padded = single(*longer, training=True, targets=LABELS, key_mask=mask).statistics["sketch_loss"]
    torch.testing.assert_close(padded, loss)
    nothing = single(*longer, training=True, targets=LABELS, key_mask=torch.zeros_like(mask))
    assert nothing.auxiliary_loss.isfinite()


def test_only_the_objective_trains_the_sketch_and_trains_nothing_else():
    for single, targets in ((Single("smart_bird", True), words(30)), (pooled(), LABELS)):
        inputs = [t.requires_grad_() for t in single.inputs(30)]
        parameters = list(single.mechanism.parameters())
        result = single(*inputs, training=True, targets=targets)
        by_task = torch.autograd.grad(result.out.sum(), [*inputs, *parameters], allow_unused=True)
        assert [g is not None for g in by_task] == [False] + [True] * 3 + [False] * len(parameters)
        by_own = torch.autograd.grad(result.auxiliary_loss, [*inputs, *parameters], allow_unused=True)
        assert [g is not None for g in by_own] == [False] * 4 + [True] * len(parameters)
        assert all((g != 0).any() for g in by_own[4:])


def test_equal_tokens_tie_alike_in_decoding_and_in_the_whole_pass():
    """Without positions in its input a sketch gives equal tokens equal weights, and the first of them are chosen."""
    config = small(attention=named("smart_bird"), positions={"kind": "rotary"})
    model = build_model(config, seed=3)
    for seed in range(3):
        tokens = random_tokens(2, 80, vocabulary=5, seed=seed)
        nats = model.token_scores(tokens, RngContext.evaluation(7, 2)).nats
        decoded = decoded_nats(model, tokens, 40, model.new_cache(2, seed=7))
        torch.testing.assert_close(decoded, nats[:, 40:], rtol=1e-4, atol=1e-4)


def test_an_objective_that_does_not_fit_the_task_is_rejected():
    answer = Targets(torch.zeros(2, 3, dtype=torch.int64), None, answer=True)
    for labels, targets, hint in ((False, LABELS, "pooled"), (True, words(20), "token"), (True, answer, "answer")):
        single = pooled() if labels else Single("smart_bird", False)
        with pytest.raises(ConfigError, match=f'smart_bird.objective: .*Set it to "{hint}"'):
            single(*single.inputs(20), training=True, targets=targets)
