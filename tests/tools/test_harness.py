"""The adapter for lm-evaluation-harness against `megasparse evaluate`, with a stand-in for the package lm_eval."""

import importlib
import math
import random
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from megasparse.data.index import Index
from megasparse.data.reader import EvaluationStream
from megasparse.errors import ConfigError
from megasparse.runs.api import evaluate, generate, load_checkpoint
from tests.helpers.commands import refusal
from tests.helpers.trained import prepare_text, trained


@pytest.fixture
def harness(monkeypatch):
    contents = {
        "lm_eval": {},
        "lm_eval.__main__": {"cli_evaluate": None},
        "lm_eval.api": {},
        "lm_eval.api.model": {"LM": object},
        "lm_eval.api.registry": {"register_model": lambda name: lambda model: model},
    }
    for name, values in contents.items():
        module = ModuleType(name)
        vars(module).update(values)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "tools.harness", raising=False)
    return importlib.import_module("tools.harness").MegasparseLM


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("harness")
    (folder / "source.txt").write_text("".join(random.Random(0).choices("some text\n", k=4000)))
    data = prepare_text(folder / "source.txt", folder / "data")
    trained(data, folder / "run", ["lsh", "local"], 20, optimizer={"learning_rate": 1e-2, "warmup_steps": 1})
    return folder / "run"


def requests(*arguments):
    return [SimpleNamespace(args=one) for one in arguments]


@pytest.mark.parametrize("stride", [None, 13])
def test_a_text_of_several_windows_has_the_bits_of_evaluate(run, harness, stride):
    _, config, _, _ = load_checkpoint(run)
    stream = EvaluationStream(Index.load(config.data.path), "test")
    text = bytes(stream.read(0, stream.tokens).tolist()).decode()
    assert stream.tokens > 3 * config.data.sequence_length
    [nats] = harness(str(run), stride=stride).loglikelihood_rolling(requests((text,)))
    assert -nats / math.log(2) / len(text) == pytest.approx(evaluate(run, stride=stride)["bits_per_dim"], rel=1e-6)


def test_a_continuation_has_the_likelihood_of_its_tokens_and_is_greedy_or_not(run, harness):
    model = harness(str(run))
    greedy = generate(run, "a text ", 3, temperature=0.0).removeprefix("a text ")
    pairs = [("a text ", greedy), ("a text ", chr(ord(greedy[0]) % 64 + 33)), ("", "a text"), ("x" * 500, greedy)]
    (first, is_greedy), (_, other), (whole, _), (_, _) = model.loglikelihood(requests(*pairs))
    assert is_greedy and not other
    [rolling] = model.loglikelihood_rolling(requests(("a text",)))
    assert whole == pytest.approx(rolling, rel=1e-6)
    [both], [context] = (model.loglikelihood_rolling(requests((text,))) for text in ("a text " + greedy, "a text "))
    assert first == pytest.approx(both - context, abs=1e-4)


def test_generation_ends_before_a_stop_string(run, harness):
    whole = generate(run, "a text ", 12, temperature=0.0).removeprefix("a text ")
    stop = whole[1:3]
    settings = ({"until": [stop], "max_gen_toks": 12}, {"until": [], "max_gen_toks": 12})
    ended, free = harness(str(run)).generate_until(requests(*(("a text ", one) for one in settings)))
    assert ended == whole.partition(stop)[0] and free == whole
    assert len(harness(str(run)).generate_until(requests(("a text " * 40, {"max_gen_toks": 500})))[0]) == 63


def test_a_device_is_an_override_and_a_leaking_decoder_is_rejected(run, harness, monkeypatch):
    assert harness(str(run), device="cpu", batch_size=1).encode("ab").equal(torch.tensor([97, 98]))
    refusal(lambda: harness(str(run), device="abacus"), ConfigError, r"run\.device")
    monkeypatch.setattr("megasparse.model.decoder.Causal.leaks", ["chunk"], raising=False)
    refusal(lambda: harness(str(run)), ConfigError, "not strictly causal")


def test_a_missing_package_is_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.delitem(sys.modules, "tools.harness", raising=False)
    with pytest.raises(SystemExit, match="lm_eval is not installed"):
        importlib.import_module("tools.harness")
