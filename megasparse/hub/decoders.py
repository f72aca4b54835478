"""Formats of Hugging Face decoders: Llama (and SmolLM2), Mistral, Qwen2, Qwen3 and GPT-2."""

import json
import math
from abc import abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from megasparse.config.schema import Config, ModelConfig, PositionsConfig, kinds
from megasparse.errors import HubError
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
    unfilled,
    use_tied,
    weights_of,
)
from megasparse.hub.replace import ENTRY, entry_of, mechanisms, replacement
from megasparse.hub.tensor_file import BUFFERS, TensorFile
from megasparse.hub.tokenizer_files import GENERATION, SPECIAL, chat_files
from megasparse.ops.positions import LLAMA3_TURNS, YARN_TURNS

HEAD = "lm_head.weight"
ACTIVATIONS = {"silu": "swiglu", "gelu": "geglu", "gelu_pytorch_tanh": "geglu_tanh"}
GPT2_ACTIVATIONS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu", "relu": "relu"}


LLAMA = """
    embedding.weight                            model.embed_tokens.weight
    .attention.norm.weight                      .input_layernorm.weight
    .attention.attention.query.*                .self_attn.q_proj.*
    .attention.attention.key.*                  .self_attn.k_proj.*
    .attention.attention.value.*                .self_attn.v_proj.*
    .attention.attention.output.*               .self_attn.o_proj.*
    .attention.attention.query_norm.weight      .self_attn.q_norm.weight
    .attention.attention.key_norm.weight        .self_attn.k_norm.weight
    .attention.attention.mechanisms.            .self_attn.megasparse.
    .feed_forward.norm.weight                   .post_attention_layernorm.weight
    .feed_forward.feed_forward.gate~            .mlp.gate_proj.*
    .feed_forward.feed_forward.up~              .mlp.up_proj.*
    .feed_forward.feed_forward.down~            .mlp.down_proj.*
    head.norm_weight                            model.norm.weight
    head.weight                                 lm_head.weight
"""
GPT2 = """
    embedding.weight                            transformer.wte.weight
    embedding.positions.table                   transformer.wpe.weight
    .attention.norm.*                           .ln_1.*
    .attention.attention.query|key|value.*      .attn.c_attn.*      T
    .attention.attention.output.*               .attn.c_proj.*      T
    .attention.attention.mechanisms.            .attn.megasparse.
    .feed_forward.norm.*                        .ln_2.*
    .feed_forward.feed_forward.up~              .mlp.c_fc.*         T
    .feed_forward.feed_forward.down~            .mlp.c_proj.*       T
    head.norm_*                                 transformer.ln_f.*
    head.weight                                 lm_head.weight
"""


