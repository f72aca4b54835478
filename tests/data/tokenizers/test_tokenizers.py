"""Tokens of bytes, of words, of tokenizer.json files and of sentencepiece's models."""

import json
import os
import re
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from sentencepiece import SentencePieceNormalizer, SentencePieceProcessor
from sentencepiece.sentencepiece_model_pb2 import ModelProto
from tokenizers import Tokenizer as Original

from megasparse.data.tokenizers import build_tokenizer
from megasparse.data.tokenizers.huggingface import HuggingFaceTokenizer
from megasparse.data.tokenizers.sentence_piece import LONGEST, segments
from megasparse.data.tokenizers.simple import ByteTokenizer, WordTokenizer, vocabulary_file
from megasparse.data.tokenizers.tokenizer import SpecialTokens, Tokenizer
from megasparse.errors import ConfigError
from tests.helpers.cases import together
from tests.helpers.commands import refusal
from tests.helpers.tokenizers import (
    ODD_TEXTS,
    PROSE,
    byte_level,
    random_texts,
    sentencepiece_model,
    unigram,
    wordpiece,
    written,
)


def test_by_name():
    assert build_tokenizer("bytes").vocabulary == 256 and build_tokenizer("pixels").name == "pixels"
    refusal(lambda: build_tokenizer("byte"), ConfigError, r'data\.tokenizer: .*"byte".*Did you mean "bytes"')


def test_text_comes_as_soon_as_its_characters_are_whole():
    tokens = ByteTokenizer().encode("n\u00efve \u8a9e".encode() + b"\xe8").tolist()
    assert list(ByteTokenizer().text(tokens)) == ["n", "\u00ef", "v", "e", " ", "\u8a9e", "\ufffd"]


UNREADABLE: dict[Callable[[Path], Any], str] = {
    lambda path: None: "No such file",
    os.mkdir: "this is not a regular file",
    os.mkfifo: "this is not a regular file",
    lambda path: path.touch() or os.truncate(path, 1 << 40): "more than the limit of 67,108,864",
}


@together("name", ["x.model", "x.json", "x.txt"])
@together("make", UNREADABLE)
def test_the_file_of_a_tokenizer_must_be_readable(tmp_path, name, make):
    make(tmp_path / name)
    match = rf"data\.tokenizer: .*{name} cannot be read \(.*{UNREADABLE[make]}"
    refusal(lambda: build_tokenizer(str(tmp_path / name)), ConfigError, match)
    refusal(lambda: build_tokenizer("tokenizer.bin"), ConfigError, r"FILE\.model, FILE\.json, FILE\.txt")


SAMPLE = " = Robert <unk> = \n \n He was a <unk> \u00a0 of the\u3000the @-@ stage .\n"
"""Text as in the official files: a space at both ends of a line."""


def tokenizer_of(folder: Path, *words: str) -> WordTokenizer:
    path = folder / "words.txt"
    path.write_text("".join(f"{word}\n" for word in words), encoding="utf-8")
    return WordTokenizer(path)


def test_lines_are_words_and_their_ends(tmp_path):
    found = tokenizer_of(tmp_path, "the", "<unk>", "<eos>", "=", "of", "was")
    tokens = found.encode(SAMPLE)
    expected = [
        token
        for line in SAMPLE.split("\n")[:-1]
        for token in [*({"the": 0, "=": 3, "of": 4, "was": 5}.get(word, 1) for word in line.strip().split()), 2]
    ]
    assert tokens.tolist() == expected and tokens.dtype == torch.int64
    assert found.decode(tokens) == b"= <unk> <unk> =\n\n<unk> was <unk> <unk> of the the <unk> <unk> <unk>\n"
    assert "".join(found.text(tokens.tolist())).encode() == found.decode(tokens)
    assert found.encode("the of").tolist() == [0, 4] and found.encode("").tolist() == []
    assert found.encode(b"the \xff of\n").tolist() == [0, 1, 4, 2]
    assert (found.special, found.separator, found.lossless) == (None, None, False)
    assert found.word_starts().tolist() == [True] * 6
    assert torch.equal(torch.cat([found.encode(line + "\n") for line in SAMPLE.split("\n")[:-1]]), tokens)


def test_the_vocabulary_is_counted_and_ordered_by_frequency(tmp_path):
    raw = PROSE.encode()
    words = vocabulary_file([raw[i : i + 77] for i in range(0, len(raw), 77)]).decode().split("\n")[:-1]
    counts = Counter(PROSE.split())
    counts["<eos>"] = PROSE.count("\n")
    assert words == sorted([*counts, "<unk>"], key=lambda word: (-counts[word], word))
    found = tokenizer_of(tmp_path, *words)
    assert found.decode(found.encode(PROSE)).decode().split() == PROSE.split()


