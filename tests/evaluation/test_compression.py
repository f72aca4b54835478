"""Tokens to bytes and back, by every strictly causal mechanism, at the promised length; and the commands."""

import dataclasses
import math
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch

from megasparse.attention import lsh
from megasparse.cli.main import main
from megasparse.config.schema import ModelConfig
from megasparse.errors import DataError, UserError
from megasparse.evaluation import compression
from megasparse.evaluation.bits_per_dim import Windows, of_model, score
from megasparse.evaluation.compression import (
    DEEPEST,
    MARGIN,
    SCALE,
    Code,
    decode,
    encode,
    model_digest,
    pack,
    unpack,
    walk,
    weights,
)
from megasparse.model.build import build_model
from tests.helpers.models import attention, by_path, named, random_tokens, small, strict_names
from tests.helpers.scoring import Stream
from tests.helpers.trained import prepared, trained


def coder_and_tokens(name, tokens=70, seed=0):
    return build_model(small(attention=named(name)), seed=3).double().eval(), random_tokens(1, tokens, seed=seed)[0]


@by_path("name", strict_names())
def test_every_causal_mechanism_gives_the_tokens_back_at_the_promised_length(name):
    model, tokens = coder_and_tokens(name)
    code = encode(model, tokens, 30, seed=7)  # two whole windows and a ragged one
    assert decode(model, code, len(tokens), 30, seed=7).equal(tokens)
    promised = score(of_model(model), Stream(tokens), Windows(30, batch=2), 7).nats / math.log(2)
    assert promised - 1 < 32 * len(code.words) < promised * 1.0001 + 64
    if name == "lsh":  # other rotations, other predictions
        assert not decode(model, code, len(tokens), 30, seed=8).equal(tokens)


def record_passes(monkeypatch):
    """Record the results of `whole_passes`."""
    recorded, original = [], compression.whole_passes

    def whole_passes(*given):
        recorded.append(original(*given))
        return recorded[-1]

    monkeypatch.setattr(compression, "whole_passes", whole_passes)
    return recorded


SHIFTED = {"shifted_keys": True, "local": True}


@pytest.mark.parametrize("lsh", [{**SHIFTED, "rounds": 1}, {**SHIFTED, "rounds": 2}, {"shared_qk": False}], ids=str)
def test_whole_windows_predict_what_the_cache_predicts(monkeypatch, lsh):
    sections = attention("local", "ngram", "lsh", lsh=lsh)
    model = build_model(small(attention=sections, positions={"kind": "rotary"}), seed=3).double().eval()
    tokens, recorded = random_tokens(1, 100)[0], record_passes(monkeypatch)

    def predictions(text):
        below = []

        def choose(starts, t, of_step):
            below.append(of_step)
            return tokens[torch.tensor(starts) + t]

        walk(model, 100, 30, 7, choose, lambda _: None, text)
        return np.concatenate(below)

    whole, cached = predictions(tokens), predictions(None)
    assert recorded[0] is not None and np.abs(whole - cached).max() < MARGIN / 10
    assert decode(model, encode(model, tokens, 30, seed=7), 100, 30, seed=7).equal(tokens)


def test_a_hash_within_rounding_of_another_bucket_is_coded_from_the_cache(monkeypatch):
    """Two rotations are equal, so vectors whose bucket belongs to the first are as near to the second's."""
    model, tokens = coder_and_tokens("lsh shifted")
    draw, recorded = lsh.rotations, record_passes(monkeypatch)
    monkeypatch.setattr(lsh, "rotations", lambda *given: draw(*given)[..., [0, 0, *range(2, 16)]])
    assert decode(model, encode(model, tokens, 30, seed=7), len(tokens), 30, seed=7).equal(tokens)
    assert recorded == [None]


def test_probabilities_that_two_machines_round_apart_are_written_down():
    """A decoder whose logits differ by less than MARGIN, and lie on a middle between two grid points."""
    generator = torch.Generator().manual_seed(0)

    class Toy:
        config = small(residual_dtype="bf16")  # not coded in whole passes
        logits = -(torch.randint(0, 300, (40, config.vocabulary), generator=generator).double() + 0.5) / SCALE
        logits[:, 0] = 0.0
        error = 0.0

        def parameters(self):
            return iter([self.logits])

        def new_cache(self, batch, seed):
            return dataclasses.make_dataclass("Cache", ["rng", "position", "layers"])(None, 0, ())

        def prefill(self, tokens, cache):
            return self.logits[:1] * (1 + self.error)

        def decode(self, token, cache):
            cache.position += 1
            return self.logits[cache.position : cache.position + 1] * (1 + self.error)

    model, tokens = Toy(), random_tokens(1, 40)[0]
    code = encode(model, tokens, 40, seed=0)
    assert len(code.exceptions) == 40 * (Toy.config.vocabulary - 1)
    for model.error in (1e-12, -1e-12):
        assert decode(model, code, 40, 40, seed=0).equal(tokens)
    model.error = 1e-2
    assert not decode(model, code, 40, 40, seed=0).equal(tokens)