class DecoderFormat(Format):
    """Format of a causal language model. Parameters are copied exactly.

    A megasparse decoder predicts token t from the tokens before it, and the first one from the embedding of
    `model.start_token`. Hugging Face's input is therefore [BOS, token 0, token 1, ...], and its logits at t predict
    token t. Without a `bos_token_id`, BOS is the first `eos_token_id`, which separates training documents.

    Dropout, tiles and activations are not converted. Attention other than full is replaced attention, see hub.replace.
    """

    note = "Start every input with the token `bos_token_id`, as in training; its tokenizer may not add it."
    loading: ClassVar[dict[str, Any]] = {"attn_implementation": "sdpa"}
    architecture: str
    base: str
    """Prefix of the tensors except the output projection."""
    table: str
    layers: str
    """Name of a layer, see formats.weights_of."""
    names: ClassVar[Mapping[str, str]]
    """Hugging Face's key for keys of the `model` section."""

    def __init__(self, name: str):
        self.name = name

    def weights(self, model: ModelConfig) -> list[Weight]:
        return weights_of(self.table, self.layers, model)

    def export(self, config: Config, weight: Callable[[str], Tensor]) -> Exported:
        model = config.model
        files = chat_files(config, model.max_length, room=model.vocabulary)
        generation = {"eos_token_id": model.end_token} | json.loads(files.get(GENERATION, "{}"))
        hf_config = {
            "model_type": self.name,
            "architectures": [self.architecture],
            **hf_sizes(model, self.names),
            "dtype": "float32",
            **{key: generation.get(key) for key in SPECIAL},  # end and padding tokens, or null
            "bos_token_id": model.start_token,
            **self.hf_config(model),
        }
        self._check_expressible(model)
        if {*kinds(model)} != {"full"}:
            hf_config |= replacement(model, config.run.seed)
        weights = self.weights(model)
        return Exported(hf_config, lambda: ((entry.theirs, entry.write(weight)) for entry in weights), files)

    def model_section(self, hf_config: dict[str, Any], path: Path) -> dict[str, Any]:
        """Return the section `model` for the config.json at `path`."""
        config = read_configuration(self.name, hf_config, path)
        if config.hidden_size % config.num_attention_heads and not getattr(config, "head_dim", None):
            raise not_ours(path, "num_attention_heads", config.num_attention_heads, "a divisor of hidden_size")
        window = getattr(config, "sliding_window", None)
        if window is not None and window < config.max_position_embeddings:
            problem = f"megasparse supports no window below {config.max_position_embeddings} tokens"
            hint = f'Set "max_position_embeddings" to {window} there, for texts up to that length'
            raise HubError(path, f"sliding_window is {window}, but {problem}", hint)
        section = {
            "kind": "decoder",
            **sizes_of(config, self.names),
            "blocks": "ordinary",
            "activations": "stored",
            "logit_scale": 1.0,
            "start_token": start_token(config, path),
            "attention": {"pattern": ["full"]},
            **self.section(config, path),
        }
        entry = entry_of(config, path) if ENTRY in hf_config else {}
        return section | {key: value for key, value in entry.items() if key != "seed"}

    def load(self, hf_config: dict[str, Any], tensors: TensorFile) -> Imported:
        path = tensors.path / "config.json"
        section, config = self.model_section(hf_config, path), read_configuration(self.name, hf_config, path)
        model, longest = model_of(section, path), config.max_position_embeddings
        if model.positions.kind == "learned" and model.max_length != longest:
            problem = f"max_length of its replaced attention is not the model's {longest}"
            raise HubError(path, problem, f"Replace the original model's attention with --max-length {longest}")
        if any(mechanism.shared_qk for mechanism in mechanisms(unfilled(model))):
            problem = "its replaced attention has shared queries and keys, so its keys would be lost"
            raise HubError(path, problem, "Replace the original model's attention by one with separate keys")
        names, weights = tensors.names(), self.weights(model)
        bare = {entry.theirs: entry.theirs.removeprefix(f"{self.base}.") for entry in weights}
        stored = {theirs: short if short in names else theirs for theirs, short in bare.items()}
        if model.tied_embeddings:
            use_tied(stored, weights[0].theirs, HEAD, names)
        unread = [name for name in names if name.endswith(BUFFERS) or (name == HEAD and model.tied_embeddings)]
        ignored = {name: tensors.shape(name) for name in unread}
        read = readers(tensors, weights, stored, ignored)
        if model.tied_embeddings:
            tensors.check_tied(HEAD, stored[weights[0].theirs])
        seed = entry_of(config, path).get("seed", 0) if ENTRY in hf_config else 0
        run, data = {"seed": seed}, {"sequence_length": model.max_length}
        return Imported({"model": section, "run": run, "data": data}, read)

    @torch.no_grad()
    def logits(self, model: Any, tokens: Tensor, seed: int) -> Tensor:
        read = F.pad(tokens[:, :-1], (1, 0), value=start_token(model.config, Path(self.name)))
        return model(input_ids=read, use_cache=False).logits.float()

    def comparable(self, config: Config) -> Config:
        """Return the configuration with full attention and fp32 residual streams. Rounding changes the keys that a
        query selects now and then, and so every later logit.
        """
        return config.changed(model={"attention": {"pattern": ["full"]}, "residual_dtype": "fp32"})

    @abstractmethod
    def section(self, config: Any, path: Path) -> dict[str, Any]:
        """Return further keys of `model`."""

    @abstractmethod
    def hf_config(self, model: ModelConfig) -> dict[str, Any]:
        """Return further keys of config.json."""

    def _check_expressible(self, model: ModelConfig) -> None:
        required = {"kind": "decoder", "style": "reformer", "blocks": "ordinary", "output_bias": False}
        for key, only in (required | {"adaptive_cutoffs": [], "ngrams": None}).items():
            self.must_be(model, key, only)
        self.must_be(model, "logit_scale", 1.0, *([] if model.tied_embeddings else [None]))
        if model.start_token is None:
            problem = f"null, a learned start vector, which Hugging Face's {self.name} does not support"
            raise HubError("model.start_token", problem, "Export to another format, such as megasparse")
        if any(mechanism.shared_qk for mechanism in mechanisms(unfilled(model))):
            raise self.inexpressible("attention.pattern", model.attention.pattern, "separate queries and keys")


