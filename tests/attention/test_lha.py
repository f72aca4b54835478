import math

import pytest
import torch
import torch.nn.functional as F

import megasparse.ops.hash_learning as hash_learning
from megasparse.attention import lha as lha_module
from megasparse.attention.contract import AttentionContext, AttentionInputs, RecomputeCache
from megasparse.attention.heads import Padding
from megasparse.attention.observation import calls
from megasparse.config.schema import PositionsConfig
from megasparse.model.build import build_model
from megasparse.ops.positions import sinusoids
from megasparse.ops.random import RngContext
from tests.helpers.definitions import utilities
from tests.helpers.models import Single, attention, random_tokens, randomise, small, training_draws

MASK = torch.ones(2, 40, dtype=torch.bool)
MASK[0, 33:] = False
MASK[1, 35:] = False
SEGMENTS = torch.tensor([[0] * 11 + [1] * 29, [0] * 20 + [1] * 5 + [2] * 15])


def lha(causal, **settings):
    """2 heads, 16 wide, 128 positions, 16 buckets, 3 layers; in float64."""
    single = Single("lha", causal, settings=settings)
    randomise(single.mechanism.double(), 0.5, seed=11)
    return single


def heads_of(inputs, causal):
    return AttentionInputs(*inputs[1:], None, None, causal)


def scores_by_hand(mechanism, side, x):
    """H of one side, (B, H, L, N), head by head."""
    weights = dict(mechanism.hash.named_parameters())
    found = []
    for head in range(x.shape[1]):
        y, first = x[:, head], weights[f"{side}_weight1"][head]
        y = y @ first
        if f"{side}_bias1" in weights:
            y = torch.relu(y + weights[f"{side}_bias1"].view(x.shape[1], -1)[head])
            y = y @ weights[f"{side}_weight2"][head] + weights[f"{side}_bias2"].view(x.shape[1], -1)[head]
        found.append(y)
    return torch.stack(found, 1)


def both_scores(mechanism, q, k, causal):
    query, key = scores_by_hand(mechanism, "query", q), scores_by_hand(mechanism, "key", k)
    return (query + key, query + key) if causal else (query, key)


def groups(key_mask, segments):
    """Tokens of every document of every row."""
    for row in range(2):
        real = torch.ones(40, dtype=torch.bool) if key_mask is None else key_mask[row]
        document = torch.zeros(40, dtype=torch.int64) if segments is None else segments[row]
        for number in range(int(document.max()) + 1):
            yield row, (real & (document == number)).nonzero()[:, 0]


def members_by_hand(scores, tokens, size):
    """{bucket: set of tokens} of one head of one document, scores (n, N)."""
    share = torch.softmax(scores, -1)
    found = {}
    for bucket in range(share.shape[1]):
        order = sorted(range(len(tokens)), key=lambda i: (-share[i, bucket].item(), i))
        found[bucket] = [tokens[i].item() for i in order[:size]]
    return found


def in_best(scores, size):
    """(B, H, n, N), 1 where a token is one of the `size` best of a bucket, by scores (B, H, n, N) of one document."""
    found = torch.zeros_like(scores)
    for row in range(scores.shape[0]):
        for head in range(scores.shape[1]):
            for bucket, tokens in members_by_hand(scores[row, head], torch.arange(scores.shape[2]), size).items():
                found[row, head, tokens, bucket] = 1
    return found


