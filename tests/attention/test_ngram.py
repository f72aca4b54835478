"""N-gram attention against its dense definition, in both of its ways to compute it."""

import pytest
import torch

from megasparse.attention.contract import AttentionContext, AttentionInputs, MechanismSpec
from megasparse.attention.ngram import NGramAttention, NGramAttentionConfig, ngram_codes
from megasparse.errors import ConfigError
from megasparse.ops.random import RngContext
from megasparse.settings.load import load_config
from tests.helpers.comparing import assert_same_with_gradients
from tests.helpers.models import known_tokens

CHUNK, WINDOW, LENGTH = 6, 7, 50


def mechanism(*lengths, sinks=0):
    spec = MechanismSpec(heads=2, head_dim=8, d_model=16, max_length=1 << 20, causal=True)  # many buckets
    config = NGramAttentionConfig(lengths=list(lengths), chunk=CHUNK, window=WINDOW, sinks=sinks)
    made = NGramAttention(config, spec)
    with torch.no_grad():
        made.bias.bias.copy_(torch.linspace(-1.0, 1.5, made.bias.bias.numel()))
    return made


def heads(**masks):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 2, LENGTH, 8, generator=generator, dtype=torch.float64) for _ in range(3))
    return AttentionInputs(q, k, v, masks.get("key_mask"), masks.get("segments"), True)


def defined(inputs, tokens, mechanism):
    """Position by position, from the tokens themselves: j is seen where the n tokens before it are those up to i."""
    lengths, bias = mechanism.config.lengths, mechanism.bias.bias.view(2, -1).double()
    shown = torch.zeros(1 + len(lengths), 2, LENGTH, LENGTH, dtype=torch.bool)  # (sources, B, L, L)
    for b in range(2):
        real = [True] * LENGTH if inputs.key_mask is None else inputs.key_mask[b].tolist()
        document = [0] * LENGTH if inputs.segments is None else inputs.segments[b].tolist()
        number = {place: sum(real[:place]) for place in range(LENGTH) if real[place]}  # chunks count real tokens

        def history(i, n, b=b, real=real, document=document):
            """Return the n tokens before position i, with None for padding and other documents."""
            places = range(i - n, i)
            same = [p >= 0 and real[p] and document[p] == document[i] for p in places]
            return [tokens[b, p + 1].item() if ok else None for p, ok in zip(places, same, strict=True)]

        for i in number:
            own = [j for j in number if j <= i and document[j] == document[i]]
            sinks = own[: mechanism.config.sinks]
            near = [j for j in own if number[i] // WINDOW - number[j] // WINDOW <= 1 or j in sinks]
            follows = [j for j in own if j - 1 in number and document[j - 1] == document[i]]
            rounds = [[j for j in follows if history(j - 1, n) == history(i, n)][1 - CHUNK :] for n in lengths]
            for source, keys in enumerate([near, *rounds]):
                shown[source, b, i, keys] = True
    score = inputs.q @ inputs.k.transpose(-1, -2) * 8**-0.5  # (B, H, L, L)
    extra = torch.cat([bias.new_zeros(2, 1), bias], dim=1)
    parts = [score + extra[:, source, None, None] for source in range(1 + len(lengths))]
    parts = [part.masked_fill(~seen[:, None], -torch.inf) for part, seen in zip(parts, shown, strict=True)]
    return torch.softmax(torch.cat(parts, dim=-1), dim=-1).nan_to_num(0.0) @ inputs.v.repeat(1, 1, len(parts), 1)


MASKS = {
    "plain": {},
    "documents": {"segments": (torch.arange(LENGTH) // 17).expand(2, -1)},
    "padding": {"key_mask": torch.tensor([[True] * LENGTH, [False] * 4 + [True] * 20 + [False] * 3 + [True] * 23])},
}
MASKS["both"] = MASKS["documents"] | MASKS["padding"]


@pytest.mark.parametrize(
    "lengths,masks,sinks",
    [([1], "plain", 3), ([3], "documents", 0), ([3], "padding", 3), ([1, 2, 4], "plain", 0), ([1, 2, 4], "both", 3)],
)
def test_it_is_as_defined_with_gradients(lengths, masks, sinks):
    tokens, made, inputs = known_tokens(2, LENGTH), mechanism(*lengths, sinks=sinks).double(), heads(**MASKS[masks])
    context = AttentionContext(0, RngContext.evaluation(0, 2), tokens=tokens)
    assert_same_with_gradients(
        lambda q, k, v: made(torch.zeros(2, LENGTH, 16), inputs._replace(q=q, k=k, v=v), context).out,
        lambda q, k, v: defined(inputs._replace(q=q, k=k, v=v), tokens, made),
        inputs[:3],
        [made.bias.bias],
    )


def test_a_match_followed_by_padding_is_ignored():
    """Only position 20 has read the same token as position 4, and padding follows that token."""
    tokens = torch.arange(LENGTH).repeat(2, 1)
    tokens[:, 0], tokens[:, 20] = -1, tokens[:, 4]
    mask = torch.ones(2, LENGTH, dtype=torch.bool)
    mask[:, 5] = False
    made, inputs = mechanism(1), heads(key_mask=mask)
    context = AttentionContext(0, RngContext.evaluation(0, 2), tokens=tokens)
    out = made(torch.zeros(2, LENGTH, 16), inputs, context).out
    torch.testing.assert_close(out, defined(inputs, tokens, made), rtol=1e-6, atol=1e-8)


def test_equal_ngrams_and_only_these_share_a_bucket():
    tokens = torch.tensor([[-1, 5, 6, 7, 8, 5, 6, 7, 9, 6, 7]])
    codes = ngram_codes(tokens, [3], 1 << 15)[0, 0].tolist()
    assert codes[3] == codes[7] and len(set(codes)) == len(codes) - 1
    pairs = ngram_codes(tokens, [2], 1 << 15)[0, 0].tolist()
    assert pairs[3] == pairs[7] == pairs[10]
    pinned = [27, 34, 24, 40, 48, 35, 20, 40, 44, 39, 36]  # rows of trained tables
    assert ngram_codes(tokens, [3], 50)[0, 0].tolist() == pinned


def test_buckets_are_filled_evenly():
    tokens = torch.arange(1 << 16)[None]
    counts = torch.bincount(ngram_codes(tokens, [1], 1 << 10)[0, 0].long(), minlength=1 << 10).double()
    assert abs(counts.var() / counts.mean() - 1) < 0.2  # Poisson, as of random codes


def test_a_model_without_tokens_is_rejected():
    with pytest.raises(ConfigError, match="hashes tokens"):
        mechanism(2)(torch.zeros(2, LENGTH, 16), heads(), AttentionContext(0, RngContext.evaluation(0, 2)))


def test_an_encoder_is_rejected():
    with pytest.raises(ConfigError, match="cannot see both ways"):
        load_config("masked_text", ['model.attention.pattern=["ngram"]'])
