import pickle

import pytest

from megasparse.data.encoders import TextEncoder, width_for
from megasparse.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "words"), [("", 0), ("a", 1), (" a  b\n\tc ", 3), ("a\u00a0b\u3000c", 3), ("é\u200bé", 1), ("\n \n", 0)]
)
def test_words_stand_between_white_space_and_line_ends_count_where_asked(text, words):
    found = TextEncoder("bytes").encode(text.encode())
    assert (found.tokens.tobytes(), found.raw_bytes, found.words) == (text.encode(), len(text.encode()), words)
    assert TextEncoder("bytes", line_ends=True).encode(text.encode()).words == words + text.count("\n")


def test_bytes_that_are_no_text_come_through():
    found = TextEncoder("bytes").encode(b"\xff \xfe")
    assert (found.tokens.tobytes(), found.words) == (b"\xff \xfe", 2)


def test_it_is_pickled_as_its_name(tmp_path):
    file = tmp_path / "words.txt"
    file.write_text("".join(f"{word}\n" for word in ["<unk>", "<eos>", *(f"w{i}" for i in range(300))]))
    encoder = TextEncoder(str(file), line_ends=True)
    raw = pickle.dumps(encoder)
    assert len(raw) < 1000
    again = pickle.loads(raw)
    for one in (encoder, again):
        assert (one.name, one.sha256, one.width, one.end, one.file) == ("words", encoder.sha256, 2, None, file)
        tokens, raw_bytes, words = one.encode(b"w0 w299\nnew")
        assert tokens.dtype == "<u2" and (tokens.tolist(), raw_bytes, words) == ([2, 301, 1, 0], 11, 4)


def test_a_separator_is_asked_for_where_there_are_documents(tmp_path):
    assert TextEncoder("bytes", documents=True).end == 0 and TextEncoder("bytes").end is None
    (tmp_path / "words.txt").write_text("<unk>\n<eos>\n")
    with pytest.raises(ConfigError, match=r'--tokenizer: the tokenizer ".*" has no token that ends a document'):
        TextEncoder(str(tmp_path / "words.txt"), documents=True)
    with pytest.raises(ConfigError, match=r'--tokenizer: there is no tokenizer "byte"'):
        TextEncoder("byte")


def test_width_for():
    assert [width_for(n) for n in (0, 255, 256, 65_535, 65_536, (1 << 32) - 1)] == [1, 1, 2, 2, 4, 4]