def test_words_that_do_not_fit_count_as_unknown():
    text = b"a a a a b b b c c d e f g\n"
    assert vocabulary_file([text], 4).split() == [b"<unk>", b"a", b"b", b"<eos>"]  # 6, 4, 3, 1
    assert vocabulary_file([text], 2).split() == [b"<unk>", b"<eos>"]
    assert vocabulary_file([text], 100) == vocabulary_file([text])


@together(
    ("content", "problem"),
    [
        (b"<unk>\n<eos>\nthe\nthe\n", "line 4, 'the', is not a word, or"),
        (b"<unk>\n\n<eos>\n", "line 2, '', is not a word"),
        (b"<unk>\n<eos>\n\n", "line 3, '', is not a word"),
        (b"", "line 1, '', is not a word"),
        (b"<unk>\n<eos>\na b\n", "line 3, 'a b', is not a word"),
        (b"<unk>\r\n<eos>\r\n", r"line 1, '<unk>\r', is not a word"),
        ("<unk>\n<eos>\na\u3000\n".encode(), r"line 3, 'a\u3000', is not a word"),
        (b"<unk>\n<eos>\n\xff\n", "line 3 is not UTF-8"),
        (b"the\n<eos>\n", "has no word <unk>"),
        (b"the\n<unk>\n", "has no word <eos>"),
    ],
)
def test_a_wrong_file_is_one_line(tmp_path, content, problem):
    path = tmp_path / "words.txt"
    path.write_bytes(content)
    refusal(lambda: build_tokenizer(str(path)), ConfigError, re.escape(f"{path}: {problem}"))


KINDS = {"wordpiece": wordpiece, "byte-level": byte_level, "unigram": unigram}
NAMES = " ".join(["[CLS] [SEP][PAD] [MASK] [UNK]a [MASK]", "<s> a</s> <pad><mask> <unk> <s> ", "the <mask> <s"])


def built(folder: Path, values: dict[str, Any]) -> HuggingFaceTokenizer:
    found = build_tokenizer(str(written(folder, values)))
    assert isinstance(found, HuggingFaceTokenizer)
    return found


def plain(values: dict[str, Any]) -> Original:
    """The `tokenizers` package without the special tokens and truncation of tokenizer.json."""
    own = Original.from_str(json.dumps(values))
    own.no_padding()
    own.no_truncation()
    return own


@pytest.mark.parametrize("kind", KINDS)
def test_ordinary_text_is_encoded_as_the_package_does(tmp_path, kind):
    values = KINDS[kind]()
    mine, own = built(tmp_path, values), plain(values)
    for text in (PROSE, "", "the models of attentions, unable", *PROSE.split("\n")[:50]):
        tokens = mine.encode(text)
        assert tokens.dtype == torch.int64 and tokens.tolist() == own.encode(text, add_special_tokens=False).ids
        assert mine.decode(tokens).decode() == own.decode(tokens.tolist())
        assert "".join(mine.text(tokens.tolist())) == own.decode(tokens.tolist())


@pytest.mark.parametrize("kind", KINDS)
def test_no_text_becomes_a_special_token(tmp_path, kind):
    values = KINDS[kind]()
    mine = built(tmp_path, values)
    assert mine.special is not None and mine.separator == mine.special.separator
    hidden = "  ".join(f" {name} " for name in ("[MASK]", "<mask>", "<s>"))
    found = set(mine.encode(NAMES).tolist()) | set(mine.encode(hidden).tolist())
    assert found and not found & set(mine.special)
    expected = [values["model"]["unk_token"] is None or 1] if kind == "wordpiece" else []
    assert mine.decode(torch.tensor([*mine.special, *expected])) == b""
    read = plain(values).encode(NAMES, add_special_tokens=False).ids
    assert set(read) & set(mine.special)  # the package's own reading of it is another


def test_special_tokens_are_hidden_though_the_file_does_not_call_them_special(tmp_path):
    values = wordpiece()
    values["added_tokens"] = [{**values["added_tokens"][4], "special": False}]
    mine = built(tmp_path, values)
    assert mine.special == SpecialTokens(2, 3, 0, 4)
    assert not set(mine.encode("a [MASK] [CLS] b").tolist()) & {0, 2, 3, 4}
    values["pre_tokenizer"] = {"type": "WhitespaceSplit"}
    assert not set(built(tmp_path, values).encode("a [MASK] [CLS] b").tolist()) & {0, 2, 3, 4}


