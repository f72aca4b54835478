import pytest
import torch
import torch.nn.functional as F

from megasparse.ops.cluster_attention import ClusterAttentionSpec, cluster_attention, operator
from megasparse.ops.cluster_attention import gpu as kernels
from megasparse.ops.cluster_attention.reference import cluster_attention as defined
from tests.helpers.kernels import DEVICE

NAMES = ["out", "z", "dq", "dk", "dv"]
BARS = {torch.float32: (1e-5, 1e-4), torch.bfloat16: (1e-2, 3e-2), torch.float16: (1e-2, 3e-2)}


def random_heads(queries, keys, dim=16, rows=(1, 2), dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(*rows, n, dim, generator=generator).to(DEVICE, dtype) for n in (queries, keys, keys)]


def random_lists(shape, length, places, seed=1):
    """Distinct tokens in random order, some places empty."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.rand(*shape, length, generator=generator).argsort(-1)[..., :places]
    tokens = F.pad(tokens, (0, max(0, places - length)), value=-1)
    return tokens.masked_fill(torch.rand(tokens.shape, generator=generator) < 0.3, -1).to(DEVICE, torch.int32)


def call(attention, heads, *lists, key_mask=None, segments=None, **rule):
    return attention(*heads, *lists, ClusterAttentionSpec(**rule), key_mask, segments)


def gradients(attention, heads, *lists, **rule):
    q, k, v = (x.clone().requires_grad_() for x in heads)
    out, z = call(attention, (q, k, v), *lists, **rule)
    generator = torch.Generator().manual_seed(2)
    out_grad, z_grad = (torch.randn(x.shape, generator=generator, dtype=torch.float64) for x in (out, z))
    loss = (out * out_grad.to(out)).sum() + (z.masked_fill(z == -torch.inf, 0.0) * z_grad.to(z)).sum()
    return out.detach(), z.detach(), *torch.autograd.grad(loss, [q, k, v])


def assert_equal_to_the_definition(heads, lists, **rule):
    rule = {"causal": False, "scale": 0.3, "count_clusters": True, **rule}
    ours = gradients(kernels.cluster_attention, heads, *lists, **rule)
    exact = gradients(defined, [x.double() for x in heads], *lists, **rule)
    assert ours[0].dtype == ours[2].dtype == heads[0].dtype and ours[1].dtype == torch.float32
    for name, a, b in zip(NAMES, ours, exact, strict=True):
        seen = b > -torch.inf
        assert torch.equal(a == -torch.inf, ~seen), name
        a, b = a[seen].double(), b[seen]
        bar = BARS[heads[0].dtype][name[0] == "d"]
        assert (a - b).norm() <= bar * b.norm() + 1e-6 * b.numel() ** 0.5, (name, (a - b).norm() / b.norm())


@pytest.mark.parametrize(
    "length,rows,masked,documents,causal,count",
    [
        (1, (1, 1), False, False, False, True),
        (9, (2, 2), True, False, False, True),
        (9, (1, 1), False, True, True, False),
        (17, (2, 1), True, True, False, True),
    ],
)
def test_N5_forward_and_gradients_are_those_of_the_definition(length, rows, masked, documents, causal, count):
    generator = torch.Generator().manual_seed(3)
    mask = (torch.rand(2, length, generator=generator) > 0.3).to(DEVICE)
    segments = torch.randint(0, 3, (2, length), generator=generator).sort(-1).values.to(DEVICE)
    rule = {
        "causal": causal,
        "count_clusters": count,
        "key_mask": mask if masked else None,
        "segments": segments if documents else None,
    }
    lists = random_lists((*rows, 2), length, 6), random_lists((*rows, 2), length, 9, seed=5)
    assert_equal_to_the_definition(random_heads(length, length, rows=(2, rows[1])), lists, **rule)


def test_other_lengths_rows_and_places_of_keys_than_of_queries():
    lists = random_lists((1, 2, 2), 40, 35), random_lists((1, 1, 2), 75, 70, seed=5)  # several tiles of both
    assert_equal_to_the_definition(random_heads(40, 75, dtype=torch.float16), lists)


@pytest.mark.parametrize("dtype", BARS, ids=str)
def test_every_dtype_and_a_head_dim_between_powers_of_two(dtype):
    lists = random_lists((1, 1, 2), 19, 12), random_lists((1, 1, 2), 19, 15, seed=5)
    assert_equal_to_the_definition(random_heads(19, 19, 40, (1, 1), dtype), lists, causal=True)


def test_tokens_in_many_clusters_and_in_none():
    """The first 3 are in all of 9 clusters, the others in one or two, the last ones in none."""
    tokens = torch.arange(9)[:, None] % 5 + torch.tensor([3, 4])
    lists = torch.cat([torch.arange(3).expand(9, -1), tokens], dim=1).flip(-1)[None, None].to(DEVICE, torch.int32)
    assert_equal_to_the_definition(random_heads(11, 11, rows=(1, 1)), (lists, lists))


@pytest.mark.parametrize("clusters", [33, pytest.param(133, marks=pytest.mark.kernels)])
def test_pairs_that_met_in_an_earlier_cluster(clusters):
    """Bits in several words, and (from 128 clusters on) in several steps of `meetings`."""
    places = torch.arange(clusters) % 5
    tokens = torch.stack([places, places + 2, torch.full_like(places, 6), torch.full_like(places, -1)], dim=-1)
    tokens[:-1, 2] = -1  # the last two meet in the last cluster alone, and once in an earlier word
    tokens[7, 2] = 6
    lists = kernels._lists(tokens[None, None].to(DEVICE), 9)
    words = kernels._meetings(lists, lists)[0, 0].cpu()  # (W, M, Mk/32)
    members = (tokens[:, :, None] == torch.arange(9)).any(1)  # (W, L)
    for cluster, found in enumerate(words[..., 0]):
        earlier = members[:cluster].long().T @ members[:cluster].long() > 0
        for place, token in enumerate(tokens[cluster].tolist()):
            for other, key in enumerate(tokens[cluster].tolist()):
                if token >= 0 and key >= 0:
                    assert bool(found[place] >> other & 1) == earlier[token, key]


def test_a_cluster_listed_twice_counts_once_or_twice():
    heads = random_heads(9, 9, rows=(1, 1))
    once = random_lists((1, 1, 1), 9, 6), random_lists((1, 1, 1), 9, 6, seed=5)
    twice = [index.repeat(1, 1, 2, 1) for index in once]
    rule = dict(causal=False, scale=1.0)
    out, z = call(kernels.cluster_attention, heads, *once, count_clusters=False, **rule)
    counted = call(kernels.cluster_attention, heads, *twice, count_clusters=True, **rule)
    assert torch.equal(counted[0], out) and torch.equal(counted[1], z)
    doubled, doubled_z = call(kernels.cluster_attention, heads, *twice, count_clusters=False, **rule)
    torch.testing.assert_close((doubled, doubled_z), (out, z + torch.tensor(2.0).log()))


def test_a_query_that_sees_nothing_gives_zero_and_no_gradient():
    heads = random_heads(4, 4, rows=(1, 1))
    queries, keys = torch.tensor([[[[0, 1, -1]]]], device=DEVICE), torch.tensor([[[[1, -1]]]], device=DEVICE)
    rule = dict(causal=True, scale=1.0, count_clusters=False)
    out, z, *grads = gradients(kernels.cluster_attention, heads, queries, keys, **rule)
    for blind in (0, 2, 3):
        assert (out[:, :, blind] == 0).all() and (z[:, :, blind] == -torch.inf).all()
        assert (grads[0][:, :, blind] == 0).all()
    torch.testing.assert_close(out[:, :, 1], heads[2][:, :, 1])
    assert (grads[1][:, :, [0, 2, 3]] == 0).all()


@pytest.mark.parametrize("size", [0.0, 1e4])
def test_zero_vectors_and_huge_scores_stay_finite(size):
    q, k, v = random_heads(9, 9, rows=(1, 1))
    lists = random_lists((1, 1, 1), 9, 6), random_lists((1, 1, 1), 9, 6, seed=5)
    rule = dict(causal=True, scale=1.0, count_clusters=False)
    out, _, *grads = gradients(kernels.cluster_attention, (q * size, k * size, v), *lists, **rule)
    assert all(x.isfinite().all() for x in (out, *grads))


def test_views_are_read_right():
    heads = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in random_heads(7, 7)]
    assert not heads[0].is_contiguous()
    lists = [random_lists((1, 1, 2), 7, 5, seed).mT.contiguous().mT for seed in (1, 5)]
    mask = torch.ones(7, 1, dtype=torch.bool, device=DEVICE).T
    assert_equal_to_the_definition(heads, lists, key_mask=mask)
    assert_equal_to_the_definition([x[:, :1].mT.contiguous().mT for x in heads], lists)


def test_gradients_of_one_output_alone_and_broadcast():
    heads = random_heads(7, 7, rows=(1, 1))
    lists = random_lists((1, 1, 1), 7, 5), random_lists((1, 1, 1), 7, 5, seed=5)
    for of in (0, 1):
        found = []
        for attention, dtype in ((kernels.cluster_attention, torch.float32), (defined, torch.float64)):
            inputs = [x.to(dtype).detach().requires_grad_() for x in heads]
            result = call(attention, inputs, *lists, causal=False, scale=0.3, count_clusters=False)[of]
            result.masked_fill(result == -torch.inf, 0.0).sum().backward()
            found.append([torch.zeros_like(x) if x.grad is None else x.grad for x in inputs])
        for a, b in zip(*found, strict=True):
            torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-5)


def test_two_runs_are_the_same_to_the_last_bit():
    heads = random_heads(13, 13, rows=(1, 1))
    lists = random_lists((1, 1, 3), 13, 8), random_lists((1, 1, 3), 13, 8, seed=5)
    rule = dict(causal=False, scale=1.0, count_clusters=True)
    first, second = (gradients(kernels.cluster_attention, heads, *lists, **rule) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("name", ["reference", "blockwise", "triton"])
def test_the_operator_runs_what_it_is_told_to(name, monkeypatch):
    def chosen(*arguments, **settings):
        raise RuntimeError(f"{name} it is")

    monkeypatch.setattr(kernels if name == "triton" else getattr(operator, name), "cluster_attention", chosen)
    monkeypatch.setenv("MEGASPARSE_OPS", name)
    index = torch.zeros(1, 1, 1, 1, dtype=torch.int64, device=DEVICE)
    with pytest.raises(RuntimeError, match=f"{name} it is"):
        call(cluster_attention, random_heads(1, 1), index, index, causal=True, scale=1.0, count_clusters=True)


@pytest.mark.kernels
@pytest.mark.parametrize("dtype", BARS, ids=str)
@pytest.mark.parametrize("dim", [16, 24, 32, 64, 128, 256])
@pytest.mark.parametrize("length,places,rows", [(1, 3, (2, 2)), (17, 9, (1, 2)), (100, 70, (1, 1))])
def test_N5_kernels_at_every_head_dim_and_length(length, places, rows, dim, dtype):
    lists = [random_lists((*rows, 2), length, places, seed) for seed in (1, 5)]
    heads = random_heads(length, length, dim, rows, dtype)
    assert_equal_to_the_definition(heads, lists, causal=dim % 32 == 0)
