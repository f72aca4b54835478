"""Hugging Face models as megasparse models: loaded from a local folder, written as a checkpoint, and used as the start
of a run that may have another attention and task.
"""

import json
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import torch
from torch import Tensor, nn

from megasparse.config.files import parse_json
from megasparse.config.schema import Config, ModelConfig, SourceConfig
from megasparse.data.tokenizers import build_tokenizer
from megasparse.errors import ConfigError, HubError
from megasparse.files import read_file
from megasparse.hub.architectures import FORMATS, format_named, hf_class
from megasparse.hub.formats import (
    DECODERS,
    TASKS,
    Format,
    compared_length,
    disagreement,
    our_logits,
    padded,
    shapes,
    unfilled,
)
from megasparse.hub.gguf_file import unpack_gguf
from megasparse.hub.replace import load_whole
from megasparse.hub.tensor_file import OWN_CONFIG, TensorFile, appearing, refuse_quantised
from megasparse.hub.tokenizer_files import (
    GENERATION,
    SPECIAL,
    Files,
    companion_files,
    found_tokenizer,
    require_tokenizer,
)
from megasparse.hub.versions import require_transformers
from megasparse.model.adapters import add_adapters
from megasparse.model.build import Model, build_model, deferred_model, empty_model, initial_weight
from megasparse.model.embedding import lengthened
from megasparse.ops.quantised import is_quantised, quantise
from megasparse.settings.load import build_config
from megasparse.training.checkpoints.bucket import Bucket
from megasparse.training.checkpoints.checkpoint import (
    Checkpoint,
    Fragment,
    load_weights,
    open_newest,
    persistent_buffers,
)
from megasparse.training.checkpoints.manifest import (
    MANIFEST,
    NO_DATA,
    RunIdentity,
    build_manifest,
    find_checkpoint,
    find_newest,
    read_manifest,
    refuse_adapters,
    seal,
    weights_digest,
)
from megasparse.training.checkpoints.rank_file import RankFile, durable, make_folder
from megasparse.training.engines.contract import put
from megasparse.training.ranks import Ranks
from megasparse.training.reporting.memory import trim_memory


@dataclass(frozen=True)
class HFModel:
    """A Hugging Face model that megasparse can express."""

    source: Path
    """The folder or GGUF file, for messages."""
    folder: Path
    format: Format
    config: Config
    """Configuration of the megasparse model, not yet of a run."""
    tensors: dict[str, Callable[[], Tensor]]
    temporary: TemporaryDirectory[str] | None = None
    """Parent of the folder if it was unpacked."""

    @staticmethod
    def open(name: str | Path) -> "HFModel":
        """Open a model: a folder, a GGUF file, or the name of a model in transformers' local cache. Nothing is
        downloaded, and code that comes with the model is not run. Raises HubError if it is damaged or cannot be
        expressed.
        """
        if Path(name).suffix != ".gguf":
            return HFModel._in_folder(folder := find_folder(name), folder)
        unpacked = unpack_gguf(Path(name))
        try:
            return HFModel._in_folder(Path(name), Path(unpacked.name), unpacked)
        except HubError as error:  # name the file, not the folder
            raise HubError(name, error.problem, error.hint) from None

    @staticmethod
    def _in_folder(source: Path, folder: Path, unpacked: TemporaryDirectory[str] | None = None) -> "HFModel":
        values = read_config(folder)
        architecture, path = values.get("model_type"), folder / "config.json"
        if not isinstance(architecture, str) or architecture not in FORMATS:
            foreign = "whose code comes with the model; such code is not run"
            reason = foreign if "auto_map" in values else "which cannot be imported"
            hint = f"Supported: {', '.join(sorted(FORMATS))}"  # a near name, as mistral of mixtral, is another model
            raise HubError(path, f"model_type is {architecture!r}, {reason}", hint)
        kind = format_named(architecture)
        if kind.name in ("bert", "roberta", *DECODERS):
            require_tokenizer(folder)
        imported = kind.load(values, TensorFile.open(folder))
        model = imported.config["model"]
        length = model.get("max_length", ModelConfig().max_length)
        if model.get("source") is not None:
            length += model["source"].get("length", SourceConfig().length)
        data = {"sequence_length": length, **imported.config.get("data", {})}
        data["tokenizer"] = found_tokenizer(folder, data.get("tokenizer"))
        sections = _with_special(folder, {**imported.config, "data": data})
        return HFModel(source, folder, kind, build_config(sections), imported.tensors, unpacked)

    @property
    def companion_files(self) -> Files:
        """Files next to a decoder's tokenizer, with its end and padding tokens."""
        if self.format.name not in DECODERS:
            return {}
        values = read_config(self.folder)
        ids = {key: values[key] for key in SPECIAL if values.get(key) is not None}
        return {GENERATION: json.dumps(ids, indent=2) + "\n", **companion_files(self.folder)}

    def build(self, config: Config | None = None) -> Model:
        """Build the megasparse model in evaluation mode. config: another one for the same weights."""
        config = config or self.config
        model = build_model(config.model, config.run.seed)
        weights = {**dict(model.named_parameters()), **persistent_buffers(model)}
        if lost := [name for name in weights if name not in self.tensors]:
            problem = f"contains no {lost[0]}, as a model without the language-modelling head"
            raise HubError(self.source, problem, "Start a run from it: megasparse pretrain CONFIG --start FOLDER")
        return fill(model, lambda name: self.tensors[name]())

    def compare(self) -> int:
        """Compare both models on random tokens. Return their number."""
        ours = self.build(self.format.comparable(self.config))
        prefix = "Megasparse" if self.format.name == "megasparse" else "AutoModel"
        loader = hf_class(prefix + TASKS[self.config.model.kind])
        theirs = load_whole(loader, self.folder, dtype=torch.float32, **self.format.loading)
        model, seed = self.config.model, self.config.run.seed
        length = compared_length(model)

        def logits(draw: int) -> tuple[Tensor, Tensor]:
            generator = torch.Generator().manual_seed(draw)
            tokens = padded(torch.randint(model.vocabulary, (1, length), generator=generator), model)
            return our_logits(ours, tokens, seed), self.format.logits(theirs, tokens, seed)

        if difference := disagreement(map(logits, range(3))):
            raise HubError(self.source, f"megasparse's logits differ from its logits by {difference:.2g}", "Report it")
        return length