@pytest.mark.parametrize("masks", [{"key_mask": MASK}, {"segments": SEGMENTS, "key_mask": MASK}], ids=len)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("psi", "utility"), [("best", "sampled"), ("argmax", "sampled"), ("best", "features")])
def test_the_loss_equals_equation_19(masks, causal, psi, utility, monkeypatch):
    """A sample as large as the document is all of it."""
    monkeypatch.setattr(hash_learning, "_CPU_TILE_ELEMENTS", 1000)
    monkeypatch.setattr(lha_module, "WEIGHT", 0.2)
    single = lha(causal, psi=psi, utility=utility)
    mechanism, inputs = single.mechanism, single.inputs(40, dtype=torch.float64)
    result = single(*inputs, training=True, step=5, **masks)
    _, q, k, _ = inputs
    query_scores, key_scores = (scores.detach() for scores in both_scores(mechanism, q, k, causal))
    rows = mechanism.features(q, AttentionContext(0, RngContext(0, 5, torch.arange(2), training=True))).double()
    kl, information = torch.zeros(2, 2, dtype=torch.float64)
    kept, count = 0.0, 0
    for row, tokens in groups(masks.get("key_mask"), masks.get("segments")):
        own = [x[row : row + 1][:, :, tokens] for x in (q, k, query_scores, key_scores)]
        codes = own[2].argmax(-1)
        kernel = torch.exp(own[0] @ own[1].transpose(-1, -2) / 4)
        if utility == "features":
            maps = [torch.exp(x @ rows.mT / 2 - x.square().sum(-1, keepdim=True) / 8) for x in own[:2]]
            kernel = maps[0] @ maps[1].mT
        if psi == "best":
            members = [in_best(scores, mechanism.bucket_size) for scores in own[2:]]
        else:
            members = [(scores == scores.amax(-1, keepdim=True)).double() for scores in own[2:]]
        target = utilities(kernel, *members)
        for side in range(2):
            predicted = torch.log_softmax(own[2 + side], -1)
            information[side] += torch.xlogy(target[side], target[side]).sum()
            kl[side] += (torch.xlogy(target[side], target[side]) - target[side] * predicted).sum()
        kept += target[0].gather(-1, codes[..., None]).sum()
        count += 2 * len(tokens)
    named = {"kl_queries": kl[0], "kl_keys": kl[1], "attention_utility": kept}
    named |= {"negative_entropy_queries": information[0], "negative_entropy_keys": information[1]}
    for name, total in named.items():
        torch.testing.assert_close(result.statistics[name], total / count)
    torch.testing.assert_close(result.auxiliary_loss, 0.2 * kl.sum() / count / 3)  # 3 layers
    assert mechanism.task_weight == 0.8


