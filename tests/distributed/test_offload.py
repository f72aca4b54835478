"""Weights and optimizer state on a disk: the losses of a run in memory, exact resume, and what is left on the disk.

Compiles DeepSpeed's async_io where that has not been done, which takes a minute or more, and needs libaio: soak tier.
One launch of two ranks, and one of a single rank that goes on from their checkpoints.
"""

import math
from pathlib import Path
from typing import Any

import pytest

from megasparse.training.checkpoints.checkpoint import Checkpoint, loaded
from megasparse.training.checkpoints.run_folder import find_newest
from megasparse.training.checkpoints.saving import Saver
from megasparse.training.engines.build import build_engine
from megasparse.training.engines.contract import Engine
from megasparse.training.ranks import Ranks, start_ranks
from tests.helpers.run_ranks import run_ranks
from tests.helpers.tiny import DummyBatches, TinyModel, identity_of, make_rng, tiny_config

pytestmark = pytest.mark.soak

CPU = {"device": "cpu"}
WIDTH = 700
"""DeepSpeed leaves in memory what is less than 1 MiB: of 2.2 million weights two sub-groups a rank are more."""
GROUPS = {"stage": 3, "sub_group_size": 300_000, "stage3_prefetch_bucket_size": 0}
PIPELINED = {"pipeline_read": True, "pipeline_write": True, "buffer_count": 12}
CASES = {
    "memory": ("fp32", GROUPS | {"offload_optimizer": CPU}),
    "optimizer": ("fp32", GROUPS | {"offload_optimizer": {"device": "nvme"}}),
    "pipelined": ("fp32", GROUPS | {"offload_optimizer": {"device": "nvme"} | PIPELINED}),
    "memory bf16": ("bf16", GROUPS | {"offload_optimizer": CPU, "offload_param": CPU}),
    "weights bf16": ("bf16", GROUPS | {"offload_param": {"device": "nvme", "max_in_cpu": 0, "buffer_size": 2_000_000}}),
}
CASES["both bf16"] = ("bf16", CASES["weights bf16"][1] | {"offload_optimizer": {"device": "nvme"}})
IN_MEMORY = {"optimizer": "memory", "pipelined": "memory", "weights bf16": "memory bf16", "both bf16": "memory bf16"}
"""Case on a disk -> the same in memory."""


def config_of(folder: str, case: str) -> Any:
    precision, zero = CASES[case]
    (disk := Path(folder, "disk")).mkdir(exist_ok=True)
    for key in ("offload_optimizer", "offload_param"):
        if zero.get(key, CPU)["device"] == "nvme":
            zero = zero | {key: zero[key] | {"nvme_path": str(disk)}}
    sections = {"training": {"precision": precision}, "deepspeed": {"zero_optimization": zero}}
    return tiny_config(Path(folder, case), "deepspeed", **sections)


def losses(engine: Engine, config: Any, first: int, last: int) -> list[str]:
    """Exactly, of the steps after `first` to `last`; nothing is learnt from step 2."""
    found = []
    for step, data in zip(range(first + 1, last + 1), DummyBatches(config, engine.ranks, 8 * first), strict=False):
        result = engine.train_step(data.micro_batches, step, 1e-4)
        assert result.applied == (step != 2)
        found.append(result.loss.hex() if result.applied else "skipped")
    return found


def state(engine: Engine, ranks: Ranks) -> dict[str, float]:
    """A sum of squares of every piece of all ranks, which is as good as the numbers where two runs are compared."""
    own = [
        [f"{f.kind} {f.name} {f.start}", f.read().double().square().sum().item()] for f in loaded(engine.fragments())
    ]
    return {key: value for part in ranks.gather(own) for key, value in part}


def on_disk(folder: str, ranks: Ranks) -> list[str]:
    """Kinds of files, of all ranks."""
    names = [path.name for path in Path(folder, "disk").rglob("*.swp")]
    kinds = ["exp_avg-", "exp_avg_sq-", "gradient", "param"]
    ranks.gather(None)  # nobody goes on before all have looked
    return sorted(kind for kind in kinds if any(kind in name for name in names))


