import itertools

import pytest
import torch
import torch.nn.functional as F

from megasparse.attention.contract import AttentionContext, AttentionInputs, MechanismSpec
from megasparse.attention.lha import LHAAttention, LHAAttentionConfig
from megasparse.attention.lsh import LSHAttention, LSHAttentionConfig
from megasparse.ops.bucketed_attention import Window
from megasparse.ops.random import RngContext
from tests.helpers.comparing import assert_same_with_gradients

WINDOW, LENGTH = Window("band", 4), 21
MASKS = {
    "key_mask": torch.rand(2, LENGTH, generator=torch.Generator().manual_seed(2)) > 0.3,
    "segments": torch.tensor([0] * 2 + [1] * 9 + [2] * 10).expand(2, -1),
}


def spec(causal=True):
    return MechanismSpec(heads=2, head_dim=6, d_model=12, max_length=64, causal=causal)


def random_heads(causal=True, **masks):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 2, LENGTH, 6, generator=generator, dtype=torch.float64) for _ in range(3))
    return AttentionInputs(q, k, v, masks.get("key_mask"), masks.get("segments"), causal)


def random_codes():
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 8, (2, 2, 2, LENGTH), generator=generator) for _ in range(2)]


def together(heads, b):
    """Which tokens of sequence b are real and of one document, (L, L)."""
    real = torch.ones(LENGTH, dtype=torch.bool) if heads.key_mask is None else heads.key_mask[b]
    document = torch.zeros(LENGTH) if heads.segments is None else heads.segments[b]
    return real & real[:, None] & (document == document[:, None])


def defined(heads, query_codes, key_codes, window, *, scale, exclude_self, count_rounds, sinks=0, ahead=WINDOW.chunk):
    """Query by query: the M keys of its bucket at or before it, and the next ones where attention is not causal. Sinks
    are the first real tokens of its document, which stand in no bucket."""
    seen = torch.zeros(*query_codes.shape, heads.k.shape[2], dtype=torch.bool)  # (B, H, R, L, L)
    for b, h, r, i in itertools.product(*map(range, query_codes.shape)):
        same = (key_codes[b, h, r] == query_codes[b, h, r, i]) & together(heads, b)[i]
        first = together(heads, b)[i].nonzero().flatten()[:sinks]
        same[first] = False
        seen[b, h, r, i, first[first <= i] if heads.causal else first] = True
        keys = same.nonzero().flatten()
        seen[b, h, r, i, keys[keys <= i][-window.chunk :]] = True
        if not heads.causal:
            seen[b, h, r, i, keys[keys > i][:ahead]] = True
    own = torch.eye(seen.shape[-1], dtype=torch.bool)
    if exclude_self:
        seen &= ~own
    count = seen.sum(2)
    real = torch.ones_like(own[:1]) if heads.key_mask is None else heads.key_mask[:, None, :, None]
    count = count + (own & (count == 0).all(-1, keepdim=True) & real)
    if count_rounds:
        count = count.clamp_max(1)
    weight = torch.exp(scale * heads.q @ heads.k.transpose(-1, -2)) * count
    blind = ~(count > 0).any(-1)
    total = weight.sum(-1).masked_fill(blind, 1.0)
    return weight @ heads.v / total[..., None], total.log().masked_fill(blind, -torch.inf)


@pytest.mark.parametrize(
    "shifted,local,sinks,masked",  # every pair of values
    [
        (False, False, 0, False),
        (False, True, 2, True),
        (True, False, 2, True),
        (True, True, 0, True),
        (True, True, 2, False),
    ],
)
def test_hashes_by_their_definition_with_the_key_of_the_token_or_of_the_previous_one(shifted, local, sinks, masked):
    settings = {"chunk": WINDOW.chunk, "shifted_keys": shifted, "local": local, "sinks": sinks}
    context = AttentionContext(0, RngContext.evaluation(0, 2))
    inputs = random_heads(**(MASKS if masked else {}))
    for mechanism in (
        LSHAttention(LSHAttentionConfig(buckets=8, **settings), spec()),
        LHAAttention(LHAAttentionConfig(hash="random", **settings), spec()),
    ):
        heads = inputs._replace(k=F.normalize(inputs.q, dim=-1)) if mechanism.shared_qk else inputs
        codes = mechanism.band_codes(heads, 0, context)[0]
        key, key_codes = (torch.zeros_like(x) if shifted else x for x in (heads.k, codes))
        for b, j in itertools.product(range(2), range(1, LENGTH if shifted else 1)):
            if together(heads, b)[j - 1, j]:
                key[b, :, j], key_codes[b, ..., j] = heads.k[b, :, j - 1], codes[b, ..., j - 1]
        seen = [F.pad(x, (0, 0, 1, 0)) if local else x for x in (codes, key_codes)]
        excludes_self = mechanism.shared_qk and not shifted
        rule = {"scale": mechanism.rule["scale"], "exclude_self": excludes_self, "count_rounds": True, "sinks": sinks}
        expected = defined(heads._replace(k=key), *seen, WINDOW, **rule)[0]
        torch.testing.assert_close(mechanism(None, heads, context).out, expected)


@pytest.mark.parametrize(
    "causal,shared,local,sinks",  # every pair of values
    [
        (False, False, False, 0),
        (True, True, True, 0),
        (False, True, True, 1),
        (True, False, False, 1),
        (True, False, True, 3),
        (False, True, False, 3),
    ],
)
def test_sinks_are_in_the_softmax_of_buckets_and_window_once(causal, shared, local, sinks):
    config = LSHAttentionConfig(chunk=WINDOW.chunk, buckets=40, shared_qk=shared, local=local, sinks=sinks)
    mechanism, (queries, keys) = LSHAttention(config, spec(causal)), random_codes()
    keys = queries if shared else keys
    ahead = WINDOW.chunk - (shared and not sinks)  # without codes of their own, the keys less than M ranks away
    everywhere = [F.pad(codes, (0, 0, 1, 0)) for codes in (queries, keys)]  # a window is a round of one bucket
    for names in ((), ("key_mask",), ("segments",), MASKS):
        heads = random_heads(causal, **{name: MASKS[name] for name in names})

        def ours(q, k, v, heads=heads):
            return mechanism.attend(heads._replace(q=q, k=k, v=v), queries, None if shared else keys)[0]

        def dense(q, k, v, heads=heads):
            codes, seen = everywhere if local else (queries, keys), heads._replace(q=q, k=k, v=v)
            return defined(seen, *codes, WINDOW, sinks=sinks, ahead=ahead, **mechanism.rule)[0]

        assert_same_with_gradients(ours, dense, heads[:3])
