"""Beam search against exhaustive search, greedy search, and decoding without a cache."""

import itertools
import math

import pytest
import torch

from megasparse.evaluation.generate import BeamSettings, Hypothesis, beam_search, length_penalty, search
from megasparse.evaluation.texts import EncodedSource
from megasparse.model.build import build_model
from tests.helpers.cases import together
from tests.helpers.models import random_tokens, small

END = 3


class Chain:
    """Tokens 0 … 3 whose odds are a synthetic function of all the tokens before, computed from the whole sequence."""

    def __init__(self, seed: int, width: int = 4):
        self.seed, self.width = seed, width
        self.sequences: list[list[int]] = [[]]
        self.asked: list[int] = []

    def logits(self, sequence: list[int]) -> torch.Tensor:
        number = self.seed * 1_000_003 + sum((token + 1) * 7**place for place, token in enumerate(sequence))
        return 2 * torch.randn(self.width, generator=torch.Generator().manual_seed(number))

    def first(self) -> torch.Tensor:
        return self.logits([])[None]

    def step(self, rows: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        self.asked.append(len(rows))
        chosen = zip(rows.tolist(), tokens.tolist(), strict=True)
        self.sequences = [[*self.sequences[row], token] for row, token in chosen]
        return torch.stack([self.logits(sequence) for sequence in self.sequences])

    def cost(self, sequence: list[int], vocabulary: int = 4) -> float:
        """Return ln p of a sequence, token by token."""
        odds = [self.logits(sequence[:place])[:vocabulary].double().log_softmax(0) for place in range(len(sequence))]
        return math.fsum(float(each[token]) for each, token in zip(odds, sequence, strict=True))


def exhaustive(chain: Chain, tokens: int, alpha: float) -> list[Hypothesis]:
    """Every sequence of at most `tokens` tokens that ends, best first."""
    found = []
    for length in range(1, tokens + 1):
        for beginning in itertools.product(range(END), repeat=length - 1):
            cost = chain.cost([*beginning, END])
            found.append(Hypothesis(list(beginning), cost, cost / ((5 + length) / 6) ** alpha, True))
    return sorted(found, key=lambda hypothesis: -hypothesis.score)


def close(found: list[Hypothesis], wanted: list[Hypothesis]) -> bool:
    return len(found) == len(wanted) and all(
        (x.tokens, x.ended) == (y.tokens, y.ended)
        and math.isclose(x.score, y.score, rel_tol=1e-6)
        and math.isclose(x.log_probability, y.log_probability, rel_tol=1e-6)
        for x, y in zip(found, wanted, strict=True)
    )


@pytest.mark.parametrize("alpha", [0.0, 0.6, 2.0])
@together("seed", range(4))
def test_a_wide_beam_is_an_exhaustive_search(seed, alpha):
    chain = Chain(seed)
    wanted = exhaustive(chain, 5, alpha)
    assert len(wanted) == 1 + 3 + 9 + 27 + 81
    found = beam_search(chain.first(), chain.step, BeamSettings(beams=500, tokens=5, ends={END}, alpha=alpha))[0]
    assert close(found[:1], wanted[:1])
    for hypothesis in found:  # it may stop before it has seen all, and what it found is scored by the definition
        assert any(close([hypothesis], [each]) for each in wanted)


def test_without_an_end_the_likeliest_of_full_length():
    chain = Chain(9)
    best = max(([*tokens] for tokens in itertools.product(range(4), repeat=4)), key=chain.cost)
    found = beam_search(chain.first(), chain.step, BeamSettings(beams=256, tokens=4, alpha=1.0))[0]
    assert len(found) == 256
    assert close(found[:1], [Hypothesis(best, chain.cost(best), chain.cost(best) / 1.5, False)])


@pytest.mark.parametrize("beams", [2, 3, 5])
@together("seed", range(6))
def test_a_narrow_beam_is_the_textbooks(seed, beams):
    """Until as many have ended as there are beams; each step all continuations of all beginnings are sorted."""
    chain = Chain(seed)
    live, ended = [[]], []
    for _ in range(7):
        every = sorted(([*x, token] for x in live for token in range(4)), key=chain.cost, reverse=True)
        ended += [x for x in every[:beams] if x[-1] == END]
        live = [x for x in every if x[-1] != END][:beams]
        if len(ended) >= beams:
            break
    wanted = sorted(ended, key=lambda x: chain.cost(x) / length_penalty(len(x), 5.0), reverse=True)[:beams]
    found = beam_search(chain.first(), chain.step, BeamSettings(beams=beams, tokens=7, ends={END}, alpha=5.0))[0]
    assert found[0].tokens == wanted[0][:-1]
    assert {tuple(x.tokens) for x in found} <= {tuple(x[:-1]) for x in ended}  # it may know sooner who wins


class Table:
    """Odds given outright: of the first token, and of every one after it."""

    def __init__(self, first: list[float], later: list[float]):
        self.odds, self.steps = [torch.tensor([x]).log() for x in (first, later)], 0

    def search(self, **rule) -> list[Hypothesis]:
        def step(rows, tokens):
            self.steps += 1
            return self.odds[1].expand(len(rows), -1)

        return beam_search(self.odds[0], step, BeamSettings(ends={1}, **rule))[0]


def test_search_stops_when_no_open_hypothesis_can_win():
    sure = Table([0.4, 0.6], [0.01, 0.99])
    (found,) = sure.search(beams=3, tokens=9)
    assert found.tokens == [] and sure.steps == 0  # 0.4 can only fall
    longer = Table([0.4, 0.6], [0.01, 0.99])
    found = longer.search(beams=3, tokens=9, alpha=4.0)
    assert found[0].tokens == [0]  # ln 0.396 / (7/6)⁴ > ln 0.6
    assert found[0].score == pytest.approx(math.log(0.396) / (7 / 6) ** 4, rel=1e-6)
    assert 1 <= longer.steps < 9


@pytest.mark.parametrize("alpha", [0.0, 3.0])
@together("seed", range(5))
def test_one_beam_is_greedy(seed, alpha):
    chain, greedy = Chain(seed), []
    while len(greedy) < 12 and (token := int(chain.logits(greedy).argmax())) != END:
        greedy.append(token)
    (found,) = beam_search(chain.first(), chain.step, BeamSettings(beams=1, tokens=12, ends={END}, alpha=alpha))[0]
    assert (found.tokens, found.ended) == (greedy, len(greedy) < 12)
    assert set(chain.asked) <= {1}


@pytest.mark.parametrize("ends", [{5}, {4, 5}, ()])
def test_ids_of_no_text_are_never_predicted_but_ends_are(ends):
    predicted = []
    for seed in range(6):
        chain = Chain(seed, width=6)
        found = beam_search(chain.first(), chain.step, BeamSettings(beams=8, tokens=6, ends=ends, vocabulary=2))[0]
        assert all(hypothesis.ended == bool(ends) for hypothesis in found)
        predicted += [token for hypothesis in found for token in hypothesis.tokens]
    assert set(predicted) == {0, 1}


def test_the_length_penalty_prefers_longer_hypotheses_and_equals_the_paper():
    assert length_penalty(1, 0.7) == 1.0
    assert length_penalty(7, 0.5) == pytest.approx(math.sqrt(2))

    def mean_length(alpha: float) -> float:
        chains = [Chain(seed) for seed in range(12)]
        best = [
            beam_search(c.first(), c.step, BeamSettings(20, tokens=8, ends={END}, alpha=alpha))[0][0] for c in chains
        ]
        return sum(len(hypothesis.tokens) for hypothesis in best) / len(best)

    assert mean_length(0.0) < mean_length(1.0) < mean_length(3.0)


def test_batched_searches_equal_separate_searches():
    """Sources of several lengths, which are padded, and hypotheses that end at different steps."""
    model = build_model(small(vocabulary=8, kind="encoder_decoder", source={"length": 12}, padding_token=7), seed=9)
    sources = [random_tokens(1, length, 7, seed=length)[0] for length in (12, 3, 7, 5)]
    rule = BeamSettings(beams=3, tokens=20, ends={6}, alpha=3.0, vocabulary=6)
    nothing = torch.empty(1, 0, dtype=torch.long)
    alone = [search(EncodedSource(model, source[None], 0), nothing, 0, rule)[0] for source in sources]
    group = torch.nn.utils.rnn.pad_sequence(sources, batch_first=True, padding_value=7)
    together = search(EncodedSource(model, group, 0), nothing.expand(4, 0), 0, rule)
    assert len({len(found[0].tokens) for found in alone}) == 4
    for mine, other in zip(together, alone, strict=True):
        assert [x.tokens for x in mine] == [x.tokens for x in other]
        assert all(x.score == pytest.approx(y.score, abs=1e-4) for x, y in zip(mine, other, strict=True))
