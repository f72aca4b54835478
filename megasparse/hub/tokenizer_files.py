"""Tokenizer files of a folder to export, for Hugging Face's fast tokenizers, and of a folder to import."""

import json
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as PackageTokenizer
from tokenizers import decoders, models, normalizers, pre_tokenizers

from megasparse.config.schema import Config, ModelConfig
from megasparse.data.tokenizers import build_tokenizer
from megasparse.data.tokenizers.huggingface import alphabet
from megasparse.data.tokenizers.sentence_piece import GRID
from megasparse.data.tokenizers.simple import END, UNKNOWN
from megasparse.data.tokenizers.tokenizer import BEGIN, MASK, NAMED, PADDING, SEPARATOR, Tokenizer
from megasparse.errors import HubError
from megasparse.files import read_file, write_file

FILE, SETTINGS, GENERATION = "tokenizer.json", "tokenizer_config.json", "generation_config.json"
BESIDE = (
    SETTINGS, GENERATION, "chat_template.jinja", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt", "tokenizer.model",
)  # fmt: skip
SPECIAL = ("eos_token_id", "pad_token_id")
TRAINED = "training_tokenizer.json"
"""The tokenizer's file in training, if `FILE` differs from it."""

Files = dict[str, str | bytes]


def write_files(files: Files, folder: Path) -> None:
    for name, content in files.items():
        write_file(folder / name, content)


def tokenizer_files(config: Config, longest: int, room: int | None = None) -> Files:
    """Return the files that AutoTokenizer reads, and the tokenizer's own file; {} for pixels. For sentencepiece models
    that tokenizer.json cannot express exactly, only the own file.

    Texts get the same ids, except that an encoder's tokenizer recognises special tokens by name, and a Hugging Face
    tokenizer adds the tokens that its tokenizer.json specifies. An encoder–decoder's adds only the separator.

    longest: the model's maximum input in tokens. room: upper bound of a padding id of bytes; None if the model never
    reads it.
    """
    tokenizer = build_tokenizer(config.data.tokenizer)
    model = config.model
    mask = model.masking.token if model.kind == "encoder" else None
    end = None if model.source is None else separator(tokenizer, model)
    if tokenizer.name == "bytes":
        return byte_files(longest, mask, model.padding_token, room, end)
    if tokenizer.file is None:
        return {}
    content = read_file(tokenizer.file)
    files: Files = {own_name(tokenizer, model.kind): content}
    values: dict[str, Any] | None  # content of tokenizer.json; None if it cannot express the tokenizer exactly
    if tokenizer.name == "huggingface":
        values = json.loads(content)
    else:
        values = of_words(content.decode().split()) if tokenizer.name == "words" else of_unigram(content)
    if values is None:
        return files
    if end is not None:
        return {**_ended(values, longest, end), **files}
    return {FILE: _json(values, 1), SETTINGS: _json(_settings(longest, mask is None, _names(values))), **files}


def chat_files(config: Config, longest: int, room: int | None = None) -> Files:
    """Return a decoder's original tokenizer files, if it was imported with them; else `tokenizer_files`."""
    file = build_tokenizer(config.data.tokenizer).file
    imported = file is not None and file.name == FILE and (file.parent / SETTINGS).is_file()
    if file is None or not imported or config.model.kind != "decoder":
        return tokenizer_files(config, longest, room)
    return {FILE: read_file(file), **companion_files(file.parent)}


def companion_files(folder: Path) -> Files:
    files: Files = {name: read_file(folder / name) for name in BESIDE if (folder / name).is_file()}
    try:
        valid = isinstance(json.loads(files.get(GENERATION, "{}")), dict)
    except (ValueError, RecursionError):
        valid = False
    if not valid:
        raise HubError(folder / GENERATION, "cannot be read as a JSON object", "Restore it")
    return files


def byte_files(
    longest: int, mask: int | None, padding: int | None = None, room: int | None = None, end: int | None = None
) -> Files:
    """Return the files of a byte tokenizer. mask: an encoder's mask token. end: token after every text of an
    encoder–decoder. padding: by default the first unused id. A decoder's tokenizer reads names of special tokens as
    text.
    """
    special = {} if mask is None else {"[MASK]": mask}
    if padding is None:
        padding = 256 if mask is None else max(256, mask + 1)
    if room is None or padding < room:
        special["[PAD]"] = padding
    if end is not None:
        return _ended(of_bytes({**special, SEPARATOR[0]: end}), longest, end)
    values = of_bytes(special)
    return {FILE: _json(values, 1), SETTINGS: _json(_settings(longest, mask is None, _names(values)))}


