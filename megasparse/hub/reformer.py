"""HuggingFace's Reformer, `ReformerModelWithLMHead`, and our decoder: the same model, written in two ways.

V vocabulary, E width.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megasparse.config.attention import attends_fully, heads_of_layer, kinds
from megasparse.config.load import build_config
from megasparse.config.schema import Config, ModelConfig
from megasparse.errors import HubError
from megasparse.hub.formats import Exported, Imported, check_parts, must_be
from megasparse.hub.reformer_config import hf_config, model_section, other_files, read_config
from megasparse.hub.reformer_outputs import outputs
from megasparse.hub.tensor_file import TensorFile
from megasparse.ops.positions import sinusoids

if TYPE_CHECKING:
    from transformers import PreTrainedModel

WORDS = "reformer.embeddings.word_embeddings.weight"
AXIS = "reformer.embeddings.position_embeddings.weights."
TABLE = "reformer.embeddings.position_embeddings.embedding.weight"
HEAD, HEAD_BIAS = "lm_head.decoder.weight", "lm_head.bias"
OLD_HEAD_BIAS = "lm_head.decoder.bias"
"""Name under which transformers before 5 has written the bias a second time."""

NEVER = -1e4
"""Bias of a token that is never predicted, which half precision can hold."""

CONSTANT_TABLES: dict[str, Callable[[int, int], Tensor]] = {
    "sinusoidal": lambda length, width: sinusoids(0, length, width),
    "none": torch.zeros,
}
"""Positions of ours that HuggingFace's has as a table: (max_length, E)."""


class ReformerFormat:
    """Every parameter of either model is one of the other's, bit for bit, but for what follows.

    Start: our decoder predicts token t from the tokens before it, the first one from a start vector. HuggingFace's
    predicts the token after each of its inputs. So its input is [BOS, token 0, token 1, ...], its logits at t are ours
    of token t, and the embedding of BOS is our start vector. Where the start vector is one of the token embeddings,
    that token is BOS. Else BOS is one token more, with id V: its row of the LM head is 0 and its bias `NEVER`, by which
    it is known again; its logit means nothing (`suppress_tokens` keeps generation from it). A model of HuggingFace's
    without a `bos_token_id` starts at its `pad_token_id`, as the published ones were trained.

    Bias of the LM head: `model.output_bias`; one of zeros is left out. transformers 5 keeps it and does not add it to
    the logits; transformers 4, which the published models were made with, does, and so do we.

    Positions: sinusoidal ones, or none, are a table there, and are known again by its values.

    Not expressible there, and refused: anything but reversible blocks, attention other than `local`, and `lsh` with
    window = "chunk", same_bucket = false and count_rounds = false; tied embeddings (its head
    reads both streams side by side, twice as wide as an embedding). Not
    expressible here, and refused: encoders (its local attention lays the ends of a sequence together), other
    numbers of chunks, other activations. Not carried over: what acts in training alone (dropout of attention weights,
    number of hash rounds in training) and what trades memory for time (tiles).

    LSH layers: HuggingFace's draws other rotations than ours (`hash_seed` null: new ones at each call), and the first
    chunk of each hash round also sees the last chunk of the round before. So single logits differ, as between two
    seeds of ours; `outputs` says how the two are compared.
    """

    name = "reformer"
    note = (
        "An input begins with BOS (its tokenizer sets it), and the logits at a position predict the next token; the "
        "logit of BOS itself means nothing. Attention inside hash buckets is random here: HuggingFace's Reformer draws "
        "new rotations at each call (hash_seed null), and lets the first chunk of a hash round see the last chunk of "
        "the round before, as the model it was written from does not. So single logits differ from that model's, as "
        "between two draws of its own rotations. A sequence that does not fill its last chunk is filled up, and must "
        "fit max_position_embeddings so."
    )
    """Note for the model card."""

    def export(self, config: Config, weight: Callable[[str], Tensor]) -> Exported:
        """See formats.Format."""
        model = config.model
        _check_expressible(model)
        check_parts(self.name, model)
        start = weight("embedding.start")
        rows = (weight("embedding.weight").view(torch.int32) == start.view(torch.int32)).all(dim=1).nonzero()
        bos = int(rows[0]) if len(rows) else model.vocabulary
        return Exported(hf_config(model, bos), partial(_export, model, weight, bos), other_files(config, bos))

    def load(self, hf_config: dict[str, Any], tensors: TensorFile) -> Imported:
        """See formats.Format."""
        theirs = read_config(hf_config, tensors.path / "config.json")
        rows, width = theirs.vocab_size, theirs.hidden_size
        bias = _read_bias(tensors, rows)
        bos = start_token(theirs)
        if bos >= rows:
            problem = f"bos_token_id or pad_token_id is {bos}, but vocab_size is {rows}"
            raise HubError(tensors.path / "config.json", problem, "Give a model with its own config.json")
        vocabulary = rows - added_start(bos, tensors.read(HEAD, (rows, 2 * width)), bias)
        section = model_section(theirs) | {"vocabulary": vocabulary, "output_bias": bool(bias[:vocabulary].any())}
        if not theirs.axial_pos_embds:
            section["positions"] = _positions_of(tensors.read(TABLE, (section["max_length"], width)))
        sections = {"model": section, "data": {"sequence_length": section["max_length"]}}
        model = build_config(sections).model
        plain = {their: (ours, shape) for ours, their, shape in _plain(model)}
        special = {WORDS: (rows, width), HEAD: (rows, 2 * width), HEAD_BIAS: (rows,)}
        if not theirs.axial_pos_embds:
            special[TABLE] = (model.max_length, width)
        ignored = {name: tensors.shape(name) for name in tensors.names() if _is_ignored(name)}
        tensors.check({**special, **{their: shape for their, (_, shape) in plain.items()}, **ignored})
        found: dict[str, Callable[[], Tensor]] = {
            "embedding.weight": lambda: tensors.read(WORDS)[:vocabulary],
            "embedding.start": lambda: tensors.read(WORDS)[bos : bos + 1],
            "head.weight": lambda: tensors.read(HEAD)[:vocabulary],
            **{ours: partial(_flat_axis, tensors, their) for their, (ours, _) in plain.items()},
        }
        if model.output_bias:
            found["head.bias"] = lambda: bias[:vocabulary]
        if model.positions.kind == "learned":
            found["embedding.positions.table"] = partial(tensors.read, TABLE)
        return Imported(sections, found)

    def outputs(self, model: "PreTrainedModel", tokens: Tensor, seed: int) -> Iterator[tuple[str, Tensor]]:
        """See formats.Format and reformer_outputs."""
        head: Any = model.lm_head
        bos = start_token(model.config)
        vocabulary = model.config.vocab_size - added_start(bos, head.decoder.weight, head.bias)
        return outputs(model, bos, vocabulary, tokens, seed)


