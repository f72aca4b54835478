"""Models of HuggingFace's as ours: opened from a local folder, written as a checkpoint, and as the start of a run whose
attention and task may be others.
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
from megasparse.config.load import build_config
from megasparse.config.schema import Config, ModelConfig, SourceConfig
from megasparse.data.tokenizers import build_tokenizer
from megasparse.errors import ConfigError, HubError, UserError, did_you_mean
from megasparse.files import read_file
from megasparse.hub import require_transformers
from megasparse.hub.formats import (
    DECODERS,
    FORMATS,
    TASKS,
    Format,
    compared_length,
    disagreement,
    format_named,
    hf_class,
    our_logits,
    padded,
)
from megasparse.hub.gguf_file import unpack_gguf
from megasparse.hub.megasparse_format import shapes, unfilled
from megasparse.hub.tensor_file import TensorFile, appearing
from megasparse.hub.tokenizer_files import FILE, GENERATION, SPECIAL, Files, beside, found_tokenizer
from megasparse.model.adapters import add_adapters
from megasparse.model.build import Model, build_model, deferred_model, empty_model, initial_weight
from megasparse.training.checkpoints.bucket import newest_anywhere
from megasparse.training.checkpoints.checkpoint import (
    Checkpoint,
    Fragment,
    find_checkpoint,
    load_weights,
    open_newest,
    persistent_buffers,
)
from megasparse.training.checkpoints.manifest import FORMAT, MANIFEST, NO_DATA, read_manifest, seal, versions
from megasparse.training.checkpoints.rank_file import RankFile, durable, make_folder
from megasparse.training.ranks import Ranks

DRAWS_COMPARED = 3
"""Draws of the tokens of which one must agree."""


@dataclass(frozen=True)
class HFModel:
    """A model of HuggingFace's that ours can express."""

    folder: Path
    format: Format
    config: Config
    """Configuration of our model, which is in no run yet."""
    tensors: dict[str, Callable[[], Tensor]]
    """Our name of every weight, and its value, read when called."""
    temporary: TemporaryDirectory[str] | None = None
    """Parent of the folder if it was unpacked from a GGUF file."""

    @staticmethod
    def open(name: str | Path) -> "HFModel":
        """Open a model. name: a folder, a GGUF file, or the name of a model in transformers' local cache. Nothing is
        downloaded, and no code that comes with a model is run.

        Raises HubError for what is missing, damaged or of an architecture that ours does not express; ConfigError where
        the settings it gives do not go together.
        """
        unpacked = unpack_gguf(Path(name)) if Path(name).suffix == ".gguf" else None
        folder = find_folder(name if unpacked is None else unpacked.name)
        values = read_config(folder)
        architecture, path = values.get("model_type"), folder / "config.json"
        if not isinstance(architecture, str) or architecture not in FORMATS:
            if "auto_map" not in values:
                hint = did_you_mean(str(architecture), FORMATS)
                raise HubError(path, f"model_type is {architecture!r}, which cannot be imported", hint)
            problem = f"model_type is {architecture!r}, whose code comes with the model, and such code is not run"
            raise HubError(path, problem, f"Give a model of a known architecture: {', '.join(sorted(FORMATS))}")
        kind = format_named(architecture)
        if kind.name in ("bert", "roberta", *DECODERS) and not (folder / FILE).is_file():
            hint = "Save it there: AutoTokenizer.from_pretrained(MODEL).save_pretrained(FOLDER)"
            raise HubError(folder / FILE, "is missing, without which its tokens mean nothing", hint)
        imported = kind.load(values, TensorFile.open(folder))
        model = imported.config["model"]
        length = model.get("max_length", ModelConfig().max_length)
        if model.get("source") is not None:
            length += model["source"].get("length", SourceConfig().length)
        data = {"sequence_length": length, **imported.config.get("data", {})}
        data["tokenizer"] = found_tokenizer(folder, data.get("tokenizer"))
        sections = _with_special(folder, {**imported.config, "data": data})
        return HFModel(folder, kind, build_config(sections), imported.tensors, unpacked)

    @property
    def beside(self) -> Files:
        """A decoder's chat template, and what else lies beside its tokenizer; the tokens that end and pad a text."""
        if self.format.name not in DECODERS:
            return {}
        values = read_config(self.folder)
        ids = {key: values[key] for key in SPECIAL if values.get(key) is not None}
        return {GENERATION: json.dumps(ids, indent=2) + "\n", **beside(self.folder)}

    def build(self, config: Config | None = None) -> Model:
        """Our model with its weights, in evaluation mode. config: another one with the same weights."""
        config = config or self.config
        model = build_model(config.model, config.run.seed)
        weights = {**dict(model.named_parameters()), **persistent_buffers(model)}
        if lost := [name for name in weights if name not in self.tensors]:
            problem = f"has no weight for {lost[0]}, as a model without the head that predicts tokens"
            raise HubError(self.folder, problem, "Start a run from it: megasparse pretrain CONFIG --start FOLDER")
        with torch.no_grad():
            for name, weight in weights.items():
                weight.copy_(self.tensors[name]())
        return model.eval()

    def compare(self) -> int:
        """Run both models on the same random tokens; returns their number. Raises HubError where they differ."""
        ours = self.build(self.format.comparable(self.config))
        prefix = "Megasparse" if self.format.name == "megasparse" else "AutoModel"
        settings = {"local_files_only": True, "use_safetensors": True, "dtype": torch.float32}
        try:
            theirs = hf_class(prefix + TASKS[self.config.model.kind]).from_pretrained(self.folder, **settings)
        except (OSError, ValueError, RuntimeError) as error:
            problem = f"transformers does not load it ({' '.join(str(error).split())})"
            raise HubError(self.folder, problem, "Give a model that it loads") from None
        model, seed = self.config.model, self.config.run.seed
        length = compared_length(model)

        def logits(draw: int) -> tuple[Tensor, Tensor]:
            generator = torch.Generator().manual_seed(draw)
            tokens = padded(torch.randint(model.vocabulary, (1, length), generator=generator), model)
            return our_logits(ours, tokens, seed), self.format.logits(theirs, tokens, seed)

        if difference := disagreement(map(logits, range(DRAWS_COMPARED))):
            problem = f"our model's logits differ from its by {difference:.2g}"
            raise HubError(self.folder, problem, "Report it, with the model's config.json")
        return length