def files_with_start(files: Files, token: int, name: str) -> Files:
    """Add the special token `name`, also for padding, before every text to a tokenizer."""
    if FILE not in files:
        return files
    values, settings = json.loads(files[FILE]), json.loads(files[SETTINGS])
    values["added_tokens"] = [added for added in values["added_tokens"] if added["content"] not in PADDING]
    settings |= {"bos_token": name, "pad_token": name}
    return {**files, FILE: _json(with_start(values, token, name), 1), SETTINGS: _json(settings)}


def own_name(tokenizer: Tokenizer, kind: str) -> str:
    """Return the name of a tokenizer's own file in an exported folder, or its name. An encoder–decoder's training file
    is another one than its tokenizer.json, which adds the separator after every text.
    """
    if tokenizer.file is None:
        return tokenizer.name
    renamed = kind == "encoder_decoder" and tokenizer.file.suffix == Path(FILE).suffix
    return TRAINED if renamed else f"tokenizer{tokenizer.file.suffix}"


def separator(tokenizer: Tokenizer, model: ModelConfig) -> int | None:
    if tokenizer.special is None or tokenizer.special.separator >= model.vocabulary:
        return None
    return tokenizer.special.separator


def require_tokenizer(folder: Path) -> None:
    if not (folder / FILE).is_file():
        hint = "Save it there: AutoTokenizer.from_pretrained(MODEL).save_pretrained(FOLDER)"
        raise HubError(folder / FILE, "is missing, without which tokens are undefined", hint)


def found_tokenizer(folder: Path, named: str | None) -> str:
    """Return `data.tokenizer` for the model in a folder. named: `own_name` from its config.json; without it, the
    tokenizer.json, or `bytes` if there is none or it is from `byte_files`.
    """
    if named in NAMED:
        return str(named)
    if named is not None:
        if named not in {path.name for path in folder.iterdir() if path.is_file()}:
            raise HubError(folder, f"the tokenizer {named[:200]!r} of its config.json is missing", "Copy it again")
        return str(folder / named)
    file = folder / FILE
    of_text = file.is_file()
    if of_text:
        with suppress(ValueError, RecursionError):  # damage is reported when the file is opened
            values = json.loads(read_file(file))
            of_text = not isinstance(values, dict) or values.get("model") != of_bytes({})["model"]
    return str(file) if of_text else "bytes"


def _ended(values: dict[str, Any], longest: int, end: int) -> Files:
    """Return the files of a tokenizer.json that adds `end` after every text."""
    values = with_end(values, end)
    names = {**_names(values), "eos_token": str(name_of(values, end))}
    settings = {**_settings(longest, decoder=True, names=names), "padding_side": "right"}
    return {FILE: _json(values, 1), SETTINGS: _json(settings)}


def _names(values: dict[str, Any]) -> dict[str, str]:
    """Return the setting and name of each special token in a tokenizer.json."""
    present = [added["content"] for added in values["added_tokens"] if added["special"]]
    settings = {"cls_token": BEGIN, "sep_token": SEPARATOR, "pad_token": PADDING, "mask_token": MASK}
    matches = {key: [name for name in names if name in present] for key, names in settings.items()}
    return {key: names[0] for key, names in matches.items() if names}


