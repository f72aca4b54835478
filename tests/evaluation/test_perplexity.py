"""Perplexities against sums that are written out by hand, of models whose probabilities are known."""

import json
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from launch import evaluate as launcher
from megasparse.attention.heads import build_mechanism
from megasparse.config.schema import Config
from megasparse.data.index import Index
from megasparse.data.tokenizers import build_tokenizer
from megasparse.data.tokenizers.simple import vocabulary_file
from megasparse.errors import ConfigError
from megasparse.evaluation.images import png_bits_per_dim
from megasparse.evaluation.results import Protocol, Scoring, protocol_of
from megasparse.evaluation.results import decoder_summary as summary
from megasparse.evaluation.results import evaluate_decoder as evaluate
from megasparse.model.stack import TokenScores
from megasparse.training.checkpoints.checkpoint import Checkpoint
from megasparse.training.checkpoints.manifest import find_checkpoint
from megasparse.training.ranks import Ranks
from tests.helpers import commands
from tests.helpers.models import small
from tests.helpers.scoring import Stream, protocol_with, write_uniform
from tests.helpers.trained import prepare_text

TEXT = b"the cat saw the dog and the dog saw the cat . the end\n" * 3 + b"a bird\n"
WORDS = TEXT.split()
BYTES_A_WORD = len(TEXT) / len(WORDS)
VOCABULARY = sorted(set(WORDS))


class Model:
    """Every token of an id costs so many nats, `seed` more of them for each seed."""

    leaks: list[str] = []  # noqa: RUF012

    def __init__(self, nats: list[float], mechanisms: tuple[object, ...] = (), **config: int):
        self.nats, self.config = torch.tensor(nats, dtype=torch.float64), small(**config)
        self.mechanisms = lambda: enumerate(mechanisms)

    def token_scores(self, tokens, rng):
        return TokenScores(self.nats[tokens] + rng.seed, tokens == 0, torch.ones_like(tokens, dtype=torch.bool))


def test_only_tested_setups_report_a_code_length():
    def of(mechanism, config=(), **changed):
        model, stream = Model([1.0] * 256, (mechanism,), **dict(config)), Stream(list(TEXT))
        return evaluate(model, stream, protocol("bytes", **changed), 1, None, Ranks())["protocol"]

    packaged = build_mechanism("lsh", small(), 2)
    assert (of(packaged)["code_length"], of(packaged)["no_code_length"]) == (True, [])
    (reason,) = of(object())["no_code_length"]
    assert reason == "layer 0: bit-exact causality is not tested for object"
    assert of(packaged, score_from=3)["no_code_length"] == ["the first 3 tokens of each window are not scored"]
    for kind in ("sparse_transformer", "performer"):  # their products are as large as a document
        mechanism = build_mechanism(kind, small(), 2)
        assert of(mechanism)["code_length"]
        for key in ("document_separator", "padding_token"):
            result, name = of(mechanism, {key: 0}), type(mechanism).__name__
            assert not result["code_length"] and of(packaged, {key: 0})["code_length"]
            assert result["no_code_length"] == [f"layer 0: a later model.{key} changes the rounding of {name}"]


def protocol(tokenizer: str = "words", **changed) -> Protocol:
    """The protocol of TEXT."""
    return protocol_with(tokenizer, **{"split_bytes": len(TEXT), "split_words": len(WORDS), **changed})


def of_words(nats: list[float], batch: int = 1, limit: int | None = None, **changed) -> dict:
    """Result of the word tokens of TEXT: one for each word, where `nats` are those of the vocabulary."""
    stream = Stream([VOCABULARY.index(word) for word in WORDS])
    return evaluate(Model(nats), stream, protocol(**changed), batch, limit, Ranks())


def of_bytes(nats: list[float], limit: int | None = None, **changed) -> dict:
    return evaluate(Model(nats), Stream(list(TEXT)), protocol("bytes", **changed), 1, limit, Ranks())


