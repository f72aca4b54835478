import pytest
import torch

from megasparse.data.tokenizers import build_tokenizer
from megasparse.data.tokenizers.simple import ByteTokenizer
from megasparse.errors import ConfigError


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
def test_a_token_that_is_no_byte_is_refused(token):
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
