"""Tasks whose answers are texts: translation, summaries, headlines. B batch, S source length, E width, N examples.

A source is its tokens and an end; so is its target, which the decoder predicts from a learned start vector on.
Micro-batches have about equally many tokens, of like length (Vaswani et al. 2017, section 5.1).
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, count, islice
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from megasparse.attention.contract import Targets
from megasparse.attention.cross import EncoderOutput
from megasparse.config.finetuning import FinetuneConfig
from megasparse.config.schema import ModelConfig, encoder_part
from megasparse.data.order import permutation
from megasparse.data.tokenizers import Tokenizer
from megasparse.errors import ConfigError, DataError
from megasparse.evaluation.generate import BeamSettings, search_with
from megasparse.model.decoder import EncoderDecoder
from megasparse.model.stack import mean_cost
from megasparse.ops.random import RngContext
from megasparse.tasks.backbones import Backbone, attention_settings
from megasparse.tasks.batches import (
    EncodedExample,
    ExampleBatches,
    ExampleCounts,
    ExampleEncoder,
    Movable,
    Padded,
    require_vocabulary,
    side_by_side,
)
from megasparse.tasks.form import Form
from megasparse.tasks.task import Example, SourceLocation, Task


@dataclass(frozen=True)
class Texts(Movable):
    """A micro-batch of sources and targets."""

    source: Padded
    target: Padded | None
    """Targets; None where some example has none."""
    rule: BeamSettings
    """Settings of the search for answers."""

    def numel(self) -> int:
        """Number of tokens read and predicted, without padding."""
        target = 0 if self.target is None else int(self.target.lengths.sum())
        return int(self.source.lengths.sum()) + target


def padded(sequences: Sequence[np.ndarray]) -> Padded:
    """Return sequences of token ids, at least 1 each, padded to the longest."""
    tokens, lengths = side_by_side(sequences, max(map(len, sequences)))
    return Padded(tokens, torch.zeros_like(tokens), lengths)


class SequenceToSequenceBody(Backbone):
    """One of our encoder–decoders, whole: all weights of a checkpoint of its pretraining."""

    causal = False

    def __init__(self, config: ModelConfig):
        super().__init__()
        assert config.source is not None
        self.stack = EncoderDecoder(config)
        self.width, self.vocabulary, self.longest = config.d_model, config.vocabulary, config.source.length
        self.task_weight = self.stack.task_weight

    def forward(
        self, read: Padded, rng: RngContext, classes: Tensor | None, answer: Targets | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the encoder's states (B, S, E) fp32 of the sources, and the sum of its mechanisms' losses. answer: the
        targets' tokens, from which the encoder's sketch learns.
        """
        states, auxiliary, _ = self.stack.encoder(read.tokens, rng, read.mask, answer)
        return states, auxiliary

    def attention(self) -> dict[str, Any]:
        """Return the settings of both sides; the decoder's attention to the source is `source`'s `cross_attention`."""
        config = self.stack.config
        assert config.source is not None
        source = {**attention_settings(encoder_part(config)), "cross_attention": config.source.cross_attention}
        return {**attention_settings(config), "source": source}


