"""Small tokenizers of every kind, and texts to try them on."""

import json
import random
from functools import lru_cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

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
    """Half random bytes, half hard cases: white space, parts of U+2581 and of a byte piece's name."""
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


def _saved(model: models.Model, names: list[str | AddedToken], **parts: Any) -> Tokenizer:
    tokenizer = Tokenizer(model)
    for part, value in parts.items():
        setattr(tokenizer, part, value)
    tokenizer.add_special_tokens(names)
    return tokenizer


def wordpiece() -> dict[str, Any]:
    """A tokenizer.json like BERT's uncased ones, with the further entries of published files."""
    words = ["the", "atten", "##tion", "of", "a", "model", "##s", "un", "##able", "[", "]", ".", ",", "mask", "'", "!"]
    letters = "abcdefghijklmnopqrstuvwxyz0123456789"
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    pieces = [*names, *words, *letters[1:], *(f"##{letter}" for letter in letters if letter != "s"), "\u00b7"]
    model = models.WordPiece({piece: token for token, piece in enumerate(pieces)}, unk_token="[UNK]")
    frame = processors.TemplateProcessing("[CLS] $A [SEP]", "$A $B:1", [("[CLS]", 2), ("[SEP]", 3)])
    normalizer, split = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    parts = {"normalizer": normalizer, "pre_tokenizer": split, "post_processor": frame, "decoder": decoders.WordPiece()}
    tokenizer = _saved(model, names, **parts)
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=128)
    return dict(json.loads(tokenizer.to_str()))


def byte_level(merges: tuple[tuple[str, str], ...] = (("t", "h"), ("th", "e"), ("\u0120", "the"))) -> dict[str, Any]:
    """A tokenizer.json as RoBERTa's are, with merges as texts, which tokenizers wrote before 2024."""
    names = ["<s>", "<pad>", "</s>", "<unk>"]
    pieces = [*names, *alphabet(), *("".join(pair) for pair in merges), "<mask>"]
    model = models.BPE({piece: token for token, piece in enumerate(pieces)}, list(merges))
    split, frame = pre_tokenizers.ByteLevel(False), processors.RobertaProcessing(("</s>", 2), ("<s>", 0), True, False)
    names = [*names, AddedToken("<mask>", lstrip=True)]
    values = json.loads(_saved(model, names, pre_tokenizer=split, post_processor=frame).to_str())
    texts = {"continuing_subword_prefix": "", "end_of_word_suffix": "", "merges": [" ".join(pair) for pair in merges]}
    return {**values, "decoder": values["pre_tokenizer"], "model": {**values["model"], **texts}}


def unigram() -> dict[str, Any]:
    """A tokenizer.json as XLM-R's are, whose special tokens are pieces like any other."""
    names = ["<s>", "<pad>", "</s>", "<unk>"]
    pieces = [(name, 0.0) for name in names] + [("\u2581the", -2.0), ("\u2581", -2.5), ("ing", -4.0)]
    pieces += [(letter, -5.0) for letter in "abcdefghijklmnopqrstuvwxyz<>/\u00e9,."] + [("<mask>", 0.0)]
    parts = {"pre_tokenizer": pre_tokenizers.Metaspace(), "decoder": decoders.Metaspace()}
    model = models.Unigram(pieces, 3, False)
    return dict(json.loads(_saved(model, [*names, "<mask>"], normalizer=normalizers.NFKC(), **parts).to_str()))


def written(folder: Path, values: dict[str, Any], name: str = "tokenizer.json") -> Path:
    path = folder / name
    path.write_text(json.dumps(values, ensure_ascii=False), encoding="utf-8")
    return path
