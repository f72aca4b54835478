"""BERT, and ours of `style` bert: the same network under other names."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn.functional as F
from pydantic import ValidationError
from torch import Tensor

from megasparse.config.attention import heads_of_layer
from megasparse.config.model_checks import check_model
from megasparse.config.schema import Config, ModelConfig
from megasparse.errors import HubError
from megasparse.hub.compare import watched_outputs
from megasparse.hub.formats import Exported, Imported, check_parts, must_be
from megasparse.hub.tensor_file import TensorFile
from megasparse.hub.tokenizer_files import tokenizer_files

if TYPE_CHECKING:
    from transformers import PreTrainedModel

HEAD, HEAD_BIAS = "cls.predictions.decoder.weight", "cls.predictions.bias"
SECOND_BIAS = "cls.predictions.decoder.bias"
"""The same parameter as `HEAD_BIAS` where embeddings are tied, and the one that counts where they are not."""
TABLE, TYPES = "embedding.positions.table", "embedding.token_types"
OWN_CONFIG = "Give a model with its own config.json"


@dataclass(frozen=True)
class Weight:
    """A parameter of both models."""

    ours: str
    theirs: str
    shape: tuple[int, ...]
    """Shape in HuggingFace's model; ours may lack rows of a table that nothing reads, and sides of length 1."""
    our_shape: tuple[int, ...] | None = None
    """Shape in our model, where it differs by sides of length 1."""


