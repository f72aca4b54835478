"""Tokens that are bytes or words, and the files of tokenizers."""

import re
from collections import Counter
from pathlib import Path

import pytest
import torch

from megasparse.data.tokenizers import build_tokenizer
from megasparse.data.tokenizers.simple import ByteTokenizer, WordTokenizer, vocabulary_file
from megasparse.errors import ConfigError
from tests.helpers.refusals import refusal
from tests.helpers.tokenizers import PROSE


@pytest.mark.parametrize("raw", [b"", bytes(range(256)), b"a" * 1_000_000, b"\xff\xfe\x00"])
def test_bytes_come_back_unchanged(raw):
    tokens = ByteTokenizer().encode(raw)
    assert tokens.dtype == torch.int64 and tokens.tolist() == list(raw)
    assert ByteTokenizer().decode(tokens) == raw


@pytest.mark.parametrize("text", ["", "naïve 語", "\ud800 lone", "\U000e0fff unassigned"])
def test_text_is_utf8_lone_surrogates_included(text):
    assert ByteTokenizer().decode(ByteTokenizer().encode(text)).decode("utf-8", "surrogatepass") == text


def test_every_code_point_comes_back():
    """Unassigned ones, surrogates and non-characters among them, on one line of 4 MB."""
    text = "".join(map(chr, range(0x110000))).replace("\n", "")
    assert ByteTokenizer().decode(ByteTokenizer().encode(text)).decode("utf-8", "surrogatepass") == text


@pytest.mark.parametrize("token", [-1, 256])
def test_a_number_that_is_no_byte_is_refused(token):
    with pytest.raises(ValueError):
        ByteTokenizer().decode(torch.tensor([token]))


def test_by_name():
    assert build_tokenizer("bytes").vocabulary == 256 and build_tokenizer("pixels").name == "pixels"
    with pytest.raises(ConfigError, match=r'data\.tokenizer: .*"byte".*Did you mean "bytes"'):
        build_tokenizer("byte")


def test_text_comes_as_soon_as_its_characters_are_whole():
    tokens = ByteTokenizer().encode("n\u00efve \u8a9e".encode() + b"\xe8").tolist()
    assert list(ByteTokenizer().text(tokens)) == ["n", "\u00ef", "v", "e", " ", "\u8a9e", "\ufffd"]


def test_the_file_of_a_tokenizer_must_be_readable(tmp_path):
    for name in ("x.model", "x.json", "x.txt"):
        with pytest.raises(ConfigError, match=rf"data\.tokenizer: .*{name} cannot be read \(No such file"):
            build_tokenizer(str(tmp_path / name))
        (tmp_path / name).mkdir()
        with pytest.raises(ConfigError, match=rf"data\.tokenizer: .*{name} cannot be read \(Is a directory"):
            build_tokenizer(str(tmp_path / name))
    with pytest.raises(ConfigError, match=r"FILE\.model, FILE\.json, FILE\.txt"):
        build_tokenizer("tokenizer.bin")


SAMPLE = " = Robert <unk> = \n \n He was a <unk> \u00a0 of the\u3000the @-@ stage .\n"
"""Text as in the official files: a space at both ends of a line."""


def tokenizer(folder: Path, *words: str) -> WordTokenizer:
    path = folder / "words.txt"
    path.write_text("".join(f"{word}\n" for word in words), encoding="utf-8")
    return WordTokenizer(path)


def test_lines_are_words_and_their_ends(tmp_path):
    found = tokenizer(tmp_path, "the", "<unk>", "<eos>", "=", "of", "was")
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
    pieces = [raw[i : i + 77] for i in range(0, len(raw), 77)]
    words = vocabulary_file(pieces).decode().split("\n")[:-1]
    counts = Counter(PROSE.split())
    counts["<eos>"] = PROSE.count("\n")
    assert words == sorted([*counts, "<unk>"], key=lambda word: (-counts[word], word))
    found = tokenizer(tmp_path, *words)
    assert found.decode(found.encode(PROSE)).decode().split() == PROSE.split()


def test_words_that_do_not_fit_count_as_unknown():
    text = b"a a a a b b b c c d e f g\n"
    assert vocabulary_file([text], 4).split() == [b"<unk>", b"a", b"b", b"<eos>"]  # 6, 4, 3, 1
    assert vocabulary_file([text], 2).split() == [b"<unk>", b"<eos>"]
    assert vocabulary_file([text], 100) == vocabulary_file([text])


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"<unk>\n<eos>\nthe\nthe\n", "line 4, 'the', is line 3 too"),
        (b"<unk>\n\n<eos>\n", "line 2 is empty"),
        (b"<unk>\n<eos>\n\n", "line 3 is empty"),
        (b"", "line 1 is empty"),
        (b"<unk>\n<eos>\na b\n", "line 3, 'a b', has white space in it"),
        (b"<unk>\r\n<eos>\r\n", r"line 1, '<unk>\r', has white space in it"),
        ("<unk>\n<eos>\na\u3000\n".encode(), r"line 3, 'a\u3000', has white space in it"),
        (b"<unk>\n<eos>\n\xff\n", "line 3 is not UTF-8"),
        (b"the\n<eos>\n", "has no word <unk>"),
        (b"the\n<unk>\n", "has no word <eos>"),
    ],
)
def test_a_wrong_file_is_one_line(tmp_path, content, problem):
    path = tmp_path / "words.txt"
    path.write_bytes(content)
    refusal(lambda: build_tokenizer(str(path)), ConfigError, re.escape(f"{path}: {problem}"))


@pytest.mark.parametrize("token", [-1, 2])
def test_numbers_that_are_no_tokens_are_refused(tmp_path, token):
    with pytest.raises(ValueError, match="is no token of 2 words"):
        tokenizer(tmp_path, "<unk>", "<eos>").decode(torch.tensor([0, token]))


def test_another_file_is_another_tokenizer(tmp_path):
    hashes = {tokenizer(tmp_path, *words).sha256 for words in (["<unk>", "<eos>"], ["<eos>", "<unk>"])}
    assert len(hashes) == 2
