"""The encoder: masked tokens (whole words, never padding or special tokens), scores and visible tokens."""

import dataclasses
import math

import pytest
import torch

from megasparse.attention.heads import Padding
from megasparse.config.schema import MaskingConfig, SentenceOrderConfig
from megasparse.model.build import build_model
from megasparse.model.stack import padding_of
from megasparse.ops.random import RngContext
from tests.helpers.cases import together
from tests.helpers.models import random_tokens, small, training_draws

MASK, PAD, BEGIN, SEPARATOR, VOCABULARY = 256, 257, 258, 259, 260
SPACE = ord(" ")


def encoder(pattern=("local", "lsh", "full"), **changes):
    return build_model(small(pattern, kind="encoder", vocabulary=VOCABULARY, **changes), 0)


def asked(model, tokens, rng, padding=None):
    return model.prepare_inputs(tokens, rng, padding or padding_of(tokens, model.config))


def text(batch, length, seed=0):
    generator = torch.Generator().manual_seed(seed)
    letters = torch.randint(97, 123, (batch, length), generator=generator)
    return letters.masked_fill(torch.rand(batch, length, generator=generator) < 0.2, SPACE)


def pairs(batch, length, seed=0):
    generator = torch.Generator().manual_seed(seed)
    tokens = text(batch, length, seed)
    tokens[:, 0] = BEGIN
    for row in tokens:
        first, second = (torch.randperm(length - 3, generator=generator)[:2].sort().values + 2).tolist()
        row[[first, second]] = SEPARATOR
        row[second + 1 :] = PAD
    return tokens


