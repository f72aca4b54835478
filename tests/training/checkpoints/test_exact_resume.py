"""A run that stops anywhere and resumes is bit-identical to an uninterrupted one: every mechanism, dropout on."""

import hashlib
import json
import math
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch

from launch import pretrain
from megasparse.config.attention import MECHANISMS
from megasparse.model.decoder import Decoder
from megasparse.model.encoder import Encoder
from megasparse.training.checkpoints.manifest import find_newest
from tests.helpers import commands
from tests.helpers.models import VARIANTS, attention, can_be_causal, causal_names, kind_of
from tests.helpers.tiny import read_metrics
from tests.helpers.trained import prepared

STEPS = 12
"""50 sequences of 64 bytes, 10 of them a step, so that an epoch has 5 steps."""
TIMES = ("speed/", "memory/", "checkpoint/")
BOTH = attention("lsh", "lha").model_dump(mode="json")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return prepared(tmp_path_factory.mktemp("prepared"))


class Died(Exception):
    pass


class Read:
    """Inputs of the model in training: (step, sample numbers, digest of the tokens) of each micro-batch."""

    def __init__(self, patch: pytest.MonkeyPatch, fail_at: int | None = None):
        self.batches: list[tuple[int, list[int], str]] = []
        self.fail_at = fail_at
        """The micro-batch in whose forward pass the process dies."""
        for kind in (Decoder, Encoder):
            patch.setattr(kind, "forward", self.recording(kind.forward))

    def recording(self, forward: Any) -> Any:
        def record(model: Any, tokens: Any, rng: Any, *padding: Any) -> Any:
            if rng.training:
                if len(self.batches) == self.fail_at:
                    raise Died
                digest = hashlib.sha256(tokens.cpu().numpy().tobytes()).hexdigest()
                self.batches.append((rng.step, rng.samples.tolist(), digest))
            return forward(model, tokens, rng, *padding)

        return record


def configuration(data: Path, run: Path, attention: dict[str, Any], /, **sections: dict[str, Any]) -> Path:
    model = {"max_length": 64, "layers": 2, "d_model": 32, "d_ff": 64, "heads": 4, "dropout": 0.1}
    values: dict[str, Any] = {
        "run": {"directory": str(run), "engine": "torch", "device": "cpu"},
        "model": {**model, "attention": attention},
        "data": {"path": str(data), "sequence_length": 64},
        "training": {"steps": STEPS, "global_batch": 10, "micro_batch": 5},
        "optimizer": {"learning_rate": 0.01, "warmup_steps": 3},
        "evaluation": {"every": 4, "sequences": 2},
    }
    for name, section in sections.items():
        values[name] = {**values.get(name, {}), **section}
    path = run.with_suffix(".json")
    path.write_text(json.dumps(values))
    return path


def launch(config: Path, *arguments: str, fail_at: int | None = None) -> list[tuple[int, list[int], str]]:
    with pytest.MonkeyPatch.context() as patch:
        read = Read(patch, fail_at)
        try:
            commands.run(pretrain, "--config", config, *arguments)
        except Died:
            assert fail_at is not None
    return read.batches


def reported(run: Path) -> list[dict[str, float]]:
    """Every number of metrics.jsonl that is not of time, memory or saving."""
    return [{k: v for k, v in line.items() if not k.startswith(TIMES)} for line in read_metrics(run)]


def state(run: Path) -> dict[str, bytes]:
    """Weights, moments and buffers of the newest checkpoint, as bytes."""
    return {path.name: path.read_bytes() for path in find_newest(run / "checkpoints").glob("*.safetensors")}


def outcome(run: Path, read: list[Any]) -> tuple[Any, ...]:
    """All that a run was given, reported and saved."""
    return read, reported(run), state(run)


def goes_on_exactly(data: Path, folder: Path, attention: dict[str, Any], stop: int, **sections: Any) -> list[Any]:
    """A run stopped at a step and started again is the run in a stretch. Returns the metrics."""
    straight, stopped = (configuration(data, folder / name, attention, **sections) for name in ("straight", "stopped"))
    whole = outcome(folder / "straight", launch(straight))
    read = launch(stopped, "--stop-at", str(stop)) + launch(stopped)
    assert outcome(folder / "stopped", read) == whole
    return whole[1]


@pytest.fixture(scope="module")
def straight(data, tmp_path_factory):
    run = tmp_path_factory.mktemp("straight") / "run"
    return outcome(run, launch(configuration(data, run, BOTH)))


def test_the_run_has_epochs_and_accumulates(straight):
    read, lines, _ = straight
    assert [step for step, _, _ in read] == [step for step in range(1, STEPS + 1) for _ in range(2)]
    digests = [digest for _, _, digest in read]
    assert len(set(digests)) == len(digests), "each epoch has an order of its own"
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert len({line["train/loss"] for line in lines}) == STEPS


def test_stopped_at_every_step(data, tmp_path, straight):
    config = configuration(data, tmp_path / "run", BOTH)
    read = [batch for stop in range(1, STEPS + 1) for batch in launch(config, "--stop-at", str(stop))]
    assert outcome(tmp_path / "run", read) == straight


