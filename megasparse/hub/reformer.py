"""Format of Hugging Face's Reformer, `ReformerModelWithLMHead`: a megasparse decoder is the same model.

B batch, L length, H heads, R rounds, D head dim, V vocabulary, E width.
"""

import copy
import json
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from megasparse.attention.lsh import lsh_buckets
from megasparse.config.schema import Config, ModelConfig, evaluation_rounds, heads_of_layer, kinds
from megasparse.data.tokenizers import build_tokenizer
from megasparse.errors import HubError
from megasparse.hub.formats import (
    Exported,
    Format,
    Imported,
    Weight,
    check_only,
    hf_sizes,
    not_ours,
    read_configuration,
    readers,
    sizes_of,
    weights_of,
)
from megasparse.hub.tensor_file import BUFFERS, OWN_CONFIG, TensorFile
from megasparse.hub.tokenizer_files import Files, files_with_start, tokenizer_files
from megasparse.ops.positions import sinusoids
from megasparse.ops.random import RngContext, rotations
from megasparse.settings.load import build_config

WORDS = "reformer.embeddings.word_embeddings.weight"
AXIS = "reformer.embeddings.position_embeddings.weights."
TABLE = "reformer.embeddings.position_embeddings.embedding.weight"
HEAD, HEAD_BIAS = "lm_head.decoder.weight", "lm_head.bias"
DECODER_BIAS = "lm_head.decoder.bias"
"""The bias that transformers adds, except from 5.0 to 5.23, which store HEAD_BIAS only and add none."""

BOS = "[BOS]"
NEVER = -1e4
"""Bias of a token that is never predicted; representable in half precision."""

CONSTANT_TABLES: dict[str, Callable[[int, int], Tensor]] = {
    "sinusoidal": lambda length, width: sinusoids(0, length, width),
    "none": torch.zeros,
}
"""Positions that Hugging Face stores as a table (max_length, E)."""

WEIGHTS = """
    .attention.norm.*                   .attention.layer_norm.*
    .attention.attention.query.weight   .attention.self_attention.query.weight
    .attention.attention.key.weight     .attention.self_attention.key.weight
    .attention.attention.value.weight   .attention.self_attention.value.weight
    .attention.attention.output.weight  .attention.output.dense.weight
    .feed_forward.norm.*                .feed_forward.layer_norm.*
    .feed_forward.feed_forward.up~      .feed_forward.dense.dense.*
    .feed_forward.feed_forward.down~    .feed_forward.output.dense.*
    head.norm_*                         reformer.encoder.layer_norm.*
"""


RENAMED = {
    "d_model": "hidden_size",
    "d_ff": "feed_forward_size",
    "heads": "num_attention_heads",
    "dropout": "hidden_dropout_prob",
    "norm_eps": "layer_norm_eps",
}
"""Hugging Face's key for keys of the `model` section."""