def model(seed: int) -> TinyModel:
    made = TinyModel(seed, WIDTH)
    made.poisoned = {10: math.nan}  # of step 2
    return made


def goes_on(folder: str, case: str, checkpoint: Path, ranks: Ranks) -> tuple[list[str], dict[str, float]]:
    config = config_of(folder, case)
    engine = build_engine(model(2), config, make_rng, ranks, Checkpoint.open(checkpoint))
    found = losses(engine, config, 3, 6), state(engine, ranks)
    engine.close()
    return found


def two_ranks(folder: str) -> dict[str, Any]:
    report: dict[str, Any] = {}
    ranks = start_ranks(config_of(folder, "memory").run)
    for case in CASES:
        config = config_of(folder, case)
        engine = build_engine(model(1), config, make_rng, ranks)
        whole = losses(engine, config, 0, 3)
        files = on_disk(folder, ranks)
        path = Saver(identity_of(config), ranks).save(engine, 3, 24, {})
        assert path is not None
        whole += losses(engine, config, 3, 6)
        at_end = state(engine, ranks)
        engine.close()
        again, state_again = goes_on(folder, case, path, ranks)
        report[case] = {"losses": whole, "again": again, "same state": state_again == at_end, "files": files}
    for then, now in (("optimizer", "memory"), ("memory", "optimizer"), ("memory bf16", "both bf16")):
        path = find_newest(Path(folder, then, "checkpoints"))
        assert path is not None
        report[f"{then} to {now}"] = goes_on(folder, now, path, ranks)[0]
    ranks.gather(None)
    report["left"] = [path.name for path in Path(folder, "disk").iterdir()]
    ranks.stop()
    return report


def one_rank(folder: str) -> dict[str, Any]:
    """Goes on from what two ranks saved."""
    ranks = start_ranks(config_of(folder, "memory").run)
    paths = {case: find_newest(Path(folder, case, "checkpoints")) or Path() for case in CASES}
    return {case: goes_on(folder, case, paths[case], ranks)[0] for case in ("memory", "optimizer", "both bf16")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tmp_path_factory.mktemp("offload"))


@pytest.fixture(scope="module")
def report(folder):
    first, second = run_ranks(two_ranks, timeout=900, folder=folder)
    assert first == second, "the ranks disagree"
    return first


@pytest.mark.parametrize(("case", "memory"), IN_MEMORY.items())
def test_losses_are_those_of_a_run_in_memory_to_the_last_bit(report, case, memory):
    losses = report[case]["losses"]
    assert losses == report[memory]["losses"] and losses[1] == "skipped"
    assert float.fromhex(losses[5]) < float.fromhex(losses[0]), "nothing was learnt"


@pytest.mark.parametrize("case", CASES)
def test_resume_is_exact(report, case):
    assert report[case]["again"] == report[case]["losses"][3:]
    assert report[case]["same state"]


def test_it_lies_on_the_disk(report):
    optimizer, weights = ["exp_avg-", "exp_avg_sq-", "gradient"], ["param"]
    found = {case: report[case]["files"] for case in CASES}
    assert found == {
        "memory": [],
        "optimizer": optimizer,
        "pipelined": optimizer,
        "memory bf16": [],
        "weights bf16": weights,
        "both bf16": [*optimizer, *weights],
    }


def test_a_run_goes_on_from_disk_to_memory_and_back(report):
    assert report["optimizer to memory"] == report["memory to optimizer"] == report["memory"]["losses"][3:]
    assert report["memory bf16 to both bf16"] == report["memory bf16"]["losses"][3:]


def test_nothing_is_left(report):
    assert report["left"] == []


def test_one_rank_goes_on_from_two(report, folder):
    (alone,) = run_ranks(one_rank, world_size=1, timeout=900, folder=folder)
    for case, found in alone.items():
        expected = report[case]["losses"][3:]
        tolerance = 1e-2 if case.endswith("bf16") else 1e-5
        assert [float.fromhex(x) for x in found] == pytest.approx([float.fromhex(x) for x in expected], rel=tolerance)
    assert alone["optimizer"] == alone["memory"]
