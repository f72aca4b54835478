"""Tasks that forecast the rows of a table. L rows read, H rows predicted, T columns predicted, C columns read."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from megasparse.config.finetuning import FinetuneConfig
from megasparse.config.schema import ModelConfig
from megasparse.errors import ConfigError
from megasparse.tasks.backbones import Backbone
from megasparse.tasks.encoding import Counts, Encoded, Encoder
from megasparse.tasks.form import Form
from megasparse.tasks.forms.forecaster import ForecastBody, Forecaster, Windows
from megasparse.tasks.readers.series import Series
from megasparse.tasks.task import Example, Task


@dataclass(frozen=True)
class Window(Encoded):
    values: np.ndarray
    """Values, float64 (L, C): the rows read, scaled; of the task's columns, those that the model reads first."""
    marks: np.ndarray
    """Time features, float64 (L + H, F)."""

    @property
    def length(self) -> int:
        return len(self.values)

    def content(self) -> Iterator[bytes]:
        for part in (self.values, self.marks, self.label):
            yield f"{part.shape}\n".encode()
            yield np.ascontiguousarray(part).tobytes()


class WindowCounts(Counts):
    def lines(self, split: str, limit: int) -> list[str]:
        return [f"{split}: {self.examples:,} windows of {limit:,} rows"]


class WindowEncoder(Encoder):
    """Encoder that takes examples as they are: the task has scaled them, and all are equally long."""

    def encode(self, examples: Iterable[Example]) -> Iterator[Encoded]:
        self.counts = WindowCounts(longest=self.config.max_length)
        for example in examples:
            self.counts.examples += 1
            values, marks = (part for part in example.inputs if isinstance(part, np.ndarray))
            yield Window((), example.label, example.location, example.name, values, marks)


class ForecastForm(Form):
    """Mean squared error; answers and labels are float64 (H, T), scaled. Predictions are in the file's own units."""

    two_sided = True

    def __init__(self, task: Task, config: FinetuneConfig):
        super().__init__(task, config)
        assert isinstance(task, Series)
        self.series, settings = task, config.task.forecast
        for key, value in (("checkpoint", config.start.checkpoint), ("huggingface", config.start.huggingface)):
            if value is not None:
                problem = "given, and no pretrained model reads rows of numbers"
                raise ConfigError(f"start.{key}", problem, "Give a `model`, which is trained from its initial weights")
        if settings.overlap > config.task.max_length:
            problem = f"{settings.overlap} rows are more than the task.max_length = {config.task.max_length} read"
            raise ConfigError("task.forecast.overlap", problem, "Lower it")
        if settings.relative and (unread := [column for column in task.targets if column not in task.inputs]):
            problem = f'true, and "{unread[0]}" is predicted but not read'
            raise ConfigError("task.forecast.relative", problem, "Add it to task.forecast.inputs, or set it to false")
        self.shape = (settings.horizon, len(task.targets))

    def body(self, model: ModelConfig) -> Backbone:
        settings = self.config.task.forecast
        rows = settings.overlap + settings.horizon
        if rows > model.max_length:
            problem = f"{settings.overlap} + {settings.horizon} rows of the decoder are more than {model.max_length}"
            raise ConfigError("model.max_length", problem, f"Set it to {rows}, or lower task.forecast.horizon")
        return ForecastBody(model, len(self.series.inputs) + self.series.time_features, settings.overlap)

    def encoder(self, start: Any) -> Encoder:
        return WindowEncoder(self.task, None, start.body.vocabulary)

    def model(self, body: Backbone) -> nn.Module:
        assert isinstance(body, ForecastBody)
        relative = self.config.task.forecast.relative
        anchors = [self.series.inputs.index(column) for column in self.series.targets] if relative else None
        return Forecaster(body, len(self.series.targets), self.config.run.seed, anchors)

    def collate(self, examples: Sequence[Encoded]) -> Windows:
        windows = [example for example in examples if isinstance(example, Window)]
        read = len(self.series.inputs)
        labels = None if any(each.label is None for each in windows) else _stack([each.label for each in windows])
        return Windows(
            _stack([each.values[:, :read] for each in windows]), _stack([each.marks for each in windows]), labels
        )

    def dummy_batch(self, body: Backbone, batch: int, length: int) -> Windows:
        rows, marks = len(self.series.inputs), self.series.time_features
        values = torch.randn(batch, length, rows, generator=torch.Generator().manual_seed(0))
        return Windows(values, torch.zeros(batch, length + self.shape[0], marks), torch.zeros(batch, *self.shape))

    def answer(self, example: Encoded, predicted: np.ndarray) -> np.ndarray:
        return predicted.reshape(self.shape)

    def row(self, example: Encoded, predicted: np.ndarray) -> dict[str, Any]:
        """`label` and `predicted`: the numbers of the forecast by column; `name` is the date of the first row."""
        label = example.label
        return {
            "label": None if label is None else self.in_units(label),
            "predicted": self.in_units(self.answer(example, predicted)),
        }

    def in_units(self, scaled: np.ndarray) -> dict[str, list[float]]:
        """Targets (rows, T), by column and in the units of the file."""
        own = self.series.target_places
        values = scaled * self.series.scale[own] + self.series.mean[own]
        return {column: values[:, i].tolist() for i, column in enumerate(self.series.targets)}


def _stack(parts: Sequence[np.ndarray]) -> Tensor:
    return torch.from_numpy(np.stack(parts).astype(np.float32))
