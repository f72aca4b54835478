"""Hugging Face architectures that megasparse models are exported to and imported from, tables of weights, and the
comparison of both models on the same tokens. B batch, L length, S length of a source, V vocabulary.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from pydantic import ValidationError
from torch import Tensor

from megasparse.attention.heads import Padding
from megasparse.config.schema import Config, ModelConfig, heads_of_layer
from megasparse.errors import HubError
from megasparse.hub.tensor_file import OWN_CONFIG, TensorFile
from megasparse.model.build import Model, empty_model
from megasparse.model.decoder import Causal, EncoderDecoder
from megasparse.model.stack import padding_of
from megasparse.ops.random import RngContext
from megasparse.settings.checks import check_model
from megasparse.training.checkpoints.checkpoint import persistent_buffers


@dataclass(frozen=True)
class Exported:
    """A megasparse model in the form of a Hugging Face model."""

    config: dict[str, Any]
    tensors: Callable[[], Iterator[tuple[str, Tensor]]]
    """Yields name and value of each tensor, one at a time."""
    files: dict[str, str | bytes] = field(default_factory=dict)


@dataclass(frozen=True)
class Imported:
    """A Hugging Face model in the form of a megasparse model."""

    config: dict[str, Any]
    tensors: dict[str, Callable[[], Tensor]]
    """Reader of every parameter and learned buffer (fp32), by megasparse's name."""


class Format(ABC):
    """A Hugging Face architecture and its conversion to and from megasparse."""

    name: str
    """`model_type` in config.json."""
    note = ""
    loading: ClassVar[dict[str, Any]] = {}
    """Arguments of from_pretrained for the model whose logits are compared."""
    unread: ClassVar[frozenset[str]] = frozenset()
    """Tensors that only some versions of transformers read."""

    @abstractmethod
    def export(self, config: Config, weight: Callable[[str], Tensor]) -> Exported:
        """Convert a megasparse model. weight: returns a parameter (fp32) by name. Raises HubError for a key that the
        architecture cannot express.
        """

    @abstractmethod
    def load(self, hf_config: dict[str, Any], tensors: TensorFile) -> Imported:
        """Convert a Hugging Face model. Raises HubError for unsupported settings and for missing or wrong tensors."""

    @abstractmethod
    def logits(self, model: Any, tokens: Tensor, seed: int) -> Tensor:
        """Return the logits (B, L, V) of Hugging Face's model as `our_logits` does. seed: of the
        run that trained it.
        """

    def comparable(self, config: Config) -> Config:
        """Return a configuration with the same weights whose logits equal `logits`."""
        return config

    def must_be(self, model: ModelConfig, key: str, *only: Any) -> None:
        """Raise HubError unless a key of the `model` section is one of the values `only`."""
        if (value := attrgetter(key)(model)) not in only:
            raise self.inexpressible(key, value, " or ".join(map(repr, only)))

    def inexpressible(self, key: str, value: Any, only: str) -> HubError:
        problem = f"{value!r} is not supported by Hugging Face's {self.name}, only {only}"
        return HubError(f"model.{key}", problem, "Export to another format, such as megasparse")

    def check_parts(self, model: ModelConfig) -> None:
        """Raise HubError unless PARTS are the defaults."""
        for key in PARTS:
            self.must_be(model, key, ModelConfig.model_fields[key].default)

    def check_pattern(self, model: ModelConfig, *kinds: str) -> None:
        """Raise HubError unless all heads of each layer have one of these kinds of attention."""
        for number, entry in enumerate(model.attention.pattern):
            if len(split := heads_of_layer(model, number)) > 1 or not split.keys() <= {*kinds}:
                raise self.inexpressible(f"attention.pattern[{number}]", entry, " or ".join(map(repr, kinds)))


DECODERS = ("gpt2", "llama", "mistral", "qwen2", "qwen3")

TASKS = {"decoder": "ForCausalLM", "encoder": "ForMaskedLM", "encoder_decoder": "ForSeq2SeqLM"}
"""Suffix of Hugging Face's class names."""
PARTS = (
    "key_heads", "attention_biases", "query_key_norm", "feed_forward", "feed_forward_biases", "norm", "logit_scale",
    "start_token", "ngrams",
)  # fmt: skip
"""Keys of `model` of which Hugging Face's encoders and Reformers support only the default."""


# Configurations

