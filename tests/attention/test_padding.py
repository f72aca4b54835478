"""Any length is accepted; longer batches, padding and other documents never change a real token's output."""

import pytest
import torch

from megasparse.attention import full
from megasparse.attention.contract import AttentionContext, Targets
from megasparse.attention.heads import MultiHeadAttention, Padding
from megasparse.model.build import build_model
from megasparse.ops.random import RngContext
from tests.helpers.models import EVERY, Single, by_path, known_tokens, named, random_tokens, small, strict_names


@by_path("name", strict_names())
def test_any_length_up_to_the_maximum_and_a_longer_batch_changes_nothing(name):
    model = build_model(small(attention=named(name)), seed=0)
    tokens = random_tokens(2, 128)
    longest = model.token_scores(tokens, RngContext.evaluation(0, 2)).nats
    for length in (1, 2, 7, 8, 9, 63, 127):
        nats = model.token_scores(tokens[:, :length], RngContext.evaluation(0, 2)).nats
        torch.testing.assert_close(nats, longest[:, :length], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["full", "full shared"])
def test_masks_of_full_attention_are_made_for_some_queries_at_a_time(name, monkeypatch):
    single = Single(name, causal=True)
    inputs, masks = single.inputs(40), {"segments": torch.arange(40).div(15, rounding_mode="floor").expand(2, -1)}
    masks["key_mask"] = torch.arange(40).expand(2, -1) < torch.tensor([[40], [33]])
    whole, sizes, mask = single(*inputs, **masks).out, [], full._mask
    monkeypatch.setattr(full, "_MASK", 9 * 40)
    monkeypatch.setattr(full, "_mask", lambda *x: sizes.append(mask(*x).shape) or mask(*x))
    torch.testing.assert_close(single(*inputs, **masks).out, whole)
    assert [size[-2:] for size in sizes] == [(9, 40)] * 4 + [(4, 40)]


@by_path("name", strict_names())
def test_an_attention_layer_alone_trains_with_a_mask_of_integers(name):
    config = small(attention=named(name))
    layer, tokens = MultiHeadAttention(config, layer=0), known_tokens(2, 40)
    x, mask = torch.randn(2, 40, config.d_model, generator=torch.Generator().manual_seed(0)), torch.ones(2, 40).long()
    mask[1, 30:] = 0
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.01)
    for step in range(3):
        rng = RngContext(0, step, torch.arange(2), training=True)
        context = AttentionContext(0, rng, targets=Targets(tokens.clamp_min(0), None), tokens=tokens)
        output = layer(x, context, Padding(mask))
        loss = output.out.square().mean() + (0 if output.auxiliary_loss is None else output.auxiliary_loss)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert output.out.isfinite().all() and loss.isfinite()
        assert all(weight.isfinite().all() for weight in layer.parameters())
    with pytest.raises(ValueError, match=r"key_mask is torch.float32.*give a bool mask"):
        Padding(mask.float())


@EVERY
def test_padding_on_either_side_changes_no_real_token(name, causal):
    """Padding may hold anything, infinities of attention scores included. Smart Bird's keys are drawn by their
    place in the row, as dropout is: padding before them shifts the draw. Without padding, the first token may be given
    to an n-gram layer, which nothing precedes."""
    single, tokens = Single(name, causal), random_tokens(2, 40)
    inputs, mask = single.inputs(40), torch.ones(2, 40, dtype=torch.bool)
    masked = single(*inputs, key_mask=mask, tokens=tokens).out
    torch.testing.assert_close(masked, single(*inputs, tokens=tokens).out, rtol=1e-4, atol=1e-5)
    shifts = name not in ("smart_bird random", "smart_bird draws")
    for left, right in ((5, 30), (8, 3)):  # a part of a chunk before and whole chunks behind, and a whole one before
        check_padding(single, causal, left * shifts, right)


def check_padding(single, causal, left, right):
    stop = left + 40
    inputs = single.inputs(stop + right)
    mask = torch.zeros(2, stop + right, dtype=torch.bool)
    mask[:, left:stop] = True
    tokens = known_tokens(2, stop + right)
    padded = single(*inputs, key_mask=mask, tokens=tokens).out
    x, *heads = inputs
    known = tokens[:, left:stop].clone()
    if causal:
        known[:, 0] = -1
    alone = single(x[:, left:stop], *(h[:, :, left:stop] for h in heads), tokens=known).out
    torch.testing.assert_close(padded[:, :, left:stop], alone, rtol=1e-4, atol=1e-5)
    assert (padded[:, :, :left] == 0).all() and (padded[:, :, stop:] == 0).all()
    for other in (x[:, :left], x[:, stop:], *(h[:, :, :left] for h in heads), *(h[:, :, stop:] for h in heads)):
        other *= 1e4
    tokens[:, :left] = tokens[:, stop + 1 :] = 1
    torch.testing.assert_close(single(*inputs, key_mask=mask, tokens=tokens).out, padded, rtol=1e-5, atol=1e-6)


@EVERY
def test_packed_documents_never_see_each_other(name, causal):
    single = Single(name, causal)
    inputs = single.inputs(60)
    segments = torch.tensor([0] * 24 + [1] * 36).expand(2, -1)
    tokens = known_tokens(2, 60)
    packed = single(*inputs, segments=segments, tokens=tokens).out
    x, *heads = (t.clone() for t in inputs)
    x[:, :24] = x[:, :24].flip(1)
    for head in heads:
        head[:, :, :24] = head[:, :, :24].flip(2)
    tokens[:, 1:24] = tokens[:, 1:24].flip(1)
    changed = single(x, *heads, segments=segments, tokens=tokens).out
    torch.testing.assert_close(changed[:, :, 24:], packed[:, :, 24:], rtol=1e-5, atol=1e-6)


def test_padding_is_not_scored():
    model = build_model(small(), seed=0)
    tokens = random_tokens(2, 50)
    mask = torch.ones(2, 50, dtype=torch.bool)
    mask[:, 40:] = False
    objective, statistics = model(tokens, RngContext.evaluation(0, 2), Padding(mask))
    short, _ = model(tokens[:, :40], RngContext.evaluation(0, 2))
    assert statistics["tokens"] == 80
    torch.testing.assert_close(objective, short)


@pytest.mark.parametrize("name", ["lha", "lha separate", "smart_bird heads", "ranked"])
def test_padding_changes_no_auxiliary_loss(name):
    single = Single(name, causal=True)
    x, *heads = single.inputs(60)
    expected = single(x[:, :40], *(h[:, :, :40] for h in heads), training=True).auxiliary_loss
    mask = (torch.arange(60) < 40).expand(2, -1)
    torch.testing.assert_close(single(x, *heads, training=True, key_mask=mask).auxiliary_loss, expected)