FORMAT = ReformerFormat()


def start_token(hf_config: Any) -> int:
    """The token whose embedding is the start vector."""
    for token in (hf_config.bos_token_id, hf_config.pad_token_id):
        if token is not None:
            return int(token)
    return 0


def added_start(bos: int, head: Tensor, bias: Tensor) -> bool:
    """Whether the last token is one that `ReformerFormat.export` has added for our start vector."""
    return bos == len(head) - 1 and bias[bos].item() == NEVER and not head[bos].any()


def _check_expressible(model: ModelConfig) -> None:
    """Raise HubError for the first setting that HuggingFace's Reformer has not."""
    lsh, found = model.attention.lsh, kinds(model)
    wanted: list[tuple[str, Any, Any]] = [
        ("kind", model.kind, "decoder"),
        ("blocks", model.blocks, "reversible"),
        ("embedding_once", model.embedding_once, False),
        ("tied_embeddings", model.tied_embeddings, False),
        ("adaptive_cutoffs", model.adaptive_cutoffs, []),
        ("attention.output_dropout", model.attention.output_dropout, None),
    ]
    if "local" in found:
        local = model.attention.local
        wanted += [("attention.local.relative", local.relative, False), ("attention.local.sinks", local.sinks, 0)]
    if "lsh" in found:
        wanted += [
            ("attention.lsh.shared_qk", lsh.shared_qk, True),
            ("attention.lsh.window", lsh.window, "chunk"),
            ("attention.lsh.same_bucket", lsh.same_bucket, False),
            ("attention.lsh.count_rounds", lsh.count_rounds, False),
            ("attention.lsh.local", lsh.local, False),
        ]
        if attends_fully(model, "lsh"):
            wanted.append(("attention.full_below", model.attention.full_below, None))
    for key, value, only in wanted:
        must_be("Reformer", key, value, only)
    for layer in range(model.layers):
        if len(split := heads_of_layer(model, layer)) > 1 or not split.keys() <= {"local", "lsh"}:
            kind = split if len(split) > 1 else next(iter(split))
            raise _inexpressible(f"attention.pattern[{layer % len(model.attention.pattern)}]", kind, "'local' or 'lsh'")
    positions = model.positions
    if positions.kind not in ("axial", "learned", *CONSTANT_TABLES):
        raise _inexpressible("positions.kind", positions.kind, "'axial', 'learned', 'sinusoidal' or 'none'")
    must_be("Reformer", "positions.offset", positions.offset, 0)
    if positions.axial_shape and len(positions.axial_shape) != 2:
        raise _inexpressible("positions.axial_shape", positions.axial_shape, "two axes")


