"""The engine on two ranks: every ZeRO setting against plain torch, exact resume, skipped steps.

One launch of two gloo ranks (`everything`) runs all cases one after another; the tests check its report."""

import dataclasses
import hashlib
import itertools
import math
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from megasparse.config.schema import Config
from megasparse.data.tokenizers.simple import ByteTokenizer
from megasparse.evaluation.generate import generate
from megasparse.model.build import build_model
from megasparse.ops.random import RngContext
from megasparse.optimizers import learning_rate
from megasparse.training.checkpoints.checkpoint import Checkpoint
from megasparse.training.checkpoints.manifest import find_newest
from megasparse.training.checkpoints.saving import Saver
from megasparse.training.engines import build_engine
from megasparse.training.engines.contract import Engine
from megasparse.training.ranks import Ranks, RunHooks, StopWanted, check_stop, start_ranks
from tests.helpers.run_ranks import run_ranks
from tests.helpers.tiny import DummyBatches, TinyModel, identity_of, make_rng, tiny_config

CPU = {"device": "cpu"}
ZERO: dict[str, dict[str, Any]] = {
    "zero-0": {"stage": 0},
    "zero-1": {"stage": 1},
    "zero-2": {"stage": 2},
    "zero-2-offload": {"stage": 2, "offload_optimizer": CPU},
    "zero-3": {"stage": 3, "sub_group_size": 5000},  # several vectors of weights on a rank
    "zero-3-offload": {"stage": 3, "offload_optimizer": CPU, "offload_param": CPU},
}
# Every kind of layer, dropout, tiles; widths that no number of ranks divides, so that every partition is padded.
DECODER: dict[str, Any] = {
    "max_length": 32, "layers": 3, "d_model": 33, "d_ff": 45, "heads": 3, "dropout": 0.1,
    "feed_forward_tiles": 3, "loss_tiles": 2, "ngrams": {"lengths": [1, 3], "rows": 11, "width": 5},
    "positions": {"kind": "axial", "axial_shape": [4, 8], "axial_dims": [12, 21]},
    "attention": {"pattern": ["local", "lsh", "full"], "local": {"chunk": 4}, "lsh": {"chunk": 4, "rounds": 2}},
}  # fmt: skip
HALF, ADAFACTOR, MUON = {"precision": "bf16"}, {"name": "adafactor"}, {"name": "muon"}
TIED = {"model": DECODER | {"tied_embeddings": True, "adaptive_cutoffs": [50, 120]}, "training": {"micro_batch": 1}}
"""Accumulates over four micro-batches."""
CHECKPOINTED = {"model": DECODER | {"blocks": "ordinary", "activations": "checkpoint", "label_smoothing": 0.1}}


@dataclasses.dataclass(frozen=True)
class Group:
    """Runs under several ZeRO settings and one in plain torch."""

    sections: dict[str, dict[str, Any]]
    zero: Sequence[str] = tuple(ZERO)
    steps: int = 4
    tolerance: float = 1e-5
    resumes: bool = True
    """Each saves half way, and another engine resumes from there."""
    writes: bool = False
    """Each writes a text after step 3."""


GROUPS = {
    "fast": Group({}, ("zero-3",)),
    "fp32": Group({}, steps=6, writes=True),
    "bf16": Group({"training": HALF}, ("zero-0", "zero-2", "zero-3"), tolerance=1e-2),
    "adafactor": Group({"optimizer": ADAFACTOR}, ("zero-0", "zero-1", "zero-3")),
    "adafactor bf16": Group({"optimizer": ADAFACTOR, "training": HALF}, ("zero-1", "zero-3"), tolerance=1e-2),
    "muon": Group({"optimizer": MUON}, ("zero-0", "zero-1", "zero-2-offload", "zero-3")),
    "muon bf16": Group({"optimizer": MUON, "training": HALF}, ("zero-0", "zero-2"), tolerance=1e-2),
    "tied": Group(TIED, ("zero-0", "zero-2", "zero-3"), resumes=False, writes=True),
    "checkpointed": Group(CHECKPOINTED, ("zero-2", "zero-3"), resumes=False, writes=True),
}
HALF_WAY = GROUPS["fp32"].steps // 2
BYTES = {"name": ByteTokenizer.name, "sha256": ByteTokenizer.sha256}
RUNS = [
    pytest.param(group, name, marks=() if group == "fast" else pytest.mark.slow)
    for group, settings in GROUPS.items()
    for name in settings.zero
]


