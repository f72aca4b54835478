"""The model card of an exported folder: README.md with the metadata that HuggingFace reads."""

import json
from pathlib import Path
from typing import Any

from megasparse import __version__
from megasparse.config.attention import kinds
from megasparse.config.schema import Config, ModelConfig, encoder_part
from megasparse.data.index import Index
from megasparse.data.tokenizers import NAMED, build_tokenizer
from megasparse.errors import DataError, HubError
from megasparse.hub.formats import TASKS, Exported, format_named
from megasparse.hub.megasparse_format import unfilled
from megasparse.hub.tokenizer_files import FILE, TRAINED
from megasparse.model.decoder import Causal
from megasparse.training.checkpoints.checkpoint import Checkpoint
from megasparse.training.checkpoints.manifest import NO_DATA

_DECODER = """\
```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained(FOLDER, trust_remote_code=True)
model = AutoModelForCausalLM.from_pretrained(FOLDER, trust_remote_code=True)  # needs: pip install megasparse
inputs = tokenizer("The ", return_tensors="pt")
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=64)[0]))
```

{tokens} Logits at position t predict token t + 1; an empty input gives those of the first token.
An input has at most {longest:,} tokens."""
_ENCODER = """\
```python
from transformers import AutoModelForMaskedLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained(FOLDER, trust_remote_code=True)
model = AutoModelForMaskedLM.from_pretrained(FOLDER, trust_remote_code=True)  # needs: pip install megasparse
inputs = tokenizer(f"The {{tokenizer.mask_token}}", return_tensors="pt")
print(tokenizer.decode(model(**inputs).logits[0].argmax(-1)))
```

{tokens}"""
_ENCODER_DECODER = """\
```python
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained(FOLDER, trust_remote_code=True)
model = AutoModelForSeq2SeqLM.from_pretrained(FOLDER, trust_remote_code=True)  # needs: pip install megasparse
inputs = tokenizer(["A source.", "And another one."], padding=True, return_tensors="pt")
print(tokenizer.batch_decode(model.generate(**inputs, num_beams=4), skip_special_tokens=True))
```

{tokens} The tokenizer puts the separator behind every text, as sources and targets of the training have it.
A source has at most {longest:,} tokens with it, a target {target:,}."""
_BARE = """\
```python
from transformers import {auto}

model = {auto}.from_pretrained(FOLDER, trust_remote_code=True)  # needs: pip install megasparse
```

{tokens}"""
_NAMED_TOKENS = {
    "bytes": "A token is a byte of UTF-8.",
    "pixels": "A token is the value of a sub-pixel, 0 to 255; rows from the top, pixels from the left, then colours.",
}
_FILE_TOKENS = {
    ".model": "Its tokenizer is the sentencepiece model `tokenizer.model`, with which any bytes come back unchanged.",
    ".json": "Its tokenizer is the `tokenizer.json` of the training, which says what comes before and after a text.",
    ".txt": "A token is a word of `tokenizer.txt`; white space and unknown words do not come back as they were.",
}
_TASK = {"decoder": "text-generation", "encoder": "fill-mask", "encoder_decoder": "translation"}
_USAGE = {"decoder": _DECODER, "encoder": _ENCODER, "encoder_decoder": _ENCODER_DECODER}
_DESCRIPTION = {
    "decoder": "a causal language model",
    "encoder": "a bidirectional encoder of masked tokens",
    "encoder_decoder": "an encoder that reads a source and a decoder that predicts its target",
}


def card(checkpoint: Checkpoint, exported: Exported, to: str, evaluation: str | Path | None) -> str:
    """README.md of a checkpoint that is exported as `to`; evaluation: see `measurements`. Raises HubError."""
    config = checkpoint.config
    lines = [*_header(config), *_summary(checkpoint, config), *_usage(config, exported, to)]
    lines += ["", "## Training", "", *_training(checkpoint, config)]
    if measured := measurements(checkpoint, evaluation):
        lines += ["", "## Evaluation", "", *(line for result in measured for line in _measured(result))]
    elsewhere: Any = {"run": {"directory"}, "data": {"path", "mixture"}}  # of the machine that it ran on
    if config.data.tokenizer not in NAMED:
        elsewhere["data"].add("tokenizer")
    lines += ["", "## Configuration", "", "```json", config.model_dump_json(indent=2, exclude=elsewhere), "```"]
    return "\n".join(lines) + "\n"


def measurements(checkpoint: Checkpoint, given: str | Path | None) -> list[dict[str, Any]]:
    """Results of megasparse evaluate for this checkpoint: the one in the file `given`, or those that lie in the run's
    folder. Raises HubError where the given file is none, or is of another checkpoint.
    """
    if given is None:
        found = (_result(path) for path in sorted(checkpoint.path.parent.parent.glob("*.json")))
        return [result for result in found if result is not None and _is_of(result, checkpoint)]
    result = _result(Path(given))
    if result is None:
        raise HubError(given, "is no result of megasparse evaluate", "Give the file that its --json wrote")
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
    return result if good and any(name in result for name in _MEASURES) else None


