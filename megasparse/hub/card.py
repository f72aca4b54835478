"""The model card of an exported folder: README.md with the metadata that Hugging Face reads."""

import json
from pathlib import Path
from typing import Any

from megasparse import __version__
from megasparse.config.attention import kinds
from megasparse.config.schema import Config, encoder_part
from megasparse.data.tokenizers import NAMED, build_tokenizer
from megasparse.errors import HubError
from megasparse.hub.formats import TASKS, Exported, format_named
from megasparse.hub.megasparse_format import unfilled
from megasparse.hub.tokenizer_files import FILE
from megasparse.model.decoder import Causal
from megasparse.training.checkpoints.checkpoint import Checkpoint
from megasparse.training.checkpoints.manifest import NO_DATA

PIPELINES = {"decoder": "text-generation", "encoder": "fill-mask", "encoder_decoder": "translation"}
USE = {
    "decoder": 'inputs = tokenizer("The ", return_tensors="pt")\nprint(tokenizer.decode(model.generate(**inputs)[0]))',
    "encoder": 'inputs = tokenizer("The [MASK]", return_tensors="pt")\nlogits = model(**inputs).logits',
    "encoder_decoder": 'inputs = tokenizer(["A source."], return_tensors="pt")\n'
    "print(tokenizer.batch_decode(model.generate(**inputs, num_beams=4), skip_special_tokens=True))",
}
MEASURES = (
    "bits_per_dim", "bits_per_token", "bits_per_byte", "token_perplexity", "word_perplexity", "loss", "accuracy",
)  # fmt: skip
"""Numbers of a result of megasparse evaluate that the card repeats."""


def card(checkpoint: Checkpoint, exported: Exported, to: str, evaluation: str | Path | None) -> str:
    """README.md of a checkpoint that is exported as `to`; evaluation: see `measurements`. Raises HubError."""
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
    lines += ["", "Its licence is for those who publish it to state.", "", "## Use", "", *_use(config, exported, to)]
    lines += ["", "## Training", "", *_training(checkpoint, config)]
    if results := measurements(checkpoint, evaluation):
        lines += ["", "## Evaluation", "", *map(_measured, results)]
    elsewhere: Any = {"run": {"directory"}, "data": {"path", "mixture"}}  # of the machine that it ran on
    if config.data.tokenizer not in NAMED:
        elsewhere["data"].add("tokenizer")
    lines += ["", "## Configuration", "", "```json", config.model_dump_json(indent=2, exclude=elsewhere), "```"]
    return "\n".join(lines) + "\n"


def _use(config: Config, exported: Exported, to: str) -> list[str]:
    if to != "megasparse":
        architecture = exported.config["architectures"][0]
        code = f"from transformers import {architecture}\n\nmodel = {architecture}.from_pretrained(FOLDER)"
        return ["```python", code, "```", "", getattr(format_named(to), "note", "")]
    auto, name = f"AutoModel{TASKS[config.model.kind]}", str(exported.config["tokenizer"])
    code = f"model = {auto}.from_pretrained(FOLDER, trust_remote_code=True)  # pip install megasparse"
    if FILE not in exported.files:
        note = f"Tokens are `{name}`, 0 to 255 a sub-pixel." if name == "pixels" else ""
        note = note or f"No tokenizer.json can be exactly its tokenizer; `{name}` is read by megasparse."
        return ["```python", f"from transformers import {auto}\n\n{code}", "```", "", note]
    load = f"from transformers import {auto}, AutoTokenizer\n\ntokenizer = AutoTokenizer.from_pretrained(FOLDER)"
    return ["```python", f"{load}\n{code}\n{USE[config.model.kind]}", "```", "", f"Its tokenizer is `{name}`."]


def _training(checkpoint: Checkpoint, config: Config) -> list[str]:
    fingerprint, training = checkpoint.manifest["data_fingerprint"], config.training
    if fingerprint == NO_DATA:
        return ["The weights were imported, and not trained further."]
    sequences = f"{training.global_batch} sequences of {config.data.sequence_length:,} tokens"
    rate = f"{config.optimizer.name}, learning rate {config.optimizer.learning_rate:g}, {training.precision}"
    tokenizer = checkpoint.manifest["tokenizer"].get("name")
    return [
        f"- {checkpoint.step:,} steps of {sequences}, {rate}",
        f"- data: index {fingerprint}, tokenizer {tokenizer}",
    ]


def measurements(checkpoint: Checkpoint, path: str | Path | None) -> list[dict[str, Any]]:
    """Results of megasparse evaluate for this checkpoint: the one in the file `path`, or those in the run's folder.
    Raises HubError where the file is none, or is of another checkpoint.
    """
    if path is None:
        results = [_result(file) for file in sorted(checkpoint.path.parent.parent.glob("*.json"))]
        return [result for result in results if result is not None and _is_of(result, checkpoint)]
    if (result := _result(Path(path))) is None:
        raise HubError(path, "is no result of megasparse evaluate", "Give the file that its --json wrote")
    if not _is_of(result, checkpoint):
        protocol = result["protocol"]
        problem = f"was measured at step {protocol.get('checkpoint_step')} of {protocol.get('checkpoint')}"
        raise HubError(path, problem, f"Evaluate {checkpoint.path}, or export that one")
    return [result]


def _result(path: Path) -> dict[str, Any] | None:
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    good = isinstance(result, dict) and isinstance(result.get("protocol"), dict)
    return result if good and any(name in result for name in MEASURES[:-1]) else None


def _is_of(result: dict[str, Any], checkpoint: Checkpoint) -> bool:
    protocol = result["protocol"]
    same_data = protocol.get("trained_on_fingerprint") == checkpoint.manifest["data_fingerprint"]
    return same_data and protocol.get("checkpoint_step") == checkpoint.step


def _measured(result: dict[str, Any]) -> str:
    protocol = result["protocol"]
    left_out = {"bits_per_byte"} if protocol.get("lossless") is False else set()
    numbers = [f"{name} {result[name]:.4f}" for name in MEASURES if result.get(name) and name not in left_out]
    windows = f"windows of {protocol.get('sequence_length')}, stride {protocol.get('stride')}"
    where = f"split `{protocol.get('split')}` ({windows}, data {protocol.get('data_fingerprint')})"
    return f"- {', '.join(numbers)}, over {result['dims']:,} tokens of {where}"
