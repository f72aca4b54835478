"""HuggingFace's decoders (Llama, as SmolLM2 is one, Mistral, Qwen2, Qwen3, GPT-2), and ours of ordinary blocks."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from megasparse.config.attention import heads_of_layer
from megasparse.config.schema import Config, ModelConfig
from megasparse.errors import HubError
from megasparse.hub.bert import check_tied, model_of, not_ours, read_configuration
from megasparse.hub.compare import watched_outputs
from megasparse.hub.formats import Exported, Imported, must_be
from megasparse.hub.rotary import rope_of, rotary_of
from megasparse.hub.tensor_file import TensorFile
from megasparse.hub.tokenizer_files import chat_files, special_ids

if TYPE_CHECKING:
    from transformers import PreTrainedModel

HEAD = "lm_head.weight"
BUFFERS = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")
"""How names of constants end that old files hold beside the weights."""
ACTIVATIONS = {"silu": "swiglu", "gelu": "geglu", "gelu_pytorch_tanh": "geglu_tanh"}
GPT2_ACTIVATIONS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu", "relu": "relu"}


@dataclass(frozen=True)
class Weight:
    """A parameter of HuggingFace's model, and those of ours that it is, one after another."""

    theirs: str
    shape: tuple[int, ...]
    ours: tuple[str, ...]
    transposed: bool = False

    def read(self, tensors: TensorFile, name: str, number: int) -> Tensor:
        """Our parameter of a number. name: of theirs in the file."""
        value = tensors.read(name, self.shape)
        return (value.T if self.transposed else value).chunk(len(self.ours))[number].contiguous()

    def write(self, weight: Callable[[str], Tensor]) -> Tensor:
        """Their parameter. weight: ours of a name."""
        value = torch.cat([weight(name) for name in self.ours])
        return value.T if self.transposed else value


