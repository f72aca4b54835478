import itertools

import pytest
import torch
import torch.nn.functional as F

from megasparse.attention.contract import AttentionInputs, MechanismSpec
from megasparse.attention.lsh import LSHAttention, LSHAttentionConfig
from megasparse.ops.bucketed_attention import Window
from tests.helpers.comparing import assert_same_with_gradients

WINDOW = Window("band", 4)


def random_heads(length, causal=True, dtype=torch.float64, **masks):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 2, length, 6, generator=generator, dtype=dtype) for _ in range(3))
    return AttentionInputs(q, k, v, masks.get("key_mask"), masks.get("segments"), causal)


def random_codes(length, rounds=2, buckets=3):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, buckets, (2, 2, rounds, length), generator=generator) for _ in range(2)]


def together(heads, b):
    """Which tokens of sequence b are real and of one document, (L, L)."""
    length = heads.q.shape[2]
    real = torch.ones(length, dtype=torch.bool) if heads.key_mask is None else heads.key_mask[b]
    document = torch.zeros(length) if heads.segments is None else heads.segments[b]
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


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("local", [True, False])
@pytest.mark.parametrize("sinks", [0, 1, 3])
def test_sinks_are_in_the_softmax_of_buckets_and_window_once(causal, shared, local, sinks):
    length = 21
    spec = MechanismSpec(heads=2, head_dim=6, d_model=12, max_length=64, causal=causal)
    config = LSHAttentionConfig(chunk=WINDOW.chunk, buckets=40, shared_qk=shared, local=local, sinks=sinks)
    mechanism, (queries, keys) = LSHAttention(config, spec), random_codes(length, buckets=8)
    keys = queries if shared else keys
    ahead = WINDOW.chunk - (shared and not sinks)  # without codes of their own, the keys less than M ranks away
    everywhere = [F.pad(codes, (0, 0, 1, 0)) for codes in (queries, keys)]  # a window is a round of one bucket
    mask = torch.rand(2, length, generator=torch.Generator().manual_seed(2)) > 0.3
    documents = torch.tensor([0] * 2 + [1] * 9 + [2] * 10).expand(2, -1)
    for masks in ({}, {"key_mask": mask}, {"segments": documents}, {"key_mask": mask, "segments": documents}):
        heads = random_heads(length, causal, **masks)

        def ours(q, k, v, heads=heads):
            return mechanism.attend(heads._replace(q=q, k=k, v=v), queries, None if shared else keys)[0]

        def dense(q, k, v, heads=heads):
            codes, seen = everywhere if local else (queries, keys), heads._replace(q=q, k=k, v=v)
            return defined(seen, *codes, WINDOW, sinks=sinks, ahead=ahead, **mechanism.rule)[0]

        assert_same_with_gradients(ours, dense, heads[:3])