class TextModel(nn.Module):
    """−ln p(target | source), summed over the target's tokens, its end among them (Vaswani et al. 2017)."""

    varying_token_counts = True

    def __init__(self, body: SequenceToSequenceBody):
        super().__init__()
        self.body = body

    def count_scored(self, batch: Texts) -> Tensor:
        """Number of tokens of the targets."""
        assert batch.target is not None
        return batch.target.lengths.sum()

    def forward(self, batch: Texts, rng: RngContext, divisor: float | None = None) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the objective, mean nats of a target token (in training with label smoothing) plus auxiliary losses;
        and the statistics of tasks/form.py, each token with weight 1, and `accuracy`. Without targets the loss is 0.

        Out of training `predicted` has the token ids (n,) of each example's best hypothesis, without its end; a single
        NaN where the model's probabilities are not finite.
        """
        stack = self.body.stack
        answer = None if batch.target is None else Targets(batch.target.tokens, batch.target.mask, answer=True)
        states, auxiliary = self.body(batch.source, rng, None, answer)
        memory = EncoderOutput(states, batch.source.mask)
        loss = torch.zeros((), device=states.device)
        sums: dict[str, Any] = {"nats": loss, "tokens": loss}
        if batch.target is not None:
            target = batch.target
            scores, cost, losses, statistics = stack.score_targets(target.tokens, rng, target.mask, memory)
            loss, predicted = mean_cost(scores, cost, divisor)
            auxiliary, sums = auxiliary + losses, statistics | predicted
            if not rng.training:
                sums["costs"] = torch.where(scores.scored, scores.nats, 0.0).sum(1)
                sums["weights"] = target.lengths.float()
        if not rng.training:
            prompt = torch.zeros(len(memory.states), 0, dtype=torch.int64, device=memory.states.device)
            best = search_with(stack, prompt, stack.cache_beside(memory, rng), batch.rule)
            sums["predicted"] = [
                torch.tensor(beams[0].tokens if beams else [math.nan], dtype=torch.float64) for beams in best
            ]
        return self.body.task_weight * loss + auxiliary, sums


LENGTH_PENALTY = 0.6
"""Exponent of ((5 + length)/6), by which a hypothesis' log-probability is divided (Wu et al. 2016)."""


@dataclass(frozen=True)
class EncodedText(EncodedExample):
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


class SourceTargetEncoder(ExampleEncoder):
    """Sources are cut, refused and counted as other inputs are, but keep their end. A target that is cut has no end:
    it would teach to end too early.
    """

    def __init__(self, task: Task, tokenizer: Tokenizer, vocabulary: int, end: int):
        super().__init__(task, tokenizer, vocabulary)
        self.end = np.array([end], dtype=np.int64)

    def reset(self) -> None:
        super().reset()
        self.answers = ExampleCounts()

    def encoded(self, example: Example) -> EncodedText:
        """Encode source and answer. Raises DataError also for an answer that is empty or longer than
        task.generation.target_length, if the configuration refuses these.
        """
        sequences, label, location = super().encoded(example).sequences, example.label, example.location
        target = None if label is None else self._target(label, location)
        return EncodedText(sequences, label, location, example.name, target)

    def lines(self, split: str) -> list[str]:
        lines, answers = super().lines(split), self.answers
        if answers.examples:
            lines[0] += f"; {answers.examples:,} answers, the longest of {answers.longest:,} tokens"
        limit, hint = self.config.generation.target_length, "task.generation.target_length to learn"
        return lines + answers.notes(split, "answers", limit, hint)

    def _frame(self, segments: int) -> list[np.ndarray]:
        return [self.end[:0], self.end]

    def _target(self, answer: str, location: SourceLocation) -> np.ndarray:
        assert self.tokenizer is not None
        tokens, limit = self.tokenizer.encode(answer).numpy(), self.config.generation.target_length
        self.answers.examples += 1
        if not len(tokens):
            self.count_empty(self.answers, "its answer is empty: the model has nothing to predict", location)
        self.is_cut(len(tokens) + 1, location, self.answers)
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

    def encoder(self, start: Any) -> ExampleEncoder:
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
            generation.beams, generation.target_length, {end}, LENGTH_PENALTY, tokenizer.vocabulary
        )
        return SourceTargetEncoder(self.task, tokenizer, body.vocabulary, end)

    def model(self, body: Backbone) -> TextModel:
        assert isinstance(body, SequenceToSequenceBody)
        return TextModel(body)

    def collate(self, examples: Sequence[Any]) -> Texts:
        targets = [example.target for example in examples]
        target = None if any(target is None for target in targets) else padded(targets)
        return Texts(padded([example.source for example in examples]), target, self.rule)

    def answer(self, example: EncodedExample, predicted: np.ndarray) -> str:
        """Return the text of the tokens, stripped of white space; empty if the probabilities were not finite."""
        return "".join(self.tokenizer.text(int(token) for token in predicted if np.isfinite(token))).strip()


