"""A tiny language model and dummy data, for tests of training that need no real model."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megasparse.config.schema import Config, RunSettings
from megasparse.data.batches import Batch, Step, Steps
from megasparse.model.build import build_model
from megasparse.ops.random import RngContext
from megasparse.training.checkpoints.checkpoint import Checkpoint
from megasparse.training.checkpoints.manifest import RunIdentity
from megasparse.training.engines import build_engine
from megasparse.training.engines.contract import Engine, MakeRng, StepResult
from megasparse.training.ranks import Ranks, RunHooks
from megasparse.training.run import Evaluate, Recipe, TrainingRun, open_training


class TinyModel(nn.Module):
    """Predicts token t from token t−1. Its sizes divide by no number of ranks, so that every partition is padded."""

    is_autoregressive = True

    def __init__(self, seed: int = 0, width: int = 13):
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.norm = nn.LayerNorm(width)
        self.hidden = nn.Linear(width, 3 * width)
        self.out = nn.Linear(3 * width, 256)
        self.poisoned: dict[int, float] = {}
        """Global sample number -> summand of its loss; `nan` and `inf` poison the step."""
        self.poisoned_gradient: set[int] = set()
        """Global sample numbers whose loss is finite and whose gradient is not."""
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                mean = 1.0 if name == "norm.weight" else 0.0
                parameter.copy_(mean + 0.2 * torch.randn(parameter.shape, generator=generator))

    def forward(self, tokens: Tensor, rng: Any) -> tuple[Tensor, dict[str, Tensor]]:
        _, samples = rng
        hidden = self.norm(self.embedding(tokens[:, :-1]))
        logits = self.out(torch.nn.functional.gelu(self.hidden(hidden))).float()
        nats = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")
        count = torch.tensor(tokens[:, 1:].numel())
        objective = nats / count + sum(self.poisoned.get(int(s), 0.0) for s in samples)
        if self.poisoned_gradient & {int(s) for s in samples}:
            objective = objective + (logits * 0).sum().sqrt()  # √ has an infinite slope at 0, times 0 is NaN
        return objective, {"nats": nats.detach(), "tokens": count, "width": torch.tensor(13.0)}


def make_rng(step: int, samples: Tensor) -> tuple[int, Tensor]:
    return step, samples


def tiny_config(directory: str | Path, engine: str = "torch", **sections: dict[str, Any]) -> Config:
    """A run of 20 steps of 8 sequences, 2 at a time; `sections` override keys by section."""
    values: dict[str, Any] = {
        "run": {"directory": str(directory), "engine": engine, "device": "cpu"},
        "training": {"steps": 20, "global_batch": 8, "micro_batch": 2},
        "optimizer": {"learning_rate": 0.01, "warmup_steps": 3, "weight_decay": 0.1},
        "checkpoint": {"every": 10},
    }
    for name, section in sections.items():
        values[name] = section if name == "deepspeed" else {**values.get(name, {}), **section}
    return Config.model_validate(values)


def dummy_sample(number: int, length: int = 24) -> Tensor:
    """Tokens of a global sample number: a random walk, so that there is something to learn."""
    steps = torch.randint(0, 4, (length,), generator=torch.Generator().manual_seed(number))
    return (steps.cumsum(0) + 97 * number) % 256


class DummyBatches(Steps):
    """This rank's share of every global batch, or its part of that, from global sample number `start` on."""

    def __init__(self, config: RunSettings, ranks: Ranks, start: int = 0):
        self.config, self.ranks, self.position = config, ranks, start

    def __next__(self) -> Step:
        whole, micro = self.config.training.global_batch, self.config.training.micro_batch
        ranks, batches = self.ranks, []
        for number in range(whole // (micro * ranks.data_ranks)):
            first = self.position + (number * ranks.data_ranks + ranks.data_rank) * micro
            samples = torch.arange(first, first + micro)
            tokens = torch.stack([dummy_sample(int(sample)) for sample in samples])
            own = tokens.chunk(ranks.sequence_size, dim=1)[ranks.sequence_rank]
            batches.append(Batch(own, samples))
        self.position += whole
        return Step(batches, self.position, 0.0)


def tiny_engine(
    config: Config,
    ranks: Ranks = Ranks(),  # noqa: B008
    model: nn.Module | None = None,
    start: Checkpoint | None = None,
) -> Engine:
    """An engine around a model, by default a TinyModel, with its weights or the weights of `start`."""
    return build_engine(model or TinyModel(), config, make_rng, ranks, start)


def train_steps(engine: Engine, config: RunSettings, first: int, last: int, rate: float = 0.01) -> list[float]:
    batches = DummyBatches(config, engine.ranks, (first - 1) * config.training.global_batch)
    steps = zip(range(first, last + 1), batches, strict=False)
    return [engine.train_step(data.micro_batches, step, rate).loss for step, data in steps]


def identity_of(config: RunSettings, data: str = "data", tokenizer: dict[str, str] | None = None) -> RunIdentity:
    return RunIdentity(config, data, tokenizer or {})


@contextmanager
def tiny_run(
    config: Config,
    model: nn.Module | None = None,
    ranks: Ranks = Ranks(),  # noqa: B008
    evaluate: Evaluate | None = None,
    hooks: RunHooks | None = None,
    draws: MakeRng = make_rng,
    **options: Any,
) -> Iterator[TrainingRun]:
    """A run on dummy data, wired as every run is. options: arguments of `open_training`."""
    recipe = Recipe(
        identity_of(config),
        draws,
        lambda: model or TinyModel(),
        lambda position, _: DummyBatches(config, ranks, position),
        lambda engine, _: evaluate,
        flops_per_token=(1e6, 2e6),
    )
    with open_training(recipe, ranks, **options) as run:
        run.hooks = hooks or run.hooks
        yield run


def read_metrics(run: Path, file: str = "metrics.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / file).read_text().splitlines()]


def metrics(config: RunSettings) -> list[dict[str, Any]]:
    return read_metrics(Path(config.run.directory))


def dummy_steps(config: Config, ranks: Ranks, steps: int) -> list[StepResult]:
    """Train the configured model on dummy data, from its initial weights; each step is applied."""
    engine = build_engine(build_model(config.model, 0), config, partial(RngContext, 0, training=True), ranks)
    batches = zip(range(1, steps + 1), DummyBatches(config, ranks), strict=False)
    found = [engine.train_step(data.micro_batches, step, 0.003) for step, data in batches]
    engine.close()
    assert all(result.applied for result in found)
    return found
