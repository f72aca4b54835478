"""How well hashes find the attention of a trained model: utility, imbalance, recall, errors of the output."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from tqdm import tqdm

from megasparse.attention.hash_training import Utility, train_hashes
from megasparse.data.reader import EvaluationStream
from megasparse.data.tokenizers import build_tokenizer
from megasparse.errors import ConfigError
from megasparse.evaluation.attention.quality import record_calls
from megasparse.evaluation.attention.study import Protocol, maps, study
from megasparse.evaluation.restore import restore
from megasparse.model.encoder import Encoder
from megasparse.runs.data import open_folder


def attention_quality(
    directory: str,
    data: str | None,
    overrides: Sequence[str] = (),
    *,
    split: str = "validation",
    windows: int = 10,
    length: int | None = None,
    buckets: int = 4,
    top: int = 16,
    hash_steps: int = 300,
    hash_utility: Utility = "exact",
    picture: Path | None = None,
) -> dict[str, Any]:
    """Measure a checkpoint's attention on windows of held-out text, and write maps of it into the folder `picture`.

    directory: a checkpoint, or a run's folder. data: a folder of shards, by default the one trained on. length: tokens
    per window. top: weights per query that recall counts. hash_steps: steps of training LHA's hashes.
    Raises ConfigError for numbers that do not go together.
    """
    model, config, checkpoint, device = restore(directory, overrides)
    tokenizer = build_tokenizer(config.data.tokenizer)
    if isinstance(model, Encoder) and config.model.masking.whole_words:
        model.set_word_starts(tokenizer.word_starts())
    index = open_folder(data or config.data.path, config, tokenizer)
    protocol = Protocol(
        checkpoint=str(checkpoint.path),
        checkpoint_step=checkpoint.step,
        data_fingerprint=index.fingerprint,
        split=split,
        windows=windows,
        length=min(1024, config.data.sequence_length) if length is None else length,
        buckets=buckets,
        top=top,
        hash_split=config.data.split,
        hash_steps=hash_steps,
        hash_utility=hash_utility,
        seed=config.run.seed,
    )
    held_out, training = EvaluationStream(index, split), EvaluationStream(index, protocol.hash_split)
    check(protocol, held_out, training, min(config.model.max_length, index.record or config.model.max_length))

    def calls(stream: EvaluationStream, windows: int, number: int) -> list:
        tokens = window(stream, number, windows, protocol.length, index.record or 1)
        return record_calls(model, tokens.to(device), config.run.seed + number)

    order = torch.randperm(protocol.hash_steps, generator=torch.Generator().manual_seed(config.run.seed)).tolist()
    progress = tqdm(order, desc="training hashes", unit="step", disable=None)
    steps = (calls(training, protocol.hash_steps, number) for number in progress)
    hashes, divergence = train_hashes(steps, protocol.buckets, config.run.seed, hash_utility)
    measured = partial(calls, held_out, protocol.windows)
    result = {**study(measured, hashes, protocol, config.model.attention), "hash_divergence": divergence}
    if picture:
        picture.mkdir(parents=True, exist_ok=True)
        for number, (call, mechanism) in enumerate(zip(measured(0), hashes, strict=True)):
            pixels = maps(call, mechanism, protocol, config.model.attention).cpu().numpy()
            Image.fromarray(pixels).save(picture / f"{number:02d}_layer{call.context.layer}_{call.kind}.png")
    return result


def check(protocol: Protocol, held_out: EvaluationStream, training: EvaluationStream, longest: int) -> None:
    """ConfigError for numbers that do not go together. longest: what both the model and the data's records allow."""
    if protocol.split == protocol.hash_split:
        raise ConfigError("--split", f'LHA\'s hashes are trained on "{protocol.split}"', "Measure on another split")
    if not 2 <= protocol.length <= longest:
        problem = f"{protocol.length} is not in 2 … {longest}, what model.max_length and the data's records allow"
        raise ConfigError("--length", problem, "Change it")
    if protocol.buckets < 2 or protocol.buckets % 2 or protocol.buckets > protocol.length:
        raise ConfigError("--buckets", f"{protocol.buckets} is not an even number up to --length", "LSH wants it even")
    for key, number in (
        ("--windows", protocol.windows - 1),
        ("--top", protocol.top),
        ("--hash-steps", protocol.hash_steps),
    ):
        if number < 1:
            raise ConfigError(key, "too few", "Ask for more")
    for key, stream, windows in (("--windows", held_out, protocol.windows), ("--length", training, 1)):
        if stream.tokens < windows * protocol.length:
            problem = f"{windows} windows of {protocol.length} tokens do not fit a split of {stream.tokens}"
            raise ConfigError(key, problem, "Ask for fewer, or for shorter ones")


def window(stream: EvaluationStream, number: int, windows: int, length: int, record: int) -> Tensor:
    """One of `windows` windows, spread evenly over a split, each the beginning of a record: (1, length)."""
    start = number * (stream.tokens - length) // max(1, windows - 1) // record * record
    return stream.read(start, start + length).unsqueeze(0)