def test_a_tokenizer_whose_special_tokens_text_can_have_is_rejected(tmp_path):
    values = wordpiece()
    values |= {"pre_tokenizer": None, "normalizer": None}
    refusal(lambda: built(tmp_path, values), ConfigError, "a text can become its special token")


def test_added_words_and_lossy_parts_do_not_cost_bytes(tmp_path):
    """A token that eats the white space around it: its line is encoded in bytes, the others as before."""
    values = byte_level()
    number = len(values["model"]["vocab"])
    added = {**values["added_tokens"][-1], "id": number, "content": "W\u00d6RD", "special": False, "rstrip": True}
    values["added_tokens"].append(added)
    mine = built(tmp_path, values)
    raw = "the W\u00d6RD  x\nthe end\n".encode()
    tokens = mine.encode(raw)
    assert torch.equal(tokens[len("the W\u00d6RD  x\n".encode()) :], mine.encode("the end\n"))
    assert len(tokens) < len(raw)
    assert mine.decode(tokens) == raw and mine.vocabulary == number + 1
    assert number in mine.encode("W\u00d6RDx").tolist() and mine.decode(torch.tensor([number])) == "W\u00d6RD".encode()


def test_lossy_tokenizers_are_marked(tmp_path):
    spaced = byte_level()
    spaced["pre_tokenizer"] = {**spaced["pre_tokenizer"], "add_prefix_space": True}
    for values in (wordpiece(), unigram(), spaced, {**byte_level(), "normalizer": {"type": "NFC"}}):
        assert not built(tmp_path, values).lossless
    mine = built(tmp_path, wordpiece())
    expected = plain(wordpiece()).decode(mine.encode("the \ufffd models").tolist())
    assert mine.decode(mine.encode(b"The \xff Models")).decode() == expected


def test_word_starts(tmp_path):
    for values, text, words in (
        (wordpiece(), "the attention models unable", ["the", "attention", "models", "unable"]),
        (byte_level(), "the thing\n\tthe end", ["the", " thing", "\n", "\t", "the", " end"][:3]),
        (unigram(), "the thing going", ["▁the", "▁thing", "▁going"]),
    ):
        mine = built(tmp_path, values)
        tokens = mine.encode(text)
        starts, names = mine.word_starts(), {token: piece for piece, token in plain(values).get_vocab().items()}
        assert starts.shape == (mine.vocabulary,)
        found = list[str]()
        for token in tokens.tolist():
            piece = names[token].removeprefix("##").translate(str.maketrans("\u0120\u010a\u0109", " \n\t"))
            found[-1:] = [*found[-1:], piece] if starts[token] or not found else [found[-1] + piece]
        assert found[: len(words)] == words
    level = {"type": "WordLevel", "vocab": {"[UNK]": 0, "a": 1}, "unk_token": "[UNK]"}
    values = {**wordpiece(), "model": level, "decoder": None, "added_tokens": []}
    assert built(tmp_path, values).word_starts().tolist() == [True, True]


def test_a_separator_without_the_others(tmp_path):
    values = byte_level()
    values["added_tokens"] = [{**values["added_tokens"][0], "content": "<|endoftext|>"}]
    values["model"]["vocab"] = {
        {"<s>": "<|endoftext|>", "<pad>": "x1", "</s>": "x2", "<mask>": "x3"}.get(piece, piece): token
        for piece, token in values["model"]["vocab"].items()
    }
    mine = built(tmp_path, values)
    assert mine.special is None and mine.separator == 0


def damages(values: dict[str, Any]) -> dict[str, Any]:
    model = values["model"]

    def with_model(**changed: Any) -> str:
        return json.dumps({**values, "model": {**model, **changed}, "added_tokens": []})

    return {
        "cut": json.dumps(values)[:-100],
        "no UTF-8": b"\xff" + json.dumps(values).encode(),
        "a list": "[]",
        "deep": "[" * 100_000,
        "no model": json.dumps({key: value for key, value in values.items() if key != "model"}),
        "no tokens": with_model(vocab={}, merges=[]),
        "vocabulary of text": with_model(vocab="abc"),
        "negative ids": with_model(vocab={"a": -1}),
        "huge ids": with_model(vocab={"[UNK]": 0, "a": 1 << 25}),
        "huge special id": json.dumps({**values, "added_tokens": [{**values["added_tokens"][3], "id": 1 << 31}]}),
        "pre-tokenizer": json.dumps({**values, "pre_tokenizer": {"type": "Split", "pattern": {"Regex": "("}}}),
        "merges": json.dumps({**byte_level(), "model": {**byte_level()["model"], "merges": ["x y z", "q"]}}),
    }