def test_a_uniform_model_needs_log2_of_its_vocabulary():
    found = of_words([math.log(len(VOCABULARY))] * len(VOCABULARY))
    assert found["bits_per_token"] == pytest.approx(math.log2(9), rel=1e-12)
    assert found["token_perplexity"] == found["word_perplexity"] == pytest.approx(9.0, rel=1e-12)
    assert found["bits_per_byte"] == pytest.approx(math.log2(9) / BYTES_A_WORD, rel=1e-12)
    assert f"bits/byte {found['bits_per_byte']:.4f}, token perplexity 9.0000, word" in summary(found)
    assert (found["dims"], found["bytes"], found["words"]) == (len(WORDS), len(TEXT), len(WORDS))
    of_text = of_bytes([math.log(256)] * 256)
    assert of_text["bits_per_dim"] == of_text["bits_per_byte"] == pytest.approx(8.0, rel=1e-12)
    assert of_text["word_perplexity"] == pytest.approx(256**BYTES_A_WORD, rel=1e-9)
    assert "word" not in summary(of_text)  # a number of millions, beside which nothing stands


def test_byte_and_word_tokens_give_the_same_code_length():
    """A byte costs by a unigram model; a word as its bytes and the white space behind it do."""
    of_byte = [-math.log((1 + TEXT.count(byte)) / (256 + len(TEXT))) for byte in range(256)]
    in_words = of_words([math.fsum(of_byte[byte] for byte in word + b" ") for word in VOCABULARY])
    in_bytes = of_bytes([of_byte[32] if byte == 10 else of_byte[byte] for byte in range(256)])
    for name in ("nats", "bits_per_byte", "word_perplexity"):
        assert in_words[name] == pytest.approx(in_bytes[name], rel=1e-12)
    assert in_words["word_perplexity"] == pytest.approx(2 ** (in_words["bits_per_byte"] * BYTES_A_WORD), rel=1e-9)
    assert in_words["bits_per_token"] == pytest.approx(in_bytes["bits_per_dim"] * BYTES_A_WORD, rel=1e-12)


@pytest.mark.parametrize("stride", [16, 5])
def test_batches_change_no_number(stride):
    nats = [0.1 + 0.7 * i for i in range(len(VOCABULARY))]
    one = of_words(nats, stride=stride)
    assert one["protocol"]["coverage"] == 1.0
    other = of_words(nats, batch=8, stride=stride)
    for name in ("bits_per_token", "bits_per_byte", "token_perplexity", "word_perplexity", "nats", "accuracy"):
        assert other[name] == pytest.approx(one[name], rel=1e-9)


def test_part_of_a_split_has_byte_counts_only_for_byte_tokens():
    words, text = of_words([1.0] * 9, limit=1), of_bytes([1.0] * 256, limit=1)
    assert (words["dims"], words["bytes"], words["words"]) == (16, None, None)
    assert words["bits_per_token"] == pytest.approx(1 / math.log(2)) and words["token_perplexity"] == math.e
    assert words["bits_per_byte"] is words["word_perplexity"] is None
    reason = f"known only for the whole split, of which 16 of {len(WORDS)} tokens were scored"
    assert words["protocol"]["left_out"] == dict.fromkeys(["bits_per_byte", "word_perplexity"], reason)
    assert words["protocol"]["coverage"] == 16 / len(WORDS)
    assert (text["bytes"], text["words"], text["word_perplexity"]) == (16, None, None)
    assert text["bits_per_byte"] == text["bits_per_dim"] == pytest.approx(1 / math.log(2))
    assert summary(words).startswith("1.4427 bits/token, accuracy 6.25 %, token perplexity 2.7183 (16 of ")


