"""Tasks whose answers are texts: translation, summaries, headlines. B batch, S source length, E width, N examples.

Sources and targets end in a separator. The decoder predicts the target from a learned start vector. Micro-batches
contain about equally many tokens, of similar lengths (Vaswani et al. 2017, section 5.1).
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
from megasparse.tasks.batches import EncodedExample, ExampleBatches, ExampleCounts, Movable, Padded, side_by_side
from megasparse.tasks.body import Backbone, attention_settings
from megasparse.tasks.form import Form, require_vocabulary
from megasparse.tasks.task import Example, Task

LENGTH_PENALTY = 0.6  # exponent of ((5 + length)/6), the divisor of a hypothesis' log-probability (Wu et al. 2016)


@dataclass(frozen=True)
class Texts(Movable):
    """A micro-batch of sources and targets."""

    source: Padded
    target: Padded | None  # None if any example has none
    rule: BeamSettings  # settings of beam search

    def numel(self) -> int:
        """Return the number of tokens read and predicted, without padding."""
        return sum(int(side.lengths.sum()) for side in (self.source, self.target) if side is not None)


def padded(sequences: Sequence[np.ndarray]) -> Padded:
    """Pad sequences of token ids, of at least 1 each, to the longest."""
    tokens, lengths = side_by_side(sequences)
    return Padded(tokens, torch.zeros_like(tokens), lengths)


class SequenceToSequenceBody(Backbone):
    """A megasparse encoder–decoder with all weights of a pretraining checkpoint."""

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
        """Return the encoder's states (B, S, E) fp32, and its auxiliary losses. answer: targets for its sketch."""
        states, auxiliary, _ = self.stack.encoder(read.tokens, rng, read.mask, answer)
        return states, auxiliary

    def attention(self) -> dict[str, Any]:
        config = self.stack.config
        return {**attention_settings(config), "source": attention_settings(encoder_part(config))}


class TextModel(nn.Module):
    """−ln p(target | source), summed over the target's tokens with its end (Vaswani et al. 2017)."""

    varying_token_counts = True

    def __init__(self, body: SequenceToSequenceBody):
        super().__init__()
        self.body = body

    def count_scored(self, batch: Any) -> Tensor:
        """Return the number of target tokens."""
        return batch.target.lengths.sum()

    def forward(self, batch: Texts, rng: RngContext, divisor: float | None = None) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the objective, mean nats per target token (with label smoothing in training) plus auxiliary losses,
        and the statistics of `Form.model`, with weight 1 per token, and `accuracy`. Without targets the loss is 0.

        In evaluation `predicted` contains the token ids (n,) of each example's best hypothesis, without its end, or one
        NaN if the model's probabilities are not finite.
        """
        stack, target = self.body.stack, batch.target
        answer = None if target is None else Targets(target.tokens, target.mask, answer=True)
        states, auxiliary = self.body(batch.source, rng, None, answer)
        memory = EncoderOutput(states, batch.source.mask)
        loss = torch.zeros((), device=states.device)
        sums: dict[str, Any] = {"nats": loss, "tokens": loss}
        if target is not None:
            scores, cost, losses, statistics = stack.score_targets(target.tokens, rng, target.mask, memory)
            loss, predicted = mean_cost(scores, cost, divisor)
            auxiliary, sums = auxiliary + losses, statistics | predicted
            if not rng.training:
                sums["costs"] = torch.where(scores.scored, scores.nats, 0.0).sum(1)
                sums["weights"] = target.lengths.float()
        if not rng.training:
            prompt = torch.zeros(len(states), 0, dtype=torch.int64, device=states.device)
            best = search_with(stack, prompt, stack.cache_beside(memory, rng), batch.rule)
            ids = (beams[0].tokens if beams else [math.nan] for beams in best)
            sums["predicted"] = [torch.tensor(tokens, dtype=torch.float64) for tokens in ids]
        return self.body.task_weight * loss + auxiliary, sums


@dataclass(frozen=True)
class EncodedText(EncodedExample):
    """An encoded pair of texts; `length` is the source's."""

    target: np.ndarray | None
    """The answer and its end, int64 (T,); without the end if it was truncated. None without an answer."""

    @property
    def source(self) -> np.ndarray:
        """The source's tokens, int64 (S,)."""
        return self.sequences[0].tokens

    def content(self) -> Iterator[bytes]:
        yield from super().content()
        yield b"" if self.target is None else self.target.tobytes()


