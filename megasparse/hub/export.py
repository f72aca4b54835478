"""Export of a checkpoint to a folder that Hugging Face classes load, with its model card. V vocabulary."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megasparse import __version__
from megasparse.config.schema import Config, ModelConfig, encoder_part, kinds
from megasparse.data.tokenizers import NAMED, build_tokenizer
from megasparse.errors import HubError
from megasparse.files import read_file
from megasparse.hub.architectures import format_named, hf_class
from megasparse.hub.formats import (
    TASKS,
    Exported,
    Format,
    compared_length,
    our_logits,
    padded,
    require_agreement,
    unfilled,
)
from megasparse.hub.importing import fill
from megasparse.hub.tensor_file import appearing, refuse_existing, write_tensors
from megasparse.hub.tokenizer_files import FILE, Files, write_files
from megasparse.model.build import build_model, empty_model
from megasparse.model.decoder import Causal
from megasparse.training.checkpoints.checkpoint import Checkpoint, open_newest
from megasparse.training.checkpoints.manifest import NO_DATA


def to_hf(
    checkpoint: str | Path, output: str | Path, to: str = "megasparse", evaluation: str | Path | None = None
) -> Path:
    """Export a pretrained checkpoint, as described by `megasparse.to_hf`, which also exports fine-tuned models."""
    format, output = format_named(to), Path(output)
    refuse_existing(output)
    opened = open_newest(Path(checkpoint), build=empty_model)
    config = opened.config
    if build_tokenizer(config.data.tokenizer).identity != opened.manifest["tokenizer"]:
        problem = f"{config.data.tokenizer} is not the tokenizer that the model was trained with"
        raise HubError("data.tokenizer", problem, "Restore its file")
    exported = format.export(config, lambda name: opened.tensor("weight", name))
    text = card(opened, exported, to, evaluation)
    with appearing(output) as folder:
        files: Files = {"config.json": json.dumps(exported.config, indent=2) + "\n", "README.md": text}
        files |= exported.files
        write_files(files, folder)
        write_tensors(exported.tensors(), folder)
        texts = texts_with_logits(opened, format)
        settings: dict[str, Any] = {"dtype": torch.float32, "local_files_only": True, "output_loading_info": True}
        loader = hf_class(exported.config["architectures"][0])
        theirs, info = loader.from_pretrained(folder, **settings, **format.loading)
        for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
            if names := sorted(set(map(str, info[problem])) - format.unread):
                named = f"transformers finds {problem} in it: {names[0]}"
                raise HubError(folder, named, "Please report this with the run's configuration")
        from megasparse.hub.replace import restore_attention

        restore_attention(theirs, folder)
        theirs.eval()
        pairs = ((logits, format.logits(theirs, tokens, config.run.seed)) for tokens, logits in texts)
        require_agreement(pairs, output)
    return output


def texts_with_logits(checkpoint: Checkpoint, format: Format) -> list[tuple[Tensor, Tensor]]:
    """Return the texts of `text_tokens`, with the logits of a checkpoint's model that `format` compares."""
    config = checkpoint.config
    model = build_model(format.comparable(config).model, config.run.seed)
    fill(model, partial(checkpoint.tensor, "weight"))
    return [(tokens, our_logits(model, tokens, config.run.seed)) for tokens in text_tokens(config.model)]


def text_tokens(model: ModelConfig) -> list[Tensor]:
    """Return real text, the source code of this file, in three pieces (2, L) int64: of an encoder with masked tokens,
    of an encoder–decoder with padding.
    """
    pieces, count, length = 3, 2, compared_length(model)
    text = bytearray(Path(__file__).read_bytes()[: pieces * count * length])
    tokens = torch.frombuffer(text, dtype=torch.uint8).long().view(pieces, count, length)
    if model.kind == "encoder":
        tokens[:, :, ::7] = model.masking.token
    return [padded(text, model) for text in tokens % model.vocabulary]


# The model card: README.md with the metadata of the Hugging Face hub

PIPELINES = {"decoder": "text-generation", "encoder": "fill-mask", "encoder_decoder": "translation"}
USE = {
    "decoder": 'inputs = tokenizer("The ", return_tensors="pt")\n'
    "print(tokenizer.decode(model.generate(**inputs, max_new_tokens=64, do_sample=True)[0]))",
    "encoder": 'inputs = tokenizer("The [MASK]", return_tensors="pt")\nlogits = model(**inputs).logits',
    "encoder_decoder": 'inputs = tokenizer(["A source."], return_tensors="pt")\n'
    "print(tokenizer.batch_decode(model.generate(**inputs, num_beams=4), skip_special_tokens=True))",
}
MEASURES = (
    "bits_per_dim", "bits_per_token", "bits_per_byte", "token_perplexity", "word_perplexity", "loss", "accuracy",
)  # fmt: skip
"""Metrics of `megasparse evaluate` that the card contains."""