SIZES = {
    "vocabulary": "vocab_size",
    "max_length": "max_position_embeddings",
    "layers": "num_hidden_layers",
    "d_model": "hidden_size",
    "heads": "num_attention_heads",
    "tied_embeddings": "tie_word_embeddings",
}
"""Hugging Face's key for keys of the `model` section."""


def sizes_of(config: Any, names: Mapping[str, str]) -> dict[str, Any]:
    return {ours: getattr(config, theirs) for ours, theirs in names.items()}


def hf_sizes(model: ModelConfig, names: Mapping[str, str]) -> dict[str, Any]:
    return {theirs: getattr(model, ours) for ours, theirs in names.items()}


def not_ours(path: Path, key: str, value: Any, only: str) -> HubError:
    return HubError(path, f"{key} is {value!r}, but megasparse supports only {only}", "Such models cannot be imported")


def check_only(config: Any, only: Mapping[str, Any], path: Path) -> None:
    """Raise HubError for a value of config.json that is not supported."""
    for key, expected in only.items():
        if (value := getattr(config, key, expected)) != expected:
            raise not_ours(path, key, value, repr(expected))


def read_configuration(name: str, values: dict[str, Any], path: Path) -> Any:
    """Parse Hugging Face's configuration of a model_type. Raises HubError if it is invalid, or if the attention was
    replaced: the weights would be loaded as a model with full attention.
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers import CONFIG_MAPPING

    from megasparse.hub.replace import ENTRY

    if ENTRY in values and name not in DECODERS:
        raise HubError(path, f"its attention was replaced ({ENTRY}), which would be lost", "Use the original model")
    if values.get("model_type") != name:
        raise HubError(path, f"its model_type is {values.get('model_type')!r}", f"Use a model of type {name!r}")
    damages = (StrictDataclassError, TypeError, ValueError, LookupError)
    with HubError.instead_of(damages, path, f"is not a configuration of {name} ({{}})", OWN_CONFIG):
        return CONFIG_MAPPING[name].from_dict(values)


def model_of(section: dict[str, Any], path: Path) -> ModelConfig:
    """Validate a `model` section read from `path`."""
    try:
        model = ModelConfig.model_validate(section)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in ("model", *first["loc"]))
        raise HubError(path, f"gives {key} = {first['input']!r} ({first['msg']})", OWN_CONFIG) from None
    check_model(model)
    return model


# Weights


def shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all parameters and learned buffers of a model."""
    model = unfilled(config)
    return {name: tuple(x.shape) for name, x in {**dict(model.named_parameters()), **persistent_buffers(model)}.items()}


def unfilled(config: ModelConfig) -> Any:
    """Build a model on the meta device."""
    with torch.device("meta"):
        return empty_model(config)


class Weight(NamedTuple):
    """A parameter of Hugging Face's model, and the megasparse parameters that it concatenates."""

    ours: tuple[str, ...]
    """Empty if megasparse lacks the parameter, which is then exported as zeros."""
    theirs: str
    shape: tuple[int, ...]
    """Shape in Hugging Face's model; megasparse may omit the unused first rows of a table."""
    our_shape: tuple[int, ...] = ()
    transposed: bool = False

    def read(self, tensors: TensorFile, stored: str, number: int) -> Tensor:
        """Return the megasparse parameter `ours[number]`. stored: name in the file."""
        value = tensors.read(stored, self.shape)
        value = (value.T if self.transposed else value).chunk(len(self.ours))[number]
        return value.reshape(self.our_shape).contiguous()

    def write(self, weight: Callable[[str], Tensor]) -> Tensor:
        """Return Hugging Face's parameter. weight: reads megasparse's."""
        if not self.ours:
            return torch.zeros(self.shape)
        value = torch.cat([weight(name) for name in self.ours])
        if self.transposed:
            return value.T
        if value.dim() == 2 and (missing := self.shape[0] - len(value)) > 0:
            value = F.pad(value, (0, 0, missing, 0))
        return value.reshape(self.shape)


PAIRS = {".*": (".weight", ".bias"), "_*": ("_weight", "_bias"), "~": ("", "_bias")}


