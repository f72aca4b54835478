"""The start of fine-tuning: a megasparse checkpoint, a Hugging Face model, initial weights, or a run's own start."""

import hashlib
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch

from megasparse.config.attention import AttentionConfig
from megasparse.config.finetuning import FinetuneConfig
from megasparse.config.messages import show
from megasparse.config.schema import ModelConfig
from megasparse.data.tokenizers import build_tokenizer
from megasparse.data.tokenizers.tokenizer import NAMED, Tokenizer, words_of
from megasparse.errors import CheckpointError, ConfigError, FileError, HubError
from megasparse.files import file_sha256, read_file, write_file
from megasparse.model.build import empty_model, initialise
from megasparse.settings.checks import check_model
from megasparse.tasks.body import Backbone, HuggingFaceBody, MegasparseBody, add_adapters
from megasparse.tasks.glove import initialise_from_glove
from megasparse.training.checkpoints.checkpoint import (
    Checkpoint,
    on_meta,
    open_newest,
    persistent_buffers,
    tokenizer_copy,
)

FOLDER, RECORD = "start", "body.json"
"""Names of the start's folder in a run's folder, and of the record of its body."""
OURS = ("megasparse", "reformer", "yoso")
"""`model_type` of Hugging Face models that are converted to megasparse models; others remain transformers models."""
COPY = "Copy the whole run folder again"


@dataclass(frozen=True)
class Start:
    """A body with its pretrained or initial weights."""

    body: Backbone
    tokenizer: Tokenizer
    sha256: str | None = None  # of the pretrained weights; None for initial ones
    record: dict[str, Any] | None = None  # description of a transformers model for `rebuild`; None for megasparse's

    def write(self, run: Path) -> None:
        """Write the record, and the tokenizer's file if there is one, to RUN/start."""
        folder, record, body = run / FOLDER, self.record, cast(Any, self.body)
        folder.mkdir(parents=True, exist_ok=True)
        name, file = self.tokenizer.name, self.tokenizer.file
        if file is not None:
            name = f"tokenizer{file.suffix}"
            write_file(folder / name, read_file(file))
        if record is None:
            record = {"kind": "megasparse", "model": json.loads(body.stack.config.model_dump_json())}
            record |= {} if body.pooler is None else {"pooler": True}
        write_file(folder / RECORD, json.dumps({**record, "tokenizer": name}, indent=2) + "\n")


def open_start(config: FinetuneConfig, form: Any, labels: int) -> Start:
    """Build the body of a configuration, for tasks of a form.

    labels: number of classes that a Smart Bird sketch learns. Raises ConfigError, CheckpointError and HubError if the
    weights are missing, damaged, too short for `task.max_length`, or do not match `start.sha256`.
    """
    if config.model is not None:
        named, body = config.task.tokenizer, _megasparse_body(config, config.model, form, labels)
        run = Path(config.run.directory)
        tokenizer = build_tokenizer(named if Path(named).exists() else tokenizer_copy(named, run))
        if config.start.glove is not None:
            initialise_from_glove(body.stack, config.start.glove, words_of(tokenizer))
        start = Start(body, tokenizer)
    elif config.start.checkpoint is not None:
        start = _of_checkpoint(config, Path(config.start.checkpoint), form, labels)
    else:
        start = _of_huggingface(config, Path(str(config.start.huggingface)), form, labels)
    expected = config.start.sha256
    if expected is not None and expected != start.sha256:
        hint = "Use the weights that the run started from, or choose another run.directory and remove start.sha256"
        raise ConfigError("start.sha256", f"{show(expected)}, but the weights have {show(start.sha256)}", hint)
    require_length(config, start.body)
    return start


def require_length(config: FinetuneConfig, body: Backbone) -> None:
    """Raise ConfigError if the inputs can be longer than the sequences that a body reads."""
    if config.task.max_length > body.longest:
        problem = f"{config.task.max_length} tokens are more than the model's maximum of {body.longest}"
        raise ConfigError("task.max_length", problem, "Lower it, or use a model trained on longer inputs")


def rebuild(run: Path, form: Any, checkpoint: Checkpoint) -> tuple[Backbone, Tokenizer]:
    """Build a run's body, without its weights, and its tokenizer.

    Raises CheckpointError if the record cannot be read or does not describe the checkpoint's weights.
    """
    with _record_of(run) as (record, tokenizer):
        if record["kind"] == "megasparse":
            stored = checkpoint.manifest["tensors"].get("weight", {})
            model = ModelConfig.model_validate(record["model"])
            body = on_meta(checkpoint, model, lambda: body_of(record, form.body))
            for name, parameter in body.named_parameters():
                entry = stored.get(f"body.{name}")
                if entry is not None and entry["shape"] != list(parameter.shape):
                    problem = f"body.{name} has shape {entry['shape']}, but {list(parameter.shape)} in the run's record"
                    raise CheckpointError(checkpoint.path, problem, COPY)
        else:
            from megasparse.hub.tensor_file import depth

            layers = depth(record["config"])
            if layers > (weights := len(checkpoint.manifest["tensors"].get("weight", {}))):
                raise CheckpointError(checkpoint.path, f"contains {weights} weights, the record {layers} layers", COPY)
        return body_of(record, form.body), tokenizer


