"""The engine on two ranks: every ZeRO setting against plain torch, exact resume, skipped steps, saves that fail.

One launch of two gloo ranks (`everything`) runs all cases one after another; the tests look at what it reports.
"""

import dataclasses
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
from megasparse.data.tokenizers.byte import ByteTokenizer
from megasparse.errors import CheckpointError, ConfigError
from megasparse.evaluation.generate import generate
from megasparse.hub.export import to_hf
from megasparse.hub.tensor_file import TensorFile
from megasparse.model.build import build_model
from megasparse.ops.random import RngContext
from megasparse.training.checkpoints.checkpoint import Checkpoint
from megasparse.training.checkpoints.resume import find_start
from megasparse.training.checkpoints.run_folder import find_newest
from megasparse.training.checkpoints.saving import Saver
from megasparse.training.engines.build import build_engine
from megasparse.training.engines.contract import Engine
from megasparse.training.ranks import Ranks, start_ranks
from megasparse.training.reporting.rank_table import StepTimes
from megasparse.training.schedule import learning_rate
from megasparse.training.stopping.hooks import RunHooks, StopWanted, check_stop, sync_step
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
HALF = {"precision": "bf16"}
ADAFACTOR = {"name": "adafactor"}
ADAFACTOR_ZERO = ("zero-0", "zero-1", "zero-3")
ADAFACTOR_BF16 = ("zero-1", "zero-3")
SHORT = 8
"""Steps of the runs beside those in fp32 with AdamW."""
BF16 = ("zero-0", "zero-1", "zero-2", "zero-3")


# Every kind of layer, dropout, tiles; widths that no number of ranks divides, so that every partition is padded.
DECODER: dict[str, Any] = {
    "max_length": 32,
    "layers": 3,
    "d_model": 33,
    "d_ff": 45,
    "heads": 3,
    "dropout": 0.1,
    "feed_forward_tiles": 3,
    "loss_tiles": 2,
    "positions": {"kind": "axial", "axial_shape": [4, 8], "axial_dims": [12, 21]},
    "attention": {"pattern": ["local", "lsh", "full"], "local": {"chunk": 4}, "lsh": {"chunk": 4, "rounds": 2}},
}
TIED = {"model": DECODER | {"tied_embeddings": True, "adaptive_cutoffs": [50, 120]}, "training": {"micro_batch": 1}}
CHECKPOINTED = {"model": DECODER | {"blocks": "ordinary", "activations": "checkpoint", "label_smoothing": 0.1}}


def decoder_config(directory: Path, engine: str = "torch", **sections: dict[str, Any]) -> Config:
    return tiny_config(directory, engine, **{"model": DECODER, **sections})


def run(
    config: Config,
    ranks: Ranks,
    first: int,
    last: int,
    checkpoint: Path | None = None,
    save: Saver | None = None,
    written: list[int] | None = None,
) -> tuple[list[str], Engine]:
    """Losses (as exact hexadecimal) of steps first..last; with `save`, a checkpoint after the last.

    written: takes the tokens that the model writes after step 5 by cached decoding, beyond several windows.
    """
    opened = Checkpoint.open(checkpoint) if checkpoint else None
    engine = build_engine(build_model(config.model, 0), config, partial(RngContext, 0, training=True), ranks, opened)
    losses, position = [], opened.sequences if opened else 0
    for step, data in zip(range(first, last + 1), DummyBatches(config, ranks, position), strict=False):
        result = engine.train_step(data.micro_batches, step, learning_rate(step, 20, config.optimizer))
        losses += [result.loss.hex(), result.grad_norm.hex()]
        position = data.position
        if step == 5 and written is not None:
            engine.module.eval()
            written += generate(engine.module, torch.arange(5), 27, hash_seed=0)
            engine.module.train()
    if save:
        save.save(engine, last, position, {})
    return losses, engine


