import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from sentencepiece import SentencePieceNormalizer, SentencePieceProcessor
from sentencepiece.sentencepiece_model_pb2 import ModelProto

from megasparse.data.tokenizers import build_tokenizer
from megasparse.data.tokenizers.contract import SpecialTokens, Tokenizer
from megasparse.data.tokenizers.sentence_piece import LONGEST, segments
from megasparse.errors import ConfigError
from tests.helpers.refusals import refusal
from tests.helpers.tokenizers import ODD_TEXTS, PROSE, random_texts, sentencepiece_model

TYPES = ("unigram", "bpe")


@pytest.fixture(scope="module", params=TYPES)
def model(request, tmp_path_factory):
    return built(tmp_path_factory.mktemp("model"), sentencepiece_model(request.param))


def built(folder: Path, data: bytes) -> Tokenizer:
    (folder / "x.model").write_bytes(data)
    return build_tokenizer(str(folder / "x.model"))


@pytest.mark.parametrize("name", ODD_TEXTS)
def test_odd_text_comes_back(model, name):
    raw = ODD_TEXTS[name]
    tokens = model.encode(raw)
    assert model.decode(tokens) == raw and tokens.dtype == torch.int64
    assert "".join(model.text(tokens.tolist())) == raw.decode("utf-8", "replace")
    assert not {0, 1, 2, 3, 4} & set(tokens.tolist())  # <unk> and special tokens


@pytest.mark.parametrize("odd", [b"\xe2\x96\x81", b"\0", b"\xff", "\ud800".encode("utf-8", "surrogatepass")])
def test_what_is_odd_costs_its_own_bytes_alone(model, odd):
    of_bytes = 5 + torch.tensor(list(odd))
    expected = torch.cat([model.encode("the attention"), of_bytes, model.encode(" of the")])
    assert torch.equal(model.encode(b"the attention" + odd + b" of the"), expected)


def test_any_bytes_come_back(model):
    for raw in random_texts(400):
        assert model.decode(model.encode(raw)) == raw


def test_what_sentencepiece_would_change_comes_back_all_the_same(model, monkeypatch):
    class Changing:
        def encode(self, texts: list[str], num_threads: int) -> list[list[int]]:
            return [own.encode(text.replace("of", "")) for text in texts]

    own = model._processor
    monkeypatch.setattr(model, "_processor", Changing())
    tokens = model.encode("the attention\nof the\n")
    assert model.decode(tokens) == b"the attention\nof the\n"
    assert tokens.tolist() == [*own.encode("the attention\n"), *(5 + byte for byte in b"of the\n")]


def test_long_lines_come_back(model):
    for raw in (b"x" * 1_000_000, b" " * 300_000, PROSE.replace("\n", " ").encode() * 15):
        assert model.decode(model.encode(raw)) == raw


def test_every_code_point_comes_back(tmp_path):
    model = built(tmp_path, sentencepiece_model())
    raw = "".join(map(chr, [*range(0x11000), *range(0x1F000, 0x1FB00), *range(0xE0000, 0xE1000), 0x10FFFF]))
    for text in (raw.encode("utf-8", "surrogatepass"), " ".join(raw).encode("utf-8", "surrogatepass")):
        assert model.decode(model.encode(text)) == text
    assert torch.equal(model.encode(raw), model.encode(raw.encode("utf-8", "surrogatepass")))


def test_ordinary_text_is_encoded_as_sentencepiece_does(tmp_path):
    for kind in TYPES:
        data = sentencepiece_model(kind)
        own, model = SentencePieceProcessor(model_proto=data), built(tmp_path, data)
        assert len(model.encode(PROSE)) < len(PROSE.encode()) / 1.3
        assert model.encode(PROSE).tolist() == [
            token for line in PROSE.splitlines(keepends=True) for token in own.encode(line)
        ]
        long = PROSE.replace("\n", " ")[: 3 * LONGEST]
        assert model.encode(long).tolist() == own.encode(long)


def test_long_lines_are_cut_before_spaces():
    text = "word  " * LONGEST + "\n" + "x" * (2 * LONGEST + 1) + "\n\nend"
    found = list(segments(text))
    assert "".join(found) == text and max(map(len, found)) <= LONGEST
    cuts = [one for one, after in pairwise(found) if after.startswith(" ")]
    assert len(cuts) == 6 and all(one.endswith("word") for one in cuts)
    assert found[-2:] == ["\n", "end"]


def test_special_tokens_are_no_text(model):
    assert model.special == SpecialTokens(begin=1, separator=2, padding=3, mask=4) and model.separator == 2
    assert model.vocabulary == 420 and model.lossless
    assert model.decode(torch.tensor([1, 2, 3, 4, 0])) == b""
    for token in (-1, 420):
        with pytest.raises(ValueError, match="is no token of 420"):
            model.decode(torch.tensor([token]))


def test_words_begin_at_white_space(model):
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


@pytest.mark.parametrize(
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
def test_a_model_that_changes_text_is_refused(tmp_path, data, problem):
    said = refusal(lambda: built(tmp_path, data()), ConfigError, problem)
    assert re.search(r"megasparse train-tokenizer|README", said)


def charsmap() -> bytes:
    model = SentencePieceNormalizer(rule_name="nmt_nfkc").serialized_model_proto()
    return parsed(model).normalizer_spec.precompiled_charsmap


def test_a_foreign_model_without_special_tokens_has_none(tmp_path):
    proto = parsed(sentencepiece_model())
    proto.pieces[2].piece, proto.pieces[4].type = "</s>", ModelProto.SentencePiece.USER_DEFINED
    model = built(tmp_path, proto.SerializeToString())
    assert model.special is None and model.separator == 2
    assert model.encode("a[MASK]").tolist()[-1] == 4 and model.decode(torch.tensor([4])) == b"[MASK]"