class LlamaFormat(DecoderFormat):
    """Llama and similar decoders: RMS norms, rotary positions, gated feed-forwards, grouped key heads."""

    base, table, layers = "model", LLAMA, "model.layers.{}"
    names = SIZES | {"d_ff": "intermediate_size", "norm_eps": "rms_norm_eps"}
    families: ClassVar[dict[str, tuple[str, tuple[str, ...], bool]]] = {
        "llama": ("LlamaForCausalLM", ("none", "all"), False),
        "mistral": ("MistralForCausalLM", ("none",), False),
        "qwen2": ("Qwen2ForCausalLM", ("qkv",), False),
        "qwen3": ("Qwen3ForCausalLM", ("none", "all"), True),
    }
    """Class, supported biases of projections, and use of query and key norms."""

    def __init__(self, name: str):
        super().__init__(name)
        self.architecture, self.biases, self.normed = self.families[name]

    def section(self, config: Any, path: Path) -> dict[str, Any]:
        if config.hidden_act not in ACTIVATIONS:
            raise not_ours(path, "hidden_act", config.hidden_act, " or ".join(map(repr, ACTIVATIONS)))
        biased, heads = getattr(config, "attention_bias", False), config.num_attention_heads
        dim = getattr(config, "head_dim", None)
        return {
            "head_dim": dim if dim and dim * heads != config.hidden_size else None,
            "key_heads": config.num_key_value_heads,
            "norm": "rms",
            "feed_forward": ACTIVATIONS[config.hidden_act],
            "feed_forward_biases": getattr(config, "mlp_bias", False),
            "attention_biases": "all" if biased else self.biases[0],
            "query_key_norm": self.normed,
            "positions": rotary_of(config.rope_parameters, path),
        }

    def hf_config(self, model: ModelConfig) -> dict[str, Any]:
        activations: dict[str | None, str] = {ours: theirs for theirs, ours in ACTIVATIONS.items()}
        biases = model.attention_biases or "none"
        self.must_be(model, "norm", "rms")
        self.must_be(model, "positions.kind", "rotary")
        self.must_be(model, "feed_forward", *activations)
        self.must_be(model, "attention_biases", *self.biases, *([None] if "none" in self.biases else []))
        self.must_be(model, "query_key_norm", self.normed)
        if self.name != "llama":
            self.must_be(model, "feed_forward_biases", False)
        width = model.head_dim or model.d_model // model.heads
        return {
            "num_key_value_heads": model.key_heads or model.heads,
            "head_dim": width,
            "hidden_act": activations[model.feed_forward],
            **({"attention_bias": biases == "all"} if "all" in self.biases else {}),
            **({"mlp_bias": model.feed_forward_biases} if self.name == "llama" else {"sliding_window": None}),
            **rope_of(model.positions, width),
        }


class GPT2Format(DecoderFormat):
    """GPT-2: layer norms, learned positions, biases everywhere. Its matrices are transposed."""

    architecture, base, table, layers = "GPT2LMHeadModel", "transformer", GPT2, "transformer.h.{}"
    names: ClassVar = {
        "vocabulary": "vocab_size",
        "max_length": "n_positions",
        "layers": "n_layer",
        "d_model": "n_embd",
        "heads": "n_head",
        "tied_embeddings": "tie_word_embeddings",
        "norm_eps": "layer_norm_epsilon",
    }

    def section(self, config: Any, path: Path) -> dict[str, Any]:
        only = {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False}
        check_only(config, only, path)
        if (kind := config.activation_function) not in GPT2_ACTIVATIONS:
            raise not_ours(path, "activation_function", kind, " or ".join(map(repr, GPT2_ACTIVATIONS)))
        return {
            "d_ff": config.n_inner or 4 * config.n_embd,
            "feed_forward": GPT2_ACTIVATIONS[kind],
            "attention_biases": "all",
            "positions": {"kind": "learned"},
        }

    def hf_config(self, model: ModelConfig) -> dict[str, Any]:
        activations = {"gelu_tanh": "gelu_new", "gelu": "gelu", "relu": "relu", None: "relu"}
        required = {"norm": "layer", "positions.kind": "learned", "positions.offset": 0, "feed_forward_biases": True}
        for key, only in (required | {"attention_biases": "all", "query_key_norm": False}).items():
            self.must_be(model, key, only)
        self.must_be(model, "feed_forward", *activations)
        self.must_be(model, "key_heads", None, model.heads)
        self.must_be(model, "head_dim", None, model.d_model / model.heads)
        return {"n_inner": model.d_ff, "activation_function": activations[model.feed_forward]}


