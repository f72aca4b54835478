"""The architectures of Hugging Face that a model of ours can be written as and read from, and tables of weights."""

import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

import torch
import torch.nn.functional as F
from pydantic import ValidationError
from torch import Tensor

from megasparse.config.model_checks import check_model
from megasparse.config.schema import Config, ModelConfig
from megasparse.errors import ConfigError, HubError, did_you_mean
from megasparse.hub.tensor_file import TensorFile

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Exported:
    """A model of ours as one of Hugging Face's."""

    config: dict[str, Any]
    """Its config.json, with `model_type` and `architectures`."""
    tensors: Callable[[], Iterator[tuple[str, Tensor]]]
    """Hugging Face's name and value of each tensor, made one at a time."""
    files: dict[str, str | bytes] = field(default_factory=dict)
    """Content of the other files of its folder, by name: a tokenizer, code."""


@dataclass(frozen=True)
class Imported:
    """A model of Hugging Face's as one of ours."""

    config: dict[str, Any]
    """Sections of our configuration, `model` above all."""
    tensors: dict[str, Callable[[], Tensor]]
    """Our name of every parameter and learned buffer, and its value (fp32), read when called."""


class Format(Protocol):
    """An architecture of Hugging Face beside ours."""

    name: str
    """`model_type` of its config.json."""

    def export(self, config: Config, weight: Callable[[str], Tensor]) -> Exported:
        """Return the exported tensors and files. weight: the value (fp32) of our parameter of a name.

        Raises HubError naming the key of the configuration, and its value, that the architecture cannot express.
        """

    def load(self, hf_config: dict[str, Any], tensors: TensorFile) -> Imported:
        """Raises HubError for what ours cannot express, and for missing, unexpected and wrong-shaped tensors."""

    def logits(self, model: "PreTrainedModel", tokens: Tensor, seed: int) -> Tensor:
        """Return the logits (B, L, V) of Hugging Face's model as `compare.our_logits` defines them.

        tokens: (B, L). seed: of the run that trained the model, on which random hashes depend.
        """


DECODERS = ("gpt2", "llama", "mistral", "qwen2", "qwen3")

FORMATS = {
    **dict.fromkeys(("bert", "roberta", "yoso"), "megasparse.hub.bert"),
    **dict.fromkeys(DECODERS, "megasparse.hub.decoders"),
    "megasparse": "megasparse.hub.megasparse_format",
    "reformer": "megasparse.hub.reformer",
}
"""The module of each, whose FORMAT it is or is in; imported when it is asked for, because it may need transformers."""
TASKS = {"decoder": "ForCausalLM", "encoder": "ForMaskedLM", "encoder_decoder": "ForSeq2SeqLM"}
"""Endings of the names of Hugging Face's classes, by our kinds of models."""
PARTS = (
    "key_heads", "attention_biases", "query_key_norm", "feed_forward", "feed_forward_biases", "norm", "logit_scale",
    "start_token",
)  # fmt: skip
"""Keys of `model` that Hugging Face's encoders and Reformers have one value of."""
OWN_CONFIG = "Give a model with its own config.json"


def format_named(name: str) -> Format:
    """Raises ConfigError where there is none of this name."""
    if name not in FORMATS:
        raise ConfigError("format", f'there is none named "{name}"', did_you_mean(name, FORMATS))
    module = importlib.import_module(FORMATS[name]).FORMAT
    return cast(Format, module[name] if isinstance(module, dict) else module)


def comparable(format: Format, config: Config) -> Config:
    """Return the configuration of ours, of the same weights, whose logits are those that `format.logits` gives."""
    return cast(Config, getattr(format, "comparable", lambda same: same)(config))


# Configurations


def must_be(architecture: str, key: str, value: Any, *only: Any) -> None:
    """Raise HubError for a value of our configuration that an architecture of Hugging Face's has not."""
    if value not in only:
        allowed = " or ".join(map(repr, only))
        problem = f"{value!r} is not in HuggingFace's {architecture}, which has only {allowed} there"
        raise HubError(f"model.{key}", problem, "Export to another format, such as megasparse")


def check_parts(architecture: str, model: ModelConfig) -> None:
    """Raise HubError for another value of one of PARTS than its default."""
    for key in PARTS:
        must_be(architecture, key, getattr(model, key), ModelConfig.model_fields[key].default)


def not_ours(path: Path, key: str, value: Any, only: str) -> HubError:
    """The error that config.json has a value that ours cannot express."""
    return HubError(path, f"{key} is {value!r}, and ours has only {only} there", "Such a model cannot be imported")