@pytest.mark.parametrize(
    "kind,settings",
    [
        ("full", {"sinusoidal_positions": True}),
        ("lha", {"sinusoidal_positions": True}),
        ("lha", {"normalize": True}),
        ("lha", {"sinusoidal_positions": True, "project_positions": True, "normalize": True}),
    ],
    ids=str,
)
def test_positions_and_normalisation_of_queries_and_keys(kind, settings):
    """Projections of x, plus sinusoids as they are or projected to the heads of a layer, then (y − mean)/deviation."""
    config = small(attention=attention(kind, **{kind: settings}), positions=PositionsConfig(kind="none"))
    model = build_model(config, seed=3, dtype=torch.float64)
    layer, x = model.layers[1].attention.attention, torch.randn(2, 5, 32, dtype=torch.float64)
    with calls(layer) as found:
        layer(x, AttentionContext(1, RngContext.evaluation(0, 2)), Padding())
    for side, given in (("query", found[0].inputs.q), ("key", found[0].inputs.k)):
        wanted = x @ getattr(layer, side).weight.T
        if settings.get("project_positions"):
            weight = layer.mechanisms["lha"].position_projections[side].weight
            wanted = wanted + sinusoids(0, 5, 32).double() @ weight.T
        wanted = wanted.view(2, 5, 2, 16).transpose(1, 2)
        if "sinusoidal_positions" in settings and not settings.get("project_positions"):
            wanted = wanted + sinusoids(0, 5, 16).double()
        if settings.get("normalize"):
            variance = wanted.var(-1, correction=0, keepdim=True)
            wanted = (wanted - wanted.mean(-1, keepdim=True)) / (variance + 1e-6).sqrt()
        torch.testing.assert_close(given, wanted, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("kind", ["mlp", "linear"])
@pytest.mark.parametrize("causal", [False, True])
def test_gradients_of_the_loss_equal_the_definition(kind, causal, monkeypatch):
    monkeypatch.setattr(hash_learning, "_CPU_TILE_ELEMENTS", 1000)
    single = lha(causal, hash=kind)
    mechanism, inputs = single.mechanism, single.inputs(40, dtype=torch.float64)
    names, parameters = zip(*mechanism.named_parameters(), strict=True)
    assert len(names) == {"mlp": 8, "linear": 2}[kind]
    ours = torch.autograd.grad(3 * single(*inputs, training=True).auxiliary_loss, parameters)
    _, q, k, _ = inputs
    scores = both_scores(mechanism, q, k, causal)
    best = (in_best(s.detach(), mechanism.bucket_size) for s in scores)
    psi = utilities(torch.exp(q @ k.mT / 4), *best)
    loss = sum(F.kl_div(torch.log_softmax(s, -1), p, reduction="sum") for s, p in zip(scores, psi, strict=True))
    expected = torch.autograd.grad(0.05 * loss / (2 * 2 * 40), parameters)
    for name, a, b in zip(names, ours, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12, msg=name)
        assert b.abs().max() > 1e-6


@pytest.mark.parametrize(
    "masks,causal,count_buckets",  # every pair of values
    [
        ({}, False, False),
        ({}, True, True),
        ({"key_mask": MASK}, False, True),
        ({"key_mask": MASK}, True, False),
        ({"segments": SEGMENTS, "key_mask": MASK}, False, True),
        ({"segments": SEGMENTS, "key_mask": MASK}, True, False),
    ],
)
def test_top_k_is_the_papers_algorithm(masks, causal, count_buckets, monkeypatch):
    """Buckets of the ⌊√2·N/B⌋ best queries and keys; queries in several merge by the sums of their exponentials."""
    monkeypatch.setattr(hash_learning, "_CPU_TILE_ELEMENTS", 700)
    single = lha(causal, window="top_k", count_buckets=count_buckets)
    mechanism, inputs = single.mechanism, single.inputs(40, dtype=torch.float64)
    assert (mechanism.buckets, mechanism.bucket_size) == (16, math.floor(math.sqrt(2) * 8)) == (16, 11)
    result = single(*inputs, **masks)
    _, q, k, v = inputs
    query_scores, key_scores = both_scores(mechanism, q, k, causal)
    weight = torch.zeros(2, 2, 40, 40, dtype=torch.float64)  # how often query and key meet
    for row, tokens in groups(masks.get("key_mask"), masks.get("segments")):
        for head in range(2):
            queries = members_by_hand(query_scores[row, head, tokens], tokens, 11)
            keys = members_by_hand(key_scores[row, head, tokens], tokens, 11)
            for bucket in queries:
                for i in queries[bucket]:
                    weight[row, head, i, keys[bucket]] += 1
    if causal:
        weight = weight.tril()
    if count_buckets:
        weight = weight.clamp(max=1)
    weight = weight * torch.exp(q @ k.mT / 4)
    total = weight.sum(-1, keepdim=True)
    expected = torch.where(total > 0, weight @ v / total, 0.0)
    torch.testing.assert_close(result.out, expected)
    real = masks.get("key_mask", torch.ones(2, 40, dtype=torch.bool))[:, None, :, None]
    missing = ((total == 0) & real).sum() / (2 * real.sum())
    torch.testing.assert_close(result.statistics["queries_in_no_bucket"], missing)


def test_ties_of_tokens_go_to_the_earlier_ones():
    """Repeated tokens score equally where no positions were added."""
    single = lha(False, window="top_k")
    x, q, k, v = single.inputs(40, dtype=torch.float64)
    q, k = (t[:, :, :1].expand_as(t) for t in (q, k))
    assigned = single.mechanism.assign(heads_of([x, q, k, v], False), evaluation())
    assert all((members == torch.arange(11, dtype=torch.int32)).all() for members in assigned.members)


@pytest.mark.parametrize("masks", [{}, {"segments": SEGMENTS, "key_mask": MASK}], ids=len)
def test_the_causal_band_is_the_last_tokens_of_the_joint_bucket(masks):
    single = lha(True)
    inputs = single.inputs(40, dtype=torch.float64)
    result = single(*inputs, **masks)
    _, q, k, v = inputs
    codes = both_scores(single.mechanism, q, k, True)[0].argmax(-1)
    out = torch.zeros_like(q)
    for row, tokens in groups(masks.get("key_mask"), masks.get("segments")):
        for head in range(2):
            for i in tokens:
                same = [j for j in tokens if j <= i and codes[row, head, j] == codes[row, head, i]][-8:]
                weight = torch.softmax(k[row, head, same] @ q[row, head, i] / 4, 0)
                out[row, head, i] = weight @ v[row, head, same]
    torch.testing.assert_close(result.out, out)
    assert result.auxiliary_loss is None and result.statistics == {}  # evaluation


def test_the_band_of_an_encoder_has_separate_buckets_and_reports_their_balance():
    single = lha(False)
    inputs = single.inputs(40, dtype=torch.float64)
    masks = {"segments": SEGMENTS, "key_mask": MASK}
    result = single(*inputs, **masks)
    _, q, k, v = inputs
    queries, keys = (s.argmax(-1) for s in both_scores(single.mechanism, q, k, False))
    imbalanced, held, lonely, count = 0, 0, 0, 0
    for row, tokens in groups(MASK, SEGMENTS):
        for head in range(2):
            for bucket in range(16):
                n, m = ((c[row, head, tokens] == bucket).sum().item() for c in (queries, keys))
                held += n + m > 0
                imbalanced += n > 2 * m or m > 2 * n
                lonely += n if m == 0 else 0
                count += n
                if m == 0:
                    alone = tokens[queries[row, head, tokens] == bucket]
                    assert torch.equal(result.out[row, head, alone], v[row, head, alone])
    assert lonely > 0
    assert result.statistics["bucket_imbalance"].item() == pytest.approx(imbalanced / held)
    assert result.statistics["queries_in_no_bucket"].item() == pytest.approx(lonely / count)


def evaluation(head_offset=0, seed=0, layer=0):
    return AttentionContext(layer, RngContext.evaluation(seed, 2), head_offset, RecomputeCache())


def test_a_random_hash_is_one_projection_for_queries_and_keys_and_never_changes():
    single = lha(False, hash="random")
    mechanism, inputs = single.mechanism, single.inputs(40)
    assert list(mechanism.parameters()) == [] and mechanism.task_weight == 1.0
    assert single(*inputs, training=True).auxiliary_loss is None
    x, q, _, v = inputs
    heads = heads_of([x, q, 3 * q, v], False)
    codes = mechanism.assign(heads, evaluation()).query_codes
    assert torch.equal(codes, mechanism.assign(heads, evaluation()).key_codes)
    assert not torch.equal(codes, mechanism.assign(heads, evaluation(seed=1)).query_codes)
    assert not torch.equal(codes, mechanism.assign(heads, evaluation(layer=1)).query_codes)
    for step in range(2):
        training = AttentionContext(0, RngContext(0, step, torch.arange(2), True), 0, RecomputeCache())
        assert torch.equal(codes, mechanism.assign(heads, training).query_codes)
    second = heads_of([x, q[:, 1:], q[:, 1:], v[:, 1:]], False)
    assert torch.equal(codes[:, 1:], mechanism.assign(second, evaluation(head_offset=1)).query_codes)
    opposite = mechanism.assign(heads._replace(q=-q), evaluation()).query_codes
    assert torch.equal((opposite + 8) % 16, codes)  # x[R; −R]


def test_only_the_loss_trains_the_hash_and_trains_nothing_else():
    for causal in (True, False):
        single = lha(causal)
        inputs = [t.requires_grad_() for t in single.inputs(40, dtype=torch.float64)]
        result = single(*inputs, training=True)
        parameters = list(single.mechanism.parameters())
        found = torch.autograd.grad(result.out.sum(), [*parameters, *inputs], allow_unused=True, retain_graph=True)
        assert all(g is None for g in found[: len(parameters) + 1])
        assert all(g.abs().max() > 0 for g in found[len(parameters) + 1 :])
        found = torch.autograd.grad(result.auxiliary_loss, [*parameters, *inputs], allow_unused=True)
        assert all(g is None for g in found[len(parameters) :])
        assert all(g.abs().max() > 0 for g in found[: len(parameters)])


def test_the_objective_is_a_convex_combination_of_the_tasks_and_its_own():
    model = build_model(small(("lha",)), 0)
    objective, statistics = model(random_tokens(2, 90), training_draws(2))
    own = statistics["attention/lha/kl_queries"] + statistics["attention/lha/kl_keys"]
    torch.testing.assert_close(objective, 0.95 * statistics["nats"] / statistics["tokens"] + 0.05 * own)
