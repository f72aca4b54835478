import pytest
import torch

from megasparse.attention.contract import AttentionContext, AttentionInputs, MechanismSpec
from megasparse.attention.yoso import YOSOAttention, YOSOAttentionConfig
from megasparse.ops.hash_table_attention import HashTableAttentionSpec, expected_attention, hash_table_attention
from megasparse.ops.hashing import sign_codes
from megasparse.ops.normalize import unit_vectors
from megasparse.ops.random import RngContext


def yoso(place=None, **settings):
    place = place or dict(causal=False)
    place = MechanismSpec(**{**dict(heads=2, head_dim=16, d_model=32, max_length=128), **place})
    mechanism = YOSOAttention(YOSOAttentionConfig(**settings), place)
    for parameter in mechanism.parameters():
        torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(5))
    return mechanism


def random_heads(length, causal=False, batch=2, dim=16, seed=0, **masks):
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(batch, 2, length, dim, generator=generator) for _ in range(3))
    return AttentionInputs(q, k, v, masks.get("key_mask"), masks.get("segments"), causal)


def attend(mechanism, heads, training=False, rounds=None):
    batch = len(heads.q)
    rng = RngContext(0, 0, torch.arange(batch), True, rounds) if training else RngContext.evaluation(0, batch, rounds)
    return mechanism(torch.empty(0), heads, AttentionContext(0, rng))