class ReformerFormat(Format):
    """Format of the Reformer. Parameters are copied exactly, except for the following.

    Start: a megasparse decoder predicts token t from the tokens before it, and the first one from a start vector.
    Hugging Face's input is therefore [BOS, token 0, token 1, ...], its logits at t predict token t, and the embedding
    of BOS is the start vector. If that equals the embedding of a token, the token is BOS. Otherwise BOS is an extra
    token with id V; on import it is recognised by its row of the LM head, 0, and its bias, `NEVER`. Its logit is
    meaningless, and `suppress_tokens` excludes it. Without a `bos_token_id`, BOS is the `pad_token_id`, as in the
    published models.

    Bias of the LM head: `model.output_bias`; omitted if it is zero. transformers 5 stores it but does not add it,
    unlike transformers 4, which the published models were made with, and megasparse.

    Positions: sinusoidal ones, or none, are exported as a table, and recognised by its values on import.

    Not supported by Hugging Face: blocks that are not reversible, attention other than `local` and `lsh` with window =
    "chunk", same_bucket = false and count_rounds = false, and tied embeddings. Not supported by megasparse: encoders
    (their local attention wraps around the sequence), other numbers of chunks, other activations. Dropout of attention
    weights, training hash rounds and tiles are not converted.
    """

    name = "reformer"
    note = (
        "Every input starts with BOS (its tokenizer adds it), and the logits at a position predict the next token; the "
        "logit of BOS is meaningless. Attention inside hash buckets is random here: Hugging Face's Reformer draws new "
        "rotations at each call (hash_seed null), and lets the first chunk of a hash round attend to the last chunk of "
        "the round before, unlike the original model. Individual logits therefore differ from the original model's, "
        "as between two draws of its rotations. A sequence is padded to full chunks, and must fit "
        "max_position_embeddings with its padding."
    )
    unread = frozenset({DECODER_BIAS})

    def export(self, config: Config, weight: Callable[[str], Tensor]) -> Exported:
        model = config.model
        self._check_expressible(model)
        self.check_parts(model)
        start = weight("embedding.start")
        rows = (weight("embedding.weight").view(torch.int32) == start.view(torch.int32)).all(dim=1).nonzero()
        bos = int(rows[0]) if len(rows) else model.vocabulary
        return Exported(hf_config(model, bos), lambda: _export(model, weight, bos), other_files(config, bos))

    def load(self, hf_config: dict[str, Any], tensors: TensorFile) -> Imported:
        theirs = read_config(hf_config, tensors.path / "config.json")
        rows, width = theirs.vocab_size, theirs.hidden_size
        bias = tensors.read(DECODER_BIAS if DECODER_BIAS in tensors.names() else HEAD_BIAS, (rows,))
        bos = start_token(theirs)
        if bos >= rows:
            problem = f"bos_token_id or pad_token_id is {bos}, but vocab_size is {rows}"
            raise HubError(tensors.path / "config.json", problem, OWN_CONFIG)
        vocabulary = rows - added_start(bos, tensors.read(HEAD, (rows, 2 * width)), bias)
        section = model_section(theirs) | {"vocabulary": vocabulary, "output_bias": bool(bias[:vocabulary].any())}
        if not theirs.axial_pos_embds:
            table = tensors.read(TABLE, (section["max_length"], width))
            same = [kind for kind, constant in CONSTANT_TABLES.items() if torch.equal(table, constant(*table.shape))]
            section["positions"] = {"kind": [*same, "learned"][0]}
        sections = {"model": section, "data": {"sequence_length": section["max_length"]}}
        model = build_config(sections).model
        special = {WORDS: (rows, width), HEAD: (rows, 2 * width), HEAD_BIAS: (rows,)}
        if not theirs.axial_pos_embds:
            special[TABLE] = (model.max_length, width)
        plain = _plain(model)
        # constants that transformers before 5 wrote next to the weights, and a bias that may be missing
        ignored = [name for name in tensors.names() if name == DECODER_BIAS or name.endswith(BUFFERS)]
        further = special | {name: tensors.shape(name) for name in ignored}
        read: dict[str, Callable[[], Tensor]] = {
            "embedding.weight": lambda: tensors.read(WORDS)[:vocabulary],
            "embedding.start": lambda: tensors.read(WORDS)[bos : bos + 1],
            "head.weight": lambda: tensors.read(HEAD)[:vocabulary],
            **readers(tensors, plain, {entry.theirs: entry.theirs for entry in plain}, further),
        }
        if model.output_bias:
            read["head.bias"] = lambda: bias[:vocabulary]
        if model.positions.kind == "learned":
            read["embedding.positions.table"] = lambda: tensors.read(TABLE)
        return Imported(sections, read)

    def logits(self, model: Any, tokens: Tensor, seed: int) -> Tensor:
        head, bos = model.lm_head, start_token(model.config)
        bias = head.bias if head.decoder.bias is None else head.decoder.bias
        vocabulary = model.config.vocab_size - added_start(bos, head.decoder.weight, bias)
        return reformer_logits(model, bos, vocabulary, tokens, seed)

    def _check_expressible(self, model: ModelConfig) -> None:
        required = {"kind": "decoder", "blocks": "reversible", "tied_embeddings": False, "adaptive_cutoffs": []}
        if "local" in kinds(model):
            required |= {"attention.local.relative": False, "attention.local.sinks": 0}
        if "lsh" in kinds(model):
            lsh = {"shared_qk": True, "window": "chunk", "same_bucket": False, "count_rounds": False, "local": False}
            required |= {f"attention.lsh.{key}": only for key, only in lsh.items()}
        for key, value in required.items():
            self.must_be(model, key, value)
        self.check_pattern(model, "local", "lsh")
        self.must_be(model, "positions.kind", "axial", "learned", *CONSTANT_TABLES)
        self.must_be(model, "positions.offset", 0)
        if (shape := model.positions.axial_shape) and len(shape) != 2:
            raise self.inexpressible("positions.axial_shape", shape, "two axes")