@together("damage", damages(wordpiece()))
def test_a_damaged_file_is_one_line(tmp_path, damage):
    content = damages(wordpiece())[damage]
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    refusal(lambda: build_tokenizer(str(path)), ConfigError, r"^data\.tokenizer: .*tokenizer\.json")


def test_a_pattern_that_backtracks_too_long_is_one_line(tmp_path):
    values = byte_level()
    split = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
    split = {"type": "Sequence", "pretokenizers": [split, {**values["pre_tokenizer"], "use_regex": False}]}
    tokenizer = built(tmp_path, {**values, "pre_tokenizer": split})
    said = refusal(lambda: tokenizer.encode("a" * 1000 + "b"), ConfigError, "cannot encode 1,001 characters")
    assert "retry-limit" in said


def test_markers_in_a_text_are_reported_once(tmp_path, capsys):
    tokenizer = built(tmp_path, byte_level())
    assert capsys.readouterr().err == ""
    for _ in range(2):
        assert tokenizer.decode(tokenizer.encode("</s>the<mask>")) == b"</s>the<mask>"
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("contains '</s>', which is encoded as ordinary text and not as the special token")


TYPES = ("unigram", "bpe")


@pytest.fixture(scope="module", params=TYPES)
def model(request, tmp_path_factory):
    return built_model(tmp_path_factory.mktemp("model"), sentencepiece_model(request.param))


def built_model(folder: Path, data: bytes) -> Tokenizer:
    (folder / "x.model").write_bytes(data)
    return build_tokenizer(str(folder / "x.model"))


@together("odd", [b"\xe2\x96\x81", b"\0", b"\xff", "\ud800".encode("utf-8", "surrogatepass")])
def test_odd_bytes_cost_only_their_own_tokens(model, odd):
    expected = torch.cat([model.encode("the attention"), 5 + torch.tensor(list(odd)), model.encode(" of the")])
    assert torch.equal(model.encode(b"the attention" + odd + b" of the"), expected)


def test_text_that_sentencepiece_normalises_is_restored(model, monkeypatch):
    class Changing:
        def encode(self, texts: list[str], num_threads: int) -> list[list[int]]:
            return [own.encode(text.replace("of", "")) for text in texts]

    own = model._processor
    monkeypatch.setattr(model, "_processor", Changing())
    tokens = model.encode("the attention\nof the\n")
    assert model.decode(tokens) == b"the attention\nof the\n"
    assert tokens.tolist() == [*own.encode("the attention\n"), *(5 + byte for byte in b"of the\n")]


def test_ordinary_text_is_encoded_as_sentencepiece_does(tmp_path):
    for kind in TYPES:
        data = sentencepiece_model(kind)
        own, model = SentencePieceProcessor(model_proto=data), built_model(tmp_path, data)
        tokens, lines = model.encode(PROSE).tolist(), PROSE.splitlines(keepends=True)
        assert len(tokens) < len(PROSE.encode()) / 1.3
        assert tokens == [token for line in lines for token in own.encode(line)]
        long = PROSE.replace("\n", " ")[: 3 * LONGEST]
        assert model.encode(long).tolist() == own.encode(long)


def test_long_lines_are_cut_before_spaces():
    text = "word  " * LONGEST + "\n" + "x" * (2 * LONGEST + 1) + "\n\nend"
    found = list(segments(text))
    assert "".join(found) == text and max(map(len, found)) <= LONGEST
    cuts = [one for one, after in pairwise(found) if after.startswith(" ")]
    assert len(cuts) == 6 and all(one.endswith("word") for one in cuts)
    assert found[-2:] == ["\n", "end"]


def test_special_tokens_never_come_from_text(model):
    assert model.special == SpecialTokens(begin=1, separator=2, padding=3, mask=4) and model.separator == 2
    assert model.vocabulary == 420 and model.lossless
    assert model.decode(torch.tensor([1, 2, 3, 4, 0])) == b""


def test_words_start_after_white_space(model):
    starts = model.word_starts()
    assert starts.shape == (420,) and not starts[:5].any()
    for text, expected in ((" the", [True]), ("\n", [True]), ("\t", [True]), ("x", [False]), ("\0", [False])):
        assert starts[model.encode(text)].tolist()[:1] == expected, text
    tokens, words = model.encode(PROSE), list[bytes]()
    for token, start in zip(tokens, starts[tokens].tolist(), strict=True):
        piece = model.decode(token[None])
        words[-1:] = [*words[-1:], piece] if start or not words else [words[-1] + piece]
    assert all(re.fullmatch(rb"\s*\S*", word) for word in words)
    assert [word.split()[0] for word in words if word.strip()] == PROSE.encode().split()