class TextForm(Form):
    """Cross-entropy of the target's tokens. Answers are the texts found by beam search.

    Truncated sources keep their end; truncated targets do not, because it would teach the model to end too early.
    """

    two_sided, pooled_sketch = True, False

    def __init__(self, task: Task, config: FinetuneConfig):
        super().__init__(task, config)
        zero = config.deepspeed.get("zero_optimization", {})
        if config.run.engine == "deepspeed" and int(zero.get("stage", 0)) == 3:
            raise ConfigError("deepspeed.zero_optimization.stage", "3 needs equal searches on all ranks", "Set it to 2")

    def body(self, model: ModelConfig) -> Backbone:
        return SequenceToSequenceBody(model)

    def prepare(self, body: Any, tokenizer: Tokenizer) -> None:
        generation = self.config.task.generation
        if tokenizer.special is None:
            raise ConfigError("task.tokenizer", f'"{tokenizer.name}" lacks special tokens', "Use another one")
        end, longest = tokenizer.special.separator, body.stack.config.max_length
        require_vocabulary(body, max(tokenizer.vocabulary, end + 1))
        if generation.target_length > longest:
            problem = f"{generation.target_length} tokens are more than the decoder's maximum of {longest}"
            raise ConfigError("task.generation.target_length", problem, f"Set it to {longest}")
        if leaks := body.stack.leaks:
            raise ConfigError("model.attention", f"not strictly causal ({', '.join(leaks)})", 'Use window = "band"')
        self.tokenizer, self.end = tokenizer, np.array([end], dtype=np.int64)
        length, beams = generation.target_length, generation.beams
        self.rule = BeamSettings(beams, length, {end}, LENGTH_PENALTY, tokenizer.vocabulary)

    def reset(self) -> None:
        super().reset()
        limit = self.task.config.generation.target_length
        self.answers = ExampleCounts(self.task.config, "answers", "task.generation.target_length", limit)

    def encoded(self, example: Example) -> EncodedText:
        sequences, label, location, target = super().encoded(example).sequences, example.label, example.location, None
        if label is not None:
            tokens, answers = self.tokenizer.encode(label).numpy(), self.answers
            answers.examples += 1
            if not len(tokens):
                answers.count_empty("its answer is empty: the model has nothing to predict", location)
            answers.is_cut(len(tokens) + 1, location)
            target = np.concatenate([tokens, self.end])[: answers.limit]
        return EncodedText(sequences, label, location, example.name, target)

    def lines(self, split: str) -> list[str]:
        lines, answers = super().lines(split), self.answers
        if answers.examples:
            lines[0] += f"; {answers.examples:,} answers, the longest of {answers.longest:,} tokens"
        return lines + answers.notes(split)

    def frame(self, segments: int) -> list[np.ndarray]:
        return [self.end[:0], self.end]

    def model(self, body: Any) -> TextModel:
        return TextModel(body)

    def collate(self, examples: Sequence[Any]) -> Texts:
        targets = [example.target for example in examples]
        target = None if any(target is None for target in targets) else padded(targets)
        return Texts(padded([example.source for example in examples]), target, self.rule)

    def answer(self, example: EncodedExample, predicted: np.ndarray) -> str:
        """Return the text of the tokens, stripped; "" if the probabilities were not finite."""
        return "".join(self.tokenizer.text(int(token) for token in predicted if np.isfinite(token))).strip()


POOL = 8192  # number of examples that are sorted by length together
PACKS = 1  # key of the permutation of an epoch's packs; the permutation of examples has none


def sizes_of(examples: Sequence[EncodedText], most: int) -> np.ndarray:
    """Return the tokens of each source and target (N, 2). Raises DataError for an example longer than `most` tokens."""
    sizes = np.array([(x.length, 0 if x.target is None else len(x.target)) for x in examples], dtype=np.int64)
    if (too_long := np.flatnonzero(sizes.sum(1) > most)).size:
        example, tokens = examples[too_long[0]], sizes[too_long[0]].sum()
        problem = f"{tokens:,} tokens with its answer are more than training.micro_batch = {most:,}"
        raise DataError(example.location, problem, f"Raise it to {sizes.sum(1).max()}, or lower task.max_length")
    return sizes


def packed(sizes: np.ndarray, most: int, seed: int, epoch: int) -> list[np.ndarray]:
    """Return the numbers of the examples in each pack of an epoch, every example once. A pure function.

    Examples in random order are sorted in pools by length. A pack takes the next examples as long as its padded sources
    and targets have at most `most` tokens in total. Packs are then put in random order.
    """
    order = permutation(len(sizes), seed, epoch)
    packs: list[np.ndarray] = []
    for first in range(0, len(order), POOL):
        pool = order[first : first + POOL]
        pool = pool[np.lexsort((sizes[pool, 1], sizes[pool, 0]))]
        begin, longest = 0, [0, 0]
        for index, size in enumerate(sizes[pool].tolist()):
            longest = [*map(max, longest, size)]
            if (index + 1 - begin) * sum(longest) > most:
                packs.append(pool[begin:index])
                begin, longest = index, size
        packs.append(pool[begin:])
    return [packs[i] for i in permutation(len(packs), seed, epoch, PACKS)]


class TokenBatches(ExampleBatches):
    """Endless iterator of `Step`s over examples in memory, one epoch of packs after another, with batches in tokens.

    A step takes the next global_batch/micro_batch packs, whatever the number of ranks. The position counts examples,
    and each keeps the global sample number for its random draws. Raises DataError as `sizes_of` does, and ConfigError
    if the start is not the end of a batch of these sizes.
    """

    def __init__(self, examples: Sequence[EncodedText], **settings: Any):
        super().__init__(examples, **settings)
        self.sizes = sizes_of(examples, self.micro_batch)
        epoch, passed = divmod(self.position, len(examples))
        epochs = (packed(self.sizes, self.micro_batch, self.seed, number) for number in count(epoch))
        self._packs = chain.from_iterable(epochs)
        while passed > 0:
            passed -= len(next(self._packs))
        if passed:
            problem = f"{self.micro_batch}, but the checkpoint's position {self.position} is inside a batch"
            raise ConfigError("training.micro_batch", problem, "Restore the value that the run started with")

    def _deal(self) -> list[list[tuple[Any, int]]]:
        micro_batches = []
        for pack in islice(self._packs, self.global_batch // self.micro_batch):
            micro_batches.append([(self.examples[i], self.position + offset) for offset, i in enumerate(pack)])
            self.position += len(pack)
        return micro_batches