def start_token(hf_config: Any) -> int:
    tokens = (hf_config.bos_token_id, hf_config.pad_token_id, 0)
    return int(next(token for token in tokens if token is not None))


def added_start(bos: int, head: Tensor, bias: Tensor) -> bool:
    """True if the last token is one that `ReformerFormat.export` added for the start vector."""
    return bos == len(head) - 1 and bias[bos].item() == NEVER and not head[bos].any()


def _plain(model: ModelConfig) -> list[Weight]:
    """Return the tensors that are copied without changes."""
    weights = []
    for entry in weights_of(WEIGHTS, "reformer.encoder.layers.{}", model):
        layer = int(entry.theirs.split(".")[3]) if ".layers." in entry.theirs else 0
        lsh = ".self_attention.query." in entry.theirs and "lsh" in heads_of_layer(model, layer)
        weights.append(entry._replace(theirs=entry.theirs.replace(".query.", ".query_key.")) if lsh else entry)
    if model.positions.kind == "axial":
        sizes = zip(model.positions.axial_shape or (), model.positions.axial_dims or (), strict=True)
        for axis, (size, dim) in enumerate(sizes):
            shape = (size, 1, dim) if axis == 0 else (1, size, dim)
            weights.append(Weight((f"embedding.positions.axes.{axis}",), f"{AXIS}{axis}", shape, (size, dim)))
    return weights


def _export(model: ModelConfig, weight: Callable[[str], Tensor], bos: int) -> Iterator[tuple[str, Tensor]]:
    added = bos == model.vocabulary

    def with_start(rows: Tensor, start: Tensor) -> Tensor:
        return torch.cat([rows, start]) if added else rows

    yield WORDS, with_start(weight("embedding.weight"), weight("embedding.start"))
    if model.positions.kind == "learned":
        yield TABLE, weight("embedding.positions.table")
    elif model.positions.kind in CONSTANT_TABLES:
        yield TABLE, CONSTANT_TABLES[model.positions.kind](model.max_length, model.d_model)
    for entry in _plain(model):
        yield entry.theirs, entry.write(weight)
    yield HEAD, with_start(weight("head.weight"), torch.zeros(1, 2 * model.d_model))
    bias = weight("head.bias") if model.output_bias else torch.zeros(model.vocabulary)
    for name in (HEAD_BIAS, DECODER_BIAS):
        yield name, with_start(bias, torch.tensor([NEVER]))


# Configurations and other files


def read_config(values: dict[str, Any], path: Path) -> Any:
    """Parse a `ReformerConfig`. Raises HubError naming `path` and the key that megasparse cannot express."""
    config = read_configuration("reformer", values, path)
    required: dict[str, Any] = {"is_decoder": True, "hidden_act": "relu"}
    for kind in sorted(set(config.attn_layers) & {"local", "lsh"}):
        required |= {f"{kind}_num_chunks_before": 1, f"{kind}_num_chunks_after": 0}
    check_only(config, required, path)
    for kind in config.attn_layers:
        if kind not in ("local", "lsh"):
            raise not_ours(path, "attn_layers", kind, "'local' and 'lsh'")
        if not getattr(config, f"{kind}_attn_chunk_length"):
            raise not_ours(path, f"{kind}_attn_chunk_length", None, "a number of tokens")
    if not config.attn_layers:
        raise not_ours(path, "attn_layers", [], "one layer or more")
    if config.axial_pos_embds and not len(config.axial_pos_shape) == len(config.axial_pos_embds_dim) == 2:
        raise not_ours(path, "axial_pos_shape", config.axial_pos_shape, "two axes")
    if isinstance(config.num_buckets, list) and len(config.num_buckets) not in (1, 2):
        raise not_ours(path, "num_buckets", config.num_buckets, "a number or two factors")
    if not 0 <= config.hidden_dropout_prob < 1:
        raise not_ours(path, "hidden_dropout_prob", config.hidden_dropout_prob, "a rate below 1")
    return config


