"""Exported folders as their users load them: by transformers' auto classes, whose code imports megasparse."""

import json
import os
import subprocess
import sys

import pytest
import torch
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedTokenizerFast,
    pipeline,
)

from megasparse.attention.heads import Padding
from megasparse.data.tokenizers.simple import ByteTokenizer
from megasparse.hub.export import to_hf
from megasparse.hub.tokenizer_files import byte_files
from megasparse.model.build import build_model
from megasparse.ops.random import RngContext
from tests.helpers.hub import SEED, checkpoint, decoder, encoder
from tests.helpers.models import random_tokens, small_pair

PADDING = 258
"""Padding token of an encoder–decoder, and its start."""

WITHOUT_PACKAGE = """
import sys

sys.modules["megasparse"] = None
from transformers import AutoModelForCausalLM

AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)
"""


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A megasparse model of each kind and its exported folder."""
    root = tmp_path_factory.mktemp("exported")
    found = {}
    for kind, config in (
        ("decoder", decoder("lsh", blocks="ordinary", activations="checkpoint")),
        ("encoder", encoder("lha")),
        ("encoder_decoder", small_pair()),
    ):
        model, path = checkpoint(config, root / f"{kind}-run")
        found[kind] = model, to_hf(path, root / kind)
    return found


@pytest.fixture(autouse=True, scope="module")
def own_modules_cache(tmp_path_factory):
    """A folder that transformers copies code to."""
    cache = str(tmp_path_factory.mktemp("modules"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", cache)
        patch.setattr("transformers.utils.hub.HF_MODULES_CACHE", cache, raising=False)
        patch.setattr(sys, "path", list(sys.path))
        yield


def expected_logits(model, tokens):
    if model.config.kind == "encoder_decoder":
        source, rng = model.encode(tokens, SEED), RngContext.evaluation(SEED, len(tokens))
        return model.logits(model.streams(tokens[:, :-1], rng, Padding(), source=source)[0])
    streams, _, _ = model.streams(tokens, RngContext.evaluation(SEED, len(tokens)), Padding())
    logits = model.logits(streams)
    return logits[:, 1:] if model.config.kind == "decoder" else logits


def test_without_the_package_one_line_tells_how_to_install_it(folders, tmp_path):
    environment = {**os.environ, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", WITHOUT_PACKAGE, str(folders["decoder"][1])]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    message = "ImportError: this model needs the package megasparse: run pip install -e . in a clone"
    assert done.returncode == 1 and done.stderr.splitlines()[-1] == message


@pytest.mark.parametrize("kind", ["decoder", "encoder", "encoder_decoder"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)])
def test_an_exported_model_trains_under_autocast(folders, kind, dtype):
    auto = {"decoder": AutoModelForCausalLM, "encoder": AutoModelForMaskedLM, "encoder_decoder": AutoModelForSeq2SeqLM}
    tokens, losses = random_tokens(2, 30), []
    for enabled in (False, True):
        model = auto[kind].from_pretrained(folders[kind][1], trust_remote_code=True).train()
        torch.manual_seed(0)
        with torch.autocast("cpu", dtype, enabled=enabled):
            loss = model(tokens, labels=tokens).loss
        loss.backward()
        assert all(weight.grad is not None and torch.isfinite(weight.grad).all() for weight in model.parameters())
        torch.optim.SGD(model.parameters(), lr=0.01).step()
        with torch.no_grad():
            losses.append((loss.item(), model(tokens, labels=tokens).loss.item()))
    assert losses[1] == pytest.approx(losses[0], rel=1e-2)


def test_every_auto_class_of_a_folder_loads_it(folders):
    tokens = random_tokens(2, 20)
    for kind, classes in (
        ("decoder", [AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification]),
        ("encoder", [AutoModel, AutoModelForMaskedLM, AutoModelForSequenceClassification]),
    ):
        model, folder = folders[kind]
        loaded = [auto.from_pretrained(folder, trust_remote_code=True) for auto in classes]
        for hf in loaded:
            weights = {name.removeprefix("model."): value for name, value in hf.state_dict().items()}
            assert all(torch.equal(weights[name], value) for name, value in model.state_dict().items())
        with torch.no_grad():
            torch.testing.assert_close(loaded[1](tokens).logits, expected_logits(model, tokens), atol=1e-5, rtol=0)
            assert loaded[2](tokens).logits.shape == (2, 2)
        fresh = classes[1].from_config(loaded[1].config, trust_remote_code=True).state_dict()
        initial = build_model(model.config, SEED).state_dict()
        assert all(torch.equal(fresh[f"model.{name}"], value) for name, value in initial.items())
        other = AutoModelForMaskedLM if kind == "decoder" else AutoModelForCausalLM
        with pytest.raises(ValueError):
            other.from_pretrained(folder, trust_remote_code=True)


def test_an_encoder_decoder_is_loaded_generates_and_is_saved_again(folders, tmp_path):
    model, folder = folders["encoder_decoder"]
    hf = AutoModelForSeq2SeqLM.from_pretrained(folder, trust_remote_code=True)
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    inputs = tokenizer(["ab", "abcd [SEP]"], padding=True, return_tensors="pt")
    assert inputs["input_ids"][0].tolist() == [97, 98, 259, *[PADDING] * 8]
    assert inputs["input_ids"][1].tolist() == [*b"abcd [SEP]", 259] and inputs["attention_mask"][0].sum() == 3
    assert tokenizer.batch_decode(inputs["input_ids"], skip_special_tokens=True) == ["ab", "abcd [SEP]"]
    end = {"eos_token_id": 259, "pad_token_id": PADDING, "decoder_start_token_id": PADDING}
    settings = json.loads((folder / "generation_config.json").read_text())
    assert settings == {"use_cache": True, "max_length": 129, "num_beams": 1, **end}
    assert 21 < hf.generate(**inputs).shape[1] <= 129  # transformers' own default is 20 tokens
    predicted = hf.generate(**inputs, num_beams=3, max_new_tokens=6)
    hf.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    assert {path.name for path in folder.glob("*.py")} == {path.name for path in tmp_path.glob("*.py")}
    again = AutoModelForSeq2SeqLM.from_pretrained(tmp_path, trust_remote_code=True)
    same = AutoTokenizer.from_pretrained(tmp_path)(["ab", "abcd [SEP]"], padding=True, return_tensors="pt")
    assert torch.equal(again.generate(**same, num_beams=3, max_new_tokens=6), predicted)
    tokens = random_tokens(2, 20)
    for loaded in (hf, again):
        with torch.no_grad():
            found = loaded(tokens, labels=tokens).logits
            torch.testing.assert_close(found, expected_logits(model, tokens), atol=1e-5, rtol=0)
    for other in (AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification):
        with pytest.raises(ValueError):
            other.from_pretrained(folder, trust_remote_code=True)


def test_weights_on_disk_compute_as_in_memory(folders, tmp_path):
    tokens = random_tokens(2, 20)
    mixed = {"model.embedding": "disk", "model.blocks.0": "cpu", "model.blocks.1": "disk", "model.head": "disk"}
    for kind, auto, device_map in (
        ("decoder", AutoModelForCausalLM, {"": "disk"}),
        ("decoder", AutoModelForCausalLM, mixed),
        ("encoder", AutoModelForMaskedLM, mixed),
        ("encoder", AutoModelForSequenceClassification, {"model": "disk", "classifier": "disk"}),
        ("encoder_decoder", AutoModelForSeq2SeqLM, {"": "disk"}),
    ):
        whole = auto.from_pretrained(folders[kind][1], trust_remote_code=True)
        whole.save_pretrained(tmp_path / kind)  # with the new classifier
        options = {"device_map": device_map, "offload_folder": tmp_path / "disk", "trust_remote_code": True}
        hf = auto.from_pretrained(tmp_path / kind, **options)
        assert any(weight.is_meta for weight in hf.parameters())
        inputs = {"input_ids": tokens, **({"decoder_input_ids": tokens % 1 + PADDING} if "_" in kind else {})}
        assert hf(**inputs).logits.equal(whole(**inputs).logits), kind
        if hf.can_generate():
            assert hf.generate(tokens, max_new_tokens=4).equal(whole.generate(tokens, max_new_tokens=4)), kind


def test_code_of_a_folder_is_not_run_unasked(folders, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda *_: "n")
    with pytest.raises(ValueError, match="trust_remote_code"):
        AutoModelForCausalLM.from_pretrained(folders["decoder"][1], trust_remote_code=False)


def test_pipelines_run(folders):
    writer = pipeline("text-generation", model=str(folders["decoder"][1]), trust_remote_code=True)
    one, two = writer(["ab", "abcdef"], max_new_tokens=3, do_sample=False, batch_size=2)
    assert one[0]["generated_text"].startswith("ab") and two[0]["generated_text"].startswith("abcdef")
    assert one[0]["generated_text"] == writer("ab", max_new_tokens=3, do_sample=False)[0]["generated_text"]
    filler = pipeline("fill-mask", model=str(folders["encoder"][1]), trust_remote_code=True)
    found = filler("a[MASK]c")
    assert len(found) == 5 and all(each["sequence"].startswith("a") for each in found)
    labels = pipeline("text-classification", model=str(folders["encoder"][1]), trust_remote_code=True)
    assert labels("abc")[0]["label"] in ("LABEL_0", "LABEL_1")


def test_the_tokenizer_is_the_bytes_of_utf8(tmp_path):
    text = "".join(chr(c) for c in [*range(0x250), *range(0x4E00, 0x4E40), *range(0x1F600, 0x1F640)]) + " [PAD] [MASK]"
    ours = ByteTokenizer()
    for name, mask in (("decoder", None), ("encoder", 256)):
        folder = tmp_path / name
        folder.mkdir()
        for file, content in byte_files(100_000, mask).items():
            (folder / file).write_text(content, encoding="utf-8")
        for tokenizer in (AutoTokenizer.from_pretrained(folder), PreTrainedTokenizerFast.from_pretrained(folder)):
            plain = text if mask is None else text.replace("[PAD]", "").replace("[MASK]", "")
            ids = tokenizer(plain)["input_ids"]
            assert ids == ours.encode(plain).tolist()
            assert tokenizer.decode(ids) == plain
            padded = tokenizer(["a", "bcd"], padding=True)
            assert padded["attention_mask"][0] == ([0, 0, 1] if mask is None else [1, 0, 0])
            assert mask is None or tokenizer("a[MASK]")["input_ids"] == [97, 256]
