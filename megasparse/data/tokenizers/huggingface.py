"""Any tokenizer.json of Hugging Face `tokenizers`: BERT, RoBERTa, byte-level BPE, XLM-R, ..."""

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from megasparse.data.tokenizers.tokenizer import USUAL, Tokenizer, damaged, special_tokens
from megasparse.errors import report_line

SPACE = "\u2581"
AGAIN = "Copy it again"
MOST = 1 << 24
"""Largest vocabulary: a list of it is in memory."""
TRIAL = "A trial, of 1 line\n\U0010fffe"

_PARTS = re.compile("([\udc80-\udcff]+)")
"""Bytes that are not UTF-8, in a group for `split`."""
_LINES = re.compile("[^\n]*\n|[^\n]+")


def alphabet() -> list[str]:
    """Return the characters that byte-level tokenizers write bytes as: Latin-1 if printable, else U+0100 on."""
    shown = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = (byte for byte in range(256) if byte not in shown)
    replaced = {byte: chr(256 + number) for number, byte in enumerate(others)}
    return [replaced.get(byte, chr(byte)) for byte in range(256)]


BYTE_OF = {character: byte for byte, character in enumerate(alphabet())}


def raw(piece: str) -> bytes:
    """Return the bytes of a byte-level piece, or of the text if it contains another character."""
    return bytes(BYTE_OF[c] for c in piece) if all(c in BYTE_OF for c in piece) else piece.encode()


class HuggingFaceTokenizer(Tokenizer):
    """Tokens of a text, without a prefix, suffix or truncation. No text becomes a special token: the first name of one
    in a text is reported on stderr.

    Byte-level tokenizers are lossless: text that would change is encoded byte by byte. BERT's drops case, accents,
    white space and unknown words. Special tokens decode to no text.
    """

    name = "huggingface"
    file: Path
    _special_ids: dict[str, int]

    def __init__(self, file: Path):
        """Raise ConfigError for an invalid tokenizer.json, and if a text could become a special token."""
        data = self.read(file)
        try:
            unknown = self._load(json.loads(data))
            self.decode(self.encode(TRIAL))
            self.starts()
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # `tokenizers` raises bare Exception, and panics with BaseException
            raise damaged(file, f"is no usable tokenizer.json ({type(error).__name__}: {error})", AGAIN) from None
        for name, token in self._special_ids.items():
            if token != unknown and any(token in self._ids(text) for text in (name, _hidden(name))):
                raise damaged(file, f"a text can become its special token {name!r}", "Use another tokenizer")
        names = "|".join(re.escape(name) for name, token in self._special_ids.items() if token != unknown)
        self._markers = re.compile(names) if names else None

    def _load(self, values: dict[str, Any]) -> int | None:
        """Return the id of the unknown token. Raises any exception for a damaged file."""
        from tokenizers import Tokenizer as Package

        self._values, self._markers = values, None
        self._special_ids, unknown = _disguise(values)
        self._tokenizer = Package.from_str(json.dumps(values))
        self._tokenizer.encode_special_tokens = True
        ids = self._tokenizer.get_vocab()
        self.vocabulary = max(ids.values(), default=-1) + 1
        if self.vocabulary > MOST:
            raise ValueError(f"has the id {self.vocabulary - 1}")
        for name, token in self._special_ids.items():
            if ids[_hidden(name)] != token:
                raise ValueError(f"the special token {name!r} has the id {token} and the id {ids[_hidden(name)]}")
        self._names: list[str | None] = [None] * self.vocabulary
        for name, token in ids.items():
            self._names[token] = name
        self.special, self.separator = special_tokens(self._special_ids.get)
        split = _parts(values.get("pre_tokenizer"), "pretokenizers")
        plain = values.get("normalizer") is None and not any(part.get("add_prefix_space") for part in split)
        self.lossless = plain and self._byte_level() and BYTE_OF.keys() <= set(self._names)
        if self.lossless:
            self._bytes = [ids[character] for character in alphabet()]
            added, special = {token["id"] for token in values["added_tokens"]}, set(self._special_ids.values())
            texts = (None if token in special else name for token, name in enumerate(self._names))
            self._table = [
                b"" if text is None else text.encode() if token in added else raw(text)
                for token, text in enumerate(texts)
            ]
        return unknown

    def ids(self, text: bytes) -> list[int]:
        if not self.lossless:
            return self._ids(text.decode("utf-8", "replace"))
        ids: list[int] = []
        for number, part in enumerate(_PARTS.split(text.decode("utf-8", "surrogateescape"))):
            ids += self._of_bytes(part.encode("utf-8", "surrogateescape")) if number % 2 else self._checked(part)
        return ids

    def pieces(self, tokens: Iterable[int]) -> Iterator[bytes]:
        if not self.lossless:
            return self._lossy_pieces(tokens)
        return (self._table[self._known(token)] for token in tokens)

    def starts(self) -> list[bool]:
        """Mark tokens without BERT's ## or, in other tokenizers, with white space before them; all tokens if the
        tokenizer marks neither.
        """
        parts = [*_parts(self._values.get("decoder"), "decoders")]
        prefix = next((part.get("prefix", "##") for part in parts if part["type"] == "WordPiece"), None)
        if prefix is not None:
            return [not (name or "").startswith(prefix) for name in self._names]
        if self._byte_level():
            return [raw(name or "")[:1].isspace() for name in self._names]
        if any(part["type"] == "Metaspace" or part.get("content") == " " for part in parts):
            return [(name or "").replace(SPACE, " ").encode()[:1].isspace() for name in self._names]
        return [True] * self.vocabulary

    def _ids(self, text: str) -> list[int]:
        if self._markers and (marker := self._markers.search(text)):
            name = repr(marker[0])
            report_line(
                self.file, f"a text contains {name}, which is encoded as ordinary text and not as the special token"
            )
            self._markers = None
        try:
            return self._tokenizer.encode(text, add_special_tokens=False).ids
        except BaseException as error:  # a panic of `tokenizers`, as of a regex that backtracks too long
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise
            raise damaged(self.file, f"cannot encode {len(text):,} characters ({error})", "Use another one") from None

    def _checked(self, text: str) -> list[int]:
        """Return tokens that decode to the text exactly; else those of its lines, or of their bytes."""
        tokens, expected = self._ids(text), text.encode()
        if b"".join([self._table[token] for token in tokens]) == expected:
            return tokens
        lines = _LINES.findall(text)
        if len(lines) < 2:
            return self._of_bytes(expected)
        return [token for line in lines for token in self._checked(line)]

    def _of_bytes(self, some: bytes) -> list[int]:
        return [self._bytes[byte] for byte in some]

    def _known(self, token: int) -> int:
        if not 0 <= token < self.vocabulary or self._names[token] is None:
            raise ValueError(f"{token} is no token of {self.vocabulary}")
        return token

    def _lossy_pieces(self, tokens: Iterable[int]) -> Iterator[bytes]:
        """Yield the text that each token adds, decoded with the last tokens that added some."""
        special = set(self._special_ids.values())
        context, waiting = list[int](), list[int]()
        before = text = ""
        for token in tokens:
            if self._known(token) in special:
                continue
            waiting.append(token)
            before, text = self._decoded(context), self._decoded([*context, *waiting])
            if len(text) > len(before) and not text.endswith("\ufffd"):
                yield text[len(before) :].encode()
                context, waiting = waiting, []
        if waiting:
            yield text[len(before) :].encode()

    def _decoded(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens)

    def _byte_level(self) -> bool:
        return any(part["type"] == "ByteLevel" for part in _parts(self._values.get("decoder"), "decoders"))


