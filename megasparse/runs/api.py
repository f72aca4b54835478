"""Functions of `import megasparse` that have no module of their own."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from megasparse.config.finetuning import FinetuneConfig
from megasparse.config.load import load_settings
from megasparse.config.schema import Config
from megasparse.data.reader import EvaluationStream
from megasparse.data.tokenizers import Tokenizer
from megasparse.evaluation import results
from megasparse.evaluation.bits_per_dim import refuse_leaks
from megasparse.evaluation.generate import Sampling
from megasparse.evaluation.results import restore, trained_tokenizer
from megasparse.evaluation.texts import Request, texts
from megasparse.model.build import Model
from megasparse.model.decoder import Causal
from megasparse.model.encoder import Encoder
from megasparse.runs.data import open_folder

if TYPE_CHECKING:
    from megasparse.planning.plan import Plan


class LoadedCheckpoint(NamedTuple):
    """A trained model and what belongs to it."""

    model: Model
    """In evaluation mode, on `device`."""
    config: Config
    tokenizer: Tokenizer
    device: torch.device


def load_finetune_config(name: str | Path, overrides: Sequence[str] = ()) -> FinetuneConfig:
    """Read a fine-tuning configuration: a shipped one by its name, or a JSON file.

    overrides: `section.key=value`, the value in JSON. Raises ConfigError for what is wrong with either.

    >>> config = megasparse.load_finetune_config("finetune/quick", ["training.epochs=2"])
    >>> config.task.name
    'table'
    """
    return load_settings(name, overrides, FinetuneConfig)


def load_checkpoint(directory: str | Path, overrides: Sequence[str] = ()) -> LoadedCheckpoint:
    """Load the model of a pretraining run's newest checkpoint, or of a checkpoint's folder.

    overrides: `section.key=value`, on the configuration that the checkpoint holds, such as "run.device=cpu".
    Raises CheckpointError where there is none or it is damaged, ConfigError for a wrong override.

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
    *,
    split: str = "test",
    overrides: Sequence[str] = (),
    stride: int | None = None,
    rounds: int | None = None,
    hash_seeds: int = 1,
    batch: int = 1,
    limit: int | None = None,
    allow_leaking_attention: bool = False,
) -> tuple[dict[str, Any], str]:
    """Evaluate a checkpoint. Returns its numbers with their protocol, and a summary of a few lines.

    directory: a checkpoint, or a run's folder, whose newest checkpoint is taken. data: a folder of shards, by default
    the one that the run was trained on. stride: new tokens per window. rounds: hash rounds in place of the configured
    ones. hash_seeds: repeat with so many draws of the rotations. limit: score only so many windows. Where several ranks
    were started, each calls this and has the same result: they share out the windows, and `parallel.sequence` of them
    the tokens of each.
    Raises UserError where a decoder's attention sees later tokens, unless this is allowed; CheckpointError, DataError
    and ConfigError for what is missing, damaged or does not fit.

        >>> numbers, summary = evaluate_split("runs/quickstart", limit=2)
        >>> numbers["bits_per_dim"] > 0
        True
    """
    model, config, checkpoint, ranks = restore(directory, overrides)
    if isinstance(model, Causal) and not allow_leaking_attention:
        refuse_leaks(model.leaks)
    tokenizer = trained_tokenizer(config, checkpoint)
    index = open_folder(data or config.data.path, config, tokenizer)
    if isinstance(model, Encoder) and config.model.masking.whole_words:
        model.set_word_starts(tokenizer.word_starts())
    protocol = results.protocol_of(config, checkpoint, index, tokenizer, split, stride, rounds, hash_seeds)
    decoder = config.model.kind == "decoder"
    evaluate = results.evaluate_decoder if decoder else results.evaluate_predictions
    result = evaluate(model, EvaluationStream(index, split), protocol, batch, limit, ranks)
    return result, (results.decoder_summary if decoder else results.prediction_summary)(result)


def evaluate(directory: str | Path, data: str | Path | None = None, **options: Any) -> dict[str, Any]:
    """Evaluate a pretrained model on a split of its data. Returns the numbers with their protocol.

    data: a folder of shards, by default the one trained on. options: those of `evaluate_split`, such as split, rounds,
    stride and limit. Raises UserError where the attention sees later tokens, or something does not fit.

    >>> result = megasparse.evaluate("runs/quickstart", limit=2)
    >>> result["bits_per_dim"] > 0
    True
    """
    return evaluate_split(directory, data, **options)[0]


def generate(
    checkpoint: str | Path | LoadedCheckpoint,
    prompt: str = "",
    tokens: int | None = None,
    *,
    source: str | None = None,
    temperature: float = 1.0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    seed: int = 0,
    beams: int | None = None,
    length_penalty: float = 0.0,
) -> str:
    """Continue a prompt with a decoder, or write the target of `source` with an encoder-decoder.

    checkpoint: a run's folder, or what `load_checkpoint` returned, which saves loading it again. tokens: how many to
    add at most (200). temperature, top_p, min_p, repetition_penalty: see `Sampling`, whose definitions are those of
    transformers. beams: beam search in place of sampling. Returns the prompt and what follows it.
    Raises UserError for a request that this model cannot meet.

    >>> megasparse.generate("runs/quickstart", "The history of ", 20, temperature=0.8).startswith("The history of ")
    True
    """
    loaded = checkpoint if isinstance(checkpoint, LoadedCheckpoint) else load_checkpoint(checkpoint)
    if loaded.config.model.kind != "encoder":
        refuse_leaks(loaded.model.leaks)  # type: ignore[union-attr, arg-type]
    sampling = Sampling(temperature, top_p, min_p, repetition_penalty, seed)
    request = Request(prompt.encode(), tokens, sampling, beams, length_penalty)
    sources = [] if source is None else [source.encode()]
    (pieces,) = texts(loaded.model, loaded.config, loaded.tokenizer, request, sources, loaded.device)
    return "".join(pieces)


def predict(directory: str | Path, *inputs: str) -> dict[str, Any]:
    """Predict one example with a fine-tuned model. inputs: its text, or the two texts of a pair.

    directory: a fine-tuning run's folder, whose best checkpoint is taken, or a checkpoint. Returns the prediction as
    `megasparse predict` writes it. Raises ConfigError where the task has other inputs.

    >>> row = megasparse.predict("runs/reviews", "a good film")
    >>> row["predicted"] in row["probabilities"]
    True
    """
    from megasparse.tasks.evaluate import predict_texts
    from megasparse.tasks.run import restore_task

    return dict(predict_texts(restore_task(directory), inputs, lambda line: print(line, file=sys.stderr)))


def plan(config: Config, gpus: int = 1, gpu_memory: str = "80GiB", gpu: str = "A100", gpus_per_node: int = 8) -> "Plan":
    """Predict what a pretraining run will take on so many GPUs: memory, FLOPs and time.

    gpu: A100, H100 or H200. Raises ConfigError for another one, and for a size without a unit.

    >>> plan = megasparse.plan(megasparse.load_config("reformer_64k"), gpus=8)
    >>> plan.fits, plan.peak < 80 * 2**30, plan.step_seconds > 0
    (True, True, True)
    """
    from megasparse.planning.plan import Plan, hardware, parse_bytes

    return Plan(config, hardware(gpu, None), gpus, gpus_per_node, parse_bytes("gpu_memory", gpu_memory))