def read_configuration(name: str, values: dict[str, Any], path: Path) -> Any:
    """Return Hugging Face's configuration of a model_type. Raises HubError naming `path` for what is none, and for a
    model whose attention was replaced: its weights would be read as those of a model with full attention.
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers import CONFIG_MAPPING

    from megasparse.hub.replace import ENTRY

    if ENTRY in values:
        problem = f"its attention was replaced ({ENTRY} in its config.json), which would be lost"
        hint = "Give the model that it was made from, or train it as megasparse.hub.load_replaced loads it"
        raise HubError(path, problem, hint)
    if values.get("model_type") != name:
        raise HubError(path, f"its model_type is {values.get('model_type')!r}", f"Give a model of {name!r}")
    try:
        return CONFIG_MAPPING[name].from_dict(values)
    except (StrictDataclassError, TypeError, ValueError, LookupError) as error:
        problem = f"is no configuration of {name} ({' '.join(str(error).split())})"
        raise HubError(path, problem, OWN_CONFIG) from None


def model_of(section: dict[str, Any], path: Path) -> ModelConfig:
    """Return our configuration of the values that were read from `path`. Raises HubError, or ConfigError for values
    that do not go together.
    """
    try:
        model = ModelConfig.model_validate(section)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in ("model", *first["loc"]))
        raise HubError(path, f"gives {key} = {first['input']!r} ({first['msg']})", OWN_CONFIG) from None
    check_model(model)
    return model


# Weights


class Weight(NamedTuple):
    """A parameter of Hugging Face's model, and those of ours that it is, one after another."""

    ours: tuple[str, ...]
    """Empty where ours has none: zeros."""
    theirs: str
    shape: tuple[int, ...]
    """Shape in Hugging Face's model; ours may lack the first rows of a table that nothing reads."""
    our_shape: tuple[int, ...] = ()
    transposed: bool = False

    def read(self, tensors: TensorFile, stored: str, number: int) -> Tensor:
        """Return our parameter of a number. stored: the name of theirs in the file."""
        value = tensors.read(stored, self.shape)
        value = (value.T if self.transposed else value).chunk(len(self.ours))[number]
        return value.reshape(self.our_shape).contiguous()

    def write(self, weight: Callable[[str], Tensor]) -> Tensor:
        """Return their parameter. weight: ours of a name."""
        if not self.ours:
            return torch.zeros(self.shape)
        value = torch.cat([weight(name) for name in self.ours])
        if self.transposed:
            return value.T
        if value.dim() == 2 and (missing := self.shape[0] - len(value)) > 0:
            value = F.pad(value, (0, 0, missing, 0))
        return value.reshape(self.shape)


PAIRS = {".*": (".weight", ".bias"), "_*": ("_weight", "_bias"), "~": ("", "_bias")}


def weights_of(table: str, model: ModelConfig) -> list[Weight]:
    """Return the weights of a table that a model of ours has.

    table: lines of our name and theirs. `{}` is the number of a layer; `a|b|c` in ours are joined there; a `T` behind
    them means that theirs is transposed. `.*`, `_*` and `~` in ours, with `.*` in theirs, are a weight and its bias.
    """
    from megasparse.hub.megasparse_format import shapes

    sizes, weights = shapes(model), []
    for in_layers, lines in groupby(filter(None, map(str.strip, table.splitlines())), lambda line: "{}" in line):
        rows = [row for line in lines for row in _rows(line)]
        for layer in range(model.layers) if in_layers else [0]:
            for ours, theirs, transposed in rows:
                names = tuple(name.format(layer) for name in ours)
                if names[0] not in sizes:
                    continue
                size = sizes[names[0]]
                shape = (size[0] * len(names), *size[1:])
                weights.append(
                    Weight(names, theirs.format(layer), shape[::-1] if transposed else shape, size, transposed)
                )
    return weights


def _rows(line: str) -> Iterator[tuple[list[str], str, bool]]:
    ours, theirs, *flags = line.split()
    ending = next((ending for ending in PAIRS if ours.endswith(ending)), "")
    for our_end, their_end in zip(PAIRS.get(ending, ("",)), PAIRS[".*"] if ending else ("",), strict=False):
        name = ours.removesuffix(ending) + our_end
        joined = next((part for part in name.split(".") if "|" in part), "")
        names = [name.replace(joined, part) for part in joined.split("|")] if joined else [name]
        yield names, theirs.removesuffix(".*" if ending else "") + their_end, bool(flags) and "bias" not in our_end


def readers(
    tensors: TensorFile, weights: list[Weight], stored: Mapping[str, str], further: Mapping[str, Iterable[int]]
) -> dict[str, Callable[[], Tensor]]:
    """Return how each of our weights is read. stored: the name in the file of each of theirs. further: shapes of other
    tensors that the file has. Raises HubError for missing, wrong-shaped and unexpected tensors.
    """
    tensors.check({stored[weight.theirs]: weight.shape for weight in weights} | dict(further))
    return {
        name: partial(weight.read, tensors, stored[weight.theirs], number)
        for weight in weights
        for number, name in enumerate(weight.ours)
    }


def check_tied(tensors: TensorFile, copy: str, of: str) -> None:
    """Raise HubError where the file has a tied parameter twice, with different values."""
    if copy in tensors.names() and not torch.equal(tensors.read(copy), tensors.read(of)):
        problem = f"{copy} and {of} differ, though by its config.json they are one"
        raise HubError(tensors.path, problem, 'Set "tie_word_embeddings" to false there, or remove the first one')