def longest(config: Any) -> int:
    length = int(config.max_position_embeddings)
    return min(length, math.prod(config.axial_pos_shape)) if config.axial_pos_embds else length


def buckets(config: Any) -> list[int]:
    """Return the factors of `num_buckets`, least significant first; if null, Hugging Face's at full length."""
    if config.num_buckets is not None:
        return [config.num_buckets] if isinstance(config.num_buckets, int) else list(config.num_buckets)
    chunk = config.lsh_attn_chunk_length
    bits = (2 * max(1, longest(config) // chunk)).bit_length() - 1
    if 2**bits <= 2 * max(math.isqrt(config.max_position_embeddings // chunk), chunk):
        return [2**bits]
    return [2 ** (bits // 2), 2 ** (bits - bits // 2)]


def model_section(config: Any) -> dict[str, Any]:
    """Return the `model` section without the keys that depend on tensors: vocabulary, bias, table of positions."""
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
        **sizes_of(config, RENAMED),
        "head_dim": config.attention_head_size,
        "attention": attention,
    }
    if config.axial_pos_embds:
        shape, dims = list(config.axial_pos_shape), list(config.axial_pos_embds_dim)
        section["positions"] = {"kind": "axial", "axial_shape": shape, "axial_dims": dims}
    return section


def hf_config(model: ModelConfig, bos: int) -> dict[str, Any]:
    """Return the config.json. bos: token whose embedding is the start vector; may be V, added."""
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
        **hf_sizes(model, RENAMED),
        "attention_head_size": model.head_dim or model.d_model // model.heads,
        "hidden_act": "relu",
        "local_attention_probs_dropout_prob": model.attention.dropout,
        "lsh_attention_probs_dropout_prob": model.attention.dropout,
        "hash_seed": None,  # a seed would reset torch's global generator at each call, and so affect sampling
    }
    if model.positions.kind == "axial":
        settings |= {"axial_pos_shape": model.positions.axial_shape, "axial_pos_embds_dim": model.positions.axial_dims}
    for kind in kinds(model):
        chunk = min(getattr(model.attention, kind).chunk, model.max_length)
        settings |= {f"{kind}_attn_chunk_length": chunk, f"{kind}_num_chunks_before": 1, f"{kind}_num_chunks_after": 0}
    if "lsh" in kinds(model):
        factors = lsh_buckets(model.attention.lsh, model.max_length, training=False)
        # The first factor is the most significant part of megasparse's bucket numbers, but Hugging Face's least.
        settings["num_buckets"] = factors[0] if len(factors) == 1 else factors[::-1]
        settings["num_hashes"] = evaluation_rounds(model)["lsh"]
    return settings


def other_files(config: Config, bos: int) -> Files:
    """Return the generation settings, and a tokenizer that starts every text with BOS if BOS is an extra token."""
    model = config.model
    ids = {"bos_token_id": bos, "pad_token_id": bos, "eos_token_id": None}
    generation: dict[str, Any] = {**ids, "max_length": model.max_length}
    if bos == model.vocabulary:  # an extra token, never predicted
        generation["suppress_tokens"] = [bos]
    files: Files = {"generation_config.json": json.dumps(generation, indent=2) + "\n"}
    if bos < build_tokenizer(config.data.tokenizer).vocabulary:
        return files
    return files | files_with_start(tokenizer_files(config, model.max_length), bos, BOS)


# Logits of Hugging Face's model for the comparison


@torch.no_grad()
def reformer_logits(model: Any, bos: int, vocabulary: int, tokens: Tensor, seed: int) -> Tensor:
    """Return logits of Hugging Face's code on [BOS, tokens], with three changes to its LSH layers: the rotations of
    megasparse's evaluation with `seed`, attention only within a hash round, and fp64, because in fp32 a token without
    visible keys in any round gets a log-sum-exp of −1e5, rounded so coarsely that the rounds' weights sum to 1 only
    within 0.4 %. The LM head's bias is added if transformers omits it.
    """
    twin: Any = copy.deepcopy(model).double().eval()
    for number, layer in enumerate(twin.reformer.encoder.layers):
        if hasattr(layer.attention.self_attention, "query_key"):
            _hash_as_ours(layer.attention.self_attention, buckets(model.config), number, seed)
    embeddings, length = twin.reformer.embeddings, tokens.shape[1]
    positions = embeddings.position_embeddings.forward

    def padded(position_ids: Tensor) -> Tensor:  # the last chunk's, beyond the last position; no token attends to it
        return F.pad(positions(position_ids[:, :length]), (0, 0, 0, position_ids.shape[1] - length))

    embeddings.position_embeddings.forward, embeddings.max_position_embeddings = padded, sys.maxsize
    read = torch.cat([torch.full_like(tokens[:, :1], bos), tokens[:, :-1]], dim=1)
    logits = twin(read, use_cache=False).logits
    if twin.lm_head.decoder.bias is None:
        logits = logits + twin.lm_head.bias
    return logits[..., :vocabulary].float()


def _hash_as_ours(layer: Any, factors: list[int], number: int, seed: int) -> None:
    """Use megasparse's rotations in Hugging Face's LSH layer, and keep its windows within a hash round: the layer
    concatenates all rounds into a ring. Tokens of a chunk of another round get the number −1, and the mask excludes
    them.
    """
    drawn = rotations(
        RngContext.evaluation(seed, 1).key(number, "lsh rotation"),
        range(layer.num_attention_heads),
        layer.num_hashes,
        layer.attention_head_size,
        factors[::-1],
        torch.device("cpu"),
    )  # (H, R, D, sum of the factors' halves), megasparse's first factor first
    parts = drawn.split([factor // 2 for factor in factors[::-1]], dim=-1)
    ours = torch.cat(parts[::-1], dim=-1).permute(0, 2, 1, 3).double()
    layer.num_buckets, layer.hash_seed = factors if len(factors) > 1 else factors[0], None
    draw, look, mask = layer._hash_vectors, layer._look_adjacent, layer._compute_attn_mask

    def hash_vectors(vectors: Tensor, *rest: Any, **named: Any) -> Tensor:
        with _Drawn(ours.to(vectors.device)):
            return draw(vectors, *rest, **named)

    def look_adjacent(vectors: Tensor, before: int, after: int) -> Tensor:
        windows = look(vectors, before, after)
        if vectors.ndim == 4:  # token numbers (B, H, chunks of all rounds, chunk)
            windows[:, :, :: vectors.shape[2] // layer.num_hashes, : vectors.shape[3]] = -1
        return windows

    def compute_mask(queries: Tensor, keys: Tensor, *rest: Any) -> Tensor:
        visible, real = mask(queries, keys.clamp_min(0), *rest), (keys >= 0).unsqueeze(-2)
        return real if visible is None else visible & real

    layer._hash_vectors, layer._look_adjacent, layer._compute_attn_mask = hash_vectors, look_adjacent, compute_mask


class _Drawn(TorchFunctionMode):
    """Context manager in which torch.randn returns `drawn`."""

    def __init__(self, drawn: Tensor):
        super().__init__()
        self.drawn = drawn

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.randn:
            assert tuple(args[0]) == tuple(self.drawn.shape)
            return self.drawn
        return func(*args, **(kwargs or {}))


FORMAT = ReformerFormat()