class BERTFormat:
    """`BertForMaskedLM`. Every parameter of either model is one of the other's, bit for bit, but for what follows.

    Token types: the table is kept whole, though tokens of ours are all of the first type; where ours has no table,
    theirs is one row of zeros. Positions: rows that nothing reads (`positions.offset`) are kept, and are zeros where
    ours has fewer. A pooler and a next-sentence head are left out on import.

    The mask token is `mask_token_id` of config.json, a key that HuggingFace's own configuration has not; without it,
    the last token. Not carried over: what acts in training alone (dropout of attention weights), what trades memory for
    time (tiles, activations), and the tokens that begin, end and pad a text.
    """

    name = "bert"
    architecture = "BertForMaskedLM"
    attention = "full"
    """The kind, in our configuration, of every layer's attention."""
    offset = 0
    """Rows of the position table before the first position's."""
    wanted: ClassVar[dict[str, Any]] = {
        "hidden_act": "gelu",
        "is_decoder": False,
        "position_embedding_type": "absolute",
    }
    """Values that config.json must have."""
    ignored: tuple[str, ...] = ("bert.pooler.", "cls.seq_relationship.", "bert.embeddings.position_ids")
    """How names of tensors begin that may be there and are not read."""
    head = "cls.predictions."
    """How the names of the head's tensors begin."""

    def export(self, config: Config, weight: Callable[[str], Tensor]) -> Exported:
        """See formats.Format."""
        model = config.model
        self._check_expressible(model)
        files = tokenizer_files(config, model.max_length, room=model.vocabulary)
        return Exported(self._hf_config(model), partial(self._export, model, weight), files)

    def load(self, hf_config: dict[str, Any], tensors: TensorFile) -> Imported:
        """See formats.Format. A model without its head, whose tensors may lack the prefix of its type, has no weights
        for ours.
        """
        path = tensors.path / "config.json"
        config = self._read_config(hf_config, path)
        model = self._model(config, path)
        names = tensors.names()
        headless = not any(name.startswith(self.head) for name in names)
        weights = [w for w in self._weights(model) if not (headless and w.ours.startswith("head."))]
        stored = {weight.ours: self._stored_name(weight.theirs, names) for weight in weights}
        shapes = {stored[weight.ours]: weight.shape for weight in weights}
        head, bias, second = (self.their_name(name) for name in (HEAD, HEAD_BIAS, SECOND_BIAS))
        copies = [head, second] if model.tied_embeddings else [bias]
        ignored = tuple(self._stored_name(start, names) for start in self.ignored)
        beside = [name for name in names if name in copies or name.startswith(ignored)]
        tensors.check(shapes | {name: tensors.shape(name) for name in beside})
        if model.tied_embeddings:
            check_tied(tensors, head, stored["embedding.weight"])
            check_tied(tensors, second, bias)
        found: dict[str, Callable[[], Tensor]] = {
            weight.ours: partial(_read, tensors, stored[weight.ours], weight) for weight in weights
        }
        section = model.model_dump(mode="json", exclude_unset=True)
        return Imported({"model": section, "data": {"sequence_length": model.max_length}}, found)

    @torch.no_grad()
    def outputs(self, model: "PreTrainedModel", tokens: Tensor, seed: int) -> Iterator[tuple[str, Tensor]]:
        """See formats.Format. The output of a branch is what is added to the stream."""
        base: Any = getattr(model, self.name)
        watched = {"embedding": base.embeddings}
        for number, layer in enumerate(base.encoder.layer):
            watched[f"layer {number} attention"] = layer.attention.output.dense
            watched[f"layer {number} feed-forward"] = layer.output.dense
        mask = torch.ones_like(tokens)
        return watched_outputs(watched, lambda: model(attention_mask=mask, **self.inputs(tokens)).logits)

    # What another architecture has under other names.

    def their_name(self, name: str) -> str:
        """The name of a tensor, given BERT's with the prefix of this type."""
        return name

    def inputs(self, tokens: Tensor) -> dict[str, Tensor]:
        """Arguments of HuggingFace's model by which every token is real and has its own position."""
        return {"input_ids": tokens}

    # What the attention adds to the two configurations and to the parameters.

    def attention_of(self, config: Any, path: Path) -> dict[str, Any]:
        """Our `model.attention`. Raises HubError naming `path` and the key that it cannot express."""
        return {"pattern": [self.attention]}

    def hf_attention(self, model: ModelConfig) -> dict[str, Any]:
        """Keys of config.json. Raises HubError naming our key that they cannot express."""
        self.must_be("attention.full.shared_qk", model.attention.full.shared_qk, False)
        return {"attention_probs_dropout_prob": model.attention.dropout}

    def attention_weights(self, model: ModelConfig, ours: str, theirs: str) -> Iterator[Weight]:
        """Weights beside the projections; ours, theirs: how the names of a layer's attention begin."""
        return iter(())

    def must_be(self, key: str, value: Any, *only: Any) -> None:
        must_be(self.name, key, value, *only)

    def _check_expressible(self, model: ModelConfig) -> None:
        self.must_be("kind", model.kind, "encoder")
        self.must_be("style", model.style, "bert")
        self.must_be("positions.kind", model.positions.kind, "learned")
        self.must_be("positions.offset", model.positions.offset, *range(self.offset + 1))
        self.must_be("head_dim", model.head_dim, None, model.d_model / model.heads)
        check_parts(self.name, model)
        for number, entry in enumerate(model.attention.pattern):
            if heads_of_layer(model, number) != {self.attention: model.heads}:
                self.must_be(f"attention.pattern[{number}]", entry, self.attention)

    def _hf_config(self, model: ModelConfig) -> dict[str, Any]:
        return {
            "model_type": self.name,
            "architectures": [self.architecture],
            "vocab_size": model.vocabulary,
            "hidden_size": model.d_model,
            "num_hidden_layers": model.layers,
            "num_attention_heads": model.heads,
            "intermediate_size": model.d_ff,
            "hidden_act": "gelu",
            "hidden_dropout_prob": model.dropout,
            "max_position_embeddings": model.max_length,
            "type_vocab_size": max(1, model.token_types),
            "layer_norm_eps": model.norm_eps,
            "tie_word_embeddings": model.tied_embeddings,
            "bos_token_id": None,
            "eos_token_id": None,
            "pad_token_id": None,
            "mask_token_id": model.masking.token,
            **self.hf_attention(model),
        }

    def _read_config(self, values: dict[str, Any], path: Path) -> Any:
        """HuggingFace's configuration. Raises HubError naming `path` for what is none, or not expressible here."""
        config = read_configuration(self.name, values, path)
        for key, only in self.wanted.items():
            if (value := getattr(config, key, only)) != only:
                raise not_ours(path, key, value, repr(only))
        if config.num_attention_heads < 1 or config.hidden_size % config.num_attention_heads:
            only = f"a divisor of hidden_size = {config.hidden_size}"
            raise not_ours(path, "num_attention_heads", config.num_attention_heads, only)
        if config.type_vocab_size < 1:
            raise not_ours(path, "type_vocab_size", config.type_vocab_size, "1 or more")
        return config

    def _model(self, config: Any, path: Path) -> ModelConfig:
        mask = getattr(config, "mask_token_id", None)
        section = {
            "kind": "encoder",
            "style": "bert",
            "vocabulary": config.vocab_size,
            "max_length": config.max_position_embeddings,
            "layers": config.num_hidden_layers,
            "d_model": config.hidden_size,
            "d_ff": config.intermediate_size,
            "heads": config.num_attention_heads,
            "blocks": "ordinary",
            "activations": "stored",
            "dropout": float(config.hidden_dropout_prob),
            "norm_eps": float(config.layer_norm_eps),
            "tied_embeddings": config.tie_word_embeddings,
            "token_types": config.type_vocab_size,
            "positions": {"kind": "learned", "offset": self.offset},
            "attention": self.attention_of(config, path),
            "masking": {"token": config.vocab_size - 1 if mask is None else mask},
        }
        return model_of(section, path)

    def _weights(self, model: ModelConfig) -> Iterator[Weight]:
        width, inner, vocabulary = model.d_model, model.d_ff, model.vocabulary
        embeddings = f"{self.name}.embeddings"
        yield Weight("embedding.weight", f"{embeddings}.word_embeddings.weight", (vocabulary, width))
        positions = self.offset + model.max_length
        yield Weight(TABLE, f"{embeddings}.position_embeddings.weight", (positions, width))
        types = max(1, model.token_types)
        yield Weight(TYPES, f"{embeddings}.token_type_embeddings.weight", (types, width))
        yield from _pair("embedding.norm.weight", "embedding.norm.bias", f"{embeddings}.LayerNorm", (width,))
        for layer in range(model.layers):
            ours, theirs = f"blocks.{layer}", f"{self.name}.encoder.layer.{layer}"
            attention, feed = f"{ours}.attention.attention", f"{ours}.feed_forward.feed_forward"
            for part, there in (
                ("query", "self.query"),
                ("key", "self.key"),
                ("value", "self.value"),
                ("output", "output.dense"),
            ):
                name = f"{attention}.{part}"
                yield from _pair(f"{name}.weight", f"{name}.bias", f"{theirs}.attention.{there}", (width, width))
            yield from self.attention_weights(model, attention, f"{theirs}.attention")
            for branch, there in (("attention", "attention.output"), ("feed_forward", "output")):
                name = f"{ours}.{branch}.norm"
                yield from _pair(f"{name}.weight", f"{name}.bias", f"{theirs}.{there}.LayerNorm", (width,))
            yield from _pair(f"{feed}.up", f"{feed}.up_bias", f"{theirs}.intermediate.dense", (inner, width))
            yield from _pair(f"{feed}.down", f"{feed}.down_bias", f"{theirs}.output.dense", (width, inner))
        transform = "cls.predictions.transform"
        yield from _pair("head.dense", "head.dense_bias", f"{transform}.dense", (width, width))
        yield from _pair("head.norm_weight", "head.norm_bias", f"{transform}.LayerNorm", (width,))
        if not model.tied_embeddings:
            yield Weight("head.weight", HEAD, (vocabulary, width))
        yield Weight("head.bias", HEAD_BIAS if model.tied_embeddings else SECOND_BIAS, (vocabulary,))

    def _stored_name(self, name: str, names: list[str]) -> str:
        """The name in a file with `names`: a model without its head may lack the prefix, and the first BERTs have
        LayerNorm.gamma and LayerNorm.beta.
        """
        name, prefix = self.their_name(name), f"{self.name}."
        if not any(each.startswith(prefix) for each in names):
            name = name.removeprefix(prefix)
        old = name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")
        return old if old in names else name

    def _export(self, model: ModelConfig, weight: Callable[[str], Tensor]) -> Iterator[tuple[str, Tensor]]:
        for one in self._weights(model):
            if one.ours == TYPES and not model.token_types:
                yield self.their_name(one.theirs), torch.zeros(one.shape)
                continue
            value = weight(one.ours)
            if one.ours == TABLE:
                value = F.pad(value, (0, 0, one.shape[0] - len(value), 0))
            yield self.their_name(one.theirs), value.reshape(one.shape)
            if one.theirs == SECOND_BIAS:
                yield self.their_name(HEAD_BIAS), value


