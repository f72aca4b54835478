"""Operators called directly under torch.autocast compute the same results as without it."""

import pytest
import torch

from megasparse.ops.bucketed_attention import BucketedAttentionSpec, Window, bucketed_attention
from megasparse.ops.cluster_attention import ClusterAttentionSpec, cluster_attention
from megasparse.ops.cross_entropy import token_scores
from megasparse.ops.gathered_attention import gathered_attention
from megasparse.ops.hash_table_attention import HashTableAttentionSpec, expected_attention, hash_table_attention
from megasparse.ops.hashing import angular_hash, sign_codes
from megasparse.ops.linear_attention import causal_linear_attention, linear_attention
from megasparse.ops.local_attention import LocalAttentionSpec, RelativeVectors, distances, relative_local_attention
from megasparse.ops.sketch import KeyChoiceSpec, chosen_keys, sketched_attention
from tests.helpers.cases import together
from tests.helpers.operators import DEVICE

LENGTH, CHUNK = 24, 8


def made(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(DEVICE)


CODES = torch.arange(LENGTH, device=DEVICE).remainder(3).expand(1, 2, 2, -1).to(torch.int16)
CLUSTERS = torch.arange(LENGTH, dtype=torch.int32, device=DEVICE).view(1, 1, 3, CHUNK)
INDEX = (torch.arange(LENGTH)[:, None] // torch.arange(1, 5)).to(DEVICE, torch.int32).expand(1, 1, -1, -1)
PROJECTION = made(2, 20, 16)
RELATIVE = RelativeVectors(made(2, len(distances(CHUNK, True)), 16), made(2, 16), made(2, 16))
BAND = BucketedAttentionSpec(Window("band", CHUNK), causal=True)
TABLES = HashTableAttentionSpec(code_bits=2, causal=True, chunk=CHUNK)

HEADS = {
    "bucketed": lambda q, k, v: bucketed_attention(q, k, v, CODES, BAND),
    "bucketed, own codes": lambda q, k, v: bucketed_attention(q, k, v, (CODES, CODES), BAND),
    "cluster": lambda q, k, v: cluster_attention(q, k, v, (CLUSTERS, CLUSTERS), ClusterAttentionSpec(True, 0.25, True)),
    "gathered": lambda q, k, v: gathered_attention(q, k, v, INDEX, scale=0.25),
    "relative local": lambda q, k, v: (
        relative_local_attention(q, k, v, RELATIVE, LocalAttentionSpec(CHUNK, True, 0.25)),
    ),
    "hash tables": lambda q, k, v: hash_table_attention(q, k, v, CODES, CODES, TABLES)[:1],
}
"""Operators with kernels, of q, k, v (1, 2, L, 16). Returns their differentiable outputs."""
OTHERS = {
    "expected": lambda q, k, v: expected_attention(q / 9, k / 9, v, TABLES)[:1],
    "linear": lambda q, k, v: (linear_attention(q, k, v, PROJECTION, scale=0.25),),
    "causal linear": lambda q, k, v: causal_linear_attention(q, k, v, PROJECTION, scale=0.25, chunk=CHUNK)[:1],
    "sketch": lambda q, k, v: sketched_attention(q[0], k[0], v[0], causal=True),
    "cross-entropy": lambda q, k, v: (
        token_scores((q + k * v).flatten(0, 2), torch.arange(2 * LENGTH, device=DEVICE) % 16, 0.1),
    ),
}
CODED = {
    "angular hash": lambda x: angular_hash(x, made(2, 3, 16, 8), [16]),
    "gaussian codes": lambda x: sign_codes(x, 0, range(2), 6, 5, "gaussian"),
    "chosen keys": lambda x: chosen_keys(x[0], x[0], KeyChoiceSpec(4, True, "top_k"), noise=None),
}


def computed(operator, dtypes, autocast, inside=False):
    """Outputs and the gradients of q, k and v. inside: autocast is on in the backward too."""
    q, k, v = (made(1, 2, LENGTH, 16 + 8 * n)[..., :16].contiguous().bfloat16() for n in range(3))
    inputs = [x.to(DEVICE, dtype).requires_grad_() for x, dtype in zip((q, k, v), dtypes, strict=True)]
    with torch.autocast(DEVICE.type, torch.bfloat16, enabled=autocast):
        outputs = operator(*inputs)
    with torch.autocast(DEVICE.type, torch.bfloat16, enabled=autocast and inside):
        grads = torch.autograd.grad([x.float().square().sum() for x in outputs], inputs)
    return [*outputs, *grads]


OWN_BACKWARDS = ["bucketed", "bucketed, own codes", "cluster", "gathered", "hash tables", "expected", "causal linear"]


@pytest.mark.parametrize("name", [*HEADS, *OTHERS])
def test_autocast_changes_no_bit(name, monkeypatch):
    """Nor does autocast in the backward, of backwards of our own."""
    monkeypatch.setenv("MEGASPARSE_OPS", "blockwise")
    for dtype in (torch.float32, torch.bfloat16):
        expected = computed((HEADS | OTHERS)[name], [dtype] * 3, False)
        for inside in (False, True)[: 1 + (name in OWN_BACKWARDS)]:
            results = computed((HEADS | OTHERS)[name], [dtype] * 3, True, inside)
            assert [x.dtype for x in results] == [x.dtype for x in expected]
            assert all(torch.equal(*pair) for pair in zip(results, expected, strict=True)), dtype


@pytest.mark.parametrize("name", CODED)
def test_codes_and_choices_are_those_without_autocast(name, monkeypatch):
    monkeypatch.setenv("MEGASPARSE_OPS", "blockwise")
    x = made(1, 2, 500, 16)
    expected = CODED[name](x)
    with torch.autocast(DEVICE.type, torch.bfloat16):
        assert torch.equal(CODED[name](x), expected)


@pytest.mark.parametrize("name", HEADS)
@together(("wide", "implementation"), enumerate(("blockwise", "triton", "triton")))  # cast alike
def test_one_input_may_be_wider_than_the_others(name, wide, implementation, monkeypatch):
    monkeypatch.setenv("MEGASPARSE_OPS", "blockwise")
    exact = computed(HEADS[name], [torch.float32] * 3, False)
    monkeypatch.setenv("MEGASPARSE_OPS", implementation)
    dtypes = [torch.bfloat16] * 3
    dtypes[wide] = torch.float32
    inside = computed(HEADS[name], dtypes, True)
    assert [x.dtype for x in inside[-3:]] == dtypes
    for found, expected in zip(inside, exact, strict=True):
        difference = (found.float() - expected).nan_to_num()  # z is −∞ where nothing is seen
        assert difference.norm() <= 2e-2 * expected.nan_to_num(neginf=0.0).norm()