def parsed(model: bytes) -> Any:
    proto = ModelProto()
    proto.ParseFromString(model)
    return proto


def changed(**changes: Any) -> bytes:
    proto = parsed(sentencepiece_model())
    for key, value in changes.items():
        setattr(proto.normalizer_spec, key, value)
    return proto.SerializeToString()


def without_bytes() -> bytes:
    proto = parsed(sentencepiece_model())
    proto.trainer_spec.byte_fallback = False
    for piece in proto.pieces:
        if piece.type == ModelProto.SentencePiece.BYTE:
            piece.type, piece.piece = ModelProto.SentencePiece.NORMAL, f"\u2582{piece.piece}"
    return proto.SerializeToString()


@together(
    ("data", "problem"),
    [
        (lambda: changed(add_dummy_prefix=True), "add_dummy_prefix"),
        (lambda: changed(remove_extra_whitespaces=True), "remove_extra_whitespaces"),
        (lambda: changed(escape_whitespaces=False), "escape_whitespaces"),
        (lambda: changed(name="nmt_nfkc", precompiled_charsmap=charsmap()), "normalization_rule_name 'nmt_nfkc'"),
        (without_bytes, "byte_fallback"),
        (lambda: b"", "is no model"),
        (lambda: b"no model at all" * 100, "is no model of sentencepiece"),
        (lambda: sentencepiece_model()[:3000], "is no model of sentencepiece"),
        (lambda: sentencepiece_model().replace(b"the", b"th\xff", 1), "is no model of sentencepiece"),
        (lambda: sentencepiece_model().replace(b"<unk>", b"<un\xff>", 1), "is no model of sentencepiece"),
        (lambda: sentencepiece_model().replace(b"<0x41>", b"<unk>\xff", 1), "is no model of sentencepiece"),
    ],
)
def test_a_model_that_changes_text_is_rejected(tmp_path, data, problem):
    said = refusal(lambda: built_model(tmp_path, data()), ConfigError, problem)
    assert re.search(r"megasparse train-tokenizer|README", said)


def charsmap() -> bytes:
    model = SentencePieceNormalizer(rule_name="nmt_nfkc").serialized_model_proto()
    return parsed(model).normalizer_spec.precompiled_charsmap


def test_no_special_tokens_are_added_to_a_foreign_model(tmp_path):
    proto = parsed(sentencepiece_model())
    proto.pieces[2].piece, proto.pieces[4].type = "</s>", ModelProto.SentencePiece.USER_DEFINED
    model = built_model(tmp_path, proto.SerializeToString())
    assert model.special is None and model.separator == 2
    assert model.encode("a[MASK]").tolist()[-1] == 4 and model.decode(torch.tensor([4])) == b"[MASK]"


LOSSLESS: dict[str, Callable[[Path], Tokenizer]] = {
    "bytes": lambda folder: ByteTokenizer(),
    "byte-level": lambda folder: built(folder, byte_level()),
    **{kind: lambda folder, kind=kind: built_model(folder, sentencepiece_model(kind)) for kind in TYPES},
}


@together("kind", LOSSLESS)
def test_any_bytes_come_back(tmp_path, kind):
    """Odd and random ones, long lines, and every code point: surrogates and unassigned ones too."""
    tokenizer = LOSSLESS[kind](tmp_path)
    points = "".join(map(chr, [*range(0x11000), *range(0x1F000, 0x1FB00), *range(0xE0000, 0xE1000), 0x10FFFF]))
    long = (b"the " * 250_000, b" " * 300_000, points.encode("utf-8", "surrogatepass"))
    assert tokenizer.lossless
    for raw in (*ODD_TEXTS.values(), *random_texts(400), *long):
        tokens = tokenizer.encode(raw)
        assert tokens.dtype == torch.int64 and tokenizer.decode(tokens) == raw
        assert not tokenizer.special or not set(tokenizer.special) & set(tokens.tolist())
        if len(raw) < 1000:
            assert "".join(tokenizer.text(tokens.tolist())) == raw.decode("utf-8", "replace")
    assert torch.equal(tokenizer.encode(points), tokenizer.encode(points.encode("utf-8", "surrogatepass")))


def test_ids_outside_the_vocabulary_are_rejected(tmp_path, model):
    words = tokenizer_of(tmp_path, "<unk>", "<eos>")
    for tokenizer in (ByteTokenizer(), words, model, *(built(tmp_path, kind()) for kind in KINDS.values())):
        for token in (-1, tokenizer.vocabulary):
            with pytest.raises(ValueError):
                tokenizer.decode(torch.tensor([token]))
