"""The model card of an exported folder: README.md with the metadata that HuggingFace reads."""

import json
from pathlib import Path
from typing import Any

import torch

from megasparse import __version__
from megasparse.config.pattern import kinds
from megasparse.config.schema import Config
from megasparse.data.index import Index
from megasparse.errors import DataError, HubError
from megasparse.hub.formats import Exported, format_named
from megasparse.model.decoder import Decoder
from megasparse.model.encoder import Encoder
from megasparse.training.checkpoint import Checkpoint
from megasparse.training.manifest import NO_DATA

_DECODER = """\
```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained(FOLDER, trust_remote_code=True)
model = AutoModelForCausalLM.from_pretrained(FOLDER, trust_remote_code=True)  # by the code in the folder
inputs = tokenizer("The ", return_tensors="pt")
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=64)[0]))
```

A token is a byte of UTF-8. Logits at position t tell token t + 1; an empty input gives those of the first token.
An input has at most {longest:,} tokens."""
_ENCODER = """\
```python
from transformers import AutoModelForMaskedLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained(FOLDER, trust_remote_code=True)
model = AutoModelForMaskedLM.from_pretrained(FOLDER, trust_remote_code=True)  # by the code in the folder
inputs = tokenizer("The c[MASK]t", return_tensors="pt")
print(tokenizer.decode(model(**inputs).logits[0].argmax(-1)))
```

A token is a byte of UTF-8."""
_TASK = {"decoder": "text-generation", "encoder": "fill-mask"}


def card(checkpoint: Checkpoint, exported: Exported, to: str, evaluation: str | Path | None) -> str:
    """README.md of a checkpoint that is exported as `to`; evaluation: see `measurements`. Raises HubError."""
    config = checkpoint.config
    lines = [*_header(config), *_summary(checkpoint, config), *_usage(config, exported, to)]
    lines += ["", "## Training", "", *_training(checkpoint, config)]
    if measured := measurements(checkpoint, evaluation):
        lines += ["", "## Evaluation", "", *(line for result in measured for line in _measured(result))]
    elsewhere: Any = {"run": {"directory"}, "data": {"path"}}  # of the machine that it ran on
    lines += ["", "## Configuration", "", "```json", config.model_dump_json(indent=2, exclude=elsewhere), "```"]
    return "\n".join(lines) + "\n"


def measurements(checkpoint: Checkpoint, given: str | Path | None) -> list[dict[str, Any]]:
    """Results of launch/evaluate.py for this checkpoint: the one in the file `given`, or those that lie in the run's
    folder. Raises HubError where the given file is none, or is of another checkpoint.
    """
    if given is None:
        found = (_result(path) for path in sorted(checkpoint.path.parent.parent.glob("*.json")))
        return [result for result in found if result is not None and _is_of(result, checkpoint)]
    result = _result(Path(given))
    if result is None:
        raise HubError(given, "is no result of launch/evaluate.py", "Give the file that its --json wrote")
    if not _is_of(result, checkpoint):
        protocol = result["protocol"]
        problem = f"was measured at step {protocol.get('checkpoint_step')} of {protocol.get('checkpoint')}"
        raise HubError(given, problem, f"Evaluate {checkpoint.path}, or export that one")
    return [result]


def _result(path: Path) -> dict[str, Any] | None:
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    good = isinstance(result, dict) and isinstance(result.get("protocol"), dict)
    return result if good and ("bits_per_dim" in result or "loss" in result) else None


def _is_of(result: dict[str, Any], checkpoint: Checkpoint) -> bool:
    protocol = result["protocol"]
    same_data = protocol.get("trained_on_fingerprint") == checkpoint.manifest["data_fingerprint"]
    return same_data and protocol.get("checkpoint_step") == checkpoint.step


def _header(config: Config) -> list[str]:
    tags = ["megasparse", "long-context", *(f"{kind.replace('_', '-')}-attention" for kind in kinds(config.model))]
    task = _TASK[config.model.kind]
    return ["---", "library_name: transformers", f"pipeline_tag: {task}", "tags:", *(f"- {tag}" for tag in tags), "---"]


def _summary(checkpoint: Checkpoint, config: Config) -> list[str]:
    model = config.model
    with torch.device("meta"):
        built = Decoder(model) if model.kind == "decoder" else Encoder(model)
    weights = sum(weight.numel() for weight in built.parameters())
    told = "a causal language model" if isinstance(built, Decoder) else "a bidirectional encoder of masked tokens"
    lines = ["", f"# megasparse {model.kind} over {config.data.tokenizer}", ""]
    lines += [f"A transformer of {weights:,} weights, {told}, for up to {model.max_length:,} tokens: {model.layers} "]
    lines[-1] += f"layers of width {model.d_model}, attention {', '.join(kinds(model))}."
    lines[-1] += f" Written by megasparse {__version__}."
    if isinstance(built, Decoder):
        leaks = "; ".join(built.leaks)
        causal = "It is strictly causal: no output depends on a later token."
        lines += ["", f"**It is not strictly causal** ({leaks})." if leaks else causal]
    return [*lines, "", "Its licence is for those who publish it to state."]


def _usage(config: Config, exported: Exported, to: str) -> list[str]:
    if to != "megasparse":
        architecture = exported.config["architectures"][0]
        code = f"from transformers import {architecture}\n\nmodel = {architecture}.from_pretrained(FOLDER)"
        note = getattr(format_named(to), "note", "")
        return ["", "## Use", "", "```python", code, "```", *(["", note] if note else [])]
    usage = _DECODER if config.model.kind == "decoder" else _ENCODER
    return ["", "## Use", "", usage.format(longest=config.model.max_length - 1)]


def _training(checkpoint: Checkpoint, config: Config) -> list[str]:
    fingerprint = checkpoint.manifest["data_fingerprint"]
    if fingerprint == NO_DATA:
        return ["The weights were imported, and not trained further."]
    training, length = config.training, config.data.sequence_length
    lines = [
        f"- {checkpoint.step:,} steps of {training.global_batch} sequences of {length:,} tokens, "
        f"{config.optimizer.name}, learning rate {config.optimizer.learning_rate:g}, {training.precision}",
        f"- data: index {fingerprint}, tokenizer {checkpoint.manifest['tokenizer'].get('name')}",
    ]
    try:
        index = Index.load(config.data.path, tolerant=True)
    except DataError:
        return lines
    if index.fingerprint == fingerprint:
        lines += [f"- corpus: {index.file.corpus}, prepared with `{index.file.command}`"]
    return lines


def _measured(result: dict[str, Any]) -> list[str]:
    protocol = result["protocol"]
    if "bits_per_dim" in result:
        found, of = f"{result['bits_per_dim']:.4f} bits/dim", "symbols"
    else:
        found, of = f"{result['loss']:.4f} nats a masked token", "masked tokens"
    return [
        f"- {found}, accuracy {100 * result['accuracy']:.2f} %, on {result['dims']:,} {of} of split "
        f"`{protocol.get('split')}` (windows of {protocol.get('sequence_length')}, stride {protocol.get('stride')}, "
        f"data {protocol.get('data_fingerprint')})"
    ]
