"""Tasks that forecast all rows of a horizon at once (Informer's generative decoder, Zhou et al. 2020).

B batch, L rows read, O of them also read by the decoder, H rows predicted, C columns read, T columns predicted, F time
features, E d_model.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megasparse.attention.contract import Targets
from megasparse.attention.cross import EncoderOutput
from megasparse.attention.heads import Padding, projection
from megasparse.config.finetuning import FinetuneConfig
from megasparse.config.schema import ModelConfig, encoder_part, predicts
from megasparse.data.tokenizers import Tokenizer
from megasparse.errors import ConfigError
from megasparse.model.branch import mean_stream
from megasparse.model.decoder import SourceEncoder
from megasparse.model.embedding import Positions
from megasparse.model.stack import Stack
from megasparse.ops.normalize import Norm
from megasparse.ops.random import RngContext
from megasparse.tasks.batches import EncodedExample, Movable
from megasparse.tasks.body import Backbone, attention_settings
from megasparse.tasks.form import DEVIATION, Form, draw_normal
from megasparse.tasks.task import Example


@dataclass(frozen=True)
class Windows(Movable):
    """A micro-batch of scaled windows, fp32."""

    values: Tensor  # rows read, (B, L, C)
    marks: Tensor  # time features of the rows read and the rows to predict, (B, L + H, F)
    labels: Tensor | None  # rows to predict, (B, H, T)

    def numel(self) -> int:
        """Return the number of rows read."""
        return self.values.shape[0] * self.values.shape[1]


class VectorEmbedding(nn.Module):
    """Embedding of rows: a linear map of row t and its time features, plus position t. width: C + F."""

    def __init__(self, config: ModelConfig, width: int, shared: nn.Linear | None = None):
        super().__init__()
        self.linear = projection(width, config.d_model, biased=False) if shared is None else shared
        self.positions = Positions(config)

    def initialise(self, seed: int, name: str) -> None:
        """Draw from a normal distribution with deviation 1/√(C + F), at most the scale of positions."""
        weight = self.linear.weight
        draw_normal(weight, weight.shape[1] ** -0.5, seed, "initial weights", f"{name}.linear.weight")

    def forward(self, rows: Tensor, first: int) -> Tensor:
        """Embed rows (B, n, C + F) at positions from `first` on. Returns (B, n, E) fp32."""
        x = self.linear(rows.to(self.linear.weight.dtype)).float()
        positions = self.positions(first, x.shape[1], x.device)
        return x if positions is None else x + positions.to(x.device, torch.float32)


class VectorStacks(Stack):
    """A decoder, and the encoder that it attends to."""

    embedding_once = True

    def __init__(self, config: ModelConfig, width: int):
        embedding = VectorEmbedding(config, width)
        super().__init__(config, embedding)
        assert config.source is not None
        source, shared = encoder_part(config), embedding.linear if config.source.shared_embedding else None
        self.encoder = SourceEncoder(source, VectorEmbedding(source, width, shared))
        self.norm = Norm(config.norm, config.d_model, config.norm_eps)


class ForecastBody(Backbone):
    """Body that reads windows. The decoder reads the last O rows, then H rows of zeros with known time features."""

    causal, vocabulary = True, 1

    def __init__(self, config: ModelConfig, width: int, overlap: int):
        super().__init__()
        assert config.source is not None
        self.stack, self.overlap = VectorStacks(config, width), overlap
        self.width, self.longest = config.d_model, config.source.length
        mechanisms = [*self.stack.mechanisms(), *self.stack.encoder.mechanisms()]
        self.task_weight = min(mechanism.task_weight for _, mechanism in mechanisms)
        self.pooled_sketch = any(predicts(side, "pooled") for side in (config, encoder_part(config)))

    def forward(self, read: Any, rng: RngContext, classes: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the normalised mean of the decoder's streams at the rows to predict, (B, H, E) fp32, and the sum of
        auxiliary losses. read: Windows.
        """
        length = read.values.shape[1]
        first, horizon = max(0, length - self.overlap), read.marks.shape[1] - length
        encoder_rows = torch.cat([read.values, read.marks[:, :length]], dim=-1)
        rows = F.pad(read.values[:, first:], (0, 0, 0, horizon))
        decoder_rows = torch.cat([rows, read.marks[:, first:]], dim=-1)
        targets = Targets(classes, None) if classes is not None and self.pooled_sketch else None
        memory, of_encoder, _ = self.stack.encoder(encoder_rows, rng, None, targets)
        source = EncoderOutput(memory, None)
        streams, of_decoder, _ = self.stack.streams(decoder_rows, rng, Padding(), targets, source=source)
        return self.stack.norm(mean_stream(streams))[:, -horizon:], of_encoder + of_decoder

    def attention(self) -> dict[str, Any]:
        config = self.stack.config
        return {"encoder": attention_settings(encoder_part(config)), "decoder": attention_settings(config)}


