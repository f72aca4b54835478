"""Ranked attention: candidates, their order and the loss of the buckets, against definitions by loops."""

import pytest
import torch

from megasparse.attention.ranked import RankingSpec, bucket_loss, ranked_keys
from tests.helpers.models import Single

BATCH, LENGTH, WIDTH, BUCKETS, PROBES, COUNT = 2, 40, 8, 5, 3, 6


@pytest.mark.parametrize(
    "members,operators,causal,first,masked",  # every pair of values
    [
        (None, "blockwise", True, 0, True),
        (None, "blockwise", True, 13, False),
        (None, "blockwise", False, 0, True),
        (3, "blockwise", True, 0, False),
        (3, "blockwise", True, 13, True),
        (3, "blockwise", False, 0, False),
        (3, "triton", True, 13, True),
        (3, "triton", False, 0, False),
    ],
)
def test_the_best_keys_of_the_probed_buckets_are_chosen(monkeypatch, members, operators, causal, first, masked):
    monkeypatch.setenv("MEGASPARSE_OPS", operators)
    monkeypatch.setattr("megasparse.attention.ranked._TILE", {"cpu": 1 << 9})  # several tiles
    monkeypatch.setattr("megasparse.ops.sketch._GATHERED_ELEMENTS", 1 << 10)  # in several parts
    generator = torch.Generator().manual_seed(1)
    q, k = (torch.randn(BATCH, length, WIDTH, generator=generator) for length in (LENGTH - first, LENGTH))
    k[:, 20] = k[:, 10]  # equal scores
    q[:, -1] *= 1e9  # scores beyond 2^20, which are equal
    codes = torch.randint(BUCKETS, (BATCH, LENGTH), generator=generator)
    codes[:, 20] = codes[:, 10]
    probes = torch.rand(BATCH, LENGTH - first, BUCKETS, generator=generator).argsort(-1)[..., :PROBES]
    real = torch.rand(BATCH, LENGTH, generator=generator) > (0.2 if masked else -1.0)
    documents = (torch.arange(LENGTH) // (11 if masked else LENGTH)).expand(BATCH, -1).contiguous()
    masks = (real, documents) if masked else (None, None)
    chosen = ranked_keys(q, k, probes, codes, RankingSpec(BUCKETS, members, COUNT, causal), *masks, first)
    assert chosen.dtype == torch.int32 and chosen.shape == (BATCH, LENGTH - first, COUNT)
    for b in range(BATCH):
        for row in range(LENGTH - first):
            i, candidates = first + row, []
            for bucket in probes[b, row]:
                visible = (j for j in range(i + 1 if causal else LENGTH) if documents[b, j] == documents[b, i])
                candidates += [j for j in visible if real[b, j] and codes[b, j] == bucket][-(members or LENGTH) :]
            score = (k[b].double() @ q[b, row].double() * WIDTH**-0.5 * 256).round().clamp(-(2**28), 2**28)
            best = (sorted(candidates, key=lambda j: (-float(score[j]), j))[:COUNT] or [i]) if real[b, i] else []
            assert chosen[b, row].tolist() == best + [-1] * (COUNT - len(best))


def test_with_all_buckets_the_sketch_chooses():
    ranked = Single("ranked", True, settings={"probes": 8, "local": False})
    sketch = Single("smart_bird heads", True, settings={"keys": 6, "sketch_dim": 8, "objective": "attention"})
    sketch.mechanism.load_state_dict(ranked.mechanism.state_dict(), strict=False)
    inputs = ranked.inputs(50)
    torch.testing.assert_close(ranked(*inputs).out, sketch(*inputs).out)


def test_the_loss_of_buckets_is_its_definition():
    generator = torch.Generator().manual_seed(2)
    scores = [torch.randn(1, 2, n, 4, generator=generator, dtype=torch.float64) for n in (6, 9)]
    shares = torch.rand(1, 2, 6, 9, generator=generator, dtype=torch.float64)
    query, key = (x[0].softmax(-1) for x in scores)
    missed = -torch.einsum("gij,gjb,gib->g", shares[0], key, query.log()) / shares.sum((0, 2, 3))
    uneven = sum(times * (p * (4 * p).log()).sum(-1) for times, p in ((1, query.mean(1)), (2, key.mean(1))))
    torch.testing.assert_close(bucket_loss(*scores, shares, (None, None)), (missed + uneven).mean())


def test_flops_count_twice_the_share_of_equal_buckets():
    def scores(**settings):
        return Single("ranked", True, settings=settings).mechanism.flops(64).forward

    of_key, visible = 2 * 2 * 8, (64 + 1) / 2  # two sketches of width 8
    assert scores(probes=8) == scores(probes=4)  # of 8 buckets
    assert scores(probes=8) - scores(probes=2) == pytest.approx(of_key * visible / 2)
    assert scores(probes=8) - scores(probes=2, members=3) == pytest.approx(of_key * (visible - 6))