def test_killed_in_the_middle_of_an_accumulation(data, tmp_path, straight):
    """The first of step 8's two micro-batches is done; the checkpoint is of step 6."""
    config = configuration(data, tmp_path / "run", BOTH, checkpoint={"every": 3})
    read = launch(config, fail_at=15)
    assert read[-1][0] == 8 and len(reported(tmp_path / "run")) == 7
    assert outcome(tmp_path / "run", read[:12] + launch(config)) == straight


@pytest.mark.slow
def test_a_cuda_graph_changes_no_bit_of_50_steps(data, tmp_path):
    """A CPU calls the pass that a GPU replays. Two micro-batches a step, stopped and resumed, with and without it."""
    pattern = attention("lsh").model_dump(mode="json")
    sections = {"training": {"steps": 50, "global_batch": 4, "micro_batch": 2}, "evaluation": {"every": 25}}
    graphed = {"directory": str(tmp_path / "graphed"), "cuda_graph": True}
    eager = configuration(data, tmp_path / "eager", pattern, **sections)
    config = configuration(data, tmp_path / "graphed", pattern, run=graphed, **sections)
    launch(eager)
    launch(config, "--stop-at", "15")
    launch(config, "--stop-at", "30", "--set", "run.cuda_graph=false")
    launch(config)
    assert reported(tmp_path / "graphed") == reported(tmp_path / "eager")
    assert state(tmp_path / "graphed") == state(tmp_path / "eager")


@pytest.mark.slow
@pytest.mark.parametrize(
    "sections",
    [
        {"training": {"precision": "bf16"}},
        {"optimizer": {"name": "adafactor", "schedule": "inverse_sqrt"}},
        {"optimizer": {"name": "muon"}},
        {"optimizer": {"weight_decay": 0.1}, "training": {"gradient_clipping": 0.1}},
        {"model": {"blocks": "ordinary", "activations": "checkpoint", "positions": {"kind": "rotary"}}},
    ],
    ids=str,
)
def test_exact_resume_for_every_precision_optimizer_and_block(data, tmp_path, sections):
    sections = {**sections, "training": {"steps": 6, **sections.get("training", {})}}
    goes_on_exactly(data, tmp_path, attention("local", "yoso").model_dump(mode="json"), 3, **sections)


@pytest.fixture
def deterministic_kernels():
    """run.deterministic sets a switch of the whole process."""
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("device", "steps"),
    [
        ("cpu", 6),
        pytest.param("cuda", 100, marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")),
    ],
)
def test_the_same_seed_twice_gives_the_same_bits(data, tmp_path, device, steps, deterministic_kernels, figures):
    """On a GPU with deterministic kernels, and their cost."""

    def run_once(name: str, deterministic: bool) -> tuple[Any, float]:
        run, mechanisms = tmp_path / name, attention("lsh", "lha", "yoso", "local").model_dump(mode="json")
        where = {"device": device, "deterministic": deterministic}
        config = configuration(data, run, mechanisms, run=where, training={"steps": steps}, model={"layers": 4})
        result = outcome(run, launch(config))
        return result, statistics.median(line["speed/step_seconds"] for line in read_metrics(run))

    fast = run_once("fast", False)[1] if device == "cuda" else math.nan  # what is deterministic once stays so
    (first, seconds), (second, _) = run_once("first", True), run_once("second", True)
    assert first == second
    if device == "cuda":
        figures(deterministic_step_ratio=seconds / fast)


def models() -> list[tuple[str, list[str]]]:
    """(kind, layers): every mechanism and variant once, different mechanisms as layers of one model."""
    result = [("encoder", [*(name for name in MECHANISMS if not can_be_causal(name)), "lsh", "routing"])]
    left = causal_names()
    while left:
        layers = list({kind_of(name): name for name in reversed(left)}.values())
        result.append(("decoder", layers))
        left = [name for name in left if name not in layers]
    return result


@pytest.mark.parametrize(
    ("kind", "layers"),
    [pytest.param(*case, marks=() if n == 1 else pytest.mark.slow) for n, case in enumerate(models())],
)
def test_every_mechanism_resumes_with_the_same_bits(data, tmp_path, kind, layers):
    """Hash functions, rotations, samples, dropout, masks, centroids: all drawn, moved and read as if never stopped."""
    variants = [VARIANTS.get(name, (name, {})) for name in layers]
    settings = attention(*(own for own, _ in variants), **dict(variants)).model_dump(mode="json")
    model: dict[str, Any] = {"max_length": 64, "d_model": 32, "d_ff": 64, "heads": 2, "dropout": 0.1}
    model |= {"layers": len(layers), "kind": kind, "vocabulary": 256 if kind == "decoder" else 257}
    small = {"training": {"steps": 4, "global_batch": 2, "micro_batch": 1}, "evaluation": {"every": 0}}
    lines = goes_on_exactly(data, tmp_path, settings, 2, model=model, **small)
    assert len(lines) == 4 and settings["pattern"] == [kind_of(name) for name in layers]