def body_of(record: dict[str, Any], build: Callable[[ModelConfig], Backbone] = MegasparseBody) -> Backbone:
    """Build the body that a record describes, without its weights. build: builds a megasparse body."""
    if record["kind"] == "megasparse":
        own: Any = build(ModelConfig.model_validate(record["model"]))
        if record.get("pooler"):
            own.norm = None
        return cast(Backbone, own)
    from transformers import AutoConfig, AutoModel

    from megasparse.hub.replace import ENTRY, positions, replace_attention

    values = record["config"]
    empty = AutoConfig.for_model(**values)
    transformer = AutoModel.from_config(empty, trust_remote_code=False, dtype=torch.float32)
    if (entry := values.get(ENTRY)) is not None:
        replace_attention(transformer, entry["attention"], max_length=entry["max_length"], seed=entry["seed"])
    return HuggingFaceBody(transformer, record["causal"], positions(transformer), record["activations"])


@contextmanager
def _record_of(run: Path) -> Iterator[tuple[dict[str, Any], Tokenizer]]:
    """Yield the record and tokenizer in a run's folder. Raises CheckpointError if reading or using them fails."""
    folder = run / FOLDER
    try:
        record = json.loads(read_file(folder / RECORD))
        name = record["tokenizer"]
        yield record, build_tokenizer(name if name in NAMED else str(folder / Path(name).name))
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(folder / RECORD, f"cannot be read ({type(error).__name__})", COPY) from None


def body_of_run(run: Path, config: FinetuneConfig, form: Any, checkpoint: Checkpoint) -> tuple[Backbone, Tokenizer]:
    """Build a run's body, without its trained weights, and its tokenizer.

    Checkpoints of adapters do not contain the frozen weights, which are loaded from `start` again. Raises
    CheckpointError if the run's record cannot be read, or the pretrained weights are missing.
    """
    if config.lora is None:
        return rebuild(run, form, checkpoint)
    with _record_of(run) as (record, tokenizer):
        labels = re.search(r'"labels": ([1-9][0-9]*)', json.dumps(record))  # of a sketch
    try:
        body = open_start(config, form, int(labels[1]) if labels else 2).body
    except (CheckpointError, ConfigError, HubError) as error:
        key = "start.checkpoint" if config.start.checkpoint is not None else "start.huggingface"
        raise CheckpointError(run, f"its pretrained weights cannot be read ({error})", f"Set {key}") from None
    add_adapters(body, config.lora, config.run.seed)
    return body, tokenizer


def _of_checkpoint(config: FinetuneConfig, path: Path, form: Any, labels: int) -> Start:
    from megasparse.evaluation.results import trained_tokenizer

    checkpoint = open_newest(path, build=empty_model)
    pretrained = checkpoint.config
    tensors = {name: partial(checkpoint.tensor, "weight", name) for name in checkpoint.manifest["tensors"]["weight"]}
    body = _filled_body(config, pretrained.model, form, labels, tensors, partial(CheckpointError, checkpoint.path))
    pooler = [tensors[name] for name in ("sentence_order.dense", "sentence_order.dense_bias") if name in tensors]
    if len(pooler) == 2 and pretrained.model.style == "bert" and form.reads_pooler:
        body.pooler, body.norm = (pooler[0](), pooler[1]()), None
    return Start(body, trained_tokenizer(pretrained, checkpoint), checkpoint.manifest["sha256"])


def _of_huggingface(config: FinetuneConfig, named: Path, form: Any, labels: int) -> Start:
    from megasparse.hub import require_transformers
    from megasparse.hub.importing import HFModel, find_folder, read_config
    from megasparse.hub.tokenizer_files import found_tokenizer, require_tokenizer

    require_transformers()
    folder = find_folder(named)
    values = read_config(folder)
    digests = "".join(f"{file.name} {file_sha256(file)}\n" for file in sorted(folder.glob("*.safetensors")))
    sha256 = hashlib.sha256(digests.encode()).hexdigest()
    if values.get("model_type") in OURS:
        foreign = HFModel.open(folder)
        body = _filled_body(config, foreign.config.model, form, labels, foreign.tensors, partial(HubError, folder))
        return Start(body, build_tokenizer(foreign.config.data.tokenizer), sha256)
    if form.two_sided:
        raise HubError(folder, "is not a megasparse encoder-decoder", "Use such a checkpoint, or `model`")
    require_tokenizer(folder)
    tokenizer = build_tokenizer(found_tokenizer(folder, None))
    body, record = _transformer(config, folder, labels)
    return Start(body, tokenizer, sha256, record)