def weights_of(table: str, layers: str, model: ModelConfig) -> list[Weight]:
    """Return the weights in a table that the megasparse model contains.

    table: lines of two names, megasparse's and Hugging Face's; `a|b|c` are concatenated; a `T` at the end means that
    Hugging Face's is transposed. `.*`, `_*` and `~`, with `.*` in the second name, are both a weight and its bias. Two
    prefixes ending in a dot mean all names with the first one. Names that start with a dot are below `blocks.{}` and
    `layers`.
    """
    sizes, weights = shapes(model), []
    lines = filter(None, map(str.strip, table.splitlines()))
    for in_layers, group in groupby(lines, lambda line: line.startswith(".")):
        rows = [row for line in group for row in _rows(line)]
        for layer in range(model.layers) if in_layers else [0]:
            ours_start, theirs_start = (f"blocks.{layer}", layers.format(layer)) if in_layers else ("", "")
            for ours, theirs, transposed in rows:
                first = ours_start + ours[0]
                parts = [name.removeprefix(first) for name in sizes if name.startswith(first)]
                for part in parts if first.endswith(".") else {""} & {*parts}:
                    names = tuple(ours_start + name + part for name in ours)
                    size = sizes[names[0]]
                    shape = (size[0] * len(names), *size[1:])
                    shape = shape[::-1] if transposed else shape
                    weights.append(Weight(names, theirs_start + theirs + part, shape, size, transposed))
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
    """Return a reader for each megasparse weight. stored: name in the file of each of Hugging Face's weights. further:
    shapes of other tensors. Raises HubError for missing, unexpected and wrong-shaped tensors.
    """
    tensors.check({stored[weight.theirs]: weight.shape for weight in weights} | dict(further))
    return {
        name: partial(weight.read, tensors, stored[weight.theirs], number)
        for weight in weights
        for number, name in enumerate(weight.ours)
    }


def use_tied(stored: dict[str, str], weight: str, copy: str, names: list[str]) -> None:
    """Read a tied weight from its copy in a file with `names` that contains only the copy. stored: see `readers`."""
    if stored[weight] not in names and copy in names:
        stored[weight] = copy


# Both models on the same tokens

TOLERANCE = 1e-4
"""Largest difference between the logits of equal models in fp32."""
LONGEST = 512
"""Longest sequence for the comparison, in tokens; half of it for a source."""


def compared_length(config: ModelConfig) -> int:
    if config.source is None:
        return min(config.max_length, LONGEST)
    return min(config.source.length, LONGEST // 2) + min(config.max_length, LONGEST // 2)


def sides(tokens: Tensor, config: ModelConfig) -> list[Tensor]:
    """Split sequences of `compared_length` into source (B, S) and target (B, L − S)."""
    assert config.source is not None
    return list(tokens.tensor_split([min(config.source.length, LONGEST // 2)], dim=1))


def padded(tokens: Tensor, config: ModelConfig) -> Tensor:
    """Pad tokens (B, L) as in the model's data: an encoder–decoder's last sequence, a quarter of source and target."""
    padding = config.padding_token
    if config.source is None or padding is None:
        return tokens
    tokens = tokens.where(tokens != padding, (padding + 1) % config.vocabulary)
    for side in sides(tokens, config):
        side[-1, side.shape[1] - side.shape[1] // 4 :] = padding
    return tokens


@torch.no_grad()
def our_logits(model: Model, tokens: Tensor, seed: int) -> Tensor:
    """Return the logits (B, L, V) in evaluation, with the draws of a run's seed; of an encoder–decoder's target. A
    decoder's logits at t predict token t from the tokens before it.
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
    """Return the largest difference between logits; infinite for NaN."""
    assert ours.shape == theirs.shape, f"shapes {ours.shape} and {theirs.shape} differ"
    largest = float((ours.double() - theirs.double()).abs().max())
    return largest if largest < torch.inf else torch.inf


def disagreement(pairs: Iterable[tuple[Tensor, Tensor]]) -> float:
    """Return 0 if the logits agree in any pair, else their largest difference in the first: a wrong weight changes all
    pairs, while rounding changes a hash only in some.
    """
    differences = []
    for ours, theirs in pairs:
        differences.append(difference(ours, theirs))
        if differences[-1] <= TOLERANCE:
            return 0.0
    return differences[0]


def require_agreement(pairs: Iterable[tuple[Tensor, Tensor]], folder: Path) -> None:
    """Raise HubError unless our and the exported model's logits agree in one of the pairs."""
    if largest := disagreement(pairs):
        raise HubError(folder, f"not written: its logits differ by {largest:.2g} (over {TOLERANCE})", "Report this")