def find_folder(name: str | Path) -> Path:
    """`name` itself if it is a folder, else that of a model in the local cache."""
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(str(name), local_files_only=True))
    except (HFValidationError, LocalEntryNotFoundError, OSError):
        hint = "Give the folder of a model, or download it first with the `hf download` command"
        raise HubError(name, "is no folder, and no model of this name is in transformers' local cache", hint) from None


def read_config(folder: Path) -> dict[str, Any]:
    """The config.json of a folder. Raises HubError where there is none, ConfigError where it is no JSON."""
    path = folder / "config.json"
    try:
        text = read_file(path).decode()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "no UTF-8"
        raise HubError(path, f"cannot be read ({reason})", "Give the folder of a HuggingFace model") from None
    values = parse_json(text, str(path))
    if not isinstance(values, dict):
        raise HubError(path, "is no configuration", "Give the folder of a HuggingFace model")
    return values


def _with_special(folder: Path, sections: dict[str, Any]) -> dict[str, Any]:
    """The same sections, with the tokenizer's mask token, if it has one. Raises HubError where the model lacks it."""
    tokenizer = build_tokenizer(sections["data"]["tokenizer"])
    model = dict(sections["model"])
    if tokenizer.file is None:
        return sections
    highest = max([tokenizer.vocabulary - 1, *(tokenizer.special or ())])
    if highest >= (rows := model.get("vocabulary", ModelConfig().vocabulary)):
        problem = f"{tokenizer.file.name} has the token {highest}, and the model {rows} tokens"
        raise HubError(folder, problem, "Give a model with its own tokenizer")
    if model.get("kind") == "encoder" and tokenizer.special is not None:
        model["masking"] = {**model.get("masking", {}), "token": tokenizer.special.mask}
    return {**sections, "model": model}


# Checkpoints of weights that were not trained here

VOCABULARY = ("embedding.weight", "head.weight", "head.bias")
"""Weights that have a row for each token."""

Readers = Mapping[str, Callable[[], Tensor]]
"""Name -> what reads the value of a weight."""
FIRST = Path("checkpoints", "00000000")
"""Path of a checkpoint in a run's folder before the first step."""


