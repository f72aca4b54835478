"""One call of each operator's kernels, forward and backward, for tools that compile all of them.

A case takes a dtype and a head dim and calls kernels like a model; `ops.kernels.recorded` records them instead.
"""

from collections.abc import Callable

import torch

Case = Callable[[torch.dtype, int], None]
CASES: dict[str, Case] = {}
"""Operator -> case."""
HEAD_DIMS = (16, 32, 64, 128, 256)
ONE_WIDTH = {"counting_sort", "hash_learning", "layer_norm", "random_numbers", "sketch", "cross_entropy"}
"""Operators that do not depend on the head dim; they are compiled once, for all widths that they use."""
ONE = 64


def case(function: Case) -> Case:
    CASES[function.__name__] = function
    return function


@case
def counting_sort(dtype: torch.dtype, head_dim: int) -> None:
    """2,048 buckets, and 16,384 in two passes; in forward and reverse order."""
    from megasparse.ops.counting_sort_kernels import counting_sort

    for bits in (11, 14):
        counting_sort(torch.zeros(2, 2048, dtype=torch.int16), bits, None, bits == 11)


@case
def gathered_attention(dtype: torch.dtype, head_dim: int) -> None:
    """Smart Bird: separate keys per head in training, shared keys in evaluation."""
    from megasparse.ops.gathered_attention_kernels import gathered_attention

    for heads in (2, 1):
        q, k, v = (torch.zeros(1, 2, 32, head_dim, dtype=dtype, requires_grad=True) for _ in range(3))
        index = torch.zeros(1, heads, 32, 16, dtype=torch.int64)
        gathered_attention(q, k, v, index, scale=0.125)[0].sum().backward()


@case
def angular_hash(dtype: torch.dtype, head_dim: int) -> None:
    """1,024 buckets in two factors, and 64 in one."""
    from megasparse.ops.hashing_kernels import angular_hash as hashed

    x = torch.zeros(1, 2, 256, head_dim, dtype=dtype)
    hashed(x, torch.zeros(2, 2, head_dim, 32), [32, 32])
    hashed(x, torch.zeros(2, 2, head_dim, 32), [64])


@case
def sign_codes(dtype: torch.dtype, head_dim: int) -> None:
    """32 hashes of 9 bits, and a number of hashes that needs several programs per token."""
    from megasparse.ops.hashing import Kind
    from megasparse.ops.hashing_kernels import sign_codes as coded

    x = torch.zeros(1, 2, 256, head_dim, dtype=dtype)
    many: tuple[tuple[int, Kind], ...] = ((32, "hadamard"), (4 * head_dim, "hadamard"), (32, "gaussian"))
    for hashes, kind in many:
        coded(x, 1, range(2), hashes, 9, kind)


@case
def learned_codes(dtype: torch.dtype, head_dim: int) -> None:
    """LHA's joint hash, a sum of two networks, for 512 buckets."""
    from megasparse.ops.hashing_kernels import learned_codes as coded

    x = torch.zeros(1, 2, 256, head_dim, dtype=dtype)
    shapes = (2, head_dim, head_dim), (2 * head_dim,), (2, head_dim, 512), (2 * 512,)
    coded((x, x), 2 * [tuple(torch.zeros(shape) for shape in shapes)])


@case
def hash_table_attention(dtype: torch.dtype, head_dim: int) -> None:
    """YOSO in a causal decoder, and in an encoder with padding, with 64-bit bucket numbers."""
    from megasparse.ops.hash_table_attention import HashTableAttentionSpec
    from megasparse.ops.hash_table_attention_kernels import hash_table_attention

    for causal in (True, False):
        q, k, v = (torch.zeros(1, 2, 2048, head_dim, dtype=dtype, requires_grad=True) for _ in range(3))
        codes = torch.zeros(1, 2, 2, 2048, dtype=torch.int16)
        mask = None if causal else torch.ones(1, 2048, dtype=torch.bool)
        spec = HashTableAttentionSpec(11, causal)
        hash_table_attention(q, k, v, codes, codes, spec, mask)[0].sum().backward()


@case
def dropout(dtype: torch.dtype, head_dim: int) -> None:
    """Layers `head_dim` wide, and 1,536; and of relu, with its gradient."""
    from megasparse.ops.random_kernels import drop, relu_gradient

    for width in (head_dim, 1536):
        x, rows = torch.zeros(1, 64, width, dtype=dtype), torch.zeros(1, 64, dtype=torch.int64)
        for relu, stream, sign in ((False, None, 1), (True, None, 1), (False, x.float(), 1), (False, x.float(), -1)):
            out = drop(x, dtype if stream is None else torch.float32, 0.1, 1234, rows, relu, stream, sign)
        relu_gradient(x, out.to(dtype), 1.1)


