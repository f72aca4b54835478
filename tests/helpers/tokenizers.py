"""Small tokenizers of every kind, and texts to try them on."""

import json
import random
from functools import lru_cache
from pathlib import Path
from typing import Any

from megasparse.data.corpora.corpus import LineSample
from megasparse.data.corpora.source import Source
from megasparse.data.tokenizers.huggingface import alphabet
from megasparse.data.tokenizers.sentence_piece import train_sentencepiece

ROOT = Path(__file__).resolve().parents[2]
PROSE = (ROOT / "docs" / "attention.md").read_text(encoding="utf-8")[:20_000]

ODD_TEXTS = {
    "empty": b"",
    "newlines": b"\n\na\n\n\nb\n",
    "tabs and spaces": b"\t\ta  b   c \t \n    indented    \n trailing \n",
    "CR LF": b"one\r\ntwo\r\n\r\nthree\r",
    "combining": "e\u0301 n\u0303 \u1e69 s\u0323\u0307 \u0928\u093f \ufb01 \u2460 \uff21 \u212b".encode(),
    "emoji": "\U0001f469\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466 \U0001f3f3\ufe0f\u200d\U0001f308".encode(),
    "other spaces": "a\u00a0b\u2003c\u3000d\u2028e\u0085f\u200bg".encode(),
    "lone surrogates": "\ud800 a \udfff\ud83d".encode("utf-8", "surrogatepass"),
    "U+2581": "\u2581a \u2581\u2581 b\u2581c\u2581".encode(),
    "NUL": b"\0a\0\0b \0",
    "BOM": b"\xef\xbb\xbfa \xef\xbb\xbf",
    "replacement": "a \ufffd b\ufffd".encode(),
    "no UTF-8": b"\xff\xfe a \xe2\x96 \x81 \xc0\x80 \xf5 \xed\xa0\x80 \xf0\x9f\x98 z\xe2",
    "names of tokens": b"[CLS] [SEP][PAD] [MASK] <unk> <s></s> <0x41> <0x0A> <pad><mask> <eos>",
    "all bytes": bytes(range(256)),
    "prose": PROSE.encode(),
}


def random_texts(number: int, seed: int = 0) -> list[bytes]:
    """Half of them any bytes, half of what is hard: white space and parts of U+2581 and of a byte piece's name."""
    drawn = random.Random(seed)
    hard = [b" ", b"\n", b"\t", b"\r", b"\xe2", b"\x96", b"\x81", b"a", b"the", b"\0", b"<0x", b"4", b">", b"\xf0\x9f"]
    return [
        drawn.randbytes(drawn.randrange(80)) if i % 2 else b"".join(drawn.choices(hard, k=drawn.randrange(40)))
        for i in range(number)
    ]


@lru_cache
def sentencepiece_model(model_type: str = "unigram", vocabulary: int = 420) -> bytes:
    """A model that learned from part of this project's documentation."""
    source = Source.open([str(ROOT / "docs" / "attention.md")], None, Path("nowhere"))
    return train_sentencepiece(LineSample(source, 20_000).lines(), vocabulary, model_type, 0.9995)


def wordpiece() -> dict[str, Any]:
    """A tokenizer.json as BERT's uncased ones are, with what published ones have besides."""
    words = ["the", "atten", "##tion", "of", "a", "model", "##s", "un", "##able", "[", "]", ".", ",", "mask", "'", "!"]
    letters = "abcdefghijklmnopqrstuvwxyz0123456789"
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    pieces = [*names, *words, *letters[1:], *(f"##{letter}" for letter in letters if letter != "s"), "\u00b7"]
    return {
        "version": "1.0",
        "truncation": {"max_length": 4, "strategy": "LongestFirst", "stride": 0, "direction": "Right"},
        "padding": {
            "strategy": {"Fixed": 128}, "direction": "Right", "pad_to_multiple_of": None,
            "pad_id": 0, "pad_type_id": 0, "pad_token": "[PAD]",
        },
        "added_tokens": [_added(token, name) for token, name in enumerate(names)],
        "normalizer": {
            "type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True,
            "strip_accents": None, "lowercase": True,
        },
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [
                {"SpecialToken": {"id": "[CLS]", "type_id": 0}},
                {"Sequence": {"id": "A", "type_id": 0}},
                {"SpecialToken": {"id": "[SEP]", "type_id": 0}},
            ],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {
                name: {"id": name, "ids": [names.index(name)], "tokens": [name]} for name in ("[CLS]", "[SEP]")
            },
        },
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        "model": {
            "type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100, "vocab": {piece: token for token, piece in enumerate(pieces)},
        },
    }  # fmt: skip


def byte_level(merges: tuple[tuple[str, str], ...] = (("t", "h"), ("th", "e"), ("\u0120", "the"))) -> dict[str, Any]:
    """A tokenizer.json as RoBERTa's are."""
    names = ["<s>", "<pad>", "</s>", "<unk>"]
    pieces = [*names, *alphabet(), *("".join(pair) for pair in merges), "<mask>"]
    split = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0", "truncation": None, "padding": None, "normalizer": None, "pre_tokenizer": split,
        "added_tokens": [
            *(_added(token, name) for token, name in enumerate(names)),
            {**_added(len(pieces) - 1, "<mask>"), "lstrip": True},
        ],
        "post_processor": {
            "type": "RobertaProcessing", "sep": ["</s>", 2], "cls": ["<s>", 0],
            "trim_offsets": True, "add_prefix_space": False,
        },
        "decoder": split,
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": "",
            "end_of_word_suffix": "", "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
            "vocab": {piece: token for token, piece in enumerate(pieces)},
            "merges": [" ".join(pair) for pair in merges],
        },
    }  # fmt: skip


def unigram() -> dict[str, Any]:
    """A tokenizer.json as XLM-R's are, whose special tokens are pieces like any other."""
    names = ["<s>", "<pad>", "</s>", "<unk>"]
    pieces = [(name, 0.0) for name in names] + [("\u2581the", -2.0), ("\u2581", -2.5), ("ing", -4.0)]
    pieces += [(letter, -5.0) for letter in "abcdefghijklmnopqrstuvwxyz<>/\u00e9,."] + [("<mask>", 0.0)]
    metaspace = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "always", "split": True}
    return {
        "version": "1.0", "truncation": None, "padding": None, "normalizer": {"type": "NFKC"},
        "added_tokens": [
            *(_added(token, name) for token, name in enumerate(names)), _added(len(pieces) - 1, "<mask>"),
        ],
        "pre_tokenizer": metaspace, "post_processor": None, "decoder": metaspace,
        "model": {"type": "Unigram", "unk_id": 3, "vocab": [list(piece) for piece in pieces], "byte_fallback": False},
    }  # fmt: skip


def _added(token: int, name: str) -> dict[str, Any]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {"id": token, "content": name, **flags}


def written(folder: Path, values: dict[str, Any], name: str = "tokenizer.json") -> Path:
    path = folder / name
    path.write_text(json.dumps(values, ensure_ascii=False), encoding="utf-8")
    return path