@torch.no_grad()
def fill(model: Model, read: Callable[[str], Tensor]) -> Model:
    for name, weight in {**dict(model.named_parameters()), **persistent_buffers(model)}.items():
        weight.copy_(read(name))
    return model.eval()


def find_folder(name: str | Path) -> Path:
    """Return `name` if it is a folder, else the folder of that model in the local cache."""
    if Path(name).is_dir():
        refuse_adapters(Path(name))
        return Path(name)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    problem = "not a folder, and no model of this name is in transformers' local cache"
    hint = "Use the folder of a model, or download the model first with the `hf download` command"
    with HubError.instead_of((HFValidationError, LocalEntryNotFoundError, OSError), name, problem, hint):
        return Path(snapshot_download(str(name), local_files_only=True))


def read_config(folder: Path) -> dict[str, Any]:
    """Read the config.json of a folder."""
    path = folder / "config.json"
    hint = "Use the folder of a Hugging Face model"
    with HubError.instead_of((OSError, ValueError), path, "cannot be read ({})", hint):
        text = read_file(path).decode()
    values = parse_json(text, str(path))
    if not isinstance(values, dict):
        raise HubError(path, "is not a configuration", hint)
    return values


def _with_special(folder: Path, sections: dict[str, Any]) -> dict[str, Any]:
    """Add the tokenizer's mask token to the sections."""
    tokenizer = build_tokenizer(sections["data"]["tokenizer"])
    model = dict(sections["model"])
    if tokenizer.file is None:
        return sections
    highest = max([tokenizer.vocabulary - 1, *(tokenizer.special or ())])
    if highest >= (rows := model.get("vocabulary", ModelConfig().vocabulary)):
        problem = f"{tokenizer.file.name} contains the token {highest}, but the model only {rows} tokens"
        raise HubError(folder, problem, "Use a model with its original tokenizer")
    if model.get("kind") == "encoder" and tokenizer.special is not None:
        model["masking"] = {**model.get("masking", {}), "token": tokenizer.special.mask}
    return {**sections, "model": model}


# Checkpoints of weights that were not trained by megasparse

VOCABULARY = ("embedding.weight", "head.weight", "head.bias")

POSITIONS = ("embedding.positions.table", "embedding.positions.axes.0")
"""Weights with one row per position, or per cell of the slowest axis."""

Readers = Mapping[str, Callable[[], Tensor]]
FIRST = Path("checkpoints", "00000000")
"""Path of a checkpoint in a run's folder before the first step."""