def _parts(value: Any, key: str) -> Iterator[dict[str, Any]]:
    """Yield a pre-tokenizer or decoder, or all those in a sequence of them."""
    if value is not None and value["type"] == "Sequence":
        for part in value[key]:
            yield from _parts(part, key)
    elif value is not None:
        yield value


def _hidden(name: str) -> str:
    """Return a name with spaces, which no pre-tokenizer leaves in a piece of text."""
    return f" {name} "


def _disguise(values: dict[str, Any]) -> tuple[dict[str, int], int | None]:
    """Remove prefixes, suffixes and truncation from a tokenizer.json, and rename its special tokens so that no text
    matches them: even with `encode_special_tokens`, `tokenizers` finds them among a unigram model's pieces.

    Returns the ids of the special tokens by name, and of the unknown one.
    """
    model, added = values["model"], values["added_tokens"]
    pieces = model["vocab"]
    ids: dict[str, int] = (
        dict(pieces) if isinstance(pieces, dict) else {piece: token for token, (piece, _) in enumerate(pieces)}
    )
    unknown: str | None = model.get("unk_token")
    if not isinstance(pieces, dict) and model.get("unk_id") is not None:
        unknown = pieces[model["unk_id"]][0]
    ids |= {token["content"]: token["id"] for token in added}
    usual = {name for names in USUAL for name in names}
    if unknown is not None:
        usual.add(unknown)
    names = {str(token["content"]) for token in added if token["special"]} | (usual & ids.keys())
    for token in added:
        if token["content"] in names:
            token |= {"content": _hidden(token["content"]), "special": True}
    if isinstance(pieces, dict):
        model["vocab"] = {_hidden(name) if name in names else name: token for name, token in pieces.items()}
    else:
        model["vocab"] = [[_hidden(name) if name in names else name, score] for name, score in pieces]
    if model.get("unk_token") in names:
        model["unk_token"] = _hidden(model["unk_token"])
    values |= {"truncation": None, "padding": None, "post_processor": None}
    return {name: ids[name] for name in names}, None if unknown is None else ids.get(unknown)