def test_counts_missing_in_the_index_are_omitted():
    found = of_words([1.0] * 9, split_bytes=None, split_words=None)
    assert found["bits_per_byte"] is found["word_perplexity"] is None
    reason = "the index of the data does not contain it"
    assert found["protocol"]["left_out"] == dict.fromkeys(["bits_per_byte", "word_perplexity"], reason)
    old = of_bytes([1.0] * 256, split_bytes=None, split_words=None)
    assert old["bytes"] == len(TEXT) and old["protocol"]["left_out"] == {"word_perplexity": reason}
    # separators of documents are tokens, but no bytes of the text
    assert of_bytes([1.0] * 256, split_bytes=len(TEXT) - 10)["bits_per_byte"] > old["bits_per_byte"]


def test_a_perplexity_beyond_the_numbers_is_left_out():
    found = of_words([1.0] * 9, split_words=1, split_bytes=0)
    assert found["word_perplexity"] == pytest.approx(math.exp(len(WORDS)))
    nearly_no_words = of_words([30.0] * 9, split_words=1)
    assert nearly_no_words["word_perplexity"] is None
    assert nearly_no_words["protocol"]["left_out"] == {"word_perplexity": "beyond the largest number"}
    assert found["bits_per_byte"] is None


def test_seeds_average_nats_and_deviate_by_the_definition():
    found = of_words([1.0] * 9, seeds=[0, 1, 5])
    assert found["nats"] == pytest.approx(3.0 * len(WORDS))
    assert found["bits_per_token"] == pytest.approx(3.0 / math.log(2))
    assert found["word_perplexity"] == pytest.approx(math.exp(3.0))
    each = {"bits_per_token": [1 / math.log(2), 2 / math.log(2), 6 / math.log(2)]}
    each["bits_per_byte"] = [value / BYTES_A_WORD for value in each["bits_per_token"]]
    each["token_perplexity"] = each["word_perplexity"] = [math.exp(1), math.exp(2), math.exp(6)]
    for name, values in each.items():
        mean = sum(values) / 3
        deviation = math.sqrt(sum((value - mean) ** 2 for value in values) / 2)
        assert found["standard_deviations"][name] == pytest.approx(deviation, rel=1e-9)
    assert found["standard_deviation"] == found["standard_deviations"]["bits_per_token"]
    assert set(of_words([1.0] * 9)["standard_deviations"].values()) == {None}


def test_pixels_are_compared_with_png_files():
    stream = Stream([0] * 96 + [i * i % 251 for i in range(48)])  # the last is harder to pack
    settings = protocol("pixels", sequence_length=48, stride=48, record=48, split_bytes=144, split_words=None)
    for limit, count in ((None, 3), (2, 2)):
        found = evaluate(Model([math.log(256)] * 256), stream, settings, 1, limit, Ranks())
        assert found["bits_per_dim"] == pytest.approx(8.0) and found["dims"] == count * 48
        assert found["png_bits_per_dim"] == png_bits_per_dim(stream, 48, limit)
        assert not {"bits_per_byte", "word_perplexity"} & found.keys()
        assert found["protocol"]["symbols"] == "sub-pixels of images of 4×4, 48 each"
        assert found["protocol"]["coverage"] == count / 3
    line = f"accuracy 0.00 %, PNG files' bits/dim {found['png_bits_per_dim']:.4f} (96 of 144"
    assert line in summary(found | {"accuracy": 0.0})


def launched(folder: Path, tokenizer: str, *arguments: str, **model: Any) -> dict:
    """Return the result of launch/evaluate.py for TEXT and a model whose output weights are all 0."""
    data, run, out = (folder / f"{Path(tokenizer).stem} {name}" for name in ("data", "run", "out.json"))
    if not data.exists():
        prepare_text(folder / "text", data, 64, 4096, split="100,0,0", tokenizer=tokenizer)
        config = {"data": {"path": str(data), "sequence_length": 16, "tokenizer": tokenizer}, "run": {"device": "cpu"}}
        whole = Config.model_validate({**config, "model": small(("local",), layers=1, **model).model_dump()})
        write_uniform(whole, run)
    commands.run(launcher, "--checkpoint", run, "--split", "train", "--json", out, *arguments)
    return json.loads(out.read_text())


