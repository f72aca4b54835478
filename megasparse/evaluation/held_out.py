"""The evaluation inside training, every so many steps: held-out loss, a sample, quality of the attention."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megasparse.config.schema import Config
from megasparse.data.index import Index
from megasparse.data.reader import EvaluationStream
from megasparse.data.tokenizers import build_tokenizer
from megasparse.evaluation.attention_quality import attention_quality
from megasparse.evaluation.bits_per_dim import Score, Scorer, of_engine, score
from megasparse.evaluation.generate import SharedDecoder, end_tokens, generate
from megasparse.evaluation.images import image_shape, picture_of
from megasparse.evaluation.results import order_sums
from megasparse.model.stack import cut
from megasparse.training.engines.contract import Engine
from megasparse.training.ranks import Ranks, RunHooks, check_stop

Found = dict[str, float | str | Tensor]
"""Scalars, texts and pictures by their names."""

PAUSE = 64
"""Tokens of a sample between two checks of whether the run should stop."""


@dataclass(frozen=True)
class HeldOut:
    """The evaluation that the training loop calls on every rank with the step; see `held_out`."""

    engine: Engine
    config: Config
    hooks: RunHooks
    stream: EvaluationStream
    quality: Callable[[], Found] | None
    draw: Callable[[], str | Tensor] | None

    def __call__(self, step: int) -> Found:
        evaluated = _is_due(step, self.config.evaluation.every)
        measured = self.quality is not None and _is_due(step, self.config.logging.attention_quality_every)
        if not evaluated and not measured:
            return {}
        model: Any = self.engine.module
        model.eval()
        try:
            results = self._losses() if evaluated else {}
            if self.quality is not None and measured:
                check_stop(self.hooks, self.engine.ranks, "quality of attention")
                results |= self.quality()
        finally:
            model.train()
        return results

    def _losses(self) -> Found:
        config, model = self.config, self.engine.module
        result = self._score(of_engine(self._window))
        results: Found = {"evaluation/loss": result.nats / result.dims, "evaluation/accuracy": result.accuracy}
        if config.model.kind == "decoder":
            results["evaluation/bits_per_dim"] = result.bits_per_dim
        if config.model.sentence_order is not None:
            order = self._score(self._order)
            results |= {
                "evaluation/sentence_order_nats": order.nats / max(1, order.dims),
                "evaluation/sentence_order_accuracy": order.correct / max(1, order.dims),
            }
        if self.draw is not None and not model.leaks:
            results["evaluation/sample"] = self.draw()
        return results

    def _score(self, scorer: Scorer) -> Score:
        config = self.config
        return score(
            scorer,
            self.stream,
            config.data.sequence_length,
            config.run.seed,
            score_from=config.model.score_from,
            limit=config.evaluation.sequences,
            ranks=self.engine.ranks,
        )

    def _order(self, tokens: Tensor, rng: Any, skip: int) -> tuple[Tensor, Tensor, Tensor]:
        check_stop(self.hooks, self.engine.ranks, "evaluation of sentence order")
        return order_sums(self.engine.module, tokens, rng)

    def _window(self, tokens: Tensor, rng: Any) -> tuple[Tensor, dict[str, Tensor]]:
        check_stop(self.hooks, self.engine.ranks, "evaluation")
        module: Any = self.engine.module
        local_tokens, padding = cut(tokens, module.config, self.engine.ranks.sequence)
        return self.engine.evaluate(local_tokens, rng, padding)


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def held_out(
    engine: Engine,
    index: Index,
    config: Config,
    hooks: RunHooks = RunHooks(),  # noqa: B008  (frozen)
) -> HeldOut | None:
    """Build the evaluation inside training; None where neither `evaluation.every` nor
    `logging.attention_quality_every` asks for it.

    It returns what is due at the step: all that `attention_quality` finds; of the evaluation "evaluation/loss" (nats a
    token; an encoder's of a masked token, an encoder–decoder's of a token of the target) and "evaluation/accuracy", of
    a decoder also "evaluation/bits_per_dim", whose dim is a token, and, where asked for, "evaluation/sample", a text
    or, of a model of pixels, an image (s, s, 3) uint8, drawn without a prompt.
    Between windows, and while a sample is drawn, it asks `hooks` whether to stop, and then raises StopWanted on all
    ranks. Raises DataError where the data has no validation split, ConfigError where a sample is asked for of
    sequences of pixels that are no images.
    """
    wants_quality = config.logging.attention_quality_every > 0
    if not config.evaluation.every and not wants_quality:
        return None
    stream = EvaluationStream(index, "validation", hooks.alive)
    quality = attention_quality(engine, index, config) if wants_quality else None
    draw = None
    if config.evaluation.every and config.evaluation.sample_tokens:
        pause = partial(check_stop, hooks, engine.ranks, "making a sample")
        draw = sampler(engine.module, config, engine.ranks, pause)
    return HeldOut(engine, config, hooks, stream, quality, draw)


def sampler(decoder: Any, config: Config, ranks: Ranks, pause: Callable[[], None]) -> Callable[[], str | Tensor]:
    """Build a function that samples a text or an image, and calls `pause` now and then. Every rank gets the same: under
    ZeRO-3 each step gathers the weights from all of them. Ranks that share sequences share out the heads.
    """
    tokenizer, tokens = build_tokenizer(config.data.tokenizer), config.evaluation.sample_tokens
    ends = end_tokens(config, tokenizer)
    shape = image_shape(config.data.sequence_length) if tokenizer.name == "pixels" else None

    model = decoder if ranks.sequence is None else SharedDecoder(decoder, ranks.sequence)

    def draw(count: int) -> Iterator[int]:
        stream = generate(
            model,
            torch.empty(0, dtype=torch.long, device=ranks.device),
            count,
            hash_seed=config.run.seed,
            vocabulary=tokenizer.vocabulary,
            ends=ends,
        )
        for number, token in enumerate(stream):
            if number % PAUSE == 0:
                pause()
            yield token

    def sample() -> str | Tensor:
        if shape is None:
            return "".join(tokenizer.text(draw(tokens)))
        picture = picture_of(list(draw(min(tokens, shape.tokens))), shape)
        return torch.from_numpy(np.array(picture))

    return sample