class DecoderFormat(ABC):
    """A causal language model. Every parameter of either model is one of the other's, bit for bit.

    Start: our decoder predicts token t from the tokens before it, the first one from the embedding of
    `model.start_token`. So HuggingFace's input is [BOS, token 0, token 1, ...]; its logits at t are ours of token t.
    A model without a `bos_token_id` starts with its first `eos_token_id`, which parts the documents of such a training.

    Not carried over: what acts in training alone (dropout) and what trades memory for time (tiles, activations).
    """

    note = "An input begins with the token `bos_token_id`, as in training; its tokenizer may leave that to you."
    """Note for the model card."""
    architecture: str
    base: str
    """Name of the part without the output projection, with which names of tensors begin."""
    bodies: tuple[str, str, str]
    """Where a layer's attention and feed-forward leave off, and what embeds the tokens."""
    layers: str

    def __init__(self, name: str):
        self.name = name

    def export(self, config: Config, weight: Callable[[str], Tensor]) -> Exported:
        """See formats.Format."""
        model = config.model
        files = chat_files(config, model.max_length, room=model.vocabulary)
        hf_config = {
            "model_type": self.name,
            "architectures": [self.architecture],
            "vocab_size": model.vocabulary,
            "tie_word_embeddings": model.tied_embeddings,
            "dtype": "float32",
            **special_ids(files),
            "bos_token_id": model.start_token,
            **self.hf_config(model),
        }
        self._check_expressible(model)
        weights = self.weights(model)
        return Exported(hf_config, lambda: ((one.theirs, one.write(weight)) for one in weights), files)

    def load(self, hf_config: dict[str, Any], tensors: TensorFile) -> Imported:
        """See formats.Format."""
        path = tensors.path / "config.json"
        config = read_configuration(self.name, hf_config, path)
        if config.hidden_size % config.num_attention_heads and not getattr(config, "head_dim", None):
            raise not_ours(path, "num_attention_heads", config.num_attention_heads, "a divisor of hidden_size")
        window = getattr(config, "sliding_window", None)
        if window is not None and window < config.max_position_embeddings:
            longest = config.max_position_embeddings
            problem = f"sliding_window is {window}, and ours has no such window below {longest} tokens"
            raise HubError(
                path, problem, f'Set "max_position_embeddings" to {window} there, for texts up to that length'
            )
        section = {
            "kind": "decoder",
            "vocabulary": config.vocab_size,
            "max_length": config.max_position_embeddings,
            "layers": config.num_hidden_layers,
            "d_model": config.hidden_size,
            "heads": config.num_attention_heads,
            "blocks": "ordinary",
            "activations": "stored",
            "tied_embeddings": config.tie_word_embeddings,
            "logit_scale": 1.0,
            "start_token": start_token(config, path),
            "attention": {"pattern": ["full"]},
            **self.section(config, path),
        }
        model = model_of(section, path)
        names, found, expected = tensors.names(), dict[str, Callable[[], Tensor]](), dict[str, tuple[int, ...]]()
        stored: dict[str, str] = {}
        for one in self.weights(model):
            bare = one.theirs.removeprefix(f"{self.base}.")
            stored[one.theirs] = bare if bare in names else one.theirs
            expected[stored[one.theirs]] = one.shape
            found |= {ours: partial(one.read, tensors, stored[one.theirs], i) for i, ours in enumerate(one.ours)}
        beside = [name for name in names if name.endswith(BUFFERS) or (name == HEAD and model.tied_embeddings)]
        tensors.check(expected | {name: tensors.shape(name) for name in beside})
        if model.tied_embeddings:
            check_tied(tensors, HEAD, next(iter(stored.values())))
        return Imported({"model": section, "data": {"sequence_length": model.max_length}}, found)

    @torch.no_grad()
    def outputs(self, model: "PreTrainedModel", tokens: Tensor, seed: int) -> Iterator[tuple[str, Tensor]]:
        """See formats.Format. The output of a branch is what is added to the stream."""
        base: Any = model.base_model
        attention, feed_forward, embedding = self.bodies
        watched = {"embedding": base.get_submodule(embedding)}
        for number, layer in enumerate(base.get_submodule(self.layers)):
            watched[f"layer {number} attention"] = layer.get_submodule(attention)
            watched[f"layer {number} feed-forward"] = layer.get_submodule(feed_forward)
        read = F.pad(tokens[:, :-1], (1, 0), value=start_token(model.config, Path(self.name)))
        return watched_outputs(watched, lambda: model(input_ids=read, use_cache=False).logits)

    # What the families differ in

    @abstractmethod
    def section(self, config: Any, path: Path) -> dict[str, Any]:
        """Keys of our `model`. Raises HubError naming `path` and the key that ours cannot express."""

    @abstractmethod
    def hf_config(self, model: ModelConfig) -> dict[str, Any]:
        """Keys of config.json. Raises HubError naming our key that they cannot express."""

    @abstractmethod
    def weights(self, model: ModelConfig) -> list[Weight]:
        """All parameters; the first is the embedding of tokens."""

    def must_be(self, key: str, value: Any, *only: Any) -> None:
        must_be(self.name, key, value, *only)

    def _check_expressible(self, model: ModelConfig) -> None:
        self.must_be("kind", model.kind, "decoder")
        self.must_be("style", model.style, "reformer")
        self.must_be("blocks", model.blocks, "ordinary")
        self.must_be("output_bias", model.output_bias, False)
        self.must_be("adaptive_cutoffs", model.adaptive_cutoffs, [])
        self.must_be("logit_scale", model.logit_scale, 1.0, *([] if model.tied_embeddings else [None]))
        if model.start_token is None:
            problem = f"null, a learned start vector, which HuggingFace's {self.name} has not"
            raise HubError("model.start_token", problem, "Export to another format, such as megasparse")
        for number, entry in enumerate(model.attention.pattern):
            if heads_of_layer(model, number) != {"full": model.heads}:
                self.must_be(f"attention.pattern[{number}]", entry, "full")
        self.must_be("attention.full.shared_qk", model.attention.full.shared_qk, False)