def packed(batch, length, seed=0):
    """Documents with a separator after each, the last row full of separators but for a token, and padding."""
    tokens = text(batch, length, seed)
    tokens[torch.rand(batch, length, generator=torch.Generator().manual_seed(seed)) < 0.1] = SEPARATOR
    tokens[-1, 1:] = SEPARATOR
    tokens[0, length // 2 :] = PAD
    return tokens


ORDER = SentenceOrderConfig(separator=SEPARATOR)
KINDS = {
    "plain": (text, {}),
    "pairs": (pairs, {"padding_token": PAD, "sentence_order": ORDER}),
    "packed": (packed, {"padding_token": PAD, "document_separator": SEPARATOR}),
}


@together("rate", [0.15, 0.5, 0.99])
@together("whole_words", [False, True])
@together("kind", KINDS)
def test_only_text_is_masked_and_as_much_as_is_counted(kind, whole_words, rate):
    make, settings = KINDS[kind]
    model = encoder(masking=MaskingConfig(rate=rate, token=MASK, whole_words=whole_words), **settings)
    model.set_word_starts(torch.arange(VOCABULARY) == SPACE)
    for step in range(20):
        tokens = make(8, 50, seed=step)
        read, scored = asked(model, tokens, training_draws(8, step))
        assert (tokens[scored] < 256).all() and torch.equal(read[~scored], tokens[~scored])
        assert not ((read[scored] == PAD) | (read[scored] == SEPARATOR)).any() or kind == "plain"
        masked, possible = scored.sum(1), (tokens < 256).sum(1)
        assert torch.equal(masked, (rate * possible).round().clamp_min(1).long().minimum(possible))
        assert model.count_scored(tokens) == masked.sum()


def test_whole_words_are_masked_except_a_truncated_one():
    masking = MaskingConfig(rate=0.3, token=MASK, whole_words=True)
    model = encoder(masking=masking, padding_token=PAD, sentence_order=ORDER)
    model.set_word_starts(torch.arange(VOCABULARY) == SPACE)
    tokens = pairs(200, 60)
    _, scored = asked(model, tokens, training_draws(200))
    whole = cut = 0
    first_letters = torch.zeros(2)  # of one-letter words and of longer ones: how many, how many masked
    for row, mask in zip(tokens.tolist(), scored.tolist(), strict=True):
        words, in_word = [], False
        for position, token in enumerate(row):
            if token >= 256:
                in_word = False
            elif token == SPACE or not in_word:
                words.append([position])
                in_word = True
            else:
                words[-1].append(position)
        kinds = [[mask[position] for position in word] for word in words]
        partly = [kind for kind in kinds if any(kind) and not all(kind)]
        assert len(partly) <= 1
        assert all(kind == sorted(kind, reverse=True) for kind in partly)  # its beginning
        whole, cut = whole + sum(all(kind) for kind in kinds), cut + len(partly)
        first_letters += torch.tensor([float(len(words)), float(sum(all(kind) for kind in kinds))])
    assert 0 < cut < 0.5 * whole
    assert 0.2 < first_letters[1] / first_letters[0] < 0.4


def test_a_word_starts_after_a_separator():
    model = encoder(masking=MaskingConfig(rate=0.5, token=MASK, whole_words=True), document_separator=SEPARATOR)
    model.set_word_starts(torch.zeros(VOCABULARY, dtype=torch.bool))
    tokens = torch.tensor([[*b"abc", SEPARATOR, *b"def", SEPARATOR]]).expand(40, -1)
    _, scored = asked(model, tokens, training_draws(40))
    first, second = [1, 1, 1, 0, 0, 0, 0, 0], [0, 0, 0, 0, 1, 1, 1, 0]
    assert {tuple(row) for row in scored.long().tolist()} == {tuple(first), tuple(second)}


def test_words_that_no_one_told_are_a_clear_error():
    model = encoder(masking=MaskingConfig(token=MASK, whole_words=True))
    with pytest.raises(RuntimeError, match="set_word_starts"):
        asked(model, text(1, 9), training_draws(1))
    assert not any("word_starts" in name for name in model.state_dict())


def test_a_random_token_is_never_a_reserved_one():
    ids = dict(padding_token=0, sentence_order=SentenceOrderConfig(separator=2))
    ids |= dict(masking=MaskingConfig(token=3, rate=0.9), vocabulary=6)
    model = build_model(small(("full",), kind="encoder", layers=1, **ids), 0)
    tokens = torch.full((300, 100), 5)
    read, scored = asked(model, tokens, training_draws(300))
    shares = read[scored].bincount(minlength=6) / scored.sum()
    third = 0.1 / 3
    torch.testing.assert_close(shares, torch.tensor([0, third, 0, 0.8, third, 0.1 + third]), rtol=0, atol=0.01)


@pytest.mark.parametrize("whole_words", [False, True])
def test_masks_depend_only_on_seed_step_and_sample(whole_words):
    model, tokens = encoder(masking=MaskingConfig(token=MASK, whole_words=whole_words)), random_tokens(4, 100)
    model.set_word_starts(torch.arange(300) % 4 == 0)  # more ids than the model has
    read, scored = asked(model, tokens, training_draws(4))
    again = asked(model, tokens, training_draws(4))
    assert torch.equal(read, again[0]) and torch.equal(scored, again[1])
    part = asked(model, tokens[2:], RngContext(0, 0, torch.tensor([2, 3]), training=True))
    assert torch.equal(read[2:], part[0]) and torch.equal(scored[2:], part[1])
    for seed, step, first in ((0, 1, 0), (1, 0, 0), (0, 0, 4)):
        other = RngContext(seed, step, torch.arange(first, first + 4), training=True)
        assert not torch.equal(scored, asked(model, tokens, other)[1])
    assert not torch.equal(scored[0], scored[1])
    fixed = asked(model, tokens, RngContext.evaluation(0, 4))[1]
    assert torch.equal(fixed, asked(model, tokens, RngContext.evaluation(0, 4, rounds=3))[1])


def test_only_masked_tokens_are_scored():
    model, tokens = encoder(masking=MaskingConfig(rate=0.3, token=MASK)), random_tokens(3, 100)
    rng = RngContext.evaluation(0, 3)
    nats, correct, scored = model.token_scores(tokens, rng)
    assert scored.sum() == 3 * 30
    objective, statistics = model(tokens, rng)
    assert statistics["tokens"] == 90
    torch.testing.assert_close(objective, nats[scored].mean())
    torch.testing.assert_close(statistics["nats"], nats[scored].sum())
    torch.testing.assert_close(statistics["accuracy"], correct[scored].float().mean())
    assert abs(nats[scored].mean() - math.log(VOCABULARY)) < 1.0


def test_scores_are_of_the_hidden_tokens_themselves():
    """The prediction at t is of token t, whose embedding the model does not read where it is masked."""
    model, tokens, rng = encoder(), random_tokens(1, 60), RngContext.evaluation(0, 1)
    read, scored = asked(model, tokens, rng)
    nats = model.token_scores(tokens, rng).nats
    at = ((read == MASK) & scored)[0].nonzero()[0].item()
    others = tokens.repeat(VOCABULARY, 1)
    others[:, at] = torch.arange(VOCABULARY)
    same_masks = dataclasses.replace(rng, samples=torch.zeros(VOCABULARY, dtype=torch.int64))
    predicted = model.token_scores(others, same_masks).nats
    assert torch.exp(-predicted[:, at].double()).sum().item() == pytest.approx(1.0, abs=1e-4)
    predicted[:, at] = nats[0, at]
    torch.testing.assert_close(predicted, nats.expand_as(predicted))


def test_nothing_but_padding_costs_nothing():
    objective, statistics = encoder()(random_tokens(1, 9), training_draws(1), Padding(torch.zeros(1, 9).bool()))
    assert objective == 0 and statistics["tokens"] == 0 and statistics["accuracy"] == 0
    objective.backward()


def test_targets_are_told_in_training_only(monkeypatch):
    model, tokens, seen = encoder(("local",)), random_tokens(2, 40), []
    mechanism = model.blocks[0].attention.attention.mechanisms["local"]
    forward = mechanism.forward

    def recording(x, heads, context):
        seen.append(context.targets)
        return forward(x, heads, context)

    monkeypatch.setattr(mechanism, "forward", recording)
    model(tokens, training_draws(2))
    assert torch.equal(seen[0].values, tokens)
    assert torch.equal(seen[0].counted, asked(model, tokens, training_draws(2))[1])
    model(tokens, RngContext.evaluation(0, 2))
    assert seen[1] is None
