"""Tasks whose examples have a label: a class, or a number. B batch, C classes, or 1 where a number is predicted."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from megasparse.errors import ConfigError
from megasparse.tasks.backbones import Backbone
from megasparse.tasks.batches import Inputs, collate, dummy_tokens
from megasparse.tasks.encoding import Encoded, Encoder, require_vocabulary, separators_of
from megasparse.tasks.form import Form
from megasparse.tasks.forms.label_model import TaskModel
from megasparse.tasks.task import Example, SourceLocation


class LabelForm(Form):
    """Cross-entropy of the class, or squared error of the number; answers are class numbers, or numbers."""

    def check(self, body: Backbone) -> None:
        head, hint = self.config.head, 'Set it to "first" or "mean"'
        if head.pooling != "pooler":
            return
        if body.pooler is None:
            raise ConfigError("head.pooling", '"pooler", and the pretrained model has none', hint)
        if self.task.towers or head.hidden not in (0, body.width):
            raise ConfigError("head.pooling", '"pooler" is as wide as the model, and of one sequence', hint)

    @property
    def reads_pooler(self) -> bool:
        return self.config.head.pooling in (None, "pooler") and not self.task.towers and not self.config.head.hidden

    def sketch_labels(self, train: Iterable[Example]) -> int:
        if self.task.classes is not None:
            return len(self.task.classes)
        return max(2, round(max(example.label for example in train if example.label is not None)) + 1)

    def encoder(self, start: Any) -> Encoder:
        task, body = self.task, start.body
        tokenizer = None if task.vocabulary is not None else start.tokenizer
        require_vocabulary(body, task.vocabulary or start.tokenizer.vocabulary, task.name if task.vocabulary else None)
        return Encoder(task, tokenizer, body.vocabulary, separators=separators_of(body))

    def model(self, body: Backbone) -> nn.Module:
        outputs = 1 if self.task.classes is None else len(self.task.classes)
        return TaskModel(body, outputs, self.config.head, self.task.towers, self.config.run.seed)

    def collate(self, examples: Sequence[Encoded]) -> Inputs:
        return collate(examples, self.config.task.max_length)

    def dummy_batch(self, body: Backbone, batch: int, length: int) -> Inputs:
        """Random tokens, and labels of class 0."""
        read = dummy_tokens(body.vocabulary, batch, length)
        labels = torch.zeros(batch, dtype=torch.float32 if self.task.classes is None else torch.int64)
        return Inputs((read,) * (2 if self.task.towers else 1), labels)

    def answer(self, example: Encoded, predicted: np.ndarray) -> int | float:
        """The class of highest probability, or the number."""
        return float(predicted[0]) if self.task.classes is None else int(predicted.argmax())

    def row(self, example: Encoded, predicted: np.ndarray) -> dict[str, Any]:
        """`label` and `predicted` are names of classes, or numbers; `probabilities` by class, null for numbers."""
        label, own, classes = example.label, self.answer(example, predicted), self.task.classes
        if classes is None:
            return {"label": label, "predicted": own, "probabilities": None}
        values = torch.from_numpy(predicted).softmax(0).tolist()
        return {
            "label": None if label is None else classes[label],
            "predicted": classes[int(own)],
            "probabilities": dict(zip(classes, values, strict=True)),
        }

    def example(self, texts: Sequence[str]) -> Example:
        task, wanted = self.task, self.task.segments
        if task.vocabulary is not None:
            return super().example(texts)
        if len(texts) != wanted:
            problem = f'{len(texts)} given, and an example of "{task.name}" has {wanted}'
            raise ConfigError("--text", problem, f"Give it {'twice' if wanted == 2 else 'once'}")
        return Example(tuple(texts), None, SourceLocation(Path("--text")), "0")
