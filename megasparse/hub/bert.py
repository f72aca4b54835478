"""Formats of BERT, RoBERTa and YOSO: megasparse encoders of `style` bert are the same network."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from megasparse.attention.heads import build_mechanism
from megasparse.attention.yoso import YOSOAttention
from megasparse.config.schema import Config, ModelConfig
from megasparse.hub.formats import (
    SIZES,
    Exported,
    Format,
    Imported,
    Weight,
    check_only,
    hf_sizes,
    model_of,
    not_ours,
    read_configuration,
    readers,
    sizes_of,
    use_tied,
    weights_of,
)
from megasparse.hub.tensor_file import TensorFile
from megasparse.hub.tokenizer_files import tokenizer_files

WEIGHTS = """
    embedding.weight                    bert.embeddings.word_embeddings.weight
    embedding.norm.*                    bert.embeddings.LayerNorm.*
    .attention.attention.query.*        .attention.self.query.*
    .attention.attention.key.*          .attention.self.key.*
    .attention.attention.value.*        .attention.self.value.*
    .attention.attention.output.*       .attention.output.dense.*
    .attention.norm.*                   .attention.output.LayerNorm.*
    .feed_forward.feed_forward.up~      .intermediate.dense.*
    .feed_forward.feed_forward.down~    .output.dense.*
    .feed_forward.norm.*                .output.LayerNorm.*
    head.dense~                         cls.predictions.transform.dense.*
    head.norm_*                         cls.predictions.transform.LayerNorm.*
    head.weight                         cls.predictions.decoder.weight