def write_checkpoint(
    config: Config,
    tensors: Readers,
    output: str | Path,
    tokenizer: Path | None = None,
    files: Mapping[str, str | bytes] | None = None,
) -> Path:
    """Write OUTPUT/checkpoints/00000000, a checkpoint that contains only weights, and OUTPUT/config.json, atomically.

    `megasparse pretrain --resume PATH` starts from it, on any data of its tokenizer. tensors: readers of every
    parameter and persistent buffer (fp32), called one at a time. tokenizer: file to copy to `data.tokenizer` in OUTPUT.
    files: content of further files. Raises HubError if OUTPUT exists, or for a missing, unexpected, wrong-shaped or not
    finite tensor.
    """
    output, name, expected = Path(output), "rank-00000.safetensors", shapes(config.model)
    for weight in (*tensors, *expected):
        if weight not in expected or weight not in tensors:
            problem = "a weight of the model, is missing" if weight in expected else "is not a weight of the model"
            raise HubError(weight, problem, OWN_CONFIG)
    fragments = [_Unread(weight, shape, tensors[weight]) for weight, shape in expected.items()]
    written = {"config.json": (config.model_dump_json(indent=2) + "\n").encode(), **(files or {})}
    if tokenizer is not None:
        written[Path(config.data.tokenizer).name] = read_file(tokenizer)
    with appearing(output) as folder:
        make_folder(folder / FIRST)
        file = RankFile(cast(list[Fragment], fragments))
        digest = file.write(folder / FIRST / name, lambda: None)
        source = config.data.tokenizer if tokenizer is None else str(tokenizer)
        run = RunIdentity(config, NO_DATA, build_tokenizer(source).identity)
        part = {"file": name, "bytes": file.bytes, "sha256": digest, "pieces": file.pieces}
        progress = {"step": 0, "sequences": 0, "state": {}, "optimizer_steps": 0, "world_size": 1}
        written[str(FIRST / MANIFEST)] = seal(build_manifest(run, [part], **progress))
        for path, content in written.items():
            raw = content.encode() if isinstance(content, str) else content
            with durable(folder / path, len(raw)) as out:
                out.write(raw)
    return output / FIRST


def with_first_token(tensors: Readers, first: int) -> Readers:
    """Rotate the vocabulary so that token `first` becomes token 0."""

    def rolled(name: str) -> Tensor:
        value = tensors[name]()
        return value.roll(-first, dims=0) if name in VOCABULARY else value

    return {name: partial(rolled, name) for name in tensors}


class _Unread:
    """The part of a Fragment that `RankFile` needs, with memory allocated only while it is written."""

    kind, start = "weight", 0

    def __init__(self, name: str, shape: tuple[int, ...], read: Callable[[], Tensor]):
        self.name, self.shape, self.numel, self._read = name, shape, math.prod(shape), read

    @property
    def memory(self) -> Tensor:
        value = self._read()
        if tuple(value.shape) != self.shape:
            raise HubError(self.name, f"has shape {list(value.shape)}, but {list(self.shape)} in the model", OWN_CONFIG)
        if not value.isfinite().all():
            raise HubError(self.name, "contains a number that is not finite", "Use an undamaged model")
        return value.detach().to(torch.float32).contiguous().view(-1)


# Runs that start from the weights of another model


def base_values(source: str | Path, weights: bool = True) -> dict[str, Any]:
    """Return the base of a configuration that starts from `source`: its model and tokenizer. weights: False reads only
    config.json of a decoder, and returns no tokenizer.
    """
    path = Path(source)
    if not weights and (path / "config.json").is_file():
        values = read_config(path)
        if (name := values.get("model_type")) in DECODERS:
            refuse_quantised(path, values)
            return {"model": cast(Any, format_named(name)).model_section(values, path / "config.json")}
    if (model := _hf_model(path)) is not None:
        config = model.config
    else:
        checkpoint = find_checkpoint(path)
        config = Checkpoint(checkpoint, read_manifest(checkpoint)).config
    return config.model_dump(mode="json", include={"model": True, "data": {"tokenizer"}})


def resumed_from(config: Config, source: str | Path, ranks: Ranks) -> str:
    """Return the value of `--resume` for a run that starts from `source`: its newest checkpoint, or the one that
    `write_start` writes to RUN/start on rank 0. With adapters always "auto", because its checkpoints contain only the
    adapters, and RUN/start the base weights. Every rank calls it.
    """
    start = _start_of(config)

    def prepare() -> bool:
        bucket = config.checkpoint.bucket
        has_checkpoints = bool(find_newest(start.parents[1] / "checkpoints") or (bucket and Bucket(bucket).steps()))
        if not start.exists() and (config.lora is not None or not has_checkpoints):
            new, unused = (", ".join(names) for names in write_start(config, Path(source), start.parents[1]))
            print(f"started from {source}; new weights: {new or 'none'}; unused: {unused or 'none'}", file=sys.stderr)
        return has_checkpoints

    return "auto" if ranks.on_first_rank(prepare) or config.lora is not None else str(start)


def require_base(config: Config) -> None:
    """Raise ConfigError if a run with adapters lacks base weights."""
    if not (start := _start_of(config)).exists():
        raise ConfigError("lora", f"{start.parents[1]} contains no base weights", "Name a model with --start")


