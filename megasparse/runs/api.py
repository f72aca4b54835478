"""Public functions of `import megasparse` that do not belong to another module."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from megasparse.config.finetuning import FinetuneConfig
from megasparse.config.schema import Config
from megasparse.data.reader import EvaluationStream
from megasparse.data.tokenizers import Tokenizer
from megasparse.evaluation import results
from megasparse.evaluation.bits_per_dim import refuse_leaks
from megasparse.evaluation.generate import Sampling
from megasparse.evaluation.results import Scoring, restore, trained_tokenizer
from megasparse.evaluation.texts import Request, texts
from megasparse.model.build import Model
from megasparse.model.decoder import Causal
from megasparse.model.encoder import Encoder
from megasparse.runs.data import open_folder
from megasparse.settings.load import load_settings

if TYPE_CHECKING:
    from megasparse.planning.plan import Plan


class LoadedCheckpoint(NamedTuple):
    """A trained model with its configuration, tokenizer and device."""

    model: Model
    """In evaluation mode, on `device`."""
    config: Config
    tokenizer: Tokenizer
    device: torch.device


def load_finetune_config(name: str | Path, overrides: Sequence[str] = ()) -> FinetuneConfig:
    """Read a fine-tuning configuration; for the arguments see `load_config`.

    Examples:
        >>> config = megasparse.load_finetune_config("finetune/quick", ["training.epochs=2"])
        >>> config.task.name
        'table'
    """
    return load_settings(name, overrides, FinetuneConfig)


def load_checkpoint(directory: str | Path, overrides: Sequence[str] = ()) -> LoadedCheckpoint:
    """Load a pretrained model, its configuration and its tokenizer.

    Args:
        directory: A run's folder (its newest checkpoint) or a checkpoint's folder.
        overrides: Changes of the checkpoint's configuration as `section.key=value`, such as "run.device=cpu".

    Raises:
        CheckpointError: The checkpoint is missing or damaged.
        ConfigError: An override is invalid.

    Examples:
        >>> loaded = megasparse.load_checkpoint("runs/quickstart")
        >>> tokens = torch.as_tensor(loaded.tokenizer.encode(b"The history of ")).long()
        >>> len(tokens), loaded.model.training
        (15, False)
    """
    model, config, checkpoint, ranks = restore(directory, overrides)
    return LoadedCheckpoint(model, config, trained_tokenizer(config, checkpoint), ranks.device)


def evaluate_split(
    directory: str | Path,
    data: str | Path | None = None,
    overrides: Sequence[str] = (),
    scoring: Scoring = Scoring(),  # noqa: B008  (frozen)
) -> tuple[dict[str, Any], str]:
    """Return the result of `evaluate` and a summary. Several ranks divide the windows and, with `parallel.sequence`,
    the tokens of each window; all return the same result.
    """
    model, config, checkpoint, ranks = restore(directory, overrides)
    if isinstance(model, Causal) and not scoring.allow_leaking_attention:
        refuse_leaks(model.leaks)
    tokenizer = trained_tokenizer(config, checkpoint)
    index = open_folder(data or config.data.path, config, tokenizer)
    if isinstance(model, Encoder) and config.model.masking.whole_words:
        model.set_word_starts(tokenizer.word_starts())
    protocol = results.protocol_of(config, checkpoint, index, tokenizer, scoring)
    decoder = config.model.kind == "decoder"
    evaluate = results.evaluate_decoder if decoder else results.evaluate_predictions
    stream = EvaluationStream(index, scoring.split)
    result = evaluate(model, stream, protocol, scoring.batch, scoring.limit, ranks)
    return result, (results.decoder_summary if decoder else results.prediction_summary)(result)


def evaluate(
    directory: str | Path, data: str | Path | None = None, overrides: Sequence[str] = (), **options: Any
) -> dict[str, Any]:
    """Score a pretrained model on a split of its data and return the numbers with their protocol.

    Args:
        directory: A run's folder (its newest checkpoint) or a checkpoint's folder.
        data: Folder of shards; by default the training data.
        overrides: Changes of the checkpoint's configuration as `section.key=value`.
        options: `split` (by default "test"); `stride`, new tokens per window; `rounds`, hash rounds instead of the
            configured ones; `hash_seeds`, draws of the hashes to average over; `batch`, windows per forward pass;
            `limit`, most windows; `allow_leaking_attention`, to score a decoder whose attention depends on later
            tokens.

    Returns:
        The metrics and their protocol, ready for JSON.

    Raises:
        UserError: The attention depends on later tokens.
        CheckpointError, DataError, ConfigError: A file or setting is missing, damaged or inconsistent.

    Examples:
        >>> result = megasparse.evaluate("runs/quickstart", limit=2)
        >>> result["bits_per_dim"] > 0
        True
    """
    return evaluate_split(directory, data, overrides, Scoring(**options))[0]


def generate(
    checkpoint: str | Path | LoadedCheckpoint,
    prompt: str = "",
    tokens: int | None = None,
    *,
    source: str | None = None,
    beams: int | None = None,
    length_penalty: float = 0.0,
    **sampling: Any,
) -> str:
    """Continue a prompt with a decoder, or write the target of a source text with an encoder–decoder.

    Args:
        checkpoint: A run's folder, or the result of `load_checkpoint` to avoid loading it again.
        prompt: Text to continue.
        tokens: Maximum number of new tokens; by default 200.
        source: Source text of an encoder–decoder.
        beams: Width of beam search, instead of sampling.
        length_penalty: Exponent of the length in beam search.
        sampling: `temperature` (1), divisor of the logits, of which 0 selects the most likely token; `top_p` (1), to
            sample from the fewest most likely tokens whose probabilities sum to at least this value; `min_p` (0), least
            probability of candidates, relative to the most likely token; `repetition_penalty` (1), divisor of positive
            and factor of negative logits of earlier tokens; `seed` (0) of the samples.

    Returns:
        The prompt and its continuation.

    Raises:
        UserError: The model does not support the request.

    Examples:
        >>> megasparse.generate("runs/quickstart", "The history of ", 20, temperature=0.8).startswith("The history of ")
        True
    """
    loaded = checkpoint if isinstance(checkpoint, LoadedCheckpoint) else load_checkpoint(checkpoint)
    if loaded.config.model.kind != "encoder":
        refuse_leaks(loaded.model.leaks)  # type: ignore[union-attr, arg-type]
    request = Request(prompt.encode(), tokens, Sampling(**sampling), beams, length_penalty)
    sources = [] if source is None else [source.encode()]
    (pieces,) = texts(loaded.model, loaded.config, loaded.tokenizer, request, sources, loaded.device)
    return "".join(pieces)


def predict(directory: str | Path, *inputs: str) -> dict[str, Any]:
    """Predict one example with a fine-tuned model.

    Args:
        directory: A fine-tuning run's folder (its best checkpoint) or a checkpoint's folder.
        inputs: The example's text, or the two texts of a pair.

    Returns:
        The prediction, in the format of `megasparse predict`.

    Raises:
        ConfigError: The task needs other inputs.

    Examples:
        >>> row = megasparse.predict("runs/reviews", "a good film")
        >>> row["predicted"] in row["probabilities"]
        True
    """
    from megasparse.tasks.run import predict_texts, restore_task

    return dict(predict_texts(restore_task(directory), inputs, lambda line: print(line, file=sys.stderr)))


def plan(config: Config, gpus: int = 1, gpu_memory: str = "80GiB", gpu: str = "A100", gpus_per_node: int = 8) -> "Plan":
    """Predict memory, FLOPs and time of a pretraining run.

    Args:
        config: The run's configuration.
        gpus: Number of GPUs.
        gpu_memory: Memory per GPU with its unit, such as "80GiB" or "80GB".
        gpu: A100, H100 or H200.
        gpus_per_node: Number of GPUs per node.

    Raises:
        ConfigError: The GPU is unknown, or the unit of the size is missing.

    Examples:
        >>> plan = megasparse.plan(megasparse.load_config("reformer_64k"), gpus=8)
        >>> plan.fits, plan.peak < 80 * 2**30, plan.step_seconds > 0
        (True, True, True)
    """
    from megasparse.planning.hardware import hardware, parse_bytes
    from megasparse.planning.plan import Plan

    return Plan(config, hardware(gpu, None), gpus, gpus_per_node, parse_bytes("gpu_memory", gpu_memory))
