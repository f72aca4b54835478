"""Bits/dim against its definition, with synthetic models whose nats are known functions of the tokens."""

import math
from typing import Any

import pytest
import torch

from megasparse.errors import ConfigError, UserError
from megasparse.evaluation.bits_per_dim import Score, Windows, of_engine, of_model, refuse_leaks, score
from megasparse.model.stack import TokenScores
from megasparse.ops.random import RngContext
from megasparse.training.ranks import Ranks
from tests.helpers.cases import together
from tests.helpers.commands import refusal
from tests.helpers.scoring import Stream


def random_bytes(count: int) -> Stream:
    """A split of random bytes."""
    return Stream(torch.randint(256, (count,), generator=torch.Generator().manual_seed(3)))


class Model:
    """A token costs a function of itself and of the token before it in the window, and counts as predicted where it is
    the greater of the two; records its inputs."""

    leaks: list[str] = []  # noqa: RUF012

    def __init__(self):
        self.rng: list[RngContext] = []

    def token_scores(self, tokens: torch.Tensor, rng: RngContext) -> TokenScores:
        self.rng.append(rng)
        before = torch.cat([torch.zeros_like(tokens[:, :1]), tokens[:, :-1]], dim=1)
        nats = 0.5 + torch.sin(tokens.double() * 0.37 + before.double() * 1.3) ** 2
        return TokenScores(nats.float(), tokens > before, torch.ones_like(tokens, dtype=torch.bool))


def constant(nats: float) -> Any:
    """A decoder whose every token costs so much, and is never the likeliest."""

    class Constant:
        def token_scores(self, tokens: torch.Tensor, rng: RngContext) -> TokenScores:
            all_of_them = torch.ones(tokens.shape, dtype=torch.bool)
            return TokenScores(torch.full(tokens.shape, nats), ~all_of_them, all_of_them)

    return Constant()


def expected(stream: Stream, scored: list[tuple[int, int, int]]) -> Score:
    """Sums over (start, stop, first) windows, token by token in plain Python."""
    total, correct, count = 0.0, 0, 0
    for start, stop, first in scored:
        for t in range(first, stop):
            token, before = int(stream.values[t]), 0 if t == start else int(stream.values[t - 1])
            total += float(torch.tensor(0.5 + math.sin(token * 0.37 + before * 1.3) ** 2).float())
            correct += token > before
            count += 1
    return Score(total, correct, count)


@pytest.mark.parametrize("batch", [1, 3, 8])
def test_non_overlapping_windows_score_every_token_once(batch):
    stream = random_bytes(1003)  # 62 windows of 16 and a ragged one of 11
    want = expected(stream, [(a, min(a + 16, 1003), a) for a in range(0, 1003, 16)])
    found = score(of_model(Model()), stream, Windows(16, batch=batch), seed=0)
    assert want.dims == 1003 == found.dims
    assert found.nats == pytest.approx(want.nats, rel=1e-9)
    assert found.bits_per_dim == pytest.approx(want.nats / math.log(2) / 1003, rel=1e-9)
    assert found.correct == want.correct
    assert found.accuracy == want.correct / 1003


@pytest.mark.parametrize("batch", [1, 8])
def test_a_stride_scores_only_new_tokens(batch):
    stream = random_bytes(50)
    scored = [(0, 16, 0), (6, 22, 16), (12, 28, 22), (18, 34, 28), (24, 40, 34), (30, 46, 40), (36, 50, 46)]
    assert [(w.start, w.stop, w.first) for w in Windows(16, 6).of(50)] == scored
    want = expected(stream, scored)
    found = score(of_model(Model()), stream, Windows(16, stride=6, batch=batch), seed=0)
    assert found == Score(pytest.approx(want.nats, rel=1e-9), want.correct, 50)


@together("total", [1, 5, 16, 17, 31, 32, 33, 100])
@together("stride", [1, 5, 15, 16])
def test_any_stride_covers_each_token_exactly_once_with_its_context(total, stride):
    seen = []
    for window in Windows(16, stride).of(total):
        assert window.stop - window.start <= 16
        if window.start:
            assert window.first - window.start == 16 - stride  # context in front of the first scored token
        seen += range(window.first, window.stop)
    assert seen == list(range(total))