"""
NAMES = SIZES | {
    "d_ff": "intermediate_size",
    "dropout": "hidden_dropout_prob",
    "norm_eps": "layer_norm_eps",
    "token_types": "type_vocab_size",
}
HEAD, HEAD_BIAS = "cls.predictions.decoder.weight", "cls.predictions.bias"
SECOND_BIAS = "cls.predictions.decoder.bias"
"""Tied to `HEAD_BIAS` if embeddings are tied; otherwise the one in use."""


class BERTFormat(Format):
    """Format of `BertForMaskedLM`. Parameters are copied exactly, except for the following.

    The table of token types is copied, although megasparse gives all tokens the first type; without one, a row of zeros
    is exported. Unused rows of positions (`positions.offset`) are copied; missing ones are exported as zeros. A pooler
    and a next-sentence head are ignored on import. The mask token is `mask_token_id` of config.json, a key that Hugging
    Face does not define, or the last token. Dropout of attention weights, tiles, activations, and the tokens that
    start, end and pad a text are not converted.
    """

    name = "bert"
    architecture = "BertForMaskedLM"
    attention = "full"
    offset = 0
    """Unused rows at the start of the position table."""
    required: ClassVar = {"hidden_act": "gelu", "is_decoder": False, "position_embedding_type": "absolute"}
    """Values that config.json must have."""
    ignored: tuple[str, ...] = ("bert.pooler.", "cls.seq_relationship.", "bert.embeddings.position_ids")
    """Prefixes of tensors to ignore."""
    head = "cls.predictions."

    def export(self, config: Config, weight: Callable[[str], Tensor]) -> Exported:
        model = config.model
        self._check_expressible(model)
        files = tokenizer_files(config, model.max_length, room=model.vocabulary)

        def tensors() -> Iterator[tuple[str, Tensor]]:
            for entry in self._weights(model):
                value = entry.write(weight)
                yield self.their_name(entry.theirs), value
                if entry.theirs == SECOND_BIAS:
                    yield self.their_name(HEAD_BIAS), value

        return Exported(self._hf_config(model), tensors, files)

    def load(self, hf_config: dict[str, Any], tensors: TensorFile) -> Imported:
        """A model without its head may lack the prefix of its type in tensor names; the head is then omitted."""
        path = tensors.path / "config.json"
        config = self._read_config(hf_config, path)
        model = self._model(config, path)
        names = tensors.names()
        headless = not any(name.startswith(self.head) for name in names)
        weights = [entry for entry in self._weights(model) if not (headless and entry.ours[0].startswith("head."))]
        stored = {entry.theirs: self._stored_name(entry.theirs, names) for entry in weights}
        head, bias, second = (self.their_name(name) for name in (HEAD, HEAD_BIAS, SECOND_BIAS))
        copies = [head, second] if model.tied_embeddings else [bias]
        if model.tied_embeddings and not headless:
            use_tied(stored, weights[0].theirs, head, names)
            use_tied(stored, HEAD_BIAS, second, names)
        starts = tuple(self._stored_name(start, names) for start in self.ignored)
        ignored = {name: tensors.shape(name) for name in names if name in copies or name.startswith(starts)}
        read = readers(tensors, weights, stored, ignored)
        if model.tied_embeddings:
            tensors.check_tied(head, stored[weights[0].theirs])
            tensors.check_tied(second, stored.get(HEAD_BIAS, bias))
        section = model.model_dump(mode="json", exclude_unset=True)
        return Imported({"model": section, "data": {"sequence_length": model.max_length}}, read)

    @torch.no_grad()
    def logits(self, model: Any, tokens: Tensor, seed: int) -> Tensor:
        return model(attention_mask=torch.ones_like(tokens), **self.inputs(tokens)).logits.float()

    def their_name(self, name: str) -> str:
        """Return the name of a tensor, given BERT's name with the prefix of this type."""
        return name

    def inputs(self, tokens: Tensor) -> dict[str, Tensor]:
        """Return the arguments of Hugging Face's model for tokens without padding."""
        return {"input_ids": tokens}

    def attention_of(self, config: Any, path: Path) -> dict[str, Any]:
        """Return `model.attention`."""
        return {"pattern": [self.attention]}

    def hf_attention(self, model: ModelConfig) -> dict[str, Any]:
        """Return keys of config.json."""
        self.must_be(model, "attention.full.shared_qk", False)
        return {"attention_probs_dropout_prob": model.attention.dropout}

    def attention_weights(self, model: ModelConfig) -> list[Weight]:
        return []

    def _check_expressible(self, model: ModelConfig) -> None:
        self.must_be(model, "kind", "encoder")
        self.must_be(model, "style", "bert")
        self.must_be(model, "positions.kind", "learned")
        self.must_be(model, "positions.offset", *range(self.offset + 1))
        self.must_be(model, "head_dim", None, model.d_model / model.heads)
        self.check_parts(model)
        self.check_pattern(model, self.attention)

    def _hf_config(self, model: ModelConfig) -> dict[str, Any]:
        return {
            "model_type": self.name,
            "architectures": [self.architecture],
            **hf_sizes(model, NAMES),
            "hidden_act": "gelu",
            "type_vocab_size": max(1, model.token_types),
            "bos_token_id": None,
            "eos_token_id": None,
            "pad_token_id": None,
            "mask_token_id": model.masking.token,
            **self.hf_attention(model),
        }

    def _read_config(self, values: dict[str, Any], path: Path) -> Any:
        config = read_configuration(self.name, values, path)
        check_only(config, self.required, path)
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
            **sizes_of(config, NAMES),
            "blocks": "ordinary",
            "activations": "stored",
            "positions": {"kind": "learned", "offset": self.offset},
            "attention": self.attention_of(config, path),
            "masking": {"token": config.vocab_size - 1 if mask is None else mask},
        }
        return model_of(section, path)

    def _weights(self, model: ModelConfig) -> list[Weight]:
        """Return all weights, the table of tokens first."""
        width, tables, vocabulary = model.d_model, f"{self.name}.embeddings", (model.vocabulary,)
        rows, types = model.positions.offset + model.max_length, (max(1, model.token_types), width)
        positions, type_names = (self.offset + model.max_length, width), ("embedding.token_types",)
        bias = HEAD_BIAS if model.tied_embeddings else SECOND_BIAS
        return [
            *weights_of(WEIGHTS.replace("bert.", f"{self.name}."), f"{self.name}.encoder.layer.{{}}", model),
            Weight(("embedding.positions.table",), f"{tables}.position_embeddings.weight", positions, (rows, width)),
            Weight(type_names if model.token_types else (), f"{tables}.token_type_embeddings.weight", types, types),
            Weight(("head.bias",), bias, vocabulary, vocabulary),
            *self.attention_weights(model),
        ]

    def _stored_name(self, name: str, names: list[str]) -> str:
        """Return the name in a file: without its head it may lack the prefix, and early BERTs use gamma and beta."""
        name, prefix = self.their_name(name), f"{self.name}."
        if not any(stored.startswith(prefix) for stored in names):
            name = name.removeprefix(prefix)
        old = name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")
        return old if old in names else name


PADDING = 1
"""RoBERTa's `pad_token_id`: positions of real tokens start after it."""
RENAMED = {
    "cls.predictions.transform.dense": "lm_head.dense",
    "cls.predictions.transform.LayerNorm": "lm_head.layer_norm",
    "cls.predictions.decoder": "lm_head.decoder",
    "cls.predictions.bias": "lm_head.bias",
}