class LlamaFormat(DecoderFormat):
    """Llama and its kin: RMS norms, rotary positions, gated feed-forwards, grouped key heads."""

    base, layers = "model", "layers"
    bodies = ("self_attn.o_proj", "mlp.down_proj", "embed_tokens")
    families: ClassVar[dict[str, tuple[str, tuple[str, ...], bool]]] = {
        "llama": ("LlamaForCausalLM", ("none", "all"), False),
        "mistral": ("MistralForCausalLM", ("none",), False),
        "qwen2": ("Qwen2ForCausalLM", ("qkv",), False),
        "qwen3": ("Qwen3ForCausalLM", ("none", "all"), True),
    }
    """model_type -> the class, the biases of projections that it can have, and whether it norms queries and keys."""

    def __init__(self, name: str):
        super().__init__(name)
        self.architecture, self.biases, self.normed = self.families[name]

    def section(self, config: Any, path: Path) -> dict[str, Any]:
        if config.hidden_act not in ACTIVATIONS:
            raise not_ours(path, "hidden_act", config.hidden_act, " or ".join(map(repr, ACTIVATIONS)))
        biased, heads = getattr(config, "attention_bias", False), config.num_attention_heads
        dim = getattr(config, "head_dim", None)
        return {
            "d_ff": config.intermediate_size,
            "head_dim": dim if dim and dim * heads != config.hidden_size else None,
            "key_heads": config.num_key_value_heads,
            "norm": "rms",
            "norm_eps": float(config.rms_norm_eps),
            "feed_forward": ACTIVATIONS[config.hidden_act],
            "feed_forward_biases": getattr(config, "mlp_bias", False),
            "attention_biases": "all" if biased else self.biases[0],
            "query_key_norm": self.normed,
            "positions": rotary_of(config.rope_parameters, path),
        }

    def hf_config(self, model: ModelConfig) -> dict[str, Any]:
        activations: dict[str | None, str] = {ours: theirs for theirs, ours in ACTIVATIONS.items()}
        biases = model.attention_biases or "none"
        self.must_be("norm", model.norm, "rms")
        self.must_be("positions.kind", model.positions.kind, "rotary")
        self.must_be("feed_forward", model.feed_forward, *activations)
        self.must_be("attention_biases", biases, *self.biases)
        self.must_be("query_key_norm", model.query_key_norm, self.normed)
        if self.name != "llama":
            self.must_be("feed_forward_biases", model.feed_forward_biases, False)
        width = model.head_dim or model.d_model // model.heads
        return {
            "hidden_size": model.d_model,
            "intermediate_size": model.d_ff,
            "num_hidden_layers": model.layers,
            "num_attention_heads": model.heads,
            "num_key_value_heads": model.key_heads or model.heads,
            "head_dim": width,
            "hidden_act": activations[model.feed_forward],
            "max_position_embeddings": model.max_length,
            "rms_norm_eps": model.norm_eps,
            **({"attention_bias": biases == "all"} if "all" in self.biases else {}),
            **({"mlp_bias": model.feed_forward_biases} if self.name == "llama" else {}),
            **({"sliding_window": None} if self.name != "llama" else {}),
            **rope_of(model.positions, width),
        }

    def weights(self, model: ModelConfig) -> list[Weight]:
        width, inner, dim = model.d_model, model.d_ff, model.head_dim or model.d_model // model.heads
        queries, keys = model.heads * dim, (model.key_heads or model.heads) * dim
        found = [_one("model.embed_tokens.weight", "embedding.weight", model.vocabulary, width)]
        biases = {"none": "", "qkv": "qkv", "all": "qkvo"}[model.attention_biases or "none"]
        sides = {"q": (queries, width), "k": (keys, width), "v": (keys, width), "o": (width, queries)}
        products = {"gate": (inner, width), "up": (inner, width), "down": (width, inner)}
        for layer in range(model.layers):
            theirs, ours = f"model.layers.{layer}", f"blocks.{layer}"
            attention, feed = f"{ours}.attention.attention", f"{ours}.feed_forward.feed_forward"
            found += [
                _one(f"{theirs}.input_layernorm.weight", f"{ours}.attention.norm.weight", width),
                _one(f"{theirs}.post_attention_layernorm.weight", f"{ours}.feed_forward.norm.weight", width),
            ]
            for (side, shape), name in zip(sides.items(), ("query", "key", "value", "output"), strict=True):
                found.append(_one(f"{theirs}.self_attn.{side}_proj.weight", f"{attention}.{name}.weight", *shape))
                if side in biases:
                    found.append(_one(f"{theirs}.self_attn.{side}_proj.bias", f"{attention}.{name}.bias", shape[0]))
            if model.query_key_norm:
                found.append(_one(f"{theirs}.self_attn.q_norm.weight", f"{attention}.query_norm.weight", dim))
                found.append(_one(f"{theirs}.self_attn.k_norm.weight", f"{attention}.key_norm.weight", dim))
            for name, shape in products.items():
                found.append(_one(f"{theirs}.mlp.{name}_proj.weight", f"{feed}.{name}", *shape))
                if model.feed_forward_biases:
                    found.append(_one(f"{theirs}.mlp.{name}_proj.bias", f"{feed}.{name}_bias", shape[0]))
        found.append(_one("model.norm.weight", "head.norm_weight", width))
        return found + ([] if model.tied_embeddings else [_one(HEAD, "head.weight", model.vocabulary, width)])