def _inexpressible(key: str, value: Any, only: str) -> HubError:
    problem = f"{value!r} is not in HuggingFace's Reformer, which has only {only} there"
    return HubError(f"model.{key}", problem, "Export to another format, such as megasparse")


def _plain(model: ModelConfig) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Our name, HuggingFace's name and shape there of every tensor that is one of the other's as it is."""
    width, d_ff = model.d_model, model.d_ff
    heads = model.heads * (model.head_dim or width // model.heads)
    if model.positions.kind == "axial":
        for axis, (size, dim) in enumerate(
            zip(model.positions.axial_shape or (), model.positions.axial_dims or (), strict=True)
        ):
            shape = (size, 1, dim) if axis == 0 else (1, size, dim)
            yield f"embedding.positions.axes.{axis}", f"{AXIS}{axis}", shape
    for layer in range(model.layers):
        attention, feed = f"blocks.{layer}.attention", f"blocks.{layer}.feed_forward"
        theirs = f"reformer.encoder.layers.{layer}"
        projections = {"query": "query", "key": "key", "value": "value"}
        if "lsh" in heads_of_layer(model, layer):
            projections = {"query": "query_key", "value": "value"}
        for part in ("weight", "bias"):
            yield f"{attention}.norm.{part}", f"{theirs}.attention.layer_norm.{part}", (width,)
            yield f"{feed}.norm.{part}", f"{theirs}.feed_forward.layer_norm.{part}", (width,)
        for ours, their in projections.items():
            name = f"{theirs}.attention.self_attention.{their}.weight"
            yield f"{attention}.attention.{ours}.weight", name, (heads, width)
        yield f"{attention}.attention.output.weight", f"{theirs}.attention.output.dense.weight", (width, heads)
        inner, outer = f"{theirs}.feed_forward.dense.dense", f"{theirs}.feed_forward.output.dense"
        yield f"{feed}.feed_forward.up", f"{inner}.weight", (d_ff, width)
        yield f"{feed}.feed_forward.up_bias", f"{inner}.bias", (d_ff,)
        yield f"{feed}.feed_forward.down", f"{outer}.weight", (width, d_ff)
        yield f"{feed}.feed_forward.down_bias", f"{outer}.bias", (width,)
    for part in ("weight", "bias"):
        yield f"head.norm_{part}", f"reformer.encoder.layer_norm.{part}", (2 * width,)


def _export(model: ModelConfig, weight: Callable[[str], Tensor], bos: int) -> Iterator[tuple[str, Tensor]]:
    added = bos == model.vocabulary

    def with_start(rows: Tensor, start: Tensor) -> Tensor:
        return torch.cat([rows, start]) if added else rows

    yield WORDS, with_start(weight("embedding.weight"), weight("embedding.start"))
    if model.positions.kind == "learned":
        yield TABLE, weight("embedding.positions.table")
    elif model.positions.kind in CONSTANT_TABLES:
        yield TABLE, CONSTANT_TABLES[model.positions.kind](model.max_length, model.d_model)
    for ours, their, shape in _plain(model):
        yield their, weight(ours).view(shape)
    yield HEAD, with_start(weight("head.weight"), torch.zeros(1, 2 * model.d_model))
    bias = weight("head.bias") if model.output_bias else torch.zeros(model.vocabulary)
    yield HEAD_BIAS, with_start(bias, torch.tensor([NEVER]))


def _read_bias(tensors: TensorFile, rows: int) -> Tensor:
    """The bias of the LM head. transformers before 5 wrote it under two names, and read it from the second."""
    bias = tensors.read(HEAD_BIAS, (rows,))
    if OLD_HEAD_BIAS not in tensors.names():
        return bias
    old = tensors.read(OLD_HEAD_BIAS, (rows,))
    if bias.any() and not torch.equal(old, bias):
        problem = f"{HEAD_BIAS} and {OLD_HEAD_BIAS} differ, though they are one bias"
        raise HubError(tensors.path, problem, "Remove the one that does not count")
    return old


def _is_ignored(name: str) -> bool:
    """Constants that transformers before 5 wrote with the weights, and the bias that was read already."""
    return name == OLD_HEAD_BIAS or name.endswith(
        tuple(f".{mask}_value_float{bits}" for mask in ("mask", "self_mask") for bits in (16, 32))
    )


def _positions_of(table: Tensor) -> dict[str, Any]:
    for kind, constant in CONSTANT_TABLES.items():
        if torch.equal(table, constant(*table.shape)):
            return {"kind": kind}
    return {"kind": "learned"}


def _flat_axis(tensors: TensorFile, name: str) -> Tensor:
    """A tensor; an axis' position embeddings without the dimension of size 1."""
    tensor = tensors.read(name)
    return tensor.flatten(0, 1) if name.startswith(AXIS) else tensor
