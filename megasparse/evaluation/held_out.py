"""Periodic evaluation during training: held-out loss, a sample, and attention quality."""

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
from megasparse.evaluation.bits_per_dim import Score, Scorer, Windows, of_engine, score
from megasparse.evaluation.generate import SharedDecoder, end_tokens, generate
from megasparse.evaluation.images import image_shape, picture_of
from megasparse.evaluation.results import order_sums
from megasparse.model.stack import cut
from megasparse.training.engines.contract import Engine
from megasparse.training.ranks import Ranks, RunHooks, check_stop

Results = dict[str, float | str | Tensor]

PAUSE = 64
"""Tokens of a sample between checks for a stop signal."""


@dataclass(frozen=True)
class HeldOut:
    """Evaluation that the training loop calls with the step on every rank; see `held_out`."""

    engine: Engine
    config: Config
    hooks: RunHooks
    stream: EvaluationStream
    quality: Callable[[], Results] | None
    draw: Callable[[], str | Tensor] | None

    def __call__(self, step: int) -> Results:
        every = self.config.evaluation.every, self.config.logging.attention_quality_every
        evaluated, quality_due = (period > 0 and step % period == 0 for period in every)
        if not evaluated and not quality_due:
            return {}
        model: Any = self.engine.module
        model.eval()
        try:
            results = self._losses() if evaluated else {}
            if self.quality is not None and quality_due:
                check_stop(self.hooks, self.engine.ranks, "quality of attention")
                results |= self.quality()
        finally:
            model.train()
        return results

    def _losses(self) -> Results:
        config, model = self.config, self.engine.module
        result = self._score(of_engine(self._window))
        results: Results = {"evaluation/loss": result.nats / result.dims, "evaluation/accuracy": result.accuracy}
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
            Windows(config.evaluation_length, score_from=config.model.score_from, limit=config.evaluation.sequences),
            config.run.seed,
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


def held_out(
    engine: Engine,
    index: Index,
    config: Config,
    hooks: RunHooks = RunHooks(),  # noqa: B008  (frozen)
) -> HeldOut | None:
    """Build the evaluation during training; None if `evaluation.every` and `logging.attention_quality_every` are 0.

    It returns the results due at a step: `attention_quality`; "evaluation/loss" (nats per scored token) and
    "evaluation/accuracy"; for decoders "evaluation/bits_per_dim" and, if configured, "evaluation/sample", a text or for
    pixels an image (s, s, 3) uint8. It raises StopWanted on all ranks if `hooks` request a stop.
    """
    wants_quality = config.logging.attention_quality_every > 0
    if not config.evaluation.every and not wants_quality:
        return None
    stream = EvaluationStream(index, "validation", hooks.alive)
    quality = attention_quality(engine, index, config) if wants_quality else None
    draw = None
    if config.evaluation.every and config.evaluation.sample_tokens:
        draw = sampler(engine.module, config, engine.ranks, partial(check_stop, hooks, engine.ranks, "making a sample"))
    return HeldOut(engine, config, hooks, stream, quality, draw)


def sampler(decoder: Any, config: Config, ranks: Ranks, pause: Callable[[], None]) -> Callable[[], str | Tensor]:
    """Return a function that samples a text or an image and regularly calls `pause`. All ranks call it, since ZeRO-3
    gathers weights from all, and get the same sample.
    """
    tokenizer, tokens = build_tokenizer(config.data.tokenizer), config.evaluation.sample_tokens
    ends = end_tokens(config, tokenizer)
    shape = image_shape(config.data.sequence_length) if tokenizer.name == "pixels" else None

    model = decoder if ranks.sequence is None else SharedDecoder(decoder, ranks.sequence)

    def draw(count: int) -> Iterator[int]:
        empty = torch.empty(0, dtype=torch.long, device=ranks.device)
        options: dict[str, Any] = {"hash_seed": config.run.seed, "vocabulary": tokenizer.vocabulary, "ends": ends}
        for number, token in enumerate(generate(model, empty, count, **options)):
            if number % PAUSE == 0:
                pause()
            yield token

    def sample() -> str | Tensor:
        if shape is None:
            return "".join(tokenizer.text(draw(tokens)))
        return torch.from_numpy(np.array(picture_of(list(draw(min(tokens, shape.tokens))), shape)))

    return sample