def write_checkpoint(
    config: Config,
    tensors: Readers,
    output: str | Path,
    tokenizer: Path | None = None,
    files: Mapping[str, str | bytes] | None = None,
) -> Path:
    """Write OUTPUT/checkpoints/00000000, a checkpoint of weights alone, and OUTPUT/config.json; returns its path.

    A run goes on from it with `megasparse pretrain --resume PATH`, on any data of its tokenizer and with any settings
    but those of its model. tensors: the value (fp32) of every parameter and persistent buffer of `config.model`, read
    one at a time. tokenizer: its file, which is copied to `data.tokenizer`, a file in OUTPUT. files: content of
    further files, by name. OUTPUT appears whole or not at all.
    Raises HubError where OUTPUT exists, cannot be written, or a tensor is missing, unexpected, of another shape or not
    finite.
    """
    output, name, expected = Path(output), "rank-00000.safetensors", shapes(config.model)
    for weight in (*tensors, *expected):
        if weight not in expected or weight not in tensors:
            problem = "a weight of the model, is missing" if weight in expected else "is no weight of the model"
            raise HubError(weight, problem, "Give a model with its own config.json")
    fragments = [_Unread(weight, shape, tensors[weight]) for weight, shape in expected.items()]
    written = {"config.json": (config.model_dump_json(indent=2) + "\n").encode(), **(files or {})}
    if tokenizer is not None:
        written[Path(config.data.tokenizer).name] = read_file(tokenizer)
    with appearing(output) as folder:
        make_folder(folder / FIRST)
        file = RankFile(cast(list[Fragment], fragments))
        digest = file.write(folder / FIRST / name, lambda: None)
        pieces = {part: {"shape": shape, "pieces": [{"file": name, **piece}]} for _, part, shape, piece in file.pieces}
        manifest = {
            "format": FORMAT,
            "step": 0,
            "sequences": 0,
            "state": {},
            "optimizer_steps": 0,
            "world_size": 1,
            "data_fingerprint": NO_DATA,
            "versions": versions(),
            "files": {name: {"bytes": file.bytes, "sha256": digest}},
            "tensors": {"weight": pieces},
            "config": json.loads(config.model_dump_json()),
            "tokenizer": identity(config.data.tokenizer if tokenizer is None else str(tokenizer)),
        }
        written[str(FIRST / MANIFEST)] = seal(manifest)
        for path, content in written.items():
            raw = content.encode() if isinstance(content, str) else content
            with durable(folder / path, len(raw)) as out:
                out.write(raw)
    return output / FIRST


def with_first_token(tensors: Readers, first: int) -> Readers:
    """The same model with token `first` as token 0, the one after it as token 1, and those before it at the end."""

    def rolled(name: str) -> Tensor:
        value = tensors[name]()
        return value.roll(-first, dims=0) if name in VOCABULARY else value

    return {name: partial(rolled, name) for name in tensors}


class _Unread:
    """The part of a Fragment that `RankFile` needs, whose memory exists only while it is written."""

    kind, start = "weight", 0

    def __init__(self, name: str, shape: tuple[int, ...], read: Callable[[], Tensor]):
        self.name, self.shape, self.numel, self._read = name, shape, math.prod(shape), read

    @property
    def memory(self) -> Tensor:
        value = self._read()
        if tuple(value.shape) != self.shape:
            problem = f"has shape {list(value.shape)}, and {list(self.shape)} in the model"
            raise HubError(self.name, problem, "Give a model with its own config.json")
        if not value.isfinite().all():
            raise HubError(self.name, "holds a number that is not finite", "Give a model that is sound")
        return value.detach().to(torch.float32).contiguous().view(-1)


def identity(name: str) -> dict[str, str]:
    """Return how a checkpoint identifies the tokenizer that `data.tokenizer` names."""
    tokenizer = build_tokenizer(name)
    return {"name": tokenizer.name, "sha256": tokenizer.sha256}


# Runs that begin with the weights of another model


def base_values(source: str | Path) -> dict[str, Any]:
    """Return the values that a configuration extends if it starts from `source`: its model and tokenizer.

    Raises HubError and CheckpointError where there is no such model.
    """
    if (model := _hf_model(path := Path(source))) is not None:
        config = model.config
    else:
        checkpoint = find_checkpoint(path)
        config = Checkpoint(checkpoint, read_manifest(checkpoint)).config
    return config.model_dump(mode="json", include={"model": True, "data": {"tokenizer"}})


