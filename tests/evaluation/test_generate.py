"""Cached generation and sampling, on a synthetic decoder whose logits are a known function of the last token."""

import pytest
import torch
from transformers import MinPLogitsWarper, RepetitionPenaltyLogitsProcessor, TemperatureLogitsWarper, TopPLogitsWarper

from megasparse.errors import ConfigError
from megasparse.evaluation.generate import Sampling, check_beams, check_length, continuations, generate, sample
from tests.helpers.cases import together


class Counter:
    """Likeliest after token t is t + 1; the cache is the list of tokens taken in."""

    def __init__(self, vocabulary: int = 300):
        self.vocabulary = vocabulary
        self.caches: list[list[int]] = []

    def new_cache(self, batch_size, seed):
        self.caches.append([seed])
        return self.caches[-1]

    def prefill(self, tokens, cache):
        assert tokens.shape[0] == 1
        cache += tokens[0].tolist()
        return self._logits(cache)

    def decode(self, token, cache):
        cache.append(int(token[0]))
        return self._logits(cache)

    def _logits(self, cache):
        last = cache[-1] if len(cache) > 1 else -1
        return -((torch.arange(self.vocabulary) - last - 1).abs().float()[None] % self.vocabulary)


def prompt(*tokens):
    return torch.tensor(tokens, dtype=torch.long)


def test_greedy_takes_the_likeliest_and_feeds_it_back():
    model = Counter()
    assert list(generate(model, prompt(10, 11), 4, hash_seed=9, temperature=0.0)) == [12, 13, 14, 15]
    assert model.caches == [[9, 10, 11, 12, 13, 14]]  # the last token is not fed: nothing comes after it


@together(
    ("begin", "count", "settings", "expected"),
    [
        ((), 3, {}, [0, 1, 2]),
        ((5,), 0, {}, []),
        ((255,), 1, {}, [256]),
        ((255,), 1, {"vocabulary": 256}, [255]),
        ((253,), 9, {"vocabulary": 256, "ends": {256}}, [254, 255]),  # the end is allowed beyond the vocabulary
        ((253,), 9, {"vocabulary": 256, "ends": {255}}, [254]),
        ((250,), 9, {"vocabulary": 256, "ends": {258, 253}}, [251, 252]),
    ],
)
def test_lengths_ends_and_the_vocabulary_bound_the_text(begin, count, settings, expected):
    assert list(generate(Counter(), prompt(*begin), count, hash_seed=0, temperature=0.0, **settings)) == expected


def test_a_seed_fixes_the_text_and_does_not_change_the_global_generator():
    def draw(seed):
        return list(generate(Counter(), prompt(10), 40, hash_seed=0, seed=seed, temperature=5.0))

    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = draw(4)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    assert draw(4) == first
    assert draw(5) != first


def draws(logits, count, seed=0, text=(), **settings):
    generator = torch.Generator().manual_seed(seed)
    return [sample(logits, text, generator, Sampling(**settings)) for _ in range(count)]


def test_one_row_draws_by_the_seed_itself():
    """A seed keeps giving the same text from version to version."""
    generator, predicted, settings = torch.Generator().manual_seed(4), [10], {"temperature": 5.0, "top_p": 0.9}
    for _ in range(20):
        predicted.append(sample(Counter()._logits([0, predicted[-1]])[0], (), generator, Sampling(**settings)))
    assert predicted[1:] == list(generate(Counter(), prompt(10), 20, hash_seed=0, seed=4, **settings))


@together(
    ("settings", "support"),
    [
        ({"top_p": 0.3}, {1}),
        ({"top_p": 0.41}, {1, 3}),
        ({"top_p": 0.69}, {1, 3}),
        ({"top_p": 0.71}, {1, 2, 3}),
        ({"top_p": 1.0}, {0, 1, 2, 3}),
        ({"min_p": 0.26}, {1, 2, 3}),
        ({"min_p": 0.51}, {1, 3}),
        ({"min_p": 0.51, "top_p": 0.3}, {1}),
        ({"min_p": 1.0}, {1}),
    ],
)
def test_top_p_and_min_p_keep_the_likeliest_tokens(settings, support):
    assert set(draws(torch.tensor([0.1, 0.4, 0.2, 0.3]).log(), 300, **settings)) == support