def test_weights_are_exponentials():
    expected = np.exp(-np.arange(DEEPEST + 1) / SCALE) * 2**24
    assert np.abs(weights() - expected).max() <= 0.5 + 1e-6 and weights().min() >= 1


def test_groups_of_windows_change_nothing_but_the_order(monkeypatch):
    model, tokens = coder_and_tokens("lsh")
    expected = encode(model, tokens, 20, seed=7)
    monkeypatch.setattr(compression, "AT_ONCE", 1)
    code = encode(model, tokens, 20, seed=7)
    assert not np.array_equal(code.words, expected.words)
    assert decode(model, code, len(tokens), 20, seed=7).equal(tokens)


def test_files_of_another_model_and_damaged_ones_are_rejected():
    model, tokens = coder_and_tokens("local")
    digest, text, path = model_digest(model, 7, 60), bytes(tokens.tolist()), Path("x.msz")
    code = Code(encode(model, tokens, 60, seed=7).words, np.array([[5, 1], [900, 0]]))
    raw = pack(code, len(tokens), text, digest)
    found, count, crc = unpack(path, raw, digest, 256)
    assert np.array_equal(np.trim_zeros(found.words, "b"), np.trim_zeros(code.words, "b"))
    assert (found.exceptions == code.exceptions).all() and (count, crc) == (len(tokens), zlib.crc32(text))
    with pytest.raises(DataError, match="compressed with another model"):
        unpack(path, raw, model_digest(build_model(model.config, seed=4).double(), 7, 60), 256)
    assert model_digest(model, 8, 60) != digest != model_digest(model, 7, 61)
    later = type("Later", (ModelConfig,), {"__annotations__": {"new": int}, "new": 0})  # a key of a later version
    model.config = later.model_validate(model.config.model_dump())
    assert model_digest(model, 7, 60) == digest
    with pytest.raises(DataError, match="not written by megasparse compress"):
        unpack(path, b"PK" + raw, digest, 256)
    huge = raw[:9] + b"\xff" * 8 + b"\x01" + raw[11:]
    zeros = Code(np.zeros(9, dtype=np.uint32), np.empty((0, 2), dtype=np.int64))  # token 0 is coded without words
    assert unpack(path, pack(zeros, 10_000_000, b"", digest), digest, 256)[1] == 10_000_000
    for wrong in (raw[:8], raw[:10], huge, pack(code, 1 << 40, text, digest)):
        with pytest.raises(DataError, match="damaged"):
            unpack(path, wrong, digest, 256)


@pytest.fixture(scope="module", params=["fp32", "bf16"])
def run(tmp_path_factory, request):
    folder = tmp_path_factory.mktemp("coder")
    training = {"steps": 2, "global_batch": 2, "micro_batch": 2, "precision": request.param}
    trained(prepared(folder), folder / "run", ["lsh", "local", "ngram"], 2, training=training)
    return folder / "run"


def test_a_file_is_restored_byte_for_byte(run, tmp_path, capsys):
    (tmp_path / "a.bin").write_bytes(bytes(reversed(range(256))) + b"\0ends here")
    main(["compress", str(tmp_path / "a.bin"), "--checkpoint", str(run)])
    assert "266 bytes compressed to" in capsys.readouterr().out
    main(["decompress", str(tmp_path / "a.bin.msz"), "--checkpoint", str(run), "--output", str(tmp_path / "b.bin")])
    assert (tmp_path / "b.bin").read_bytes() == (tmp_path / "a.bin").read_bytes()


def test_a_rejected_input_leaves_no_file(run, tmp_path):
    source, packed, out = tmp_path / "a.txt", tmp_path / "a.txt.msz", tmp_path / "out"
    source.write_bytes(b"some text of no great length")
    compression.compress(run, source, packed)
    damaged = tmp_path / "damaged.msz"
    damaged.write_bytes(packed.read_bytes()[:-1] + bytes([packed.read_bytes()[-1] ^ 1]))
    for path, message in ((damaged, ": damaged"), (source, "not written by"), (tmp_path / "none", "cannot be read")):
        with pytest.raises(UserError, match=message):
            compression.decompress(run, path, out)
    with pytest.raises(UserError, match="already exists"):
        compression.compress(run, source, packed)
    (tmp_path / "empty").touch()
    with pytest.raises(UserError, match="the file is empty"):
        compression.compress(run, tmp_path / "empty", out)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.txt", "a.txt.msz", "damaged.msz", "empty"]
