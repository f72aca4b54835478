"""Contents of tokenizer.json, as HuggingFace's `tokenizers` reads it, of tokenizers that are others here."""

import re
from typing import Any

from megasparse.data.tokenizers.huggingface import alphabet
from megasparse.data.tokenizers.sentence_piece import GRID
from megasparse.data.tokenizers.simple import END, UNKNOWN

NEVER = -1e9
"""Score of a piece that no text becomes: all can be encoded in bytes, and so better."""
UNKNOWN_PENALTY = 10.0
"""Difference by which an unknown character scores below every piece in sentencepiece."""

_ALPHABET = alphabet()
_ACROSS = re.compile("\n.|[^ ] ", re.DOTALL)
"""Part of a piece that goes over the end of a line, or over the beginning of a word."""


def of_bytes(special: dict[str, int]) -> dict[str, Any]:
    """Content for ByteTokenizer. special: the id of each special token; ids between that none has get a name, since
    added tokens are numbered one after another.
    """
    names = {token: name for name, token in special.items()}
    special = {names.get(token, f"[unused{token}]"): token for token in range(256, max(names, default=255) + 1)}
    model: dict[str, Any] = {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None}
    model |= {"end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False}
    model |= {"vocab": {character: byte for byte, character in enumerate(_ALPHABET)}, "merges": []}
    split = _byte_level(split_words=True)
    return _content(model, special, pre_tokenizer=split, decoder=split)


def of_words(words: list[str]) -> dict[str, Any]:
    """Content for WordTokenizer."""
    model = {"type": "WordLevel", "vocab": {word: token for token, word in enumerate(words)}, "unk_token": UNKNOWN}
    replaced = {"\n": f" {END} ", **{chr(code): " " for code in range(0x1C, 0x20)}}  # white space to Python alone
    parts = [{"type": "Replace", "pattern": {"String": old}, "content": new} for old, new in replaced.items()]
    normalizer = {"type": "Sequence", "normalizers": parts}
    return _content(model, {}, normalizer=normalizer, pre_tokenizer={"type": "WhitespaceSplit"})


def of_unigram(model: bytes) -> dict[str, Any] | None:
    """Content for SentencePieceTokenizer, where the model is a unigram of scores on the GRID; None of others, that no
    tokenizer.json is exactly: bpe, or scores that are rounded otherwise there.

    Pieces are written as their bytes, so that a U+2581 of a text is no space, and a name like `<0x0A>` no byte. Only a
    byte that is no known character is a token of its own.
    """
    from sentencepiece.sentencepiece_model_pb2 import ModelProto  # type: ignore[attr-defined]

    proto, kinds = ModelProto(), ModelProto.SentencePiece
    proto.ParseFromString(model)
    texts = {piece.piece.replace("\u2581", " ") for piece in proto.pieces if piece.type == kinds.NORMAL}
    known = (kinds.NORMAL, kinds.BYTE, kinds.CONTROL, kinds.UNKNOWN)
    unigram = proto.trainer_spec.model_type == proto.trainer_spec.UNIGRAM
    if not unigram or any(piece.type not in known or (piece.score * GRID) % 1 for piece in proto.pieces):
        return None
    if any(map(_ACROSS.search, texts)):
        return None
    least = min((piece.score for piece in proto.pieces if piece.type == kinds.NORMAL), default=0.0)
    vocabulary: list[tuple[str, float]] = []
    special: dict[str, int] = {}
    unknown = None
    for number, piece in enumerate(proto.pieces):
        byte = int(piece.piece[3:5], 16) if piece.type == kinds.BYTE else None
        if piece.type == kinds.NORMAL:
            raw = piece.piece.replace("\u2581", " ").encode()
            vocabulary.append(("".join(_ALPHABET[one] for one in raw), piece.score))
        elif byte is not None and (byte > 0x7F or chr(byte) not in texts):
            vocabulary.append((_ALPHABET[byte], least - UNKNOWN_PENALTY))
        else:
            vocabulary.append((piece.piece, NEVER))
        if piece.type == kinds.CONTROL:
            special[piece.piece] = number
        unknown = number if piece.type == kinds.UNKNOWN else unknown
    values = {"type": "Unigram", "unk_id": unknown, "vocab": vocabulary, "byte_fallback": False}
    split = _byte_level(split_words=False)
    return _content(values, special, pre_tokenizer=split, decoder=split)


def with_start(values: dict[str, Any], token: int, name: str) -> dict[str, Any]:
    """The same tokenizer with the special token `name`, of id `token`, before every text; ids below it that none has
    get a name, since added tokens are numbered one after another.
    """
    added = values["added_tokens"]
    known = max([len(values["model"]["vocab"]), *(other["id"] + 1 for other in added)])
    gap = [_added(unused, f"[unused{unused}]") for unused in range(known, token)]
    added = [*added, *gap, _added(token, name)]
    return {**values, "added_tokens": added, "post_processor": _template(token, name, "^A", "^AB")}


def with_end(values: dict[str, Any], token: int) -> dict[str, Any]:
    """The same tokenizer with the special token of id `token` behind every text, behind each of a pair."""
    name = name_of(values, token)
    assert name is not None
    added = values["added_tokens"]
    if not any(other["id"] == token for other in added):
        added = [*added, _added(token, name)]
    return {**values, "added_tokens": added, "post_processor": _template(token, name, "A^", "A^B^")}


def _template(token: int, name: str, single: str, pair: str) -> dict[str, Any]:
    """Where the special token, ^, stands beside a text A, and beside two."""
    special = {"SpecialToken": {"id": name, "type_id": 0}}
    parts = {"^": special, **{text: {"Sequence": {"id": text, "type_id": 0}} for text in "AB"}}
    return {
        "type": "TemplateProcessing",
        "single": [parts[part] for part in single],
        "pair": [parts[part] for part in pair],
        "special_tokens": {name: {"id": name, "ids": [token], "tokens": [name]}},
    }


def name_of(values: dict[str, Any], token: int) -> str | None:
    """The name of a token in a tokenizer.json."""
    pieces = values["model"]["vocab"]
    listed = pieces.items() if isinstance(pieces, dict) else ((name, i) for i, (name, *_) in enumerate(pieces))
    names = {number: name for name, number in listed}
    return (names | {added["id"]: added["content"] for added in values["added_tokens"]}).get(token)


def is_of_bytes(values: Any) -> bool:
    """Whether a tokenizer.json is one of `of_bytes`."""
    model = values.get("model") if isinstance(values, dict) else None
    return isinstance(model, dict) and model == of_bytes({})["model"]


def _content(
    model: dict[str, Any],
    special: dict[str, int],
    *,
    normalizer: dict[str, Any] | None = None,
    pre_tokenizer: dict[str, Any],
    decoder: dict[str, Any] | None = None,
) -> dict[str, Any]:
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_added(number, name) for name, number in special.items()],
        "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": None,
        "decoder": decoder,
        "model": model,
    }


def _added(number: int, name: str) -> dict[str, Any]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {"id": number, "content": name, **flags}


def _byte_level(split_words: bool) -> dict[str, Any]:
    """Text as characters that stand for its bytes. split_words: tokens end where GPT-2's pattern says."""
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": split_words}
