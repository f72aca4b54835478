"""The architectures of HuggingFace that a model of ours can be written as, and read from."""

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, cast

from torch import Tensor

from megasparse.config.schema import Config, ModelConfig
from megasparse.errors import ConfigError, HubError, did_you_mean
from megasparse.hub.tensor_file import TensorFile

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Exported:
    """A model of ours as one of HuggingFace's."""

    config: dict[str, Any]
    """Its config.json, with `model_type` and `architectures`."""
    tensors: Callable[[], Iterator[tuple[str, Tensor]]]
    """HuggingFace's name and value of each tensor, made one at a time."""
    files: dict[str, str | bytes] = field(default_factory=dict)
    """Content of what else its folder holds, by name: a tokenizer, code."""


@dataclass(frozen=True)
class Imported:
    """A model of HuggingFace's as one of ours."""

    config: dict[str, Any]
    """Sections of our configuration, `model` above all."""
    tensors: dict[str, Callable[[], Tensor]]
    """Our name of every parameter and learned buffer, and its value (fp32), read when called."""


class Format(Protocol):
    """An architecture of HuggingFace beside ours."""

    name: str
    """`model_type` of its config.json."""

    def export(self, config: Config, weight: Callable[[str], Tensor]) -> Exported:
        """Return the exported tensors and files. weight: the value (fp32) of our parameter of a name.

        Raises HubError naming the key of the configuration, and its value, that the architecture cannot express.
        """

    def load(self, hf_config: dict[str, Any], tensors: TensorFile) -> Imported:
        """Raises HubError for what ours cannot express, and for missing, unexpected and wrong-shaped tensors."""

    def outputs(self, model: "PreTrainedModel", tokens: Tensor, seed: int) -> Iterator[tuple[str, Tensor]]:
        """Outputs of HuggingFace's model, layer by layer, by the names of `compare.our_outputs` and in its order.

        tokens: (B, L). seed: of the run that trained the model, on which random hashes depend.
        """


DECODERS = ("gpt2", "llama", "mistral", "qwen2", "qwen3")

FORMATS = {
    "bert": "megasparse.hub.bert",
    **dict.fromkeys(DECODERS, "megasparse.hub.decoders"),
    "megasparse": "megasparse.hub.megasparse_format",
    "reformer": "megasparse.hub.reformer",
    "roberta": "megasparse.hub.roberta",
    "yoso": "megasparse.hub.yoso",
}
"""The module of each, whose FORMAT it is or has; imported only when it is asked for, for it may need transformers."""


TASKS = {"decoder": "ForCausalLM", "encoder": "ForMaskedLM", "encoder_decoder": "ForSeq2SeqLM"}
"""How the names of HuggingFace's classes end, by our kinds of models."""


def format_named(name: str) -> Format:
    """Raises ConfigError where there is none of this name."""
    if name not in FORMATS:
        raise ConfigError("format", f'there is none named "{name}"', did_you_mean(name, FORMATS))
    found = importlib.import_module(FORMATS[name]).FORMAT
    return cast(Format, found[name] if isinstance(found, dict) else found)


PARTS = (
    "key_heads", "attention_biases", "query_key_norm", "feed_forward", "feed_forward_biases", "norm", "logit_scale",
    "start_token",
)  # fmt: skip
"""Keys of `model` that encoders and Reformers of HuggingFace's have one value of."""


def must_be(architecture: str, key: str, value: Any, *only: Any) -> None:
    """Raise HubError for a value of our configuration that an architecture of HuggingFace's has not."""
    if value not in only:
        there = " or ".join(map(repr, only))
        problem = f"{value!r} is not in HuggingFace's {architecture}, which has only {there} there"
        raise HubError(f"model.{key}", problem, "Export to another format, such as megasparse")


def check_parts(architecture: str, model: ModelConfig) -> None:
    """Raise HubError for another value of one of PARTS than its default."""
    for key in PARTS:
        must_be(architecture, key, getattr(model, key), ModelConfig.model_fields[key].default)


def comparable(format: Format, config: Config) -> Config:
    """The configuration of ours, of the same weights, whose outputs are those that `format.outputs` gives: that of the
    format's own method `comparable` where it has one, else `config` itself.
    """
    return cast(Config, getattr(format, "comparable", lambda same: same)(config))