FORMAT = BERTFormat()


def read_configuration(name: str, values: dict[str, Any], path: Path) -> Any:
    """HuggingFace's configuration of a model_type. Raises HubError naming `path` for what is none, and for a model
    whose attention was replaced: its weights alone would be read, as those of a model with full attention.
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
    """Our configuration of the values that were read from `path`. Raises HubError, or ConfigError for values that do
    not go together.
    """
    try:
        model = ModelConfig.model_validate(section)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in ("model", *first["loc"]))
        raise HubError(path, f"gives {key} = {first['input']!r} ({first['msg']})", OWN_CONFIG) from None
    check_model(model)
    return model


def not_ours(path: Path, key: str, value: Any, only: str) -> HubError:
    """The error that config.json has a value that ours cannot express."""
    return HubError(path, f"{key} is {value!r}, and ours has only {only} there", "Such a model cannot be imported")


def _pair(ours: str, our_bias: str, theirs: str, shape: tuple[int, ...]) -> Iterator[Weight]:
    """Weight and bias of a linear layer or a norm."""
    yield Weight(ours, f"{theirs}.weight", shape)
    yield Weight(our_bias, f"{theirs}.bias", shape[:1])


def _read(tensors: TensorFile, name: str, weight: Weight) -> Tensor:
    value = tensors.read(name, weight.shape)
    return value if weight.our_shape is None else value.view(weight.our_shape)


def check_tied(tensors: TensorFile, copy: str, of: str) -> None:
    """Raise HubError where the file has a tied parameter twice, with different values."""
    if copy in tensors.names() and not torch.equal(tensors.read(copy), tensors.read(of)):
        problem = f"{copy} and {of} differ, though by its config.json they are one"
        raise HubError(tensors.path, problem, 'Set "tie_word_embeddings" to false there, or remove the first one')