def decoder_config(directory: Path, zero: str | None = None, **sections: dict[str, Any]) -> Config:
    deepspeed = {"deepspeed": {"zero_optimization": ZERO[zero]}} if zero else {}
    return tiny_config(directory, "deepspeed" if zero else "torch", **{"model": DECODER, **sections, **deepspeed})


def run(
    config: Config,
    ranks: Ranks,
    first: int,
    last: int,
    checkpoint: Path | None = None,
    save: tuple[Saver, int] | None = None,
    written: list[int] | None = None,
) -> tuple[list[str], Engine]:
    """Losses (as exact hexadecimal) of steps first..last; save: a checkpoint, after which step.

    written: takes the tokens that the model writes after step 3 by cached decoding, beyond several windows."""
    opened = Checkpoint.open(checkpoint) if checkpoint else None
    engine = build_engine(build_model(config.model, 0), config, partial(RngContext, 0, training=True), ranks, opened)
    losses, position = [], opened.sequences if opened else 0
    for step, data in zip(range(first, last + 1), DummyBatches(config, ranks, position), strict=False):
        rate = learning_rate(step, 20, config.optimizer)
        result = engine.train_step(data.micro_batches, step, rate)
        losses += [result.loss.hex(), result.grad_norm.hex()]
        position = data.position
        if step == 3 and written is not None:
            engine.module.eval()
            written += generate(engine.module, torch.arange(5), 15, hash_seed=0)
            engine.module.train()
        if save and step == save[1]:
            save[0].save(engine, step, position, {})
    return losses, engine


def weights(engine: Engine, ranks: Ranks) -> dict[str, str]:
    pieces = ((f"{f.kind} {f.name} {f.start}", f.memory.cpu().numpy().tobytes()) for f in engine.fragments())
    own = [[name, hashlib.sha256(bits).hexdigest()] for name, bits in pieces]
    return {key: value for part in ranks.gather(own) for key, value in part}


def train_group(folder: Path, group: str, ranks: Ranks) -> dict[str, Any]:
    settings, found, middle = GROUPS[group], dict[str, Any](), GROUPS[group].steps // 2
    for name in settings.zero:
        config = decoder_config(folder / f"{group} {name}", name, **settings.sections)
        saver = Saver(identity_of(config, tokenizer=BYTES), ranks)
        save = (saver, middle) if settings.resumes else None
        found[name] = case = {"written": list[int]()}
        written = case["written"] if settings.writes else None
        case["straight"], engine = run(config, ranks, 1, settings.steps, save=save, written=written)
        if save:
            at_end = weights(engine, ranks)
            engine.close()
            newest = find_newest(saver.directory)
            case["resumed"], engine = run(config, ranks, middle + 1, settings.steps, checkpoint=newest)
            case |= {"same_state": weights(engine, ranks) == at_end, "checkpoint": str(newest)}
        engine.close()
    return found


def alone(folder: Path, group: str) -> dict[str, Any]:
    settings, written = GROUPS[group], list[int]()
    config = decoder_config(folder / f"{group} torch", **settings.sections)
    straight, engine = run(config, Ranks(), 1, settings.steps, written=written if settings.writes else None)
    engine.close()
    return {"written": written, "straight": straight}