class RoBERTaFormat(BERTFormat):
    """BERTFormat with other names for the head, one type of tokens, and two rows of the position table that only
    padding uses.
    """

    name = "roberta"
    architecture = "RobertaForMaskedLM"
    offset = PADDING + 1
    head = "lm_head."
    ignored = ("roberta.pooler.", "roberta.embeddings.position_ids")

    def their_name(self, name: str) -> str:
        start = next((start for start in RENAMED if name.startswith(start)), "")
        return RENAMED.get(start, "") + name.removeprefix(start)

    def inputs(self, tokens: Tensor) -> dict[str, Tensor]:
        positions = torch.arange(self.offset, self.offset + tokens.shape[1])
        return {"input_ids": tokens, "position_ids": positions.expand_as(tokens)}

    def _read_config(self, values: dict[str, Any], path: Path) -> Any:
        config = super()._read_config({"pad_token_id": PADDING, **values}, path)
        config.max_position_embeddings -= self.offset
        return config

    def _hf_config(self, model: ModelConfig) -> dict[str, Any]:
        positions = model.max_length + self.offset
        return {**super()._hf_config(model), "max_position_embeddings": positions, "pad_token_id": PADDING}


class YOSOFormat(BERTFormat):
    """BERTFormat with YOSO's attention. Differences from Hugging Face's implementation:

    Hashing (`use_expectation` false) runs in a CUDA kernel that transformers downloads on demand, and draws new hashes
    at each call. `logits` are therefore computed with its expectation, and compared with megasparse's under
    `comparable`. Gaussian hashing (`use_fast_hash` false) gives each query the code of the key at its position, a bug.

    Padding: its layers expect a mask of 0 and −10,000, but get 1 and 0, so that its attention attends to padding.

    Not supported by Hugging Face: another number of hashes in evaluation than in training. Not supported by megasparse:
    hashing with the expectation's gradients (`lsh_backward` false).
    """

    name = "yoso"
    architecture = "YosoForMaskedLM"
    attention = "yoso"
    offset = 2
    ignored = ("yoso.embeddings.position_ids", "yoso.embeddings.token_type_ids")

    def attention_of(self, config: Any, path: Path) -> dict[str, Any]:
        if config.hash_code_len > 30:
            raise not_ours(path, "hash_code_len", config.hash_code_len, "30 or less")
        if config.conv_window is not None and config.conv_window % 2 == 0:
            raise not_ours(path, "conv_window", config.conv_window, "odd sizes, or null")
        if not config.use_expectation and not config.lsh_backward:
            raise not_ours(path, "lsh_backward", False, "true if use_expectation is false")
        yoso = {
            "expectation": config.use_expectation,
            "hashes": config.num_hash,
            "code_bits": config.hash_code_len,
            "projection": "hadamard" if config.use_fast_hash else "gaussian",
            "convolution": config.conv_window,
        }
        return {"pattern": ["yoso"], "yoso": yoso}

    def hf_attention(self, model: ModelConfig) -> dict[str, Any]:
        yoso = model.attention.yoso
        if not yoso.expectation:
            self.must_be(model, "attention.yoso.evaluation_hashes", None, yoso.hashes)
        with torch.device("meta"):
            mechanism = build_mechanism("yoso", model, model.heads)
        assert isinstance(mechanism, YOSOAttention)
        return {
            "use_expectation": yoso.expectation,
            "num_hash": yoso.hashes,
            "hash_code_len": mechanism.code_bits,
            "conv_window": yoso.convolution,
            "use_fast_hash": yoso.projection == "hadamard",
            "lsh_backward": True,
        }

    def attention_weights(self, model: ModelConfig) -> list[Weight]:
        size, heads = model.attention.yoso.convolution, model.heads
        if size is None:
            return []
        ours = "blocks.{}.attention.attention.mechanisms.yoso.convolution.weight"
        theirs, shape = "yoso.encoder.layer.{}.attention.self.conv.weight", (heads, 1, size, 1)
        layers = range(model.layers)
        return [Weight((ours.format(layer),), theirs.format(layer), shape, (heads, size)) for layer in layers]

    def logits(self, model: Any, tokens: Tensor, seed: int) -> Tensor:
        """Return the logits with the expectation, which `model` uses from then on."""
        for module in model.modules():
            if hasattr(module, "use_expectation"):
                module.use_expectation = True
        return super().logits(model, tokens, seed)

    def comparable(self, config: Config) -> Config:
        return config.changed(model={"attention": {"yoso": {"expectation": True}}})


FORMAT = {form.name: form for form in (BERTFormat(), RoBERTaFormat(), YOSOFormat())}