def require_start(config: Config, source: Path, ranks: Ranks) -> None:
    """Raise HubError if RUN/start was written from other weights than `source`. Every rank calls it.

    It reads vectors and the first block, so that a resume does not read a large model twice.
    """

    def compare() -> None:
        base, (pretrained, _) = Checkpoint.open(start := _start_of(config), build=empty_model), _weights_of(source)
        for name, entry in base.manifest["tensors"]["weight"].items():
            read = name in pretrained and (len(entry["shape"]) == 1 or "blocks.0." in name)
            if read and not torch.equal(pretrained[name]().float(), base.tensor("weight", name)):
                problem = f"{start.parents[1]} was written from other weights ({name} differs)"
                hint = "Omit --start to continue that run, or set run.directory to a new folder"
                raise HubError(source, problem, hint)

    if _start_of(config).exists():
        ranks.on_first_rank(compare)


def base_digest(config: Config) -> str:
    return weights_digest(read_manifest(_start_of(config)))


def _start_of(config: Config) -> Path:
    return Path(config.run.directory) / "start" / FIRST


def adapted(config: Config, device: torch.device) -> nn.Module:
    """Return the model of a run with adapters before its first step, on `device`: the frozen weights of RUN/start, read
    one at a time, quantised or in the precision of the run, and the adapters.
    """
    lora = config.lora
    assert lora is not None
    model, base = deferred_model(config.model, config.run.seed), Checkpoint.open(_start_of(config), build=empty_model)
    load_weights(model, base, buffers_only=True)
    dtype = torch.bfloat16 if config.training.precision == "bf16" else torch.float32
    for name, weight in model.named_parameters():
        values = base.tensor("weight", name).to(device)
        if lora.quantized is not None and is_quantised(name, weight.shape):
            values = quantise(values, lora.quantized, dtype)
        elif ".mechanisms." not in name:
            values = values.to(dtype)
        put(weight, values)
        del values
        base.close()
        trim_memory()
    add_adapters(model, lora, config.run.seed)
    return model


def write_start(config: Config, source: Path, output: Path) -> tuple[list[str], list[str]]:
    """Write OUTPUT/checkpoints/00000000, the model of `config` before its first step, with the pretrained weights of
    `source` and initial values for all others. A shorter table of positions is repeated. Return the names of the
    others, and of unused pretrained weights. Raises HubError if a weight has another shape or the tokenizers differ.
    """
    pretrained, tokenizer = _weights_of(source)
    if tokenizer != build_tokenizer(config.data.tokenizer).identity:
        problem = f"its tokenizer ({tokenizer['name']}) differs from data.tokenizer = {config.data.tokenizer}"
        raise HubError(source, problem, "Prepare the data with the model's tokenizer, and set data.tokenizer to it")
    new = [name for name in shapes(config.model) if name not in pretrained]
    model = deferred_model(config.model, config.run.seed) if new else unfilled(config.model)
    weights = {**dict(model.named_parameters()), **persistent_buffers(model)}
    if "embedding.weight" not in pretrained:
        raise HubError(source, "contains no token embedding", "Use a pretrained decoder or encoder")

    def read(name: str, weight: Tensor) -> Tensor:
        if name not in pretrained:
            initial = initial_weight(config.model, config.run.seed, name, weight.shape) if weight.is_meta else weight
            return initial.detach().view(weight.shape)
        value = pretrained[name]()
        if name in POSITIONS and value.shape[1:] == weight.shape[1:] and len(value) < len(weight):
            print(f"{name}: lengthened from {len(value)} to {len(weight)} rows by repetition", file=sys.stderr)
            return lengthened(value, len(weight), config.model.positions.offset)
        if value.shape != weight.shape:
            problem = f"{name} has shape {list(value.shape)}, but {list(weight.shape)} in the configured model"
            raise HubError(source, problem, "Set the sizes of the model (model.*) to those of the pretrained one")
        return value

    readers = {name: partial(read, name, weight) for name, weight in weights.items()}
    write_checkpoint(config.changed(lora=None), readers, output)
    return new, [name for name in pretrained if name not in weights]


def _weights_of(source: Path) -> tuple[Readers, dict[str, str]]:
    """Return readers of the weights of a Hugging Face folder or a checkpoint, and the identity of its tokenizer."""
    if (model := _hf_model(source)) is not None:
        return model.tensors, build_tokenizer(model.config.data.tokenizer).identity
    checkpoint = open_newest(source, build=empty_model)
    names = checkpoint.manifest["tensors"]["weight"]
    return {name: partial(checkpoint.tensor, "weight", name) for name in names}, checkpoint.manifest["tokenizer"]


def _hf_model(source: Path) -> HFModel | None:
    """Open a Hugging Face model's folder; None for a megasparse run."""
    try:
        if "model_type" not in read_config(source):
            return None
    except HubError:
        return None
    require_transformers()
    return HFModel.open(source)