def card(checkpoint: Checkpoint, exported: Exported, to: str, evaluation: str | Path | None) -> str:
    """Return the README.md of a checkpoint exported as `to`. evaluation: see `measurements`."""
    config, model = checkpoint.config, checkpoint.config.model
    built, tokenizer = unfilled(model), build_tokenizer(config.data.tokenizer)
    stacks = [model] if model.source is None else [encoder_part(model), model]
    attention = list(dict.fromkeys(kind for stack in stacks for kind in kinds(stack)))
    tags = ["megasparse", "long-context", *(f"{kind.replace('_', '-')}-attention" for kind in attention)]
    layers = f"{model.layers}" if model.source is None else f"{model.source.layers or model.layers} and {model.layers}"
    read = "" if model.source is None else f"{model.source.length:,} of source and "
    weights = sum(weight.numel() for weight in built.parameters())
    lines = ["---", "library_name: transformers", f"pipeline_tag: {PIPELINES[model.kind]}", "tags:"]
    lines += [*(f"- {tag}" for tag in tags), "---", ""]
    lines += [f"# megasparse {model.kind.replace('_', '-')} over {tokenizer.name}", ""]
    lines += [
        f"{weights:,} weights, for up to {read}{model.max_length:,} tokens: {layers} layers of width {model.d_model}, "
        f"attention {', '.join(attention)}. Written by megasparse {__version__}."
    ]
    if isinstance(built, Causal):
        causal = "It is strictly causal: no output depends on a later token."
        leaks = "; ".join(built.leaks)
        lines += ["", f"**It is not strictly causal** ({leaks})." if leaks else causal]
    lines += ["", "Add a licence before you publish the model.", "", "## Use", "", *_use(config, exported, to)]
    lines += ["", "## Training", ""]
    if (fingerprint := checkpoint.manifest["data_fingerprint"]) == NO_DATA:
        lines += ["The weights were imported, and not trained further."]
    else:
        training, optimizer, name = config.training, config.optimizer, checkpoint.manifest["tokenizer"].get("name")
        sequences = f"{training.global_batch} sequences of {config.data.sequence_length:,} tokens"
        rate = f"{optimizer.name}, learning rate {optimizer.learning_rate:g}, {training.precision}"
        lines += [f"- {checkpoint.step:,} steps of {sequences}, {rate}"]
        lines += [f"- data: index {fingerprint}, tokenizer {name}"]
    if results := measurements(checkpoint, evaluation):
        lines += ["", "## Evaluation", "", *map(_measured, results)]
    elsewhere: Any = {"run": {"directory"}, "data": {"path", "mixture"}}  # paths on the machine of the run
    if config.data.tokenizer not in NAMED:
        elsewhere["data"].add("tokenizer")
    lines += ["", "## Configuration", "", "```json", config.model_dump_json(indent=2, exclude=elsewhere), "```"]
    return "\n".join(lines) + "\n"


def _use(config: Config, exported: Exported, to: str) -> list[str]:
    if to != "megasparse":
        architecture = exported.config["architectures"][0]
        code = f"from transformers import {architecture}\n\nmodel = {architecture}.from_pretrained(FOLDER)"
        if "attn_implementation" in exported.config:
            code = "from megasparse.hub import load_replaced\n\nmodel = load_replaced(FOLDER)"
        return ["```python", code, "```", "", format_named(to).note]
    auto, name = f"AutoModel{TASKS[config.model.kind]}", str(exported.config["tokenizer"])
    code = f"model = {auto}.from_pretrained(FOLDER, trust_remote_code=True)  # needs megasparse, installed from a clone"
    if FILE not in exported.files:
        note = f"Tokens are `{name}`, 0 to 255 per sub-pixel." if name == "pixels" else ""
        note = note or f"tokenizer.json cannot express its tokenizer; megasparse reads `{name}`."
        return ["```python", f"from transformers import {auto}\n\n{code}", "```", "", note]
    load = f"from transformers import {auto}, AutoTokenizer\n\ntokenizer = AutoTokenizer.from_pretrained(FOLDER)"
    return ["```python", f"{load}\n{code}\n{USE[config.model.kind]}", "```", "", f"Its tokenizer is `{name}`."]


def measurements(checkpoint: Checkpoint, path: str | Path | None) -> list[dict[str, Any]]:
    """Return the results of `megasparse evaluate` for this checkpoint, in the file `path` or in the run's folder."""
    results = []
    for file in sorted(checkpoint.path.parent.parent.glob("*.json")) if path is None else [Path(path)]:
        if (result := _result(file)) is None:
            if path is None:
                continue
            raise HubError(path, "is not a result of megasparse evaluate", "Use the file that its --json option wrote")
        step, data = (result["protocol"].get(key) for key in ("checkpoint_step", "trained_on_fingerprint"))
        if (step, data) == (checkpoint.step, checkpoint.manifest["data_fingerprint"]):
            results.append(result)
        elif path is not None:
            of = result["protocol"].get("checkpoint")
            raise HubError(path, f"was measured at step {step} of {of}", "Export that one")
    return results


def _result(path: Path) -> dict[str, Any] | None:
    try:
        result = json.loads(read_file(path))
    except (OSError, ValueError, RecursionError):
        return None
    valid = isinstance(result, dict) and isinstance(result.get("protocol"), dict)
    return result if valid and any(name in result for name in MEASURES[:-1]) else None


def _measured(result: dict[str, Any]) -> str:
    protocol = result["protocol"]
    excluded = {"bits_per_byte"} if protocol.get("lossless") is False else set()
    numbers = [f"{name} {result[name]:.4f}" for name in MEASURES if result.get(name) and name not in excluded]
    windows = f"windows of {protocol.get('sequence_length')}, stride {protocol.get('stride')}"
    split = f"split `{protocol.get('split')}` ({windows}, data {protocol.get('data_fingerprint')})"
    return f"- {', '.join(numbers)}, over {result['dims']:,} tokens of {split}"
