import math
from dataclasses import replace

import pytest
import torch
from transformers.models.reformer.configuration_reformer import ReformerConfig
from transformers.models.reformer.modeling_reformer import LSHSelfAttention

from megasparse.attention.contract import AttentionContext, AttentionInputs
from megasparse.attention.heads import MultiHeadAttention, Padding, build_mechanism
from megasparse.attention.lsh import LSHAttentionConfig, lsh_buckets
from megasparse.attention.observation import calls
from megasparse.errors import ConfigError
from megasparse.evaluation.attention_quality import weights_of
from megasparse.hub.reformer import _hash_as_ours
from megasparse.ops.random import RngContext
from megasparse.settings.load import load_config
from tests.helpers.models import Single, attention, layer_of, small

WIDTH, HEADS = 32, 2


def settings(causal, **changes):
    return small(attention=attention("lsh", lsh=changes), kind="decoder" if causal else "encoder")


def run(layer, x):
    context = AttentionContext(0, RngContext.evaluation(5, len(x)))
    return layer(x, context, Padding()).out


CHUNK, LENGTH, BUCKETS = 8, 64, 8
AS_HUGGINGFACE = {"window": "chunk", "same_bucket": False, "count_rounds": False, "chunk": CHUNK, "buckets": BUCKETS}


