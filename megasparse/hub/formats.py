"""The architectures of Hugging Face that a model of ours can be written as and read from, and tables of weights; both
models on the same tokens. B batch, L length, S of them a source's, V vocabulary.
"""

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from pydantic import ValidationError
from torch import Tensor

from megasparse.attention.heads import Padding
from megasparse.config.attention import heads_of_layer
from megasparse.config.checks import check_model
from megasparse.config.schema import Config, ModelConfig
from megasparse.errors import ConfigError, HubError, did_you_mean
from megasparse.hub.tensor_file import TensorFile
from megasparse.model.build import Model
from megasparse.model.decoder import Causal, EncoderDecoder
from megasparse.model.stack import padding_of
from megasparse.ops.random import RngContext

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


class Format(ABC):
    """An architecture of Hugging Face beside ours."""

    name: str
    """`model_type` of its config.json."""
    note = ""
    """Note for the model card."""

    @abstractmethod
    def export(self, config: Config, weight: Callable[[str], Tensor]) -> Exported:
        """Return the exported tensors and files. weight: the value (fp32) of our parameter of a name.

        Raises HubError naming the key of the configuration, and its value, that the architecture cannot express.
        """

    @abstractmethod
    def load(self, hf_config: dict[str, Any], tensors: TensorFile) -> Imported:
        """Raises HubError for what ours cannot express, and for missing, unexpected and wrong-shaped tensors."""

    @abstractmethod
    def logits(self, model: "PreTrainedModel", tokens: Tensor, seed: int) -> Tensor:
        """Return the logits (B, L, V) of Hugging Face's model as `our_logits` defines them.

        tokens: (B, L). seed: of the run that trained the model, on which random hashes depend.
        """

    def comparable(self, config: Config) -> Config:
        """Return the megasparse configuration, with the same weights, whose logits `logits` gives."""
        return config

    def must_be(self, model: ModelConfig, key: str, *only: Any) -> None:
        """Raise HubError unless a key of ours has one of the values that the architecture has."""
        if (value := attrgetter(key)(model)) not in only:
            raise self.inexpressible(key, value, " or ".join(map(repr, only)))

    def inexpressible(self, key: str, value: Any, only: str) -> HubError:
        problem = f"{value!r} is not in HuggingFace's {self.name}, which has only {only} there"
        return HubError(f"model.{key}", problem, "Export to another format, such as megasparse")

    def check_parts(self, model: ModelConfig) -> None:
        """Raise HubError for another value of one of PARTS than its default."""
        for key in PARTS:
            self.must_be(model, key, ModelConfig.model_fields[key].default)

    def check_pattern(self, model: ModelConfig, kind: str) -> None:
        """Raise HubError unless all heads have attention of this kind."""
        for number, entry in enumerate(model.attention.pattern):
            if heads_of_layer(model, number) != {kind: model.heads}:
                raise self.inexpressible(f"attention.pattern[{number}]", entry, repr(kind))


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


def hf_class(name: str) -> Any:
    """Return a class of transformers, or one of ours behind its interface."""
    if name.startswith("Megasparse"):
        from megasparse.hub import modelling as classes
    else:
        import transformers as classes  # type: ignore[no-redef]
    return getattr(classes, name)


# Configurations

SIZES = {
    "vocabulary": "vocab_size",
    "max_length": "max_position_embeddings",
    "layers": "num_hidden_layers",
    "d_model": "hidden_size",
    "heads": "num_attention_heads",
    "tied_embeddings": "tie_word_embeddings",
}
"""Key of our `model` section -> Hugging Face's."""


def sizes_of(config: Any) -> dict[str, Any]:
    """Return our keys of SIZES from Hugging Face's configuration."""
    return {ours: getattr(config, theirs) for ours, theirs in SIZES.items()}


def hf_sizes(model: ModelConfig) -> dict[str, Any]:
    """Return Hugging Face's keys of SIZES from our configuration."""
    return {theirs: getattr(model, ours) for ours, theirs in SIZES.items()}


def not_ours(path: Path, key: str, value: Any, only: str) -> HubError:
    """Return the error for a value of config.json that megasparse cannot express."""
    return HubError(path, f"{key} is {value!r}, and ours has only {only} there", "Such a model cannot be imported")


def check_only(config: Any, only: Mapping[str, Any], path: Path) -> None:
    """Raise HubError naming `path` for a key of config.json with a value that megasparse does not support."""
    for key, expected in only.items():
        if (value := getattr(config, key, expected)) != expected:
            raise not_ours(path, key, value, repr(expected))


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


# Both models on the same tokens

TOLERANCE = 1e-4
"""Largest difference of the logits of two models in fp32 that count as the same."""
LONGEST = 512
"""Tokens of a sequence on which they are compared; of a source and its target half of them each."""


def compared_length(config: ModelConfig) -> int:
    """Tokens of a sequence that both models read."""
    if config.source is None:
        return min(config.max_length, LONGEST)
    return min(config.source.length, LONGEST // 2) + min(config.max_length, LONGEST // 2)


def sides(tokens: Tensor, config: ModelConfig) -> list[Tensor]:
    """Source (B, S) and target (B, L − S) of an encoder–decoder's sequences of `compared_length`."""
    assert config.source is not None
    return list(tokens.tensor_split([min(config.source.length, LONGEST // 2)], dim=1))


def padded(tokens: Tensor, config: ModelConfig) -> Tensor:
    """Tokens (B, L) as they are in the model's data: an encoder–decoder's padding stands at the end of a source and of
    a target only, here a quarter of the last sequence's.
    """
    padding = config.padding_token
    if config.source is None or padding is None:
        return tokens
    tokens = tokens.where(tokens != padding, (padding + 1) % config.vocabulary)
    for side in sides(tokens, config):
        side[-1, side.shape[1] - side.shape[1] // 4 :] = padding
    return tokens


@torch.no_grad()
def our_logits(model: Model, tokens: Tensor, seed: int) -> Tensor:
    """Return the logits (B, L, V) in evaluation, with the draws of a run's seed; of an encoder–decoder its target's.

    tokens: (B, L); a decoder's logits at t predict token t from those before it, an encoder reads them as they are.
    """
    padding = Padding(segments=padding_of(tokens, model.config).segments)
    rng, source = RngContext.evaluation(seed, len(tokens)), None
    if isinstance(model, EncoderDecoder):
        before, tokens = sides(tokens, model.config)
        source, padding = model.encode(before, seed), padding_of(tokens, model.config)
    read = tokens[:, :-1] if isinstance(model, Causal) else tokens
    streams, _, _ = model.streams(read, rng, padding, source=source)
    return model.logits(streams)


def difference(ours: Tensor, theirs: Tensor) -> float:
    """Return the largest difference of two models' logits; infinite where one is not a number."""
    assert ours.shape == theirs.shape, f"{ours.shape} is compared with {theirs.shape}"
    largest = float((ours.double() - theirs.double()).abs().max())
    return largest if largest < torch.inf else torch.inf


def disagreement(pairs: Iterable[tuple[Tensor, Tensor]]) -> float:
    """Return 0 if our and their logits agree in one of the pairs, else their difference in the first pair.

    One is enough: a wrong weight differs in each, a hash that the last bits of two bucket scores decide in one.
    """
    differences = []
    for ours, theirs in pairs:
        differences.append(difference(ours, theirs))
        if differences[-1] <= TOLERANCE:
            return 0.0
    return differences[0]
