"""Tasks whose answers are texts: translation, summaries, headlines. A source is its tokens and an end; so is its
target, which the decoder predicts from a learned start vector on.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megasparse.config.finetuning import FinetuneConfig
from megasparse.config.schema import ModelConfig
from megasparse.data.tokenizers import Tokenizer
from megasparse.errors import ConfigError, DataError
from megasparse.evaluation.beam import BeamSettings
from megasparse.tasks.backbones import Backbone
from megasparse.tasks.batches import dummy_tokens
from megasparse.tasks.encoding import Counts, Encoded, Encoder, require_vocabulary
from megasparse.tasks.form import Form
from megasparse.tasks.forms.sequence_to_sequence import SequenceToSequenceBody, TextModel, Texts, side_by_side
from megasparse.tasks.task import Example, SourceLocation, Task

DUMMY_ANSWER = 4
"""Number of tokens of the answers that memory is measured with."""


@dataclass(frozen=True)
class EncodedText(Encoded):
    """An encoded pair of texts; `length` is the source's."""

    target: np.ndarray | None
    """The answer and its end, int64 (T,); only the beginning of an answer that was cut. None where there is none."""

    @property
    def source(self) -> np.ndarray:
        """The source's tokens, int64 (S,)."""
        return self.sequences[0].tokens

    def content(self) -> Iterator[bytes]:
        yield from super().content()
        if self.target is not None:
            yield self.target.tobytes()


@dataclass
class TextCounts(Counts):
    answers: Counts = field(default_factory=Counts)
    answer_limit: int = 0

    def lines(self, split: str, limit: int) -> list[str]:
        found, answers = super().lines(split, limit), self.answers
        if answers.examples:
            found[0] += f"; {answers.examples:,} answers, the longest of {answers.longest:,} tokens"
        hint = "task.generation.target_length to learn"
        return found + answers.notes(f"{split}: {{:,}} answers", self.answer_limit, hint)


class TextEncoder(Encoder):
    """Sources are cut, refused and counted as other inputs are, but keep their end. A target that is cut has no end:
    it would teach to end too early.
    """

    def __init__(self, task: Task, tokenizer: Tokenizer, vocabulary: int, end: int):
        super().__init__(task, tokenizer, vocabulary)
        self.end = np.array([end], dtype=np.int64)

    def encode(self, examples: Iterable[Example]) -> Iterator[Encoded]:
        """Encode sources and answers. Raises DataError as Encoder.encode does, and for an answer that is empty or
        longer than task.generation.target_length, where the configuration refuses these.
        """
        answers = Counts()
        for found in super().encode(examples):
            target = None if found.label is None else self._target(found.label, found.location, answers)
            yield EncodedText(found.sequences, found.label, found.location, found.name, target)
        self.counts = TextCounts(
            **vars(self.counts), answers=answers, answer_limit=self.config.generation.target_length
        )

    def _frame(self, segments: int) -> list[np.ndarray]:
        return [self.end[:0], self.end]

    def _target(self, answer: str, location: SourceLocation, counts: Counts) -> np.ndarray:
        assert self.tokenizer is not None
        tokens, limit = self.tokenizer.encode(answer).numpy(), self.config.generation.target_length
        whole = len(tokens) + 1
        counts.examples, counts.longest = counts.examples + 1, max(counts.longest, whole)
        if not len(tokens):
            if self.config.empty == "refuse":
                hint = 'Remove it, or keep such examples, which are counted: --set task.empty="keep"'
                raise DataError(str(location), "its answer is empty: the model has nothing to predict", hint)
            counts.empty, counts.first_empty = counts.empty + 1, counts.first_empty or location
        if whole > limit:
            if self.config.too_long == "refuse":
                problem = f"its answer's {whole:,} tokens are more than task.generation.target_length = {limit:,}"
                hint = 'Raise it, or keep the beginning of such answers: --set task.too_long="cut"'
                raise DataError(str(location), problem, hint)
            counts.cut, counts.first_cut = counts.cut + 1, counts.first_cut or location
        return np.concatenate([tokens, self.end])[:limit]


class TextForm(Form):
    """Cross-entropy of the target's tokens; answers are the texts that beam search finds."""

    two_sided, pooled_sketch = True, False
    tokenizer: Tokenizer
    rule: BeamSettings
    """Settings of the search; known, like the tokenizer, once there is an encoder."""

    def __init__(self, task: Task, config: FinetuneConfig):
        super().__init__(task, config)
        zero = config.deepspeed.get("zero_optimization", {})
        if config.run.engine == "deepspeed" and int(zero.get("stage", 0)) == 3:
            problem = "3 has the ranks gather each weight together, and their searches for answers differ in length"
            raise ConfigError("deepspeed.zero_optimization.stage", problem, "Set it to 2")

    def body(self, model: ModelConfig) -> Backbone:
        return SequenceToSequenceBody(model)

    def encoder(self, start: Any) -> Encoder:
        body, tokenizer, generation = start.body, start.tokenizer, self.config.task.generation
        if tokenizer.special is None:
            problem = f'"{tokenizer.name}" has no special tokens, of which one ends a text'
            raise ConfigError("task.tokenizer", problem, "Give a tokenizer that has them, or start from such a model")
        end, longest = tokenizer.special.separator, body.stack.config.max_length
        require_vocabulary(body, max(tokenizer.vocabulary, end + 1))
        if generation.target_length > longest:
            problem = f"{generation.target_length} tokens are more than the {longest} that the model predicts"
            raise ConfigError("task.generation.target_length", problem, f"Set it to {longest} or less")
        if leaks := body.stack.leaks:
            problem = f"not strictly causal ({', '.join(leaks)}), and answers are predicted token by token"
            raise ConfigError("model.attention", problem, 'Take the strictly causal setting, window = "band"')
        self.tokenizer = tokenizer
        self.rule = BeamSettings(
            generation.beams, generation.target_length, end, generation.length_penalty, tokenizer.vocabulary
        )
        return TextEncoder(self.task, tokenizer, body.vocabulary, end)

    def model(self, body: Backbone) -> TextModel:
        assert isinstance(body, SequenceToSequenceBody)
        return TextModel(body)

    def collate(self, examples: Sequence[Any]) -> Texts:
        targets = [example.target for example in examples]
        known = all(target is not None for target in targets)
        sources = side_by_side([example.source for example in examples])
        return Texts(sources, side_by_side(targets) if known else None, self.rule)

    def dummy_batch(self, body: Backbone, batch: int, length: int) -> Texts:
        """Random tokens; targets of the longest length. A search is short: its caches have room for the longest answer
        from the first token on.
        """
        generator = torch.Generator().manual_seed(0)
        widths = (length, self.config.task.generation.target_length)
        source, target = (dummy_tokens(body.vocabulary, batch, width, generator) for width in widths)
        return Texts(source, target, replace(self.rule, tokens=min(self.rule.tokens, DUMMY_ANSWER)))

    def answer(self, example: Encoded, predicted: np.ndarray) -> str:
        """The text of the tokens, stripped of white space; empty where the probabilities were not finite."""
        return "".join(self.tokenizer.text(int(token) for token in predicted if np.isfinite(token))).strip()

    def example(self, texts: Sequence[str]) -> Example:
        if len(texts) != 1:
            problem = f'{len(texts)} given, and an example of "{self.task.name}" has 1'
            raise ConfigError("--text", problem, "Give it once")
        return Example(tuple(texts), None, SourceLocation(Path("--text")), "0")