def sampled_and_expected(kind, hashes, heads=200, length=16, dim=8, bits=6):
    """Sums of the same 16 tokens sampled in many heads, each with separate hashes, and their expectation."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, length, dim, generator=generator, dtype=torch.float64) for _ in range(3))
    q = unit_vectors(q + 0.5 * k)
    k = unit_vectors(k)
    spec = HashTableAttentionSpec(bits, causal=False)
    expected, _ = expected_attention(q, k, v, spec)
    many = [x.expand(-1, heads, -1, -1) for x in (q, k, v)]
    codes = [sign_codes(x, 3, range(heads), hashes, bits, kind) for x in many[:2]]
    return hash_table_attention(*many, *codes, spec)[0][0], expected[0]


def test_gaussian_samples_are_unbiased():
    sampled, expected = sampled_and_expected("gaussian", hashes=16)
    assert ((sampled.mean(0) - expected[0]) / (sampled.std(0) / len(sampled) ** 0.5)).abs().max() < 4


def test_the_bias_of_the_fast_projection_is_small():
    sampled, expected = sampled_and_expected("hadamard", hashes=32, heads=300, dim=64)
    mean, noise = sampled.mean(0), (sampled.std(0).norm() / 300**0.5).item()
    scale = ((mean * expected[0]).sum() / (expected[0] ** 2).sum()).item()
    error = (mean - expected[0]).norm().item()
    assert abs(scale - 1) < 0.02 and error < 1.5 * noise


@pytest.mark.parametrize("causal", [True, False])
def test_the_convolution_stays_inside_a_document_and_among_real_tokens(causal):
    mechanism = yoso(convolution=5)
    v = torch.randn(1, 2, 12, 16, generator=torch.Generator().manual_seed(0))
    segments = torch.tensor([[0] * 4 + [1] * 8])
    mask = torch.tensor([[True] * 9 + [False] * 3])
    whole = mechanism.convolution(v, mask, segments, causal)
    for document in (slice(0, 4), slice(4, 9)):
        torch.testing.assert_close(whole[:, :, document], mechanism.convolution(v[:, :, document], None, None, causal))
    assert (whole[:, :, 9:] == 0).all()
    weight = mechanism.convolution.weight
    inside = weight[0, 4] * v[0, 0, 6] + weight[0, 3] * v[0, 0, 5] + weight[0, 2] * v[0, 0, 4]
    if not causal:
        inside = sum(weight[0, s] * v[0, 0, 4 + s] for s in range(5))
    torch.testing.assert_close(whole[0, 0, 6], inside)


def test_outputs_have_length_one_or_are_zero_without_a_collision():
    heads = random_heads(40)
    out = attend(yoso(hashes=1, code_bits=9), heads).out
    length = out.norm(dim=-1)
    assert ((length - 1).abs().lt(1e-5) | (length == 0)).all()
    assert (length == 0).any() and (length > 0).any()


def test_training_and_evaluation_have_their_numbers_of_hashes_and_can_be_overruled():
    heads = random_heads(30)
    mechanism = yoso(hashes=4, evaluation_hashes=16)
    for training, rounds, hashes in ((True, None, 4), (False, None, 16), (True, 7, 7), (False, 7, 7)):
        assert mechanism.rounds(RngContext(0, 0, torch.arange(2), training, rounds)) == hashes
    plain = yoso(hashes=16)
    torch.testing.assert_close(attend(mechanism, heads).out, attend(plain, heads).out)
    torch.testing.assert_close(attend(mechanism, heads, training=True).out, attend(plain, heads, True, 4).out)
    assert not torch.equal(attend(mechanism, heads).out, attend(mechanism, heads, training=True).out)


def test_code_bits_keep_a_decoders_tables_below_a_key_value_cache():
    for causal, length, hashes, bits, exceed in (
        (False, 512, 32, 9, False),
        (False, 65536, 32, 16, False),
        (True, 512, 32, 4, False),
        (True, 65536, 32, 11, False),
        (True, 1024, 1, 10, False),
        (True, 32, 31, 1, False),
        (True, 32, 32, 1, True),
        (True, 1, 8, 1, True),
        (False, 1, 8, 1, False),
    ):
        mechanism = yoso(dict(causal=causal, max_length=length), hashes=hashes)
        assert mechanism.code_bits == bits
        if causal and length <= 1024:
            cache = mechanism.new_cache(1, torch.zeros(()), None)
            assert (cache.tables.numel() >= 2 * 2 * length * 16) == exceed


def test_codes_recomputed_from_rounded_vectors_hardly_flip():
    """A reversible backward perturbs q and k: a relative error of about 1e-7."""
    x = unit_vectors(torch.randn(1, 2, 4000, 64, generator=torch.Generator().manual_seed(0)))
    noise = unit_vectors(torch.randn(1, 2, 4000, 64, generator=torch.Generator().manual_seed(1)))
    codes = [sign_codes(y, 1, range(2), 32, 9, "hadamard") for y in (x, x + 1e-6 * noise)]  # ten times as large
    assert (codes[0] != codes[1]).float().mean() < 1e-4


@pytest.mark.parametrize("causal", [True, False])
def test_collisions_are_the_keys_that_a_query_meets_in_a_hash(causal):
    mask = torch.ones(2, 30, dtype=torch.bool)
    mask[1, 20:] = False
    heads = random_heads(30, causal, key_mask=mask)
    mechanism = yoso(dict(causal=causal), hashes=8, code_bits=2)
    context = AttentionContext(0, RngContext.evaluation(0, 2))
    q, k = (mechanism.codes(unit_vectors(x), 8, context) for x in (heads.q, heads.k))
    met = (q[..., :, None] == k[..., None, :]).float().mean(2) * mask[:, None, :, None] * mask[:, None, None]
    if causal:
        met = met.tril()
    expected = met.sum() / (2 * 50)
    torch.testing.assert_close(attend(mechanism, heads).statistics["collisions"], expected)


@pytest.mark.parametrize("expectation", [True, False])
def test_a_bound_of_norms_preserves_the_products(expectation):
    """Remark 2: weights (1 − acos(q·k/T)/π)^τ, for queries and keys of any length up to √T; gradients, and decoding."""
    bits, bound, length = 6, 9.0, 30
    given = yoso(dict(causal=True), expectation=expectation, code_bits=bits, norm_bound=bound, hashes=3000)
    heads = AttentionInputs(*(x.double() for x in random_heads(length, causal=True)[:3]), None, None, True)
    q, k, v = (0.4 * heads.q).requires_grad_(), (0.4 * heads.k).requires_grad_(), heads.v
    assert max(x.norm(dim=-1).max() for x in (q, k)) < 3
    weights = (1 - torch.acos(q @ k.mT / bound) / torch.pi).pow(bits).tril()
    wanted = torch.nn.functional.normalize(weights @ v, dim=-1)
    out = attend(given, AttentionInputs(q, k, v, None, None, True)).out
    error = (out - wanted).abs().max()
    assert error < (1e-9 if expectation else 0.2)
    out.sum().backward()
    assert all(x.grad.isfinite().all() and x.grad.abs().sum() > 0 for x in (q, k))
    long = AttentionInputs(100 * q.detach(), 100 * k.detach(), v, None, None, True)
    assert attend(given, long).out.isfinite().all()
    context = AttentionContext(0, RngContext.evaluation(0, 2))
    cache = given.new_cache(2, v, None)
    for t in range(length):
        token = AttentionInputs(*(x[:, :, t : t + 1].detach() for x in (q, k, v)), None, None, True)
        decoded = given.decode(torch.empty(0), token, cache, t, context)
        torch.testing.assert_close(decoded[:, :, 0], out[:, :, t].detach(), rtol=1e-6, atol=1e-6)
