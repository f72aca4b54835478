"""Tokens that an encoder may mask: never padding, separators or a pair's beginning; whole words; as many as counted."""

import pytest
import torch

from megasparse.config.schema import MaskingConfig, SentenceOrderConfig
from megasparse.model.build import build_model
from megasparse.model.padding import padding_of
from tests.helpers.models import small, training_draws

MASK, PAD, BEGIN, SEPARATOR, VOCABULARY = 256, 257, 258, 259, 260
SPACE = ord(" ")


def encoder(**changes):
    return build_model(small(("full",), kind="encoder", layers=1, vocabulary=VOCABULARY, **changes), 0)


def asked(model, tokens, rng):
    return model.prepare_inputs(tokens, rng, padding_of(tokens, model.config))


def text(batch, length, seed=0):
    """Letters in words of 0 to some letters, after a space each."""
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


@pytest.mark.parametrize("rate", [0.15, 0.5, 0.99])
@pytest.mark.parametrize("whole_words", [False, True])
@pytest.mark.parametrize("kind", KINDS)
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


def test_whole_words_are_masked_but_for_the_one_that_is_cut():
    """Words by another definition: split at spaces that begin them."""
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


def test_a_word_begins_behind_a_separator():
    """One of two words is masked, either of them."""
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
    ids = dict(
        padding_token=0, sentence_order=SentenceOrderConfig(separator=2), masking=MaskingConfig(token=3, rate=0.9)
    )
    model = build_model(small(("full",), kind="encoder", layers=1, vocabulary=6, **ids), 0)
    tokens = torch.full((300, 100), 5)
    read, scored = asked(model, tokens, training_draws(300))
    shares = read[scored].bincount(minlength=6) / scored.sum()
    third = 0.1 / 3
    torch.testing.assert_close(shares, torch.tensor([0, third, 0, 0.8, third, 0.1 + third]), rtol=0, atol=0.01)
