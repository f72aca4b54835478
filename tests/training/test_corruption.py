"""The check for silent corruption: any flipped bit is found and named, and where nothing is wrong nothing is said."""

import random
import socket

import pytest
import torch

from megasparse.errors import ConfigError, SilentCorruption
from megasparse.training.corruption import TILE, CorruptionCheck, checksums
from megasparse.training.loop import train
from megasparse.training.ranks import Ranks
from tests.helpers.ranks_in_threads import run_in_threads
from tests.helpers.tiny import DummyBatches, TinyModel, metrics, tiny_config, tiny_engine, tiny_run
from tests.helpers.trained import prepared, trained

CHECKED = {"run": {"corruption_check_every": 2}}


def by_definition(weight: torch.Tensor) -> int:
    """Σᵢ (2i + 1)·wᵢ in Python's integers, as a signed number of 64 bits."""
    size = weight.element_size()
    numbers = weight.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    words = [numbers[i : i + size] for i in range(0, len(numbers), size)]
    signed = size > 1
    total = sum((2 * i + 1) * int.from_bytes(word, "little", signed=signed) for i, word in enumerate(words)) % 2**64
    return total - 2**64 if total >= 2**63 else total


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.bool])
def test_the_checksum_is_its_definition(dtype):
    weight = torch.randn(7, 5, generator=torch.Generator().manual_seed(0)).to(dtype).t()
    assert checksums([("w", weight)]) == {"w": by_definition(weight.reshape(-1))}


def test_the_checksum_does_not_depend_on_its_tiles(monkeypatch):
    weight = torch.randn(1000, generator=torch.Generator().manual_seed(1))
    monkeypatch.setattr("megasparse.training.corruption.TILE", 64)
    assert checksums([("w", weight)]) == {"w": by_definition(weight)}
    assert TILE > 64


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_bit_of_a_number_counts_and_so_do_places(dtype):
    weight = torch.randn(300, generator=torch.Generator().manual_seed(2)).to(dtype)
    right, bits, draw = checksums([("w", weight)]), weight.element_size() * 8, random.Random(0)
    words = weight.view({2: torch.int16, 4: torch.int32}[weight.element_size()])
    for bit in range(bits):
        place = draw.randrange(300)
        mask = (1 << bit) - (1 << bits if bit == bits - 1 else 0)
        words[place] ^= mask
        assert checksums([("w", weight)]) != right, bit
        words[place] ^= mask
    assert checksums([("w", weight)]) == right
    assert checksums([("w", weight.roll(1))]) != right


def flip(model: TinyModel) -> None:
    model.hidden.weight.data.view(torch.int32).view(-1)[5] ^= 1 << 3


def step_of(ranks: Ranks, step: int, early: int | None = None, late: int | None = None) -> CorruptionCheck:
    """One step with its check, on plain torch. A bit of rank `early` flips before the step, of `late` within it."""
    config, model = tiny_config("unused", **CHECKED), TinyModel()
    engine = tiny_engine(config, ranks, model)
    check = CorruptionCheck(engine, config, 0)
    (batch, *_) = next(DummyBatches(config, Ranks())).micro_batches
    if ranks.rank == early:
        flip(model)
    verify = check.begin(step, batch)
    if ranks.rank == late:
        flip(model)
    verify()
    return check


def test_a_bit_that_flips_in_a_step_is_named_with_its_rank_on_all_ranks():
    errors = run_in_threads(lambda ranks: step_of(ranks, 4, late=1), 2)
    assert {type(error) for error in errors} == {SilentCorruption} and len({str(error) for error in errors}) == 1
    said = str(errors[0])
    assert said.startswith(f"step 4: on rank 1 ({socket.gethostname()}) hidden.weight changed between two updates; ")
    assert "on rank 0 (" not in said and "Examine that machine" in said


def test_a_replica_that_had_changed_before_is_the_odd_one_out():
    errors = run_in_threads(lambda ranks: step_of(ranks, 4, early=2), 4)
    assert {type(error) for error in errors} == {SilentCorruption}
    weight = TinyModel().hidden.weight
    right = checksums([("w", weight)])["w"]
    said = str(errors[0])
    assert f"the replicas differ: hidden.weight: {right} on ranks 0, 1, 3, " in said and said.count("on rank 2") == 1


def test_nothing_is_said_where_nothing_is_wrong_and_nothing_done_where_no_check_is_due():
    checks = run_in_threads(lambda ranks: step_of(ranks, 4), 3)
    assert all(check.seconds is not None and check.right == 3 for check in checks)
    checks = run_in_threads(lambda ranks: step_of(ranks, 3, late=1), 3)
    assert all(check.seconds is None and check.right == 0 for check in checks)


def test_a_loss_that_is_another_when_computed_again_is_named(monkeypatch):
    forward, calls = TinyModel.forward, []

    def erring(self, tokens, rng):
        calls.append(None)
        objective, statistics = forward(self, tokens, rng)
        return objective * (1 + 1e-6 * (len(calls) == 2)), statistics

    monkeypatch.setattr(TinyModel, "forward", erring)
    with pytest.raises(SilentCorruption, match=r"^step 2: on rank 0 \(.*\) the loss of one micro-batch was \d"):
        step_of(Ranks(), 2)


def test_a_run_that_is_checked_is_the_same_run(tmp_path):
    """For every mechanism that draws, remembers or moves by what it saw in training; with dropout."""
    data, pattern = prepared(tmp_path), ["lsh", "routing", "lha", "yoso"]
    plain, checked = (
        trained(data, tmp_path / name, pattern, 4, run={"directory": str(tmp_path / name), "engine": "torch", **more})
        for name, more in (("plain", {"device": "cpu"}), ("checked", {"device": "cpu", "corruption_check_every": 2}))
    )
    assert [row["train/loss"] for row in checked] == [row["train/loss"] for row in plain]
    assert ["speed/corruption_check_seconds" in row for row in checked] == [False, True, False, True]
    assert not any("speed/corruption_check_seconds" in row for row in plain)


def test_a_run_ends_before_the_update_that_would_spread_it(tmp_path, monkeypatch):
    config, model = tiny_config(tmp_path / "run", **CHECKED), TinyModel()
    forward, flipped = TinyModel.forward, []

    def flipping(self, tokens, rng):
        if rng[0] == 4 and torch.is_grad_enabled() and not flipped:
            flip(self)
            flipped.append(True)
        return forward(self, tokens, rng)

    monkeypatch.setattr(TinyModel, "forward", flipping)
    said = r"^step 4: .* hidden\.weight changed .* checkpoint of step 1 or before"  # step 2 began with those weights
    with pytest.raises(SilentCorruption, match=said) as ended, tiny_run(config, model) as run:
        train(run)
    assert ended.value.exit_code == 8
    assert [row["step"] for row in metrics(config)] == [1, 2, 3]


def test_a_gpu_needs_deterministic_kernels(monkeypatch):
    config = tiny_config("unused", **CHECKED)
    engine = tiny_engine(config)
    monkeypatch.setattr(engine, "ranks", Ranks(device=torch.device("cuda")))
    with pytest.raises(ConfigError, match=r"run\.corruption_check_every: .*run\.deterministic=true"):
        CorruptionCheck(engine, config, 0)
    unchecked = tiny_config("unused")
    CorruptionCheck(engine, unchecked, 0)
