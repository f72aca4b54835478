"""Small encoder–decoders of texts, and parallel files to fine-tune them on."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megasparse.attention.cross import EncoderOutput
from megasparse.attention.heads import Padding
from megasparse.config.schema import ModelConfig
from megasparse.ops.random import RngContext
from megasparse.tasks.batches import Segments
from megasparse.tasks.forms.texts import EncodedText, SequenceToSequenceBody, TextModel
from megasparse.tasks.task import SourceLocation
from tests.helpers.hub import made

FULL: dict[str, Any] = {"pattern": ["full"]}
PAIR: dict[str, Any] = {
    "kind": "encoder_decoder", "vocabulary": 260, "max_length": 32, "layers": 1, "d_model": 16, "d_ff": 24, "heads": 2,
    "blocks": "ordinary", "activations": "stored", "dropout": 0.1, "label_smoothing": 0.1, "attention": FULL,
    "source": {"length": 40, "attention": FULL},
}  # fmt: skip
"""A megasparse model for `model` of a fine-tuning configuration."""
WORDS = ["ab", "cde", "fg", "h", "ijkl"]


def parallel(folder: Path, number: int = 40, validation: int = 8, seed: int = 0) -> Path:
    """A folder of train.en and val.en, and of their sentences' words in capitals, last to first."""
    drawn = random.Random(seed)
    folder.mkdir(parents=True)
    for name, count in (("train", number), ("val", validation)):
        lines = [drawn.choices(WORDS, k=drawn.randint(1, 5)) for _ in range(count)]
        (folder / f"{name}.en").write_text("".join(" ".join(words) + "\n" for words in lines))
        (folder / f"{name}.de").write_text("".join(" ".join(reversed(words)).upper() + "\n" for words in lines))
    return folder


def sections(**changes: Any) -> dict[str, Any]:
    task = {
        "name": "parallel_text", "max_length": 40, "text": ["en"], "label": "de",
        "generation": {"target_length": 24, "beams": 2},
    }  # fmt: skip
    return {**changes, "model": {**PAIR, **changes.get("model", {})}, "task": {**task, **changes.get("task", {})}}


def text_model(config: ModelConfig) -> TextModel:
    body = SequenceToSequenceBody(config)
    body.stack.load_state_dict(made(config).state_dict())
    return TextModel(body).eval()


def example(source: list[int], target: list[int] | None, number: int = 0) -> EncodedText:
    """Encoded example of one text or two. target: None of an example without an answer."""
    tokens = np.array(source, dtype=np.int64)
    answer = None if target is None else np.array(target, dtype=np.int64)
    place = SourceLocation(Path("made.en"), number + 1)
    label = None if target is None else str(target)
    return EncodedText((Segments(tokens, np.zeros_like(tokens)),), label, place, str(number), answer)


def logits(model: TextModel, source: list[int], reported: list[int], rng: RngContext) -> Tensor:
    """(n + 1, V): logits of each of n tokens and of the next one, from both whole sequences in a batch of one."""
    stack = model.body.stack
    states = stack.encoder(torch.tensor([source]), rng, None)[0]
    read = torch.tensor([reported], dtype=torch.int64)
    streams = stack.streams(read, rng, Padding(), source=EncoderOutput(states, None))[0]
    return stack.logits(streams)[0]