@pytest.mark.parametrize(
    "settings",
    [
        {"repetition_penalty": 1.7},
        {"repetition_penalty": 0.6, "temperature": 0.7},
        {"top_p": 0.8, "min_p": 0.05, "repetition_penalty": 1.2, "temperature": 1.3},
    ],
)
def test_probabilities_equal_transformers(settings):
    """Drawn shares within 4 standard deviations, and the same tokens left out."""
    logits, text, count = 2.0 * torch.randn(12, generator=torch.Generator().manual_seed(3)), (1, 4, 4, 7), 4000
    temperature, top_p = settings.get("temperature", 1.0), settings.get("top_p", 1.0)
    scores = RepetitionPenaltyLogitsProcessor(settings["repetition_penalty"])(torch.tensor([text]), logits[None])
    for process in (TemperatureLogitsWarper(temperature), TopPLogitsWarper(top_p), MinPLogitsWarper(0.05)):
        if "min_p" in settings or not isinstance(process, MinPLogitsWarper):
            scores = process(torch.tensor([text]), scores)
    expected = torch.softmax(scores[0], dim=0)
    shares = torch.bincount(torch.tensor(draws(logits, count, 1, text, **settings)), minlength=12) / count
    assert ((shares - expected).abs() <= 4 * (expected * (1 - expected) / count).sqrt()).all()
    assert draws(logits, 1, text=text, **(settings | {"temperature": 0.0})) == [int(scores.argmax())]


def test_the_penalty_counts_the_prompt_and_the_text_so_far(monkeypatch):
    monkeypatch.setattr(Counter, "_logits", lambda model, cache: -torch.arange(1.0, 10.0)[None])
    settings = {"hash_seed": 0, "temperature": 0.0, "repetition_penalty": 100.0}
    assert list(generate(Counter(), prompt(1), 4, **settings)) == [0, 2, 3, 4]


def test_a_tiny_temperature_is_greedy_and_not_nan():
    assert draws(torch.tensor([1.0, 3.0, 2.0]), 1, temperature=1e-300) == [1]


class Rows(Counter):
    """A Counter of several sequences at once."""

    def prefill(self, tokens, cache):
        cache += tokens.tolist()
        return self._logits(tokens[:, -1])

    def decode(self, token, cache):
        return self._logits(token)

    def _logits(self, last):
        return -((torch.arange(self.vocabulary) - last[:, None] - 1).abs().float() % self.vocabulary)


def test_a_sampled_row_does_not_depend_on_other_rows():
    prompts, way = prompt(10, 10, 70, 10)[:, None], Sampling(temperature=5.0, seed=4)

    def rows(prompts, first=0):
        predicted = list(continuations(Rows(), prompts, 30, hash_seed=0, sampling=way, first_row=first))
        return torch.tensor(predicted).T.tolist()

    whole = rows(prompts)
    assert whole[0] == list(generate(Counter(), prompt(10), 30, hash_seed=0, seed=4, temperature=5.0))
    assert len({tuple(row) for row in whole}) == 4  # equal prompts go on differently
    assert rows(prompts[:2]) + rows(prompts[2:], first=2) == whole


@together(
    ("check", "arguments", "message"),
    [
        (check_length, (10, 7, 16), r"--tokens: a prompt of 10 tokens and 7 new tokens exceed .* = 16. Give 6"),
        (check_length, (20, 0, 16), r"--tokens.*max_length = 16\. Shorten the prompt"),
        (check_length, (0, -1, 16), r"--tokens: -1"),
        (check_beams, (0, 0.0), "--beams: 0 is less than 1"),
        (check_beams, (1, -0.5), "--length-penalty: -0.5"),
        (Sampling.check, (Sampling(-0.5, 1.0),), r"--temperature: -0.5"),
        (Sampling.check, (Sampling(float("nan"), 1.0),), r"--temperature: nan"),
        (Sampling.check, (Sampling(1.0, 0.0),), r"--top-p: 0.0"),
        (Sampling.check, (Sampling(1.0, 1.5),), r"--top-p: 1.5"),
        (Sampling.check, (Sampling(min_p=1.5),), r"--min-p: 1.5"),
        (Sampling.check, (Sampling(repetition_penalty=0.0),), r"--repetition-penalty: 0.0"),
        (Sampling.check, (Sampling(seed=1 << 63),), r"--seed: 9223372036854775808 is not a whole number from 0 to"),
    ],
)
def test_settings_that_cannot_be(check, arguments, message):
    with pytest.raises(ConfigError, match=message):
        check(*arguments)


def test_settings_at_their_bounds():
    check_length(10, 6, 16)
    check_beams(1, 0.0)
    Sampling(0.0, 1.0).check()
