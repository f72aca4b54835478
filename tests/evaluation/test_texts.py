"""Prompts and generated texts, with synthetic models."""

from types import SimpleNamespace

import pytest
import torch

import megasparse.attention  # noqa: F401  (registers the mechanisms)
from megasparse.config.schema import Config
from megasparse.data.tokenizers.simple import ByteTokenizer, PixelTokenizer
from megasparse.errors import ConfigError
from megasparse.evaluation.generate import Sampling
from megasparse.evaluation.texts import Request, read_sources, texts
from tests.helpers.cases import together
from tests.helpers.commands import refusal

CPU = torch.device("cpu")
SEPARATOR = 259


class Counter:
    """The likeliest token is the one after the last, after "d" number `after_d`."""

    def __init__(self, after_d: int = ord("e")):
        self.after_d = after_d

    def new_cache(self, batch, seed):
        return SimpleNamespace(select=lambda rows: None, before=torch.tensor([ord("a") - 1]))

    def prefill(self, tokens, cache):
        return self.decode(tokens[:, -1] if tokens.shape[1] else cache.before, cache)

    def decode(self, token, cache):
        return 50.0 * torch.nn.functional.one_hot(torch.where(token == ord("d"), self.after_d, token + 1), 260)


class FromSource(Counter):
    """Starts with the last token of each source and records its inputs."""

    def __init__(self):
        super().__init__(SEPARATOR)
        self.read = []

    def encode(self, tokens, seed):
        self.read.append((tokens.tolist(), seed))
        return tokens

    def new_cache(self, batch, seed, memory):
        last = (memory == SEPARATOR).int().argmax(-1) - 1
        return SimpleNamespace(select=lambda rows: None, before=memory[torch.arange(batch), last] - 1)


def config(kind: str = "decoder", **changes) -> Config:
    model = {"kind": kind, "max_length": 16, "vocabulary": 260, **changes}
    return Config.model_validate({"model": model, "run": {"seed": 8}})


def pair(**changes) -> Config:
    return config("encoder_decoder", source={"length": 6}, padding_token=257, **changes)


def request(prompt: bytes = b"", tokens: int | None = None, beams: int | None = None) -> Request:
    return Request(prompt, tokens, Sampling() if beams else Sampling(temperature=0.0), beams, 0.0)


def written(model, settings, asked, sources=()) -> list[str]:
    return ["".join(pieces) for pieces in texts(model, settings, ByteTokenizer(), asked, sources, CPU)]


@pytest.mark.parametrize("beams", [None, 1, 3])
def test_a_prompt_is_continued_as_far_as_there_is_room(beams):
    assert written(Counter(), config(), request("é".encode() + b"xy", 3, beams)) == ["éxyz{|"]
    assert written(Counter(), config(), request(b"p", None, beams)) == ["pqrstuvwxyz{|}~\x7f"]


@pytest.mark.parametrize("beams", [None, 1, 3])
def test_a_text_ends_with_its_document(beams):
    assert written(Counter(0), config(document_separator=0), request(b"b", 9, beams)) == ["bcd"]
    assert written(Counter(0), config(), request(b"b", 4, beams)) == ["bcd\0\1"]


def test_many_sources_are_answered_in_their_order():
    model, sources = FromSource(), [b"abcd"[i % 4 : i % 4 + 1] for i in range(19)]
    assert written(model, pair(), request(beams=2), sources) == ["abcd"[i % 4 :] for i in range(19)]
    assert [len(group) for group, _ in model.read] == [8, 8, 3]


@pytest.mark.parametrize("beams", [None, 1, 3])
def test_each_source_is_read_and_answered(beams):
    model, without_padding = FromSource(), config("encoder_decoder", source={"length": 6})
    assert written(model, pair(), request(beams=beams), [b"zzb", b"c"]) == ["bcd", "cd"]
    alone = [([[*b"zzb", SEPARATOR]], 8), ([[ord("c"), SEPARATOR]], 8)]
    assert model.read == (alone if beams is None else [([[*b"zzb", SEPARATOR], [ord("c"), SEPARATOR, 257, 257]], 8)])
    model.read.clear()
    assert written(model, without_padding, request(beams=beams), [b"zzb", b"c"]) == ["bcd", "cd"]
    assert model.read == alone
    assert written(model, pair(), request(b"a", 1, beams), [b"c"]) == ["ab"]


def test_texts_come_piece_by_piece():
    (pieces,) = texts(Counter(), config(), ByteTokenizer(), request("é".encode(), 2), [], CPU)
    assert list(pieces) == ["é", "\ufffd", "\ufffd"]  # 0xA9 + 1 and + 2 are no characters


def test_sources_are_a_text_or_the_lines_of_a_file(tmp_path):
    assert [read_sources(text, None) for text in (None, "", "\udcff")] == [[], [b""], [b"\xff"]]
    (tmp_path / "lines").write_bytes(b"one\r\n\ntwo\n")
    assert read_sources(None, str(tmp_path / "lines")) == [b"one", b"", b"two"]
    (tmp_path / "lines").write_bytes(b"one\n\ntwo\n\n")
    assert read_sources(None, str(tmp_path / "lines")) == [b"one", b"", b"two", b""]
    refusal(lambda: read_sources(None, str(tmp_path / "nothing")), match="nothing: cannot be read: No such file")
    (tmp_path / "empty").touch()
    refusal(lambda: read_sources(None, str(tmp_path / "empty")), match="empty: the file is empty")


@together(
    ("settings", "asked", "sources", "message"),
    [
        (config(), request(), [b"x"], "--source: a decoder does not read a source"),
        (pair(), request(), [], "--source: it is missing"),
        (pair(), request(), [b"12345", b"123456"], r"--source: number 2 is 7 tokens long.*model.source.length = 6"),
        (config(document_separator=0), request(b"a\0b"), [], r"--prompt: it contains the token that ends a text \(0\)"),
        (pair(vocabulary=258), request(), [b"x"], r"model.vocabulary: 258 does not include.*\(259\)"),
        (config(), request(b"a", 16), [], "--tokens: a prompt of 1 tokens and 16 new tokens exceed"),
        (config(), request(b"a" * 17), [], "--tokens: a prompt of 17 tokens and"),
        (config(), request(beams=0), [], "--beams: 0"),
        (config(), Request(b"", 1, Sampling(-1.0), None, 0.0), [], "--temperature: -1.0"),
        (config(), Request(b"", 1, Sampling(min_p=0.5), 2, 0.0), [], "--min-p: 0.5 is ignored with --beams"),
        (config(), Request(b"", 1, Sampling(), None, 0.6), [], "--length-penalty: 0.6 is ignored without --beams"),
    ],
)
def test_an_unwritable_output_is_rejected_before_the_work(settings, asked, sources, message):
    refusal(lambda: texts(FromSource(), settings, ByteTokenizer(), asked, sources, CPU), ConfigError, message)


def test_a_tokenizer_that_does_not_fit_is_rejected():
    with pytest.raises(ConfigError, match="--checkpoint: the model predicts pixels, not text"):
        texts(Counter(), config(), PixelTokenizer(), request(), [], CPU)
    tokenizer = ByteTokenizer()
    tokenizer.special = None
    with pytest.raises(ConfigError, match='"bytes" does not define special tokens'):
        texts(FromSource(), pair(), tokenizer, request(), [b"x"], CPU)