def _transformer(config: FinetuneConfig, folder: Path, labels: int) -> tuple[Backbone, dict[str, Any]]:
    """Load a model that remains a transformers model, with its attention replaced on request."""
    from transformers import AutoModel
    from transformers.utils.logging import disable_progress_bar

    from megasparse.hub.replace import ENCODERS, ENTRY, extend_positions, load_whole, positions, replace_attention
    from megasparse.hub.tensor_file import TensorFile

    disable_progress_bar()
    attention, longest = config.start.attention, config.task.max_length
    model = load_whole(AutoModel, folder, new_head=True, dtype=torch.float32)
    if model.config.is_encoder_decoder:
        raise HubError(folder, "is an encoder-decoder, without one state per sequence", "Use a decoder or an encoder")
    if attention is not None:
        settings = _with_sketch_labels(attention, labels).model_dump(mode="json", exclude_unset=True)
        replace_attention(model, settings, max_length=longest, seed=config.run.seed)
    elif not hasattr(model.config, ENTRY) and model.config.model_type in ENCODERS and longest > positions(model):
        extend_positions(model, longest)
    encoder = model.config.model_type in ENCODERS and not getattr(model.config, "is_decoder", False)
    causal = not encoder and any(getattr(module, "is_causal", False) for module in model.modules())
    record: dict[str, Any] = {"causal": causal, "activations": config.start.activations or "stored"}
    dense = getattr(getattr(model, "pooler", None), "dense", None)  # BERT's, on the first token's state
    body = HuggingFaceBody(model, longest=positions(model), **record)
    if isinstance(dense, torch.nn.Linear) and dense.bias is not None and dense.weight.shape[0] == dense.in_features:
        stored = sum("pooler.dense." in name for name in TensorFile.open(folder).names()) == 2
        body.pooler = None if not stored else (dense.weight.detach().clone(), dense.bias.detach().clone())
    return body, {"kind": "transformers", "config": model.config.to_dict(), **record}


def _megasparse_body(config: FinetuneConfig, model: ModelConfig, form: Any, labels: int) -> Any:
    """Build a megasparse model with initial weights, its configuration adapted to a task.

    A Smart Bird sketch gets the task's objective, unless that is to predict tokens as in pretraining. Lengths are
    explicit, so the padding token is an ordinary token. Raises ConfigError for a model of another kind.
    """
    if (model.kind == "encoder_decoder") != form.two_sided:
        key = "start" if config.model is None else "model.kind"
        kinds = '"encoder_decoder"' if form.two_sided else '"encoder" or "decoder"'
        raise ConfigError(key, f'"{model.kind}" is not supported by {form.task.name}', f"Use a model of kind {kinds}")
    start = config.start
    changes: dict[str, Any] = {"padding_token": None, "document_separator": None, "loss_tiles": 1}
    if start.attention is not None:
        model = model.changed(attention=start.attention)
        check_model(model)
    if form.pooled_sketch:
        changes["attention"] = _with_sketch_labels(model.attention, labels)
        if model.source is not None:
            attention = _with_sketch_labels(model.source.attention, labels)
            changes["source"] = model.source.changed(attention=attention)
    if start.activations is not None:
        if model.blocks == "reversible":
            raise ConfigError("start.activations", f'"{start.activations}" is for ordinary blocks', "Set it to null")
        changes["activations"] = start.activations
    model = model.changed(**changes)
    body: Any = form.body(model)
    initialise(body.stack, model, config.run.seed)
    return body


def _with_sketch_labels(attention: AttentionConfig, labels: int) -> AttentionConfig:
    used = {kind for entry in attention.pattern for kind in ([entry] if isinstance(entry, str) else entry)}
    sections = {kind: getattr(attention, kind) for kind in used}
    changed = {kind: new for kind, old in sections.items() if (new := old.with_labels(labels)) is not old}
    return attention.changed(**changed)


def _filled_body(
    config: FinetuneConfig, model: ModelConfig, form: Any, labels: int, tensors: Any, error: Callable[..., FileError]
) -> Any:
    """Build a megasparse model with pretrained weights; a sketch's objective keeps its initial weights.

    tensors: readers by name. error: constructor of errors about their folder.
    """
    body = _megasparse_body(config, model, form, labels)
    for name, tensor in {**dict(body.stack.named_parameters()), **persistent_buffers(body.stack)}.items():
        if ".objective." in name:
            continue
        if name not in tensors:
            hint = "Use a checkpoint of the same model, or set start.attention to null to use the checkpoint's"
            raise error(f"contains no weight {name}", hint)
        tensor.data.copy_(tensors[name]())
    return body
