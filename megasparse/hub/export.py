"""A checkpoint of ours as a folder that HuggingFace's classes load. V vocabulary."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from megasparse.config.schema import ModelConfig
from megasparse.errors import HubError
from megasparse.hub.card import card
from megasparse.hub.formats import TOLERANCE, compared_length, disagreement, format_named, hf_class, our_logits, padded
from megasparse.hub.importing import identity
from megasparse.hub.tensor_file import INDEX, WEIGHTS, appearing, refuse_existing
from megasparse.hub.tokenizer_files import Files
from megasparse.model.build import build_model, empty_model
from megasparse.training.checkpoints.checkpoint import Checkpoint, find_checkpoint, load_weights

SHARD_BYTES = 5_000_000_000
"""Largest file of tensors, unless one tensor is larger; so many bytes are in memory as they are written."""

COMPARED = 3, 2
"""Texts, and sequences in each, on which both models are run."""


def to_hf(
    checkpoint: str | Path, output: str | Path, to: str = "megasparse", evaluation: str | Path | None = None
) -> Path:
    """Write the weights of a checkpoint as a HuggingFace model: OUTPUT, which appears whole or not at all.

    checkpoint: a checkpoint's folder, or a run's (its newest), of any number of ranks and ZeRO stage. to: the
    architecture, one of `formats.FORMATS`. evaluation: a result of megasparse evaluate for the model
    card; where left out, those in the run's folder.
    Before OUTPUT gets its name, both models are run on the same text in fp32, ours first, then the one that
    transformers loads from the written files.
    Raises CheckpointError; ConfigError for another `to`; HubError where the architecture cannot express the model,
    where OUTPUT exists or cannot be written, where the evaluation is of another model, and where the two models differ.

    >>> folder = megasparse.to_hf("runs/quickstart", "export/quickstart")
    >>> sorted(path.suffix for path in folder.glob("model.*"))
    ['.safetensors']
    """
    format, output = format_named(to), Path(output)
    refuse_existing(output)
    opened = Checkpoint.open(find_checkpoint(Path(checkpoint)), build=empty_model)
    config, seed = opened.config, opened.config.run.seed
    if identity(config.data.tokenizer) != opened.manifest["tokenizer"]:
        problem = f"{config.data.tokenizer} is not the tokenizer that the model was trained with"
        raise HubError("data.tokenizer", problem, "Put its file back")
    exported = format.export(config, lambda name: opened.tensor("weight", name))
    text = card(opened, exported, to, evaluation)
    with appearing(output) as folder:
        files: Files = {
            "config.json": json.dumps(exported.config, indent=2) + "\n",
            "README.md": text,
            **exported.files,
        }
        for name, content in files.items():
            (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)
        write_tensors(exported.tensors(), folder)
        texts, model = text_tokens(config.model), build_model(format.comparable(config).model, seed).eval()
        load_weights(model, opened)
        ours = [our_logits(model, tokens, seed) for tokens in texts]
        del model
        theirs = load_exported(exported.config["architectures"][0], folder)
        pairs = ((x, format.logits(theirs, tokens, seed)) for x, tokens in zip(ours, texts, strict=True))
        if difference := disagreement(pairs):
            problem = f"not written: HuggingFace's logits differ from ours by {difference:.2g} (over {TOLERANCE})"
            raise HubError(output, problem, "Please report this with the run's configuration")
    return output


def write_tensors(tensors: Iterable[tuple[str, Tensor]], folder: Path) -> None:
    """Write model.safetensors, or where that would be larger than SHARD_BYTES several files and their index."""
    shards: list[list[str]] = []
    total, size, shard = 0, 0, dict[str, Tensor]()

    def write() -> None:
        shards.append(list(shard))
        save_file(shard, folder / f"{len(shards)}.safetensors", metadata={"format": "pt"})
        shard.clear()

    for name, tensor in tensors:
        if shard and size + tensor.nbytes > SHARD_BYTES:
            write()
            size = 0
        shard[name] = tensor.contiguous()
        size, total = size + tensor.nbytes, total + tensor.nbytes
    write()
    if len(shards) == 1:
        (folder / "1.safetensors").rename(folder / WEIGHTS)
        return
    files: dict[str, str] = {}
    for number, names in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        (folder / f"{number}.safetensors").rename(folder / file)
        files |= {name: file for name in names}
    index = {"metadata": {"total_size": total}, "weight_map": files}
    (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def load_exported(architecture: str, folder: Path) -> Any:
    """The model that transformers loads from a folder, in fp32. Raises HubError unless each parameter has one value."""
    settings: dict[str, Any] = {"dtype": torch.float32, "local_files_only": True, "output_loading_info": True}
    model, info = hf_class(architecture).from_pretrained(folder, **settings)
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if info[problem]:
            named = f"transformers finds {problem} in it: {sorted(map(str, info[problem]))[0]}"
            raise HubError(folder, named, "Please report this with the run's configuration")
    return model.eval()


def text_tokens(model: ModelConfig) -> list[Tensor]:
    """Real text, the source code of this file, in three pieces: (2, L) int64 each, of `compared_length`. In an encoder
    every seventh token is masked; an encoder–decoder's second source and target are padded.
    """
    pieces, count, length = *COMPARED, compared_length(model)
    text = bytearray(Path(__file__).read_bytes()[: pieces * count * length])
    tokens = torch.frombuffer(text, dtype=torch.uint8).long().view(pieces, count, length)
    if model.kind == "encoder":
        tokens[:, :, ::7] = model.masking.token
    return [padded(text, model) for text in tokens % model.vocabulary]
