"""The config.json of HuggingFace's Reformer as settings of ours and the other way round, and what lies beside it."""

import json
import math
from pathlib import Path
from typing import Any

from megasparse.attention.lsh import lsh_buckets
from megasparse.config.attention import evaluation_rounds, heads_of_layer, kinds
from megasparse.config.schema import Config, ModelConfig
from megasparse.data.tokenizers import build_tokenizer
from megasparse.errors import HubError
from megasparse.hub.tokenizer_files import Files, files_with_start, tokenizer_files

BOS = "[BOS]"


def read_config(values: dict[str, Any], path: Path) -> Any:
    """A `ReformerConfig` of a decoder that ours can express. Raises HubError naming `path` and the key otherwise."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import ReformerConfig

    try:
        config = ReformerConfig.from_dict(values)
    except (StrictDataclassError, TypeError, ValueError) as error:
        problem = f"is no configuration of a Reformer ({' '.join(str(error).split())})"
        raise HubError(path, problem, "Give a model with its own config.json") from None
    wanted: list[tuple[str, Any]] = [("is_decoder", True), ("hidden_act", "relu")]
    for kind in sorted(set(config.attn_layers) & {"local", "lsh"}):
        wanted += [(f"{kind}_num_chunks_before", 1), (f"{kind}_num_chunks_after", 0)]
    for key, only in wanted:
        if (value := getattr(config, key)) != only:
            raise _inexpressible(path, key, value, f"{only!r}")
    for kind in config.attn_layers:
        if kind not in ("local", "lsh"):
            raise _inexpressible(path, "attn_layers", kind, "'local' and 'lsh'")
        if not getattr(config, f"{kind}_attn_chunk_length"):
            raise _inexpressible(path, f"{kind}_attn_chunk_length", None, "a number of tokens")
    if not config.attn_layers:
        raise _inexpressible(path, "attn_layers", [], "one layer or more")
    if config.axial_pos_embds and not len(config.axial_pos_shape) == len(config.axial_pos_embds_dim) == 2:
        raise _inexpressible(path, "axial_pos_shape", config.axial_pos_shape, "two axes")
    if isinstance(config.num_buckets, list) and len(config.num_buckets) not in (1, 2):
        raise _inexpressible(path, "num_buckets", config.num_buckets, "a number or two factors")
    if not 0 <= config.hidden_dropout_prob < 1:
        raise _inexpressible(path, "hidden_dropout_prob", config.hidden_dropout_prob, "a rate below 1")
    return config


def longest(config: Any) -> int:
    """Tokens in the longest sequence."""
    length = int(config.max_position_embeddings)
    return min(length, math.prod(config.axial_pos_shape)) if config.axial_pos_embds else length


def buckets(config: Any) -> list[int]:
    """The factors of `num_buckets`, least significant first. null: as HuggingFace's layer takes it at full length."""
    if config.num_buckets is not None:
        return [config.num_buckets] if isinstance(config.num_buckets, int) else list(config.num_buckets)
    chunk = config.lsh_attn_chunk_length
    bits = (2 * max(1, longest(config) // chunk)).bit_length() - 1
    if 2**bits <= 2 * max(math.isqrt(config.max_position_embeddings // chunk), chunk):
        return [2**bits]
    return [2 ** (bits // 2), 2 ** (bits - bits // 2)]


def model_section(config: Any) -> dict[str, Any]:
    """Our `model` section, but for what the tensors decide: vocabulary, bias, and positions that are no axial ones."""
    length = longest(config)
    attention: dict[str, Any] = {"pattern": list(config.attn_layers)}
    if "local" in config.attn_layers:
        attention["local"] = {"chunk": min(config.local_attn_chunk_length, length)}
    if "lsh" in config.attn_layers:
        attention["lsh"] = {
            "rounds": config.num_hashes,
            "chunk": min(config.lsh_attn_chunk_length, length),
            "buckets": buckets(config)[::-1],
            "window": "chunk",
            "same_bucket": False,
            "count_rounds": False,
        }
    section = {
        "max_length": length,
        "layers": len(config.attn_layers),
        "d_model": config.hidden_size,
        "d_ff": config.feed_forward_size,
        "heads": config.num_attention_heads,
        "head_dim": config.attention_head_size,
        "dropout": float(config.hidden_dropout_prob),
        "norm_eps": float(config.layer_norm_eps),
        "attention": attention,
    }
    if config.axial_pos_embds:
        shape, dims = list(config.axial_pos_shape), list(config.axial_pos_embds_dim)
        section["positions"] = {"kind": "axial", "axial_shape": shape, "axial_dims": dims}
    return section


def hf_config(model: ModelConfig, bos: int) -> dict[str, Any]:
    """The config.json of a decoder whose start vector is the embedding of token `bos`, added if it is V."""
    settings = {
        "model_type": "reformer",
        "architectures": ["ReformerModelWithLMHead"],
        "is_decoder": True,
        "vocab_size": max(model.vocabulary, bos + 1),
        "bos_token_id": bos,
        "pad_token_id": bos,
        "eos_token_id": None,
        "tie_word_embeddings": False,
        "max_position_embeddings": model.max_length,
        "axial_pos_embds": model.positions.kind == "axial",
        "attn_layers": [next(iter(heads_of_layer(model, layer))) for layer in range(model.layers)],
        "hidden_size": model.d_model,
        "num_attention_heads": model.heads,
        "attention_head_size": model.head_dim or model.d_model // model.heads,
        "feed_forward_size": model.d_ff,
        "hidden_act": "relu",
        "layer_norm_eps": model.norm_eps,
        "hidden_dropout_prob": model.dropout,
        "local_attention_probs_dropout_prob": model.attention.dropout,
        "lsh_attention_probs_dropout_prob": model.attention.dropout,
        "hash_seed": None,  # a seed would set torch's global generator at each call, and sampling with it
    }
    if model.positions.kind == "axial":
        settings |= {"axial_pos_shape": model.positions.axial_shape, "axial_pos_embds_dim": model.positions.axial_dims}
    for kind in kinds(model):
        chunk = min(getattr(model.attention, kind).chunk, model.max_length)
        settings |= {f"{kind}_attn_chunk_length": chunk, f"{kind}_num_chunks_before": 1, f"{kind}_num_chunks_after": 0}
    if "lsh" in kinds(model):
        factors = lsh_buckets(model.attention.lsh, model.max_length)
        # The first factor's hash is the most significant part of our bucket numbers, the least of HuggingFace's.
        settings["num_buckets"] = factors[0] if len(factors) == 1 else factors[::-1]
        settings["num_hashes"] = evaluation_rounds(model)["lsh"]
    return settings


def other_files(config: Config, bos: int) -> Files:
    """Files of an exported decoder: how it generates, and, where BOS is no token of a text, a tokenizer that sets BOS
    before every text.
    """
    model = config.model
    generation: dict[str, Any] = {
        "bos_token_id": bos,
        "pad_token_id": bos,
        "eos_token_id": None,
        "max_length": model.max_length,
    }
    if bos == model.vocabulary:  # added, and never predicted
        generation["suppress_tokens"] = [bos]
    files: Files = {"generation_config.json": json.dumps(generation, indent=2) + "\n"}
    if bos < build_tokenizer(config.data.tokenizer).vocabulary:
        return files
    return files | files_with_start(tokenizer_files(config, model.max_length), bos, BOS)


def _inexpressible(path: Path, key: str, value: Any, only: str) -> HubError:
    hint = "Such a model cannot be imported"
    return HubError(path, f"{key} is {value!r}, and our Reformer has only {only} there", hint)