@case
def layer_norm(dtype: torch.dtype, head_dim: int) -> None:
    """Streams, read in the dtype of the weights, centred with a bias and in the RMS form."""
    from megasparse.ops.normalize_kernels import layer_norm as normalised

    for width in (768, 4096):
        x = torch.zeros(1, 64, width, requires_grad=True)
        weight, bias = (torch.ones(width, dtype=dtype, requires_grad=True) for _ in range(2))
        for added in (bias, None):
            normalised(x, weight, added, 1e-5, dtype).sum().backward()


@case
def unit_keys(dtype: torch.dtype, head_dim: int) -> None:
    """Heads that are views of a layer's tokens."""
    from megasparse.ops.normalize_kernels import unit_keys as keys_of
    from megasparse.ops.normalize_kernels import unit_vectors

    q = torch.zeros(1, 64, 2, head_dim, dtype=dtype, requires_grad=True)
    vectors, keys = keys_of(q.transpose(1, 2))
    (vectors.sum() + keys.sum() + unit_vectors(q.transpose(1, 2), None).sum()).backward()


@case
def random_numbers(dtype: torch.dtype, head_dim: int) -> None:
    """Bits, normal numbers and dropout, with keys of the host and in device memory."""
    from megasparse.ops.random import KeyTable, RngContext
    from megasparse.ops.random_kernels import bits, bits_by_head, drop, normals

    device, rows = torch.device("cpu"), torch.zeros(1, 8, dtype=torch.int64)
    samples = torch.zeros(1, dtype=torch.int64)
    for key in (1234, RngContext(0, 0, samples, True, table=KeyTable(device)).key(0, "draws")):
        bits(key, rows, 192)
        bits_by_head(key, range(8), 11, 192, device)
        normals(key, range(8), 2, 64 * 64, device)
        drop(torch.zeros(1, 8, 64, dtype=dtype), dtype, 0.1, key, rows)


@case
def bucketed_attention(dtype: torch.dtype, head_dim: int) -> None:
    """LSH of two rounds in a decoder; local attention; codes of queries and keys apart in an encoder with padding."""
    from megasparse.ops.bucketed_attention import BucketedAttentionSpec, Window
    from megasparse.ops.bucketed_attention.gpu import bucketed_attention as attend

    codes, mask = torch.zeros(1, 2, 2, 512, dtype=torch.int16), torch.ones(1, 512, dtype=torch.bool)
    band, local = Window("band", 128), Window("chunk", 128)
    for buckets, key_mask, spec in (
        (codes, None, BucketedAttentionSpec(band, causal=True)),
        (None, None, BucketedAttentionSpec(local, True, 0.125, exclude_self=False)),
        ((codes, codes), mask, BucketedAttentionSpec(band, False, 0.125, exclude_self=False)),
    ):
        q, k, v = (torch.zeros(1, 2, 512, head_dim, dtype=dtype, requires_grad=True) for _ in range(3))
        attend(q, k, v, buckets, spec, key_mask)[0].sum().backward()


@case
def sketch(dtype: torch.dtype, head_dim: int) -> None:
    """Width 4 and the largest width, in a decoder and in an encoder with padding, with and without draws."""
    from megasparse.ops.sketch import WIDEST, KeyChoiceSpec, Noise
    from megasparse.ops.sketch_kernels import chosen_keys, exact_projection, gathered_products, sketched_attention

    gathered_products(torch.zeros(64, 32, dtype=dtype), torch.zeros(64, 32), torch.zeros(64, 100, dtype=torch.int64))
    for width in (4, WIDEST):
        exact_projection(torch.zeros(1, 64, 512, dtype=dtype), torch.zeros(width, 512))
        for causal in (True, False):
            q, k, v = (torch.zeros(1, 64, width, dtype=dtype, requires_grad=True) for _ in range(3))
            mask = None if causal else torch.ones(1, 64, dtype=torch.bool)
            h, lse = sketched_attention(q, k, v, causal=causal, key_mask=mask)
            (h.sum() + lse.sum()).backward()
            noise = Noise(0, range(2), torch.arange(64).expand(1, -1))
            for draws in (noise, None):
                chosen_keys(q, k, KeyChoiceSpec(20, causal, "inverse_log_squared"), draws, lse, mask)


@case
def cross_entropy(dtype: torch.dtype, head_dim: int) -> None:
    """Bytes, BERT's word pieces with label smoothing, and a vocabulary of 256K."""
    from megasparse.ops.cross_entropy_kernels import token_scores

    for vocabulary, smoothing in ((258, 0.0), (30522, 0.1), (262144, 0.0)):
        logits = torch.zeros(2, vocabulary, dtype=dtype, requires_grad=True)
        token_scores(logits, torch.zeros(2, dtype=torch.int64), smoothing).sum().backward()


@case
def hash_learning(dtype: torch.dtype, head_dim: int) -> None:
    """LHA with 512 buckets at 64K tokens."""
    from megasparse.ops.hash_learning_kernels import divergence, ranks, unit_sum

    rows = torch.zeros(1, 2, 64, 512)
    for learn in (True, False):
        divergence(rows, unit_sum(rows), torch.zeros(1, 2, 64, dtype=torch.int16), 1.0, learn)
    ranks(rows, 0)