class Forecaster(nn.Module):
    """Model that predicts the targets of every row of the forecast by a linear layer; with `anchors`, the column of
    each target, as x̂ = level + f(x − level), with the last row read as the level (Zeng et al. 2023).
    """

    varying_token_counts = False

    def __init__(self, body: Backbone, targets: int, seed: int, anchors: list[int] | None = None):
        super().__init__()
        self.anchors = anchors
        self.body, self.output = body, projection(body.width, targets, biased=True)
        draw_normal(self.output.weight, DEVIATION, seed, "initial head", "output")

    def forward(self, windows: Windows, rng: RngContext) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the objective, mean squared error per predicted number plus auxiliary losses, and the statistics of
        `Form.model`, with weight H·T per example. `predicted` is (B, H, T) fp32. Without labels the loss is 0.

        Smart Bird's sketches learn whether an example's targets are above their training mean.
        """
        labels, read, level = windows.labels, windows, windows.values[:, -1:]
        classes = (labels.mean((1, 2)) > 0).long() if labels is not None and rng.training else None
        if self.anchors is not None:
            read = replace(windows, values=windows.values - level)
        states, auxiliary = self.body(read, rng, classes)
        predicted = self.output(states.to(self.output.weight.dtype)).float()
        if self.anchors is not None:
            predicted = predicted + level[..., self.anchors]
        weights = torch.full((len(predicted),), float(predicted[0].numel()), device=predicted.device)
        costs = torch.zeros_like(weights) if labels is None else (predicted - labels).square().sum((1, 2))
        statistics = {"nats": costs.detach().sum(), "tokens": weights.sum()}
        if not rng.training:
            statistics |= {"predicted": predicted} | ({} if labels is None else {"costs": costs, "weights": weights})
        return self.body.task_weight * costs.sum() / weights.sum() + auxiliary, statistics


@dataclass(frozen=True)
class ForecastWindow(EncodedExample):
    values: np.ndarray  # scaled rows read, float64 (L, C), of the task's columns, the model's inputs first
    features: np.ndarray  # time features, float64 (L + H, F)

    @property
    def length(self) -> int:
        return len(self.values)

    def content(self) -> Iterator[bytes]:
        for part in (self.values, self.features, self.label):
            yield f"{part.shape}\n".encode() + part.tobytes()


class ForecastForm(Form):
    """Mean squared error; answers and labels are scaled, float64 (H, T). Predictions are in the file's units."""

    two_sided = True

    def __init__(self, task: Any, config: FinetuneConfig):
        super().__init__(task, config)
        self.series, settings = task, config.task.forecast
        if config.model is None:
            raise ConfigError("start", "pretrained models do not read rows of numbers", "Use a `model` instead")
        if settings.overlap > config.task.max_length:
            raise ConfigError("task.forecast.overlap", f"{settings.overlap} is above task.max_length", "Lower it")
        if settings.relative and (unread := [column for column in task.targets if column not in task.inputs]):
            raise ConfigError("task.forecast.relative", f'true, but "{unread[0]}" is not read', "Add it to inputs")

    def body(self, model: ModelConfig) -> Backbone:
        settings = self.config.task.forecast
        rows = settings.overlap + settings.horizon
        if model.ngrams is not None:
            raise ConfigError("model.ngrams", "given, but a forecast reads numbers, not tokens", "Set it to null")
        if rows > model.max_length:
            raise ConfigError("model.max_length", f"{model.max_length} is below overlap + horizon = {rows}", "Raise it")
        return ForecastBody(model, len(self.series.inputs) + self.series.time_features, settings.overlap)

    def prepare(self, body: Backbone, tokenizer: Tokenizer) -> None:
        """Do nothing: the task has scaled the windows, which have equal lengths."""

    def encoded(self, example: Example) -> ForecastWindow:
        return ForecastWindow((), example.label, example.location, example.name, *example.inputs)

    def lines(self, split: str) -> list[str]:
        return [f"{split}: {self.counts.examples:,} windows of {self.task.config.max_length:,} rows"]

    def model(self, body: Backbone) -> nn.Module:
        relative, targets = self.config.task.forecast.relative, self.series.targets
        anchors = [self.series.inputs.index(column) for column in targets] if relative else None
        return Forecaster(body, len(targets), self.config.run.seed, anchors)

    def collate(self, examples: Sequence[Any]) -> Windows:
        def stacked(parts: list[Any]) -> Any:
            return torch.from_numpy(np.stack(parts).astype(np.float32)) if parts[0] is not None else None

        values = [example.values[:, : len(self.series.inputs)] for example in examples]
        marks, labels = [example.features for example in examples], [example.label for example in examples]
        return Windows(stacked(values), stacked(marks), stacked(labels))

    def answer(self, example: EncodedExample, predicted: np.ndarray) -> np.ndarray:
        return predicted.reshape(-1, len(self.series.targets))

    def row(self, example: EncodedExample, predicted: np.ndarray) -> dict[str, Any]:
        """Return `label` and `predicted` by column, in the file's units; `name` is the date of the first row."""
        series, rows = self.series, (example.label, self.answer(example, predicted))
        scale, mean = (values[series.target_places] for values in (series.scale, series.mean))
        values = [None if scaled is None else (scaled * scale + mean).T.tolist() for scaled in rows]
        tables = [None if columns is None else dict(zip(series.targets, columns, strict=True)) for columns in values]
        return dict(zip(("label", "predicted"), tables, strict=True))