def skips(folder: Path, name: str, ranks: Ranks, precision: str) -> dict[str, Any]:
    """Steps poisoned by one sequence on rank 1, by a loss of NaN, of infinity, and only by its gradient."""
    training = {"precision": precision}
    config = tiny_config(folder, "deepspeed", training=training, deepspeed={"zero_optimization": ZERO[name]})
    model = TinyModel()
    model.poisoned = {10: math.nan, 18: math.inf}  # of steps 2 and 3; both in micro-batches of rank 1
    model.poisoned_gradient = {26}  # of step 4
    engine = build_engine(model, config, make_rng, ranks)
    applied, unchanged = [], []
    for step, data in zip(range(1, 8), DummyBatches(config, ranks), strict=False):
        before = weights(engine, ranks)
        result = engine.train_step(data.micro_batches, step, 0.01)
        applied.append(result.applied)
        unchanged.append(weights(engine, ranks) == before)
    steps_done = engine.steps_done()
    engine.close()
    return {"applied": applied, "unchanged": unchanged, "steps_done": steps_done}


def consensus(ranks: Ranks) -> dict[str, Any]:
    """Rank 1 has no data and is asked to stop; rank 0 still writes a checkpoint; nobody has the fourth."""
    here = ranks.rank == 1
    known = ranks.any_of(here, here, not here, False)
    stopped = []
    for wanted in (False, here):
        try:
            check_stop(RunHooks(stop_wanted=lambda wanted=wanted: wanted), ranks, "evaluation")  # type: ignore[misc]
            stopped.append(False)
        except StopWanted:
            stopped.append(True)
    return {"known": known, "stopped": stopped}


def across(folder: Path, ranks: Ranks, checkpoints: dict[str, str]) -> dict[str, Any]:
    """Three steps from another ZeRO stage's checkpoint, and 2 -> 1 -> 2 ranks through plain torch."""
    losses, first = {}, HALF_WAY + 1
    for then, now in itertools.pairwise([*ZERO, "zero-0"]):
        config = decoder_config(folder / "across", now)
        losses[f"{then} to {now}"], engine = run(config, ranks, first, first + 2, checkpoint=Path(checkpoints[then]))
        engine.close()
    alone = decoder_config(folder / f"alone-{ranks.rank}")  # each rank does this for itself
    save = Saver(identity_of(alone), Ranks())
    middle, _ = run(alone, Ranks(), first, first, checkpoint=Path(checkpoints["zero-3"]), save=(save, first))
    config = decoder_config(folder / "again", "zero-3")
    end, engine = run(config, ranks, first + 1, first + 2, checkpoint=find_newest(save.directory))
    engine.close()
    return losses | {"2 to 1 to 2 ranks": middle + end}