def test_tokens_before_score_from_are_left_out_of_each_window():
    found = [(w.start, w.stop, w.first) for w in Windows(16, score_from=8).of(37)]
    assert found == [(0, 16, 8), (16, 32, 24)]  # the last window is too short to have a scored token
    with pytest.raises(ConfigError, match=r"model\.score_from"):
        score(of_model(Model()), random_bytes(5), Windows(16, score_from=8), seed=0)


def test_sums_are_float64():
    # 1 + 2^-20 in every token: float32 sums of 200,000 such numbers lose the fraction
    found = score(of_model(constant(1.0 + 2.0**-20)), random_bytes(200_000), Windows(20_000), seed=0)
    assert found.nats == pytest.approx(200_000 * (1 + 2.0**-20), rel=1e-12)


def test_an_engine_gives_the_same_number():
    model, stream = Model(), random_bytes(100)

    def engine_evaluate(tokens, rng):
        nats, correct, _ = model.token_scores(tokens, rng)
        tokens, accuracy = torch.tensor(nats.numel()), correct.float().mean()
        return nats.mean(), {"nats": nats.sum(), "tokens": tokens, "accuracy": accuracy}

    found = score(of_engine(engine_evaluate), stream, Windows(16), seed=0)
    want = score(of_model(model), stream, Windows(16), seed=0)
    assert found == Score(pytest.approx(want.nats, rel=1e-6), pytest.approx(want.correct, rel=1e-6), 100)


def test_draws_are_of_evaluation_with_the_rounds_asked_for():
    model = Model()
    score(of_model(model), random_bytes(20), Windows(16), seed=7, rounds=4)
    assert all((d.seed, d.rounds, d.training) == (7, 4, False) for d in model.rng)
    assert len({d.step for d in model.rng}) == 1
    assert [d.samples.tolist() for d in model.rng] == [[0], [16]]  # each window's own, whatever batch it stands in


def test_limit_scores_the_first_windows():
    want = expected(random_bytes(1003), [(0, 16, 0), (16, 32, 16), (32, 48, 32)])
    found = score(of_model(Model()), random_bytes(1003), Windows(16, batch=2, limit=3), seed=0)
    assert found == Score(pytest.approx(want.nats, rel=1e-9), want.correct, 48)


def test_several_ranks_give_the_same_sums_in_equally_many_calls(monkeypatch):
    stream, windows, calls = random_bytes(1003), Windows(16, batch=4), []
    whole = score(of_model(Model()), stream, windows, seed=0)
    totals = torch.zeros(3, dtype=torch.float64)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda sums: sums.copy_(totals.add_(sums)))
    for rank in range(3):  # one rank after the other; each adds its part of the sums to those before
        model = Model()
        together = score(of_model(model), stream, windows, seed=0, ranks=Ranks(rank, 3))
        calls.append(len(model.rng))
    assert together == Score(pytest.approx(whole.nats, rel=1e-9), whole.correct, whole.dims)
    assert calls == [6, 6, 6]  # 17 batches: 16 of 4 windows less one, and the ragged one


def test_nats_that_are_not_finite_are_an_error():
    with pytest.raises(UserError, match="not finite"):
        score(of_model(constant(float("nan"))), random_bytes(20), Windows(16), seed=0)


@together("stride", [0, 17, -1])
def test_a_stride_that_leaves_gaps_is_rejected(stride):
    with pytest.raises(ConfigError, match=f"--stride: {stride} "):
        score(of_model(Model()), random_bytes(20), Windows(16, stride=stride), seed=0)
    none = Windows(16, limit=0)
    refusal(lambda: score(of_model(Model()), random_bytes(20), none, seed=0), ConfigError, "--limit: 0 ")


def test_a_leaking_model_is_rejected():
    refuse_leaks([])
    refusal(lambda: refuse_leaks(["layer 1: window"]), ConfigError, r"layer 1: window.*band.*--allow-leaking-attention")