class GPT2Format(DecoderFormat):
    """GPT-2: layer norms, learned positions, biases everywhere; its matrices are the transposed ones of ours."""

    architecture, base, layers = "GPT2LMHeadModel", "transformer", "h"
    bodies = ("attn.c_proj", "mlp.c_proj", "drop")

    def section(self, config: Any, path: Path) -> dict[str, Any]:
        for key, only in (
            ("scale_attn_weights", True),
            ("scale_attn_by_inverse_layer_idx", False),
            ("add_cross_attention", False),
        ):
            if (value := getattr(config, key)) != only:
                raise not_ours(path, key, value, repr(only))
        if (kind := config.activation_function) not in GPT2_ACTIVATIONS:
            raise not_ours(path, "activation_function", kind, " or ".join(map(repr, GPT2_ACTIVATIONS)))
        return {
            "d_ff": config.n_inner or 4 * config.n_embd,
            "norm_eps": float(config.layer_norm_epsilon),
            "feed_forward": GPT2_ACTIVATIONS[kind],
            "attention_biases": "all",
            "positions": {"kind": "learned"},
        }

    def hf_config(self, model: ModelConfig) -> dict[str, Any]:
        activations = {"gelu_tanh": "gelu_new", "gelu": "gelu", "relu": "relu", None: "relu"}
        self.must_be("norm", model.norm, "layer")
        self.must_be("positions.kind", model.positions.kind, "learned")
        self.must_be("positions.offset", model.positions.offset, 0)
        self.must_be("feed_forward", model.feed_forward, *activations)
        self.must_be("feed_forward_biases", model.feed_forward_biases, True)
        self.must_be("attention_biases", model.attention_biases, "all")
        self.must_be("query_key_norm", model.query_key_norm, False)
        self.must_be("key_heads", model.key_heads, None, model.heads)
        self.must_be("head_dim", model.head_dim, None, model.d_model / model.heads)
        return {
            "n_embd": model.d_model,
            "n_inner": model.d_ff,
            "n_layer": model.layers,
            "n_head": model.heads,
            "n_positions": model.max_length,
            "activation_function": activations[model.feed_forward],
            "layer_norm_epsilon": model.norm_eps,
        }

    def weights(self, model: ModelConfig) -> list[Weight]:
        width, inner = model.d_model, model.d_ff
        found = [
            _one("transformer.wte.weight", "embedding.weight", model.vocabulary, width),
            _one("transformer.wpe.weight", "embedding.positions.table", model.max_length, width),
        ]
        for layer in range(model.layers):
            theirs, ours = f"transformer.h.{layer}", f"blocks.{layer}"
            attention, feed = f"{ours}.attention.attention", f"{ours}.feed_forward.feed_forward"
            parts = [f"{attention}.{name}" for name in ("query", "key", "value")]
            for name, branch in (("ln_1", "attention"), ("ln_2", "feed_forward")):
                for part in ("weight", "bias"):
                    found.append(_one(f"{theirs}.{name}.{part}", f"{ours}.{branch}.norm.{part}", width))
            found += [
                Weight(f"{theirs}.attn.c_attn.weight", (width, 3 * width), tuple(f"{x}.weight" for x in parts), True),
                Weight(f"{theirs}.attn.c_attn.bias", (3 * width,), tuple(f"{x}.bias" for x in parts)),
                Weight(f"{theirs}.attn.c_proj.weight", (width, width), (f"{attention}.output.weight",), True),
                _one(f"{theirs}.attn.c_proj.bias", f"{attention}.output.bias", width),
                Weight(f"{theirs}.mlp.c_fc.weight", (width, inner), (f"{feed}.up",), True),
                _one(f"{theirs}.mlp.c_fc.bias", f"{feed}.up_bias", inner),
                Weight(f"{theirs}.mlp.c_proj.weight", (inner, width), (f"{feed}.down",), True),
                _one(f"{theirs}.mlp.c_proj.bias", f"{feed}.down_bias", width),
            ]
        found += [_one(f"transformer.ln_f.{part}", f"head.norm_{part}", width) for part in ("weight", "bias")]
        return found + ([] if model.tied_embeddings else [_one(HEAD, "head.weight", model.vocabulary, width)])


def start_token(config: Any, path: Path) -> int:
    """The token that a model's sequences begin with. Raises HubError where its configuration names none."""
    ends = config.eos_token_id
    found = config.bos_token_id if config.bos_token_id is not None else ends[0] if isinstance(ends, list) else ends
    if found is None:
        raise HubError(path, "names neither bos_token_id nor eos_token_id", "Give the token that its texts begin with")
    return int(found)


def _one(theirs: str, ours: str, *shape: int) -> Weight:
    return Weight(theirs, shape, (ours,))


FORMAT = {**{name: LlamaFormat(name) for name in LlamaFormat.families}, "gpt2": GPT2Format("gpt2")}
"""By `model_type`."""