def test_from_text_to_result_with_words_and_with_bytes(tmp_path, capsys):
    (tmp_path / "text").write_bytes(TEXT)
    (tmp_path / "words.txt").write_bytes(vocabulary_file([TEXT]))
    lines = TEXT.count(b"\n")
    words = launched(tmp_path, str(tmp_path / "words.txt"), vocabulary=11, adaptive_cutoffs=[2, 5])
    ranked = sorted({*VOCABULARY, b"<eos>", b"<unk>"}, key=lambda w: (-Counter([*WORDS, *[b"<eos>"] * lines])[w], w))
    # a uniform choice among 2 words and 2 clusters, of 3 and of 6 words, and inside each
    size = {word: 1 if rank < 2 else 3 if rank < 5 else 6 for rank, word in enumerate(ranked)}
    nats = math.fsum(math.log(4 * size[word]) for word in [*WORDS, *[b"<eos>"] * lines])
    assert words["nats"] == pytest.approx(nats, rel=1e-6)
    assert words["bits_per_token"] == pytest.approx(nats / math.log(2) / (len(WORDS) + lines), rel=1e-6)
    assert words["bits_per_byte"] == pytest.approx(nats / math.log(2) / len(TEXT), rel=1e-6)
    assert words["word_perplexity"] == pytest.approx(math.exp(nats / len(WORDS)), rel=1e-6)
    assert words["token_perplexity"] == pytest.approx(math.exp(nats / (len(WORDS) + lines)), rel=1e-6)
    protocol = words["protocol"]
    assert (protocol["tokenizer"]["name"], protocol["lossless"]) == ("words", False)
    assert protocol["symbols"] == "tokens of words"
    assert protocol["no_code_length"] == ["the tokenizer is not lossless"]
    assert protocol["code_length"] is False and "bits/byte" not in capsys.readouterr().out
    assert (protocol["coverage"], protocol["context_start"], protocol["left_out"]) == (1.0, "learned start vector", {})
    text = launched(tmp_path, "bytes")
    assert text["bits_per_dim"] == text["bits_per_byte"] == pytest.approx(8.0, rel=1e-6)
    assert text["word_perplexity"] == pytest.approx(256**BYTES_A_WORD, rel=1e-5)
    assert text["protocol"]["code_length"] is True and text["protocol"]["no_code_length"] == []
    assert "8.0000 bits/dim, accuracy" in capsys.readouterr().out
    given = ["--checkpoint", tmp_path / "bytes run", "--set", f'data.tokenizer="{tmp_path / "words.txt"}"']
    assert 'data.tokenizer: "words"' in commands.refused(capsys, launcher, *given)
    refusal = commands.refused(capsys, launcher, *given, "--data", tmp_path / "words data")
    assert 'but the checkpoint was trained with "bytes"' in refusal


def test_windows_of_records_are_records(tmp_path):
    (tmp_path / "text").write_bytes(TEXT)
    launched(tmp_path, "bytes")
    config = Config.model_validate({"data": {"sequence_length": 16}})
    run = Checkpoint.open(find_checkpoint(tmp_path / "bytes run"))
    index = Index.load(tmp_path / "bytes data")
    about = {"settings": {"record": 16, "sample_bytes": 64}, "source": {"downsampling": "box", "location": ["/home"]}}
    records = replace(index, file=index.file.model_copy(update=about))
    found = protocol_of(config, run, records, build_tokenizer("bytes"), Scoring("train"))
    assert found.data_settings == {"record": 16, "sample_bytes": 64, "downsampling": "box"}
    assert (found.record, found.stride, found.split_bytes, found.split_words) == (16, 16, len(TEXT), len(WORDS))
    assert protocol_of(config, run, index, build_tokenizer("bytes"), Scoring("train", stride=8)).stride == 8
    with pytest.raises(ConfigError, match=r"--stride: 8 starts windows inside .* 16 tokens\. Remove"):
        protocol_of(config, run, records, build_tokenizer("bytes"), Scoring("train", stride=8))
