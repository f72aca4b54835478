"""The evaluation inside training, every so many steps: held-out loss, a sample, quality of the attention."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megasparse.config.schema import Config
from megasparse.data.index import Index
from megasparse.data.reader import EvaluationStream
from megasparse.data.tokenizers import build_tokenizer
from megasparse.evaluation.attention.quality import attention_quality
from megasparse.evaluation.bits_per_dim import of_engine, score
from megasparse.evaluation.generate import generate
from megasparse.evaluation.pictures import image_shape, picture_of
from megasparse.model.padding import cut
from megasparse.training.engine import Engine
from megasparse.training.stopping.hooks import RunHooks, check_stop

Found = dict[str, float | str | Tensor]
"""Scalars, texts and pictures by their names."""

PAUSE = 64
"""Tokens of a sample between two looks at whether the run should stop."""


def held_out(
    engine: Engine,
    index: Index,
    config: Config,
    hooks: RunHooks = RunHooks(),  # noqa: B008  (frozen)
) -> Callable[[int], Found] | None:
    """What the training loop calls on every rank with the step; None where neither `evaluation.every` nor
    `logging.attention_quality_every` asks for it.

    It returns what is due at the step: all that `attention_quality` finds; of the evaluation "evaluation/loss" (nats a
    token; an encoder's of a masked token, an encoder–decoder's of a token of the target) and "evaluation/accuracy", of
    a decoder also "evaluation/bits_per_dim", whose dim is a token, and, where asked for, "evaluation/sample", a text
    or, of a model of pixels, an image (s, s, 3) uint8, told from nothing.
    Between its windows, and while it makes a sample, it heeds `watch`: then what is called raises StopWanted, on all
    ranks.
    Raises DataError where the data has no split `evaluation.split`, ConfigError where a sample is asked for of
    sequences of pixels that are no images.
    """
    every = {"evaluation": config.evaluation.every, "quality": config.logging.attention_quality_every}
    if not any(every.values()):
        return None
    settings, device = config.evaluation, engine.ranks.device
    model: Any = engine.module
    stream = EvaluationStream(index, settings.split, hooks.alive)
    quality = attention_quality(engine, index, config) if every["quality"] else None
    draw = None
    if every["evaluation"] and settings.sample_tokens:
        draw = sampler(model, config, device, lambda: check_stop(hooks, engine.ranks, "making a sample"))

    def evaluate(step: int) -> Found:
        due = {name for name, steps in every.items() if steps and step % steps == 0}
        if not due:
            return {}
        model.eval()
        try:
            found = losses() if "evaluation" in due else {}
            if quality is not None and "quality" in due:
                check_stop(hooks, engine.ranks, "quality of attention")
                found |= quality()
        finally:
            model.train()
        return found

    def window(tokens: Tensor, rng: Any) -> tuple[Tensor, dict[str, Tensor]]:
        check_stop(hooks, engine.ranks, "evaluation")
        own, padding = cut(tokens, model.config, engine.ranks.sequence)
        return engine.evaluate(own, rng, padding)

    def losses() -> Found:
        result = score(
            of_engine(window),
            stream,
            config.data.sequence_length,
            config.run.seed,
            score_from=config.model.score_from,
            limit=settings.sequences,
            device=device,
            ranks_a_window=engine.ranks.sequence_size,
        )
        found: Found = {
            "evaluation/loss": result.nats / result.dims,
            "evaluation/accuracy": result.accuracy,
        }
        if config.model.kind == "decoder":
            found["evaluation/bits_per_dim"] = result.bits_per_dim
        if draw is not None and not model.leaks:
            found["evaluation/sample"] = draw()
        return found

    return evaluate


def sampler(
    decoder: Any, config: Config, device: torch.device, pause: Callable[[], None]
) -> Callable[[], str | Tensor]:
    """What tells a text or draws an image, with a `pause` now and then. Every rank gets the same: under ZeRO-3 each
    step of it gathers the weights from all of them.
    """
    tokenizer, tokens = build_tokenizer(config.data.tokenizer), config.evaluation.sample_tokens
    shape = image_shape(config.data.sequence_length) if tokenizer.name == "pixels" else None

    def predicted(count: int) -> Iterator[int]:
        found = generate(
            decoder,
            torch.empty(0, dtype=torch.long, device=device),
            count,
            hash_seed=config.run.seed,
            vocabulary=tokenizer.vocabulary,
            end=config.model.document_separator,
        )
        for number, token in enumerate(found):
            if number % PAUSE == 0:
                pause()
            yield token

    def sample() -> str | Tensor:
        if shape is None:
            return "".join(tokenizer.text(predicted(tokens)))
        picture = picture_of(list(predicted(min(tokens, shape.tokens))), shape)
        return torch.from_numpy(np.array(picture))

    return sample