def start_token(config: Any, path: Path) -> int:
    ends = config.eos_token_id
    token = config.bos_token_id if config.bos_token_id is not None else ends[0] if isinstance(ends, list) else ends
    if token is None:
        raise HubError(path, "contains neither bos_token_id nor eos_token_id", "Add the first token of its texts")
    return int(token)


# Rotary positions: `rope_parameters` of config.json

ROPE_KEYS = {"original_length": "original_max_position_embeddings", "attention_factor": "attention_factor"}
"""Hugging Face's key for keys of model.positions.scaling."""
ROPE_KINDS = {"linear": (), "llama3": ("original_length",), "yarn": ("original_length", "attention_factor")}
"""Kinds of scaling, and their keys apart from the factor."""
ROPE_TURNS: dict[str, dict[str, float]] = {
    "linear": {},
    "llama3": dict(zip(("low_freq_factor", "high_freq_factor"), LLAMA3_TURNS, strict=True)),
    "yarn": dict(zip(("beta_fast", "beta_slow"), YARN_TURNS, strict=True)),
}
"""Hugging Face's keys of which megasparse supports only these values."""


def rotary_of(rope: dict[str, Any], path: Path) -> dict[str, Any]:
    kind, section = rope["rope_type"], {"kind": "rotary", "base": float(rope["rope_theta"])}
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise not_ours(path, "partial_rotary_factor", rope["partial_rotary_factor"], "1.0")
    if kind == "default":
        return section
    if kind not in ROPE_KINDS:
        raise not_ours(path, "rope_type", kind, ", ".join(map(repr, ("default", *ROPE_KINDS))))
    if not rope.get("truncate", True):
        raise not_ours(path, "truncate", False, "true")
    for key, only in ROPE_TURNS[kind].items():
        if (value := rope.get(key)) is not None and value != only:
            raise not_ours(path, key, value, str(only))
    scaling = {"kind": kind, "factor": float(rope["factor"])}
    scaling |= {key: rope[ROPE_KEYS[key]] for key in ROPE_KINDS[kind] if rope.get(ROPE_KEYS[key]) is not None}
    both = [float(rope.get(key) or 0.0) for key in ("mscale", "mscale_all_dim")]
    if kind == "yarn" and all(both) and "attention_factor" not in scaling:
        above, below = (0.1 * scale * math.log(rope["factor"]) + 1.0 for scale in both)
        scaling["attention_factor"] = above / below
    return {**section, "scaling": scaling}


def rope_of(positions: PositionsConfig, head_dim: int) -> dict[str, Any]:
    """Return keys of config.json that every transformers reads. NTK scaling is exported as a larger base."""
    scaling = positions.scaling
    if scaling is None:
        return {"rope_theta": positions.base}
    if scaling.kind == "ntk":
        return {"rope_theta": positions.base * scaling.factor ** (head_dim / (head_dim - 2))}
    values = {ROPE_KEYS[key]: getattr(scaling, key) for key in ROPE_KINDS[scaling.kind]}
    parameters = {key: value for key, value in values.items() if value is not None}
    return {
        "rope_theta": positions.base,
        "rope_scaling": {"rope_type": scaling.kind, "factor": scaling.factor, **parameters, **ROPE_TURNS[scaling.kind]},
    }


FORMAT = {**{name: LlamaFormat(name) for name in LlamaFormat.families}, "gpt2": GPT2Format("gpt2")}