def weights(engine: Engine, ranks: Ranks) -> dict[str, list[float]]:
    """Every fp32 number that the run's state has, gathered from all ranks."""
    own = [[f"{f.kind} {f.name} {f.start}", f.read().tolist()] for f in engine.fragments()]
    return {key: value for part in ranks.gather(own) for key, value in part}


def resumes_exactly(
    folder: Path, name: str, ranks: Ranks, steps: int = SHORT, **sections: dict[str, Any]
) -> dict[str, Any]:
    """A run straight through, and one that stops half way and goes on in a new engine."""
    config = decoder_config(folder / name, "deepspeed", deepspeed={"zero_optimization": ZERO[name]}, **sections)
    written: list[int] = []
    straight, engine = run(config, ranks, 1, steps, written=written)
    at_end = weights(engine, ranks)
    engine.close()
    save = Saver(identity_of(config, tokenizer={"name": ByteTokenizer.name, "sha256": ByteTokenizer.sha256}), ranks)
    before, engine = run(config, ranks, 1, steps // 2, save=save)
    engine.close()
    newest = find_newest(save.directory)
    after, engine = run(config, ranks, steps // 2 + 1, steps, checkpoint=newest)
    same_state = weights(engine, ranks) == at_end
    engine.close()
    return {
        "straight": straight,
        "resumed": before + after,
        "same_state": same_state,
        "checkpoint": str(newest),
        "written": written,
    }


def agrees(folder: Path, ranks: Ranks, names: Sequence[str], **sections: dict[str, Any]) -> dict[str, Any]:
    """Ten steps on plain torch and on two ranks, a text in between."""
    found = {}
    for name in ("torch", *names):
        engine = "torch" if name == "torch" else "deepspeed"
        zero = {} if name == "torch" else {"deepspeed": {"zero_optimization": ZERO[name]}}
        config = decoder_config(folder / name, engine, **sections, **zero)
        written: list[int] = []
        losses, built = run(config, Ranks() if name == "torch" else ranks, 1, 10, written=written)
        found[name] = {"losses": losses, "written": written}
        built.close()
    return found


def skips(folder: Path, name: str, ranks: Ranks, precision: str) -> dict[str, Any]:
    """Steps poisoned by one sequence on rank 1, by a loss of NaN, of infinity, and by its gradient alone; and one that
    was not accepted."""
    training = {"precision": precision}
    config = tiny_config(folder, "deepspeed", training=training, deepspeed={"zero_optimization": ZERO[name]})
    model = TinyModel()
    model.poisoned = {10: math.nan, 18: math.inf}  # of steps 2 and 3; both in micro-batches of rank 1
    model.poisoned_gradient = {26}  # of step 4
    engine = build_engine(model, config, make_rng, ranks)
    applied, unchanged = [], []
    for step, data in zip(range(1, 8), DummyBatches(config, ranks), strict=False):
        before = weights(engine, ranks)
        result = engine.train_step(data.micro_batches, step, 0.01, accept=lambda loss, step=step: step != 5)  # type: ignore
        applied.append(result.applied)
        unchanged.append(weights(engine, ranks) == before)
    steps_done = engine.steps_done()
    engine.close()
    return {"applied": applied, "unchanged": unchanged, "steps_done": steps_done}


def fails_to_save(folder: Path, ranks: Ranks) -> dict[str, Any]:
    """Rank 1's write raises in the second save."""
    config = decoder_config(folder / "abort", "deepspeed", deepspeed={"zero_optimization": ZERO["zero-2"]})
    save = Saver(identity_of(config), ranks)
    _, engine = run(config, ranks, 1, 2, save=save)
    if ranks.rank == 1:
        engine.fragments = lambda: (_ for _ in ()).throw(OSError(28, "No space left on device", "disk"))  # type: ignore
    try:
        save.save(engine, 3, 24, {})
        message = ""
    except CheckpointError as error:
        message = str(error)
    engine.close()
    return {
        "message": message,
        "left": sorted(path.name for path in save.directory.iterdir()),
        "opens": Checkpoint.open(find_newest(save.directory) or "").step,
    }


def strangers(folder: Path, ranks: Ranks) -> str:
    """The ranks are given different seeds."""
    config = tiny_config(folder / "strangers", "deepspeed", run={"seed": ranks.rank})
    try:
        find_start(identity_of(config), ranks)
    except ConfigError as error:
        return str(error)
    return ""


def consensus(ranks: Ranks) -> dict[str, Any]:
    """Rank 1 has no data, is asked to stop, and needs longer; rank 0 still writes and skipped three sequences."""
    here = ranks.rank == 1
    known = sync_step(
        ranks, stop=here, failed=here, writing=not here, skipped=0 if here else 3, spent=StepTimes(0.5 + ranks.rank)
    )
    stopped = []
    for wanted in (False, here):
        try:
            check_stop(RunHooks(stop_wanted=lambda wanted=wanted: wanted), ranks, "evaluation")  # type: ignore[misc]
            stopped.append(False)
        except StopWanted:
            stopped.append(True)
    return {"known": {**dataclasses.asdict(known), "waited": known.waited >= 0}, "stopped": stopped}


def across(folder: Path, ranks: Ranks, checkpoints: dict[str, str]) -> dict[str, Any]:
    """Steps 11 to 15 from another ZeRO stage's checkpoint, and 2 -> 1 -> 2 ranks through plain torch."""
    losses = {}
    for then, now in itertools.pairwise([*ZERO, "zero-0"]):
        config = decoder_config(folder / "across", "deepspeed", deepspeed={"zero_optimization": ZERO[now]})
        losses[f"{then} to {now}"], engine = run(config, ranks, 11, 15, checkpoint=Path(checkpoints[then]))
        engine.close()
    alone = decoder_config(folder / f"alone-{ranks.rank}")  # each rank does this for itself
    save = Saver(identity_of(alone), Ranks())
    middle, _ = run(alone, Ranks(), 11, 13, checkpoint=Path(checkpoints["zero-3"]), save=save)
    config = decoder_config(folder / "again", "deepspeed", deepspeed={"zero_optimization": ZERO["zero-3"]})
    end, engine = run(config, ranks, 14, 15, checkpoint=find_newest(save.directory))
    engine.close()
    return losses | {"2 to 1 to 2 ranks": middle + end}


def adafactor_across(folder: Path, ranks: Ranks, checkpoint: Path) -> dict[str, list[str]]:
    """The second half of a run from the checkpoint of ZeRO 3: under ZeRO 1, and on one rank by plain torch."""
    first = SHORT // 2 + 1
    config = decoder_config(
        folder / "across", "deepspeed", optimizer=ADAFACTOR, deepspeed={"zero_optimization": ZERO["zero-1"]}
    )
    losses, engine = run(config, ranks, first, SHORT, checkpoint=checkpoint)
    engine.close()
    alone = decoder_config(folder / f"alone-{ranks.rank}", optimizer=ADAFACTOR)
    return {"zero-1": losses, "torch": run(alone, Ranks(), first, SHORT, checkpoint=checkpoint)[0]}


def everything(folder: str) -> dict[str, Any]:
    """All cases, on each of two ranks."""
    ranks = start_ranks(tiny_config(folder, "deepspeed").run)
    place = Path(folder)
    report: dict[str, Any] = {}
    report["torch written"] = []
    report["torch"] = run(decoder_config(place / "torch"), Ranks(), 1, 20, written=report["torch written"])[0]
    report["torch bf16"] = run(decoder_config(place / "torch", training=HALF), Ranks(), 1, SHORT)[0]
    report["torch adafactor"] = run(decoder_config(place / "torch", optimizer=ADAFACTOR), Ranks(), 1, SHORT)[0]
    half = decoder_config(place / "torch", optimizer=ADAFACTOR, training=HALF)
    report["torch adafactor bf16"] = run(half, Ranks(), 1, SHORT)[0]
    report["fp32"] = {name: resumes_exactly(place / "fp32", name, ranks, steps=20) for name in ZERO}
    report["bf16"] = {name: resumes_exactly(place / "bf16", name, ranks, training=HALF) for name in BF16}
    report["adafactor"] = {
        name: resumes_exactly(place / "adafactor", name, ranks, optimizer=ADAFACTOR) for name in ADAFACTOR_ZERO
    }
    report["adafactor bf16"] = {
        name: resumes_exactly(place / "adafactor bf16", name, ranks, optimizer=ADAFACTOR, training=HALF)
        for name in ADAFACTOR_BF16
    }
    report["adafactor across"] = adafactor_across(place, ranks, Path(report["adafactor"]["zero-3"]["checkpoint"]))
    report["tied"] = agrees(place / "tied", ranks, list(ZERO), **TIED)
    report["checkpointed"] = agrees(place / "checkpointed", ranks, ["zero-2", "zero-3"], **CHECKPOINTED)
    report["across"] = across(place, ranks, {name: case["checkpoint"] for name, case in report["fp32"].items()})
    report["skips"] = {name: skips(place, name, ranks, "fp32") for name in ZERO}
    report["skips"] |= {f"{name} bf16": skips(place, name, ranks, "bf16") for name in BF16}
    report["consensus"] = consensus(ranks)
    report["strangers"] = strangers(place, ranks)
    report["abort"] = fails_to_save(place, ranks)
    report["shared_memory"] = [p.name for p in Path("/dev/shm").glob(f"deepspeed*_{os.environ['MASTER_PORT']}_*")]
    ranks.stop()
    return report


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    first, second = run_ranks(everything, timeout=900, folder=str(tmp_path_factory.mktemp("ranks")))
    for case in (
        "fp32",
        "bf16",
        "adafactor",
        "adafactor across",
        "tied",
        "checkpointed",
        "across",
        "skips",
        "consensus",
    ):
        assert first[case] == second[case], "the ranks disagree"
    return first


def difference(one: list[str], other: list[str]) -> float:
    """Largest relative difference of two lists of numbers written as hexadecimal."""
    pairs = [(float.fromhex(a), float.fromhex(b)) for a, b in zip(one, other, strict=True)]
    return max(abs(a - b) / abs(b) for a, b in pairs)


@pytest.mark.parametrize("name", ZERO)
def test_losses_agree_with_plain_torch(report: dict[str, Any], name: str) -> None:
    assert difference(report["fp32"][name]["straight"], report["torch"]) < 1e-5
    assert float.fromhex(report["torch"][-2]) < 0.95 * float.fromhex(report["torch"][0]), "nothing was learnt"


@pytest.mark.parametrize("name", ZERO)
def test_text_is_that_of_plain_torch(report: dict[str, Any], name: str) -> None:
    assert report["fp32"][name]["written"] == report["torch written"]
    assert len(report["torch written"]) == 27


@pytest.mark.parametrize(
    ("case", "name"), [*(("tied", name) for name in ZERO), ("checkpointed", "zero-2"), ("checkpointed", "zero-3")]
)
def test_other_models_agree_with_plain_torch(report: dict[str, Any], case: str, name: str) -> None:
    """Tied embeddings with accumulation over four micro-batches; checkpointed ordinary blocks."""
    ours, alone = report[case][name], report[case]["torch"]
    assert difference(ours["losses"], alone["losses"]) < 1e-5
    assert ours["written"] == alone["written"]


@pytest.mark.parametrize("name", ADAFACTOR_ZERO)
def test_adafactor_agrees_with_plain_torch(report: dict[str, Any], name: str) -> None:
    assert difference(report["adafactor"][name]["straight"], report["torch adafactor"]) < 1e-5


@pytest.mark.parametrize("name", ADAFACTOR_BF16)
def test_adafactor_in_bf16_agrees_with_plain_torch(report: dict[str, Any], name: str) -> None:
    assert difference(report["adafactor bf16"][name]["straight"], report["torch adafactor bf16"]) < 1e-2


@pytest.mark.parametrize("name", ["zero-1", "torch"])
def test_adafactor_goes_on_under_another_stage_and_number_of_ranks(report: dict[str, Any], name: str) -> None:
    losses = report["torch adafactor"]
    assert difference(report["adafactor across"][name], losses[len(losses) // 2 :]) < 1e-5


@pytest.mark.parametrize("name", BF16)
def test_bf16_losses_agree_with_plain_torch(report: dict[str, Any], name: str) -> None:
    assert difference(report["bf16"][name]["straight"], report["torch bf16"]) < 1e-2


@pytest.mark.parametrize(
    ("group", "name"),
    [
        *(("fp32", name) for name in ZERO),
        *(("bf16", name) for name in BF16),
        *(("adafactor", name) for name in ADAFACTOR_ZERO),
        *(("adafactor bf16", name) for name in ADAFACTOR_BF16),
    ],
)
def test_resume_is_bit_identical(report: dict[str, Any], group: str, name: str) -> None:
    case = report[group][name]
    assert case["resumed"] == case["straight"]
    assert case["same_state"]


@pytest.mark.parametrize("name", ["zero-2", "zero-3"])
def test_what_two_ranks_share_is_exported_whole(report: dict[str, Any], name: str, tmp_path: Path) -> None:
    """The function to_hf itself compares the outputs of what it writes with ours."""
    shared, alone = (Checkpoint.open(Path(report["fp32"][stage]["checkpoint"])) for stage in (name, "zero-0"))
    weights = shared.manifest["tensors"]["weight"]
    assert len({piece["file"] for weight in weights.values() for piece in weight["pieces"]}) == 2
    assert any(len(weight["pieces"]) > 1 for weight in weights.values())
    file = TensorFile.open(to_hf(shared.path, tmp_path / "out"))
    assert file.names() == sorted(f"model.{weight}" for weight in weights)
    for weight in weights:
        torch.testing.assert_close(file.read(f"model.{weight}"), alone.tensor("weight", weight), atol=1e-5, rtol=1e-5)


def test_R3_resume_at_another_stage_or_number_of_ranks(report: dict[str, Any]) -> None:
    for name, losses in report["across"].items():
        assert difference(losses, report["torch"][20:30]) < 1e-6, name


@pytest.mark.parametrize("name", [*ZERO, *(f"{name} bf16" for name in BF16)])
def test_N1_what_is_not_finite_on_one_rank_is_skipped_on_all(report: dict[str, Any], name: str) -> None:
    case = report["skips"][name]
    assert case["applied"] == [True, False, False, False, False, True, True]
    assert case["unchanged"] == [False, True, True, True, True, False, False]
    assert case["steps_done"] == 3


def test_what_one_rank_knows_all_ranks_act_on(report: dict[str, Any]) -> None:
    answers = {"stop": True, "failed": True, "writing": True, "skipped": 3}
    answers |= {"spent": [[0.5, 0.0, 0.0], [1.5, 0.0, 0.0]], "waited": True}
    assert report["consensus"] == {"known": answers, "stopped": [False, True]}


def test_F2_ranks_with_different_configurations_do_not_start(report: dict[str, Any]) -> None:
    assert "different configurations" in report["strangers"]


def test_C4_a_failing_rank_aborts_the_save_of_all(report: dict[str, Any]) -> None:
    case = report["abort"]
    assert "Rank 1" in case["message"] and "No space left on device" in case["message"]
    assert case["left"] == ["00000002", "latest"]
    assert case["opens"] == 2


def test_no_shared_memory_is_left(report: dict[str, Any]) -> None:
    assert report["shared_memory"] == []