def resumed_from(config: Config, source: str | Path, ranks: Ranks) -> str:
    """Return what a run that starts from `source` resumes from: its newest checkpoint if it has one, else the one that
    `write_start` makes in RUN/start, once, on the first rank. With adapters "auto": these are in its checkpoints, and
    the weights that they belong to in RUN/start. Every rank calls it.

    Raises UserError, on all ranks, where the weights cannot be used.
    """
    start = _start_of(config)
    problem = None
    has_checkpoints = False
    if ranks.rank == 0:
        try:
            has_checkpoints = newest_anywhere(config) is not None
            if not start.exists() and (config.lora is not None or not has_checkpoints):
                new = write_start(config, Path(source), start.parents[1])
                print(f"started from {source}; new weights: {', '.join(new) or 'none'}", file=sys.stderr)
        except UserError as error:
            problem = str(error)
    has_checkpoints, problem = ranks.gather([has_checkpoints, problem])[0]
    if problem is not None:
        raise UserError(problem)
    return "auto" if has_checkpoints or config.lora is not None else str(start)


def require_base(config: Config) -> None:
    """Raise ConfigError for adapters of a run that has no start to which they could belong."""
    if config.lora is not None and not (start := _start_of(config)).exists():
        problem = f"given, but {start.parents[1]} has no weights that adapters could belong to"
        raise ConfigError("lora", problem, "Name a pretrained model with --start, or set it to null")


def _start_of(config: Config) -> Path:
    return Path(config.run.directory) / "start" / FIRST


def adapted(config: Config) -> nn.Module:
    """The model of a run with adapters before its first step: the frozen weights of RUN/start, in the precision of the
    run, and the adapters.
    """
    assert config.lora is not None
    model = empty_model(config.model)
    load_weights(model, Checkpoint.open(_start_of(config), build=empty_model))
    add_adapters(model, config.lora, config.run.seed)
    if config.training.precision == "bf16":  # as every engine will, before a GPU has them whole in fp32
        for weight in model.parameters():
            if not weight.requires_grad:
                weight.data = weight.data.bfloat16()
    return model


def write_start(config: Config, source: Path, output: Path) -> list[str]:
    """Write OUTPUT/checkpoints/00000000, the model of `config` before its first step: each weight is the pretrained
    model's of that name, where it has one, and else initial. Returns the names of the initial ones.

    source: a checkpoint or a run's folder, or a HuggingFace model's, with or without the head that predicts tokens.
    What it has beyond the model, such as another attention's own weights, is left out. Raises HubError where a weight
    has another shape, or the tokens are another tokenizer's.
    """
    if (hf_model := _hf_model(source)) is not None:
        pretrained: Readers = hf_model.tensors
        tokenizer = identity(hf_model.config.data.tokenizer)
    else:
        checkpoint = open_newest(source, build=empty_model)
        names, tokenizer = checkpoint.manifest["tensors"]["weight"], checkpoint.manifest["tokenizer"]
        pretrained = {name: partial(checkpoint.tensor, "weight", name) for name in names}
    if tokenizer != identity(config.data.tokenizer):
        problem = f"its tokenizer ({tokenizer['name']}) is another than data.tokenizer = {config.data.tokenizer}"
        raise HubError(source, problem, "Prepare the data with the model's own tokenizer, and name it there")
    new = [name for name in shapes(config.model) if name not in pretrained]
    model = deferred_model(config.model, config.run.seed) if new else unfilled(config.model)
    weights = {**dict(model.named_parameters()), **persistent_buffers(model)}
    if "embedding.weight" not in pretrained:
        raise HubError(source, "has no embedding of tokens", "Give a pretrained decoder or encoder")

    def read(name: str, weight: Tensor) -> Tensor:
        if name not in pretrained:
            initial = initial_weight(config.model, config.run.seed, name, weight.shape) if weight.is_meta else weight
            return initial.detach().view(weight.shape)
        value = pretrained[name]()
        if value.shape != weight.shape:
            problem = f"{name} has shape {list(value.shape)}, and {list(weight.shape)} in the configured model"
            raise HubError(source, problem, "Give the model the sizes of what it starts from (model.*)")
        return value

    readers = {name: partial(read, name, weight) for name, weight in weights.items()}
    write_checkpoint(config.model_copy(update={"lora": None}), readers, output)
    return new


def _hf_model(source: Path) -> HFModel | None:
    """Open a HuggingFace model's folder; None for a run of ours, whose config.json names no type."""
    try:
        if "model_type" not in read_config(source):
            return None
    except HubError:
        return None
    require_transformers()
    return HFModel.open(source)
