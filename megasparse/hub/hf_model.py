"""A model of HuggingFace's in a local folder: which one it is, and what it is as one of ours."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from megasparse.config.files import parse_json
from megasparse.config.load import build_config
from megasparse.config.schema import Config, ModelConfig, SourceConfig
from megasparse.data.tokenizers import build_tokenizer
from megasparse.errors import HubError, did_you_mean
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
from megasparse.hub.tensor_file import TensorFile
from megasparse.hub.tokenizer_files import FILE, GENERATION, SPECIAL, Files, beside, found_tokenizer
from megasparse.model.build import Model, build_model
from megasparse.training.checkpoints.checkpoint import persistent_buffers

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
        kind = format_named(_known_type(values, folder))
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
    def tokenizer_file(self) -> Path | None:
        """Path of the tokenizer's file in the folder; None where the tokenizer needs none."""
        return build_tokenizer(self.config.data.tokenizer).file

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

    def load_original(self) -> Any:
        """HuggingFace's own model, in fp32."""
        prefix = "Megasparse" if self.format.name == "megasparse" else "AutoModel"
        settings = {"local_files_only": True, "use_safetensors": True, "dtype": torch.float32}
        try:
            return hf_class(prefix + TASKS[self.config.model.kind]).from_pretrained(self.folder, **settings)
        except (OSError, ValueError, RuntimeError) as error:
            problem = f"transformers does not load it ({' '.join(str(error).split())})"
            raise HubError(self.folder, problem, "Give a model that it loads") from None

    def compare(self) -> int:
        """Run both models on the same random tokens; returns their number. Raises HubError where they differ."""
        ours, theirs = self.build(self.format.comparable(self.config)), self.load_original()
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
        text = path.read_text(encoding="utf-8")
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


def _known_type(values: dict[str, Any], folder: Path) -> str:
    name = values.get("model_type")
    if isinstance(name, str) and name in FORMATS:
        return name
    path = folder / "config.json"
    if "auto_map" in values:
        problem = f"model_type is {name!r}, whose code comes with the model, and such code is not run"
        raise HubError(path, problem, f"Give a model of a known architecture: {', '.join(sorted(FORMATS))}")
    raise HubError(path, f"model_type is {name!r}, which cannot be imported", did_you_mean(str(name), FORMATS))