POOL = 8192
"""Number of examples that are sorted by length together."""
PACKS = 1
"""Key of the permutation of an epoch's packs, beside that of its examples."""


def sizes_of(examples: Sequence[EncodedText], most: int) -> np.ndarray:
    """Return tokens of each source and target (N, 2). Raises DataError for an example that fits no pack of `most`."""
    sizes = np.array([(x.length, 0 if x.target is None else len(x.target)) for x in examples], dtype=np.int64)
    if (too_long := np.flatnonzero(sizes.sum(1) > most)).size:
        example, tokens = examples[too_long[0]], sizes[too_long[0]].sum()
        problem = f"{tokens:,} tokens with its answer's are more than training.micro_batch = {most:,}"
        hint = f"Raise it to {sizes.sum(1).max()} or more, or lower task.max_length"
        raise DataError(str(example.location), problem, hint)
    return sizes


def packed(sizes: np.ndarray, most: int, seed: int, epoch: int) -> list[np.ndarray]:
    """Return the numbers of the examples of each pack of an epoch, every example once: a function of the arguments.

    Examples in random order are sorted in pools, by their source's length, of equal ones by their target's; a pack
    takes the next ones as long as its padded sources and targets together are at most `most` tokens. Packs are then put
    in random order.
    """
    order = permutation(len(sizes), seed, epoch)
    packs: list[np.ndarray] = []
    for first in range(0, len(order), POOL):
        pool = order[first : first + POOL]
        pool = pool[np.lexsort((sizes[pool, 1], sizes[pool, 0]))]
        begin = longest_source = longest_target = 0
        for index, (source, target) in enumerate(sizes[pool].tolist()):
            longest_source, longest_target = max(longest_source, source), max(longest_target, target)
            if (index + 1 - begin) * (longest_source + longest_target) > most:
                packs.append(pool[begin:index])
                begin, longest_source, longest_target = index, source, target
        packs.append(pool[begin:])
    return [packs[i] for i in permutation(len(packs), seed, epoch, PACKS)]


class TokenBatches(ExampleBatches):
    """Endless iterator of `Step`s over examples in memory: the packs of one epoch follow those of another.

    A step takes the next global_batch/micro_batch packs whatever the number of ranks, of which rank r has every
    world_size-th from the r-th on. Its position counts examples, and each keeps the global sample number that its draws
    depend on.
    """

    def __init__(self, examples: Sequence[EncodedText], **settings: Any):
        """Prepare the batches of a run. settings: those of ExampleBatches, with batches in tokens.

        Raises DataError as `sizes_of` does, and ConfigError where other packs led to the position to begin at.
        """
        super().__init__(examples, **settings)
        self.sizes = sizes_of(examples, self.micro_batch)
        epoch, passed = divmod(self.position, len(examples))
        epochs = (packed(self.sizes, self.micro_batch, self.seed, number) for number in count(epoch))
        self._packs = chain.from_iterable(epochs)
        while passed > 0:
            passed -= len(next(self._packs))
        if passed:
            problem = f"{self.micro_batch}, and the checkpoint's position ({self.position}) is the end of no batch of"
            hint = "Put back the one that the run began with"
            raise ConfigError("training.micro_batch", f"{problem} such a size", hint)

    def _deal(self) -> list[list[tuple[EncodedExample, int]]]:
        micro_batches = []
        for pack in islice(self._packs, self.global_batch // self.micro_batch):
            micro_batches.append([(self.examples[i], self.position + offset) for offset, i in enumerate(pack)])
            self.position += len(pack)
        return micro_batches