def _is_of(result: dict[str, Any], checkpoint: Checkpoint) -> bool:
    protocol = result["protocol"]
    same_data = protocol.get("trained_on_fingerprint") == checkpoint.manifest["data_fingerprint"]
    return same_data and protocol.get("checkpoint_step") == checkpoint.step


def _header(config: Config) -> list[str]:
    tags = [
        "megasparse",
        "long-context",
        *(f"{kind.replace('_', '-')}-attention" for kind in _mechanisms(config.model)),
    ]
    task = _TASK[config.model.kind]
    return ["---", "library_name: transformers", f"pipeline_tag: {task}", "tags:", *(f"- {tag}" for tag in tags), "---"]


def _summary(checkpoint: Checkpoint, config: Config) -> list[str]:
    model = config.model
    built = unfilled(model)
    weights = sum(weight.numel() for weight in built.parameters())
    read, depth = f"{model.max_length:,} tokens", f"{model.layers}"
    if model.source is not None:
        read = f"{model.source.length:,} tokens of source and {model.max_length:,} of target"
        depth = f"{model.source.layers or model.layers} and {model.layers}"
    name = model.kind.replace("_", "-")
    lines = ["", f"# megasparse {name} over {build_tokenizer(config.data.tokenizer).name}", ""]
    lines += [f"A transformer of {weights:,} weights, {_DESCRIPTION[model.kind]}, for up to {read}: {depth} "]
    lines[-1] += f"layers of width {model.d_model}, attention {', '.join(_mechanisms(model))}."
    lines[-1] += f" Written by megasparse {__version__}."
    if isinstance(built, Causal):
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
    model = config.model
    usage = _USAGE[model.kind] if FILE in exported.files else _BARE
    if model.source is not None and "eos_token_id" not in exported.config:
        usage = _BARE
    lengths = {"longest": model.max_length - 1 if model.source is None else model.source.length}
    lengths["target"] = model.max_length
    return ["", "## Use", "", usage.format(tokens=_tokens(exported), auto=f"AutoModel{TASKS[model.kind]}", **lengths)]


def _mechanisms(model: ModelConfig) -> list[str]:
    """Kinds of all self-attention, the encoder's of an encoder–decoder first."""
    stacks = [model] if model.source is None else [encoder_part(model), model]
    return list(dict.fromkeys(kind for stack in stacks for kind in kinds(stack)))


def _tokens(exported: Exported) -> str:
    """A sentence on what a token of an exported model is."""
    name = str(exported.config["tokenizer"])
    if name in _NAMED_TOKENS:
        return _NAMED_TOKENS[name]
    sentence = (
        _FILE_TOKENS[Path(name).suffix] if name != TRAINED else f"Its tokenizer is that of the training, `{name}`."
    )
    if FILE not in exported.files:
        sentence += (
            f" No tokenizer.json can be exactly it, so AutoTokenizer does not load it; `{name}` is read by megasparse."
        )
    return sentence


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
        index = Index.load(config.data.path)
    except DataError:
        return lines
    if index.fingerprint == fingerprint:
        lines += [f"- corpus: {index.file.corpus}, prepared with `{index.file.command}`"]
    return lines


_MEASURES = {
    "bits_per_dim": ("bits/dim", "symbols"),
    "bits_per_token": ("bits a token", "tokens"),
    "loss": ("nats a masked token", "masked tokens"),
}


def _others(result: dict[str, Any]) -> list[str]:
    others = {"bits_per_byte": "bits/byte", "word_perplexity": "word perplexity"}
    if result["protocol"].get("lossless") is False:
        others.pop("bits_per_byte")
    primary = result.get("bits_per_dim")
    return [f"{unit} {result[name]:.4f}" for name, unit in others.items() if result.get(name) not in (None, primary)]


def _measured(result: dict[str, Any]) -> list[str]:
    protocol = result["protocol"]
    name = next(name for name in _MEASURES if name in result)
    unit, of = _MEASURES[name]
    if "source_length" in protocol:
        unit, of = "nats a target token", "target tokens"
    found = ", ".join([f"{result[name]:.4f} {unit}", *_others(result)])
    return [
        f"- {found}, accuracy {100 * result['accuracy']:.2f} %, on {result['dims']:,} {of} of split "
        f"`{protocol.get('split')}` (windows of {protocol.get('sequence_length')}, stride {protocol.get('stride')}, "
        f"data {protocol.get('data_fingerprint')})"
    ]