def same_layers(causal, rounds):
    """Return Hugging Face's layer and megasparse's with the same weights, rotations and windows within a round.

    In float64: a token that sees nothing in any round has a log-sum-exp of −1e5 in HuggingFace's, which fp32 rounds so
    coarsely that the rounds' shares sum to 1 only to 0.4 %."""
    torch.manual_seed(0)
    hashing = {"lsh_attn_chunk_length": CHUNK, "num_hashes": rounds, "num_buckets": BUCKETS}
    size = {"hidden_size": WIDTH, "num_attention_heads": HEADS, "attention_head_size": WIDTH // HEADS}
    reference = LSHSelfAttention(ReformerConfig(is_decoder=causal, **size, **hashing)).double().eval()
    _hash_as_ours(reference, [BUCKETS], 0, 5)
    layer = MultiHeadAttention(settings(causal, **AS_HUGGINGFACE, rounds=rounds), 0)
    with torch.no_grad():
        layer.query.weight.copy_(reference.query_key.weight)
        layer.value.weight.copy_(reference.value.weight)
        layer.output.weight.copy_(torch.eye(WIDTH))
    return reference, layer.double()


def inputs():
    # Four times wider than a normal layer's: then logits distinguish tokens.
    return torch.empty(2, LENGTH, WIDTH, dtype=torch.float64).normal_(generator=torch.Generator().manual_seed(1)) * 4


@pytest.mark.parametrize("causal,rounds", [(True, 4), (False, 4), (True, 1)])
def test_huggingface_without_its_wrap_gives_the_same_for_every_token(causal, rounds):
    """And the same gradients of the input and of the weights."""
    reference, layer = same_layers(causal, rounds)
    x = inputs()
    toward = x.roll(1)
    results = []
    for attend, weights in (
        (lambda x: reference(x).hidden_states, [reference.query_key.weight, reference.value.weight]),
        (lambda x: run(layer, x), [layer.query.weight, layer.value.weight]),
    ):
        leaf = x.clone().requires_grad_()
        out = attend(leaf)
        results.append((out.detach(), *torch.autograd.grad((out * toward).sum(), [leaf, *weights])))
    (expected, *their_grads), (out, *our_grads) = results
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    for ours_, theirs_ in zip(our_grads, their_grads, strict=True):
        assert (ours_ - theirs_).norm() < 1e-4 * theirs_.norm()


@pytest.mark.parametrize("causal", [True, False])
def test_separate_queries_and_keys_meet_if_their_hashes_agree(causal):
    """Buckets so wide that the window is the whole bucket: then only the hash decides."""
    mechanism = build_mechanism("lsh", settings(causal, shared_qk=False, rounds=2, chunk=64, buckets=4), 2)
    assert not mechanism.shared_qk and mechanism.leak is None
    _, q, k, v = (x.double() for x in Single("lsh", causal).inputs(50))
    heads = AttentionInputs(q, k, v, None, None, causal)
    context = AttentionContext(0, RngContext.evaluation(0, 2))
    query_codes, key_codes = mechanism.assign(heads, context)
    shared = build_mechanism("lsh", settings(causal, rounds=2, chunk=64, buckets=4), 2)
    assert torch.equal(key_codes, shared.assign(heads._replace(q=k), context)[0])
    seen = (query_codes[..., :, None] == key_codes[..., None, :]).any(2)
    if causal:
        seen = seen.tril()
    seen = seen | (torch.eye(50, dtype=torch.bool) & ~seen.any(-1, keepdim=True))
    score = (q @ k.transpose(-1, -2) / 4).masked_fill(~seen, -torch.inf)
    torch.testing.assert_close(mechanism(None, heads, context).out, torch.softmax(score, -1) @ v)


def test_with_shifted_keys_equal_tokens_meet_at_any_distance():
    """Also with rotary positions, which such a layer does not have."""
    layer, generator = layer_of("lsh shifted", positions={"kind": "rotary"}), torch.Generator().manual_seed(0)
    with calls(layer) as recorded:
        run(layer, 9.0 * torch.randn(1, 30, 32, generator=generator).repeat(1, 4, 1))
    weights = weights_of(recorded[0], recorded[0].mechanism)  # (1, H, 120, 120)
    assert sum(weights.diagonal(1 - 30 * n, 2, 3)[..., -29:] for n in (1, 2, 3)).min() > 0.9


def test_null_means_the_number_of_buckets_of_the_paper():
    for length, chunk, factors in (
        (65536, 256, [16, 32]),  # the paper's 512
        (12288, 128, [12, 16]),  # the paper's 192 for imagenet64
        (4096, 64, [128]),
        (64, 64, [2]),
        (65, 64, [4]),
    ):
        assert lsh_buckets(LSHAttentionConfig(chunk=chunk), length, training=True) == factors


def test_factors_are_even_near_each_other_and_barely_more_than_the_papers_number():
    for length in range(70, 9000, 123):
        for chunk in (1, 7, 64):
            factors = lsh_buckets(LSHAttentionConfig(chunk=chunk), length, training=True)
            count, paper = math.prod(factors), 2 * length / chunk
            assert all(factor % 2 == 0 for factor in factors)
            assert paper <= count <= 1.1 * paper + 8
            assert len(factors) == (1 if count <= 128 else 2)
            assert factors[-1] <= 2 * factors[0]


def test_given_numbers_of_buckets_stay():
    for buckets, factors in ((6, [6]), (148, [2, 74]), ([4, 10], [4, 10]), ([256], [256]), (2**16, [256, 256])):
        assert lsh_buckets(LSHAttentionConfig(buckets=buckets), 64, training=True) == factors
    with pytest.raises(ConfigError, match=r"evaluation_buckets: 130 is not a product of two even numbers"):
        load_config("quickstart", ["model.attention.lsh.evaluation_buckets=130"])


def test_evaluation_hashes_into_its_own_number_of_buckets():
    _, q, k, v = Single("lsh", True).inputs(50)
    heads = AttentionInputs(q, k, v, None, None, True)
    both = build_mechanism("lsh", settings(True, chunk=8, buckets=6, evaluation_buckets=32), 2)
    for buckets, training in ((6, True), (32, False)):
        context = AttentionContext(0, replace(RngContext.evaluation(0, 2), training=training))
        alike = build_mechanism("lsh", settings(True, chunk=8, buckets=buckets), 2)
        assert torch.equal(both.assign(heads, context)[0], alike.assign(heads, context)[0])
        torch.testing.assert_close(both(None, heads, context).out, alike(None, heads, context).out)