def _settings(longest: int, decoder: bool, names: dict[str, str]) -> dict[str, Any]:
    """Return tokenizer_config.json. decoder: read names of special tokens as text."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": longest,
        **names,
        **({"split_special_tokens": True} if decoder else {}),
        "padding_side": "left" if decoder else "right",
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],
    }


def _json(values: Any, indent: int = 2) -> str:
    return json.dumps(values, indent=indent, ensure_ascii=False) + "\n"


# Contents of tokenizer.json

NEVER = -1e9
"""Score of a piece that is never used, because its bytes score better."""
UNKNOWN_PENALTY = 10.0
"""Difference between the scores of the worst piece and an unknown character in sentencepiece."""

_ALPHABET = alphabet()
_ACROSS = re.compile("\n.|[^ ] ", re.DOTALL)
"""Part of a piece that crosses the end of a line or the start of a word."""


def of_bytes(special: dict[str, int]) -> dict[str, Any]:
    """Return the content for ByteTokenizer. special: id of each special token. Unused ids in between get names."""
    names = {token: name for name, token in special.items()}
    special = {names.get(token, f"[unused{token}]"): token for token in range(256, max(names, default=255) + 1)}
    model = models.BPE({character: byte for byte, character in enumerate(_ALPHABET)}, [])
    return _content(model, special, pre_tokenizers.ByteLevel(add_prefix_space=False), decoder=decoders.ByteLevel())


def of_words(words: list[str]) -> dict[str, Any]:
    model = models.WordLevel({word: token for token, word in enumerate(words)}, unk_token=UNKNOWN)
    replaced = {"\n": f" {END} ", **{chr(code): " " for code in range(0x1C, 0x20)}}  # white space only in Python
    normalizer = normalizers.Sequence([normalizers.Replace(old, new) for old, new in replaced.items()])
    return _content(model, {}, pre_tokenizers.WhitespaceSplit(), normalizer=normalizer)


def of_unigram(model: bytes) -> dict[str, Any] | None:
    """Return the content for SentencePieceTokenizer if the model is a unigram with scores on the GRID; None for others,
    which tokenizer.json cannot express exactly. Pieces are written as their bytes, so that U+2581 in a text is not a
    space, and a name like `<0x0A>` not a byte. Only bytes that are not known characters are tokens.
    """
    from sentencepiece.sentencepiece_model_pb2 import ModelProto  # type: ignore[attr-defined]

    proto, kinds = ModelProto(), ModelProto.SentencePiece
    proto.ParseFromString(model)
    texts = {piece.piece.replace("\u2581", " ") for piece in proto.pieces if piece.type == kinds.NORMAL}
    expected = (kinds.NORMAL, kinds.BYTE, kinds.CONTROL, kinds.UNKNOWN)
    unigram = proto.trainer_spec.model_type == proto.trainer_spec.UNIGRAM
    if not unigram or any(piece.type not in expected or (piece.score * GRID) % 1 for piece in proto.pieces):
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
            vocabulary.append(("".join(_ALPHABET[byte_value] for byte_value in raw), piece.score))
        elif byte is not None and (byte > 0x7F or chr(byte) not in texts):
            vocabulary.append((_ALPHABET[byte], least - UNKNOWN_PENALTY))
        else:
            vocabulary.append((piece.piece, NEVER))
        if piece.type == kinds.CONTROL:
            special[piece.piece] = number
        unknown = number if piece.type == kinds.UNKNOWN else unknown
    split = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return _content(models.Unigram(vocabulary, unknown), special, split, decoder=decoders.ByteLevel())


def with_start(values: dict[str, Any], token: int, name: str) -> dict[str, Any]:
    """Add the special token `name`, of id `token`, before every text to a tokenizer. Unused ids below it get names,
    because added tokens are numbered consecutively.
    """
    added = values["added_tokens"]
    size = max([len(values["model"]["vocab"]), *(entry["id"] + 1 for entry in added)])
    gap = [special_token(unused, f"[unused{unused}]") for unused in range(size, token)]
    added = [*added, *gap, special_token(token, name)]
    return {**values, "added_tokens": added, "post_processor": _template(token, name, "^A", "^AB")}


def with_end(values: dict[str, Any], token: int) -> dict[str, Any]:
    """Add a special token after every text, and after each of a pair, to a tokenizer."""
    name = name_of(values, token)
    assert name is not None
    added = values["added_tokens"]
    if not any(entry["id"] == token for entry in added):
        added = [*added, special_token(token, name)]
    return {**values, "added_tokens": added, "post_processor": _template(token, name, "A^", "A^B^")}


def _template(token: int, name: str, single: str, pair: str) -> dict[str, Any]:
    """Return the rule that adds the special token, ^, before or after a text A, and a pair A B."""
    special = {"SpecialToken": {"id": name, "type_id": 0}}
    parts = {"^": special, **{text: {"Sequence": {"id": text, "type_id": 0}} for text in "AB"}}
    return {
        "type": "TemplateProcessing",
        "single": [parts[part] for part in single],
        "pair": [parts[part] for part in pair],
        "special_tokens": {name: {"id": name, "ids": [token], "tokens": [name]}},
    }


def name_of(values: dict[str, Any], token: int) -> str | None:
    pieces = values["model"]["vocab"]
    listed = pieces.items() if isinstance(pieces, dict) else ((name, i) for i, (name, *_) in enumerate(pieces))
    names = {number: name for name, number in listed}
    return (names | {added["id"]: added["content"] for added in values["added_tokens"]}).get(token)


def _content(model: Any, special: dict[str, int], pre_tokenizer: Any, **parts: Any) -> dict[str, Any]:
    tokenizer = PackageTokenizer(model)
    for name, part in {"pre_tokenizer": pre_tokenizer, **parts}.items():
        setattr(tokenizer, name, part)
    added = [special_token(number, name) for name, number in special.items()]
    return {**json.loads(tokenizer.to_str()), "added_tokens": added}


def special_token(number: int, name: str) -> dict[str, Any]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {"id": number, "content": name, **flags}
