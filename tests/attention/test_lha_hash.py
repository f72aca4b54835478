"""The hash functions of LHA: what they learn, and from which tokens."""

import pytest
import torch

from megasparse.attention.contract import AttentionContext, AttentionInputs, MechanismSpec, RecomputeCache
from megasparse.attention.lha import LHAAttention, LHAAttentionConfig
from megasparse.ops.random import RngContext

EVALUATION = AttentionContext(0, RngContext.evaluation(0, 1))


@pytest.mark.parametrize("hash_", ["mlp", "linear"])
def test_learned_buckets_hold_more_attention_than_random_ones(hash_):
    """Queries of a cluster attend to the keys of another one: distance says nothing, so hashing must be learned."""
    generator = torch.Generator().manual_seed(0)
    spec = MechanismSpec(heads=1, head_dim=8, d_model=8, max_length=64, causal=False)
    centre = torch.randn(2, 8, 8, generator=generator) * 2
    cluster = torch.arange(64) % 8
    q, k = (c[cluster] + 0.3 * torch.randn(64, 8, generator=generator) for c in centre)
    q = q @ torch.linalg.pinv(centre[0]) @ torch.linalg.pinv(centre[1]).mT * 14  # q_i·k_j is large inside a cluster
    heads = AttentionInputs(*(t[None, None] for t in (q, k, k)), None, None, False)

    def utility(mechanism):
        codes = mechanism.assign(heads, EVALUATION)
        together = codes.query_codes[..., None] == codes.key_codes[..., None, :]
        return (torch.softmax(q @ k.mT / 8**0.5, -1) * together).sum(-1).mean().item()

    random = LHAAttention(LHAAttentionConfig(hash="random", chunk=8), spec)
    learned = LHAAttention(LHAAttentionConfig(hash=hash_, chunk=8), spec)
    with torch.no_grad():
        for parameter in learned.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * (parameter.dim() > 1) * 8**-0.5)
    optimizer = torch.optim.Adam(learned.parameters(), lr=0.02)
    before = utility(learned)
    for step in range(100):
        context = AttentionContext(0, RngContext(0, step, torch.arange(1), True), 0, RecomputeCache())
        optimizer.zero_grad()
        learned(heads.q, heads, context).auxiliary_loss.backward()
        optimizer.step()
    assert utility(learned) > max(0.5, 2 * before, 1.5 * utility(random))
