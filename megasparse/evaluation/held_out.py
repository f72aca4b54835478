"""The evaluation inside training: held-out loss and a text sample, every so many steps."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megasparse.config.schema import Config
from megasparse.data.index import Index
from megasparse.data.reader import EvaluationStream
from megasparse.data.tokenizer import build_tokenizer
from megasparse.evaluation.bits_per_dim import of_engine, score
from megasparse.evaluation.generate import as_text, generate
from megasparse.training.engine import Engine


def held_out(engine: Engine, index: Index, config: Config) -> Callable[[int], dict[str, float | str]] | None:
    """What the training loop calls on every rank with the step; None where `evaluation.every` is 0.

    It returns "evaluation/loss" (nats a token), "evaluation/bits_per_dim", "evaluation/accuracy", and where asked for
    "evaluation/sample", a text written from nothing.
    Raises DataError where the data has no split `evaluation.split`.
    """
    if not config.evaluation.every:
        return None
    settings, device = config.evaluation, engine.ranks.device
    decoder: Any = engine.module
    stream = EvaluationStream(index, settings.split)

    def evaluate(step: int) -> dict[str, float | str]:
        decoder.eval()
        result = score(
            of_engine(engine.evaluate),
            stream,
            config.data.sequence_length,
            config.run.seed,
            score_from=config.model.score_from,
            limit=settings.sequences,
            device=device,
        )
        found: dict[str, float | str] = {
            "evaluation/loss": result.nats / result.dims,
            "evaluation/bits_per_dim": result.bits_per_dim,
            "evaluation/accuracy": result.accuracy,
        }
        if settings.sample_tokens and not decoder.leaks:
            found["evaluation/sample"] = _sample(decoder, config, device)
        decoder.train()
        return found

    return evaluate


def _sample(decoder: Any, config: Config, device: torch.device) -> str:
    """Every rank writes the same text: under ZeRO-3 each step of it gathers the weights from all of them."""
    nothing: Tensor = torch.empty(0, dtype=torch.long, device=device)
    vocabulary = build_tokenizer(config.data.tokenizer).vocabulary
    tokens = generate(
        decoder, nothing, config.evaluation.sample_tokens, hash_seed=config.run.seed, vocabulary=vocabulary
    )
    return "".join(as_text(tokens))