def optimizer_across(folder: Path, ranks: Ranks, name: str, checkpoint: Path) -> dict[str, list[str]]:
    steps, optimizer = GROUPS[name].steps, {"name": name}
    config = decoder_config(folder / "across", "zero-1", optimizer=optimizer)
    losses, engine = run(config, ranks, steps // 2 + 1, steps, checkpoint=checkpoint)
    engine.close()
    alone = decoder_config(folder / f"alone-{ranks.rank}", optimizer=optimizer)
    return {"zero-1": losses, "torch": run(alone, Ranks(), steps // 2 + 1, steps, checkpoint=checkpoint)[0]}


def quick(folder: str) -> dict[str, Any]:
    ranks, path = start_ranks(tiny_config(folder, "deepspeed").run), Path(folder)
    report: dict[str, Any] = {"fast": train_group(path, "fast", ranks)}
    report["fast"]["torch"] = ranks.gather(alone(path, "fast") if ranks.rank == 0 else None)[0]
    report["skips"] = {"zero-2": skips(path, "zero-2", ranks, "fp32")}
    report["consensus"] = consensus(ranks)
    report["shared_memory"] = [p.name for p in Path("/dev/shm").glob(f"deepspeed*_{os.environ['MASTER_PORT']}_*")]
    ranks.stop()
    return report


def everything(folder: str) -> dict[str, Any]:
    ranks, path = start_ranks(tiny_config(folder, "deepspeed").run), Path(folder)
    groups = [group for group in GROUPS if group != "fast"]
    report: dict[str, Any] = {group: train_group(path, group, ranks) for group in groups}
    own = {group: alone(path, group) for number, group in enumerate(groups) if number % 2 == ranks.rank}
    for part in ranks.gather(own):
        for group, found in part.items():
            report[group]["torch"] = found
    for name in ("adafactor", "muon"):
        checkpoint = Path(report[name]["zero-3"]["checkpoint"])
        report[f"{name} across"] = optimizer_across(path, ranks, name, checkpoint)
    report["across"] = across(path, ranks, {name: report["fp32"][name]["checkpoint"] for name in ZERO})
    report["skips"] = {name: skips(path, name, ranks, "fp32") for name in ZERO}
    report["skips"] |= {f"{name} bf16": skips(path, name, ranks, "bf16") for name in GROUPS["bf16"].zero}
    ranks.stop()
    return report


def report_of(cases: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    first, second = run_ranks(cases, timeout=900, folder=str(tmp_path_factory.mktemp("ranks")))
    for case in first:
        assert first[case] == second[case], "the ranks disagree"
    return first


@pytest.fixture(scope="module")
def fast(tmp_path_factory):
    return report_of(quick, tmp_path_factory)


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    return report_of(everything, tmp_path_factory)


@pytest.fixture
def trained(request, group):
    return request.getfixturevalue("fast" if group == "fast" else "report")[group]


def difference(one: list[str], other: list[str]) -> float:
    pairs = [(float.fromhex(a), float.fromhex(b)) for a, b in zip(one, other, strict=True)]
    return max(abs(a - b) / abs(b) for a, b in pairs)


@pytest.mark.parametrize(("group", "name"), RUNS)
def test_losses_and_texts_agree_with_plain_torch(trained, group, name):
    ours, alone = trained[name], trained["torch"]
    assert difference(ours["straight"], alone["straight"]) < GROUPS[group].tolerance
    assert ours["written"] == alone["written"] and len(alone["written"]) == 15 * GROUPS[group].writes


@pytest.mark.slow
@pytest.mark.parametrize("name", ["zero-1", "torch"])
@pytest.mark.parametrize("optimizer", ["adafactor", "muon"])
def test_other_optimizers_resume_under_another_stage_and_number_of_ranks(report, optimizer, name):
    losses = report[optimizer]["torch"]["straight"]
    assert difference(report[f"{optimizer} across"][name], losses[len(losses) // 2 :]) < 1e-5


@pytest.mark.parametrize(("group", "name"), [run for run in RUNS if GROUPS[run.values[0]].resumes])
def test_resume_is_bit_identical(trained, group, name):
    case = trained[name]
    assert case["resumed"] == case["straight"][2 * (GROUPS[group].steps // 2) :]
    assert case["same_state"]


@pytest.mark.slow
def test_resume_at_another_stage_or_number_of_ranks(report):
    expected = report["fp32"]["torch"]["straight"][2 * HALF_WAY : 2 * HALF_WAY + 6]
    for name, losses in report["across"].items():
        assert difference(losses, expected) < 1e-6, name


SKIPS = [*ZERO, *(f"{name} bf16" for name in GROUPS["bf16"].zero)]


@pytest.mark.parametrize(
    ("launch", "name"), [("fast", "zero-2"), *(pytest.param("report", n, marks=pytest.mark.slow) for n in SKIPS)]
)
def test_a_non_finite_step_on_one_rank_is_skipped_on_all(request, launch, name):
    case = request.getfixturevalue(launch)["skips"][name]
    assert case["applied"] == [True, False, False, False, True, True, True]
    assert case["unchanged"] == [False, True, True, True, False, False, False]
    assert case["steps_done"] == 4


def test_all_ranks_act_on_a_flag_of_one_rank(fast):
    assert fast["consensus"] == {"known": [True, True, True, False], "stopped": [False, True]}


def test_no_shared_memory_is_left(fast):
    assert fast["shared_memory"] == []
