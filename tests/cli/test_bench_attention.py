"""The benchmark of attention: one tiny run from end to end, its arithmetic, and what wrong requests answer."""

import importlib.util
import json
import math
import os
from dataclasses import replace

import pytest
import torch

from megasparse.attention.full import FullAttention
from megasparse.attention.lsh import LSHAttention
from megasparse.benchmarks import attention, attention_table
from megasparse.benchmarks import crossover as crossovers
from megasparse.benchmarks.attention import MECHANISMS, PEERS, Case, Inputs, crossover, measure, model_of
from megasparse.cli import bench_attention
from megasparse.cli.main import door, parser_of
from megasparse.config.load import load_config
from megasparse.errors import UserError
from megasparse.planning.measure import MeasurementError, _attempt, alone
from tests.helpers.commands import refused

main = door("bench attention")

ON_CPU = ["--device", "cpu"]


def case(name, length=64, heads=2, dim=8, **changes):
    settings = {"batch": 1, "dtype": "fp32", "device": "cpu", "repeats": 2, "seed": 0, **changes}
    return Case(name, model_of(MECHANISMS.get(name, "lsh"), length, heads, dim, rounds=2, window=8), **settings)


@pytest.fixture
def here(monkeypatch):
    """Measures in this process: figures of memory mean nothing then."""
    monkeypatch.setattr(attention_table, "alone", lambda function, *arguments: function(*arguments))


@pytest.mark.parametrize("name", [*MECHANISMS, *PEERS])
def test_every_implementation_runs_forward_and_backward(name):
    found = measure(case(name, batch=2))
    assert len(found.forward) == len(found.both) == 2
    assert all(0 < forward < both for forward, both in zip(found.forward, found.both, strict=True))
    assert found.least is None  # no GPU


@pytest.mark.parametrize("causal", [True, False])
def test_what_the_backward_needs_is_counted_once(causal):
    """Queries, keys, values and the output, (1, 2, 64, 8) of 4 bytes each, and a log-sum-exp of every query."""
    built = replace(case("sdpa"), model=model_of("lsh", 64, 2, 8, rounds=2, window=8, causal=causal))
    assert 4 * 4096 <= measure(built).kept_bytes <= 4 * 4096 + 2 * 512


@pytest.mark.parametrize("name", ["lsh", "sdpa", "hf", "reformer-pytorch"])
def test_gradients_reach_the_inputs_and_start_afresh(name, monkeypatch):
    torch.manual_seed(0)
    leaves, norms = [], []
    original = attention._leaves
    monkeypatch.setattr(attention, "_leaves", lambda *inputs: leaves.extend(original(*inputs)) or leaves)
    run, _ = attention.build(case(name), torch.device("cpu"))
    for _ in range(2):
        run()()
        norms.append([leaf.grad.norm().item() for leaf in leaves])
    assert all(norm > 0 for norm in norms[0])
    if name in ("lsh", "sdpa"):  # the others draw anew
        assert norms[0] == norms[1]


def test_all_have_the_same_inputs():
    ours, theirs = (Inputs(case(name), torch.device("cpu")) for name in ("lsh", "hf"))
    assert all(torch.equal(getattr(ours, x), getattr(theirs, x)) for x in "qkvg")


def test_clustered_queries_and_keys_lie_together():
    found = Inputs(case("yoso-clustered", length=512, dim=64), torch.device("cpu"))
    cosine = torch.nn.functional.cosine_similarity(found.q[0, 0, :, None], found.k[0, 0, None], dim=-1)
    near = cosine > 0.7
    assert 0.08 < near.float().mean() < 0.2  # 8 clusters
    assert cosine[near].mean().item() == pytest.approx(0.9, abs=0.02)


def test_the_crossover_is_interpolated_on_logarithmic_scales():
    quadratic = {n: 1e-6 * n**2 for n in (512, 1024, 2048, 4096)}
    linear = {n: 1500e-6 * n for n in (512, 1024, 2048, 4096)}
    assert crossover(linear, quadratic) == pytest.approx(1500, abs=1)
    assert crossover(quadratic, linear) is None
    assert crossover({64: 1.0}, {64: 2.0}) == 64
    assert crossover({64: 3.0, 128: 1.0}, {64: 2.0, 128: math.inf}) == 128
    twice = {64: 3.0, 128: 1.0, 256: 3.0, 512: 1.0}
    assert crossover(twice, dict.fromkeys(twice, 2.0)) > 256  # not the first one


def test_a_run_writes_a_table_and_all_its_figures(tmp_path, capsys, monkeypatch, here):
    def figures(case):
        if case.implementation == "sdpa" and case.model.max_length == 128:
            return {"error": "out of memory"}
        times = {"lsh": 1.0, "sdpa": 3.0}[case.implementation] * case.model.max_length
        spread = attention_table.spread([times, 2 * times, 1.5 * times])
        sizes = {"extra_bytes": 5, "testing_bytes": 4, "kept_bytes": 3}
        return {"forward": spread, "forward_backward": spread, **sizes, "of_roofline": 0.5, "note": ""}

    monkeypatch.setattr(attention_table, "figures", figures)
    monkeypatch.setattr(crossovers, "figures", figures)
    out = tmp_path / "deep" / "bench.json"
    lengths = ["--lengths", "64,128,256", "--window", "8", "--compare", "sdpa"]
    main([*ON_CPU, *lengths, "--json", str(out)])
    shown = capsys.readouterr().out
    found = json.loads(out.read_text())
    assert found["command"].startswith("megasparse bench attention --device cpu") and found["machine"]["torch"]
    rows = {(row["implementation"], row["length"]): row for row in found["rows"]}
    assert len(rows) == 6
    assert rows["lsh", 64]["beside"] == {"sdpa": {"faster": 3.0, "memory": 1.0}}
    assert rows["sdpa", 256]["error"] == "not tried, after 128 tokens"
    assert rows["lsh", 128]["beside"] == {} and rows["lsh", 128]["forward"]["median"] == 192.0
    assert found["crossovers"] == [{"implementation": "lsh", "heads": 8, "head_dim": 64, "length": 64}]
    assert "| sdpa | 128 | out of memory |" in shown and "| 3 / 1 | 50 |" in shown
    assert "lsh is faster than SDPA, forward + backward, from 64 tokens or fewer on." in shown
    widths = {line.count("|") for line in shown.splitlines() if line.startswith("|")}
    assert len(widths) == 1


def test_each_measurement_has_a_process_of_its_own_whose_end_is_told():
    assert alone(os.getpid) != os.getpid()
    with pytest.raises(MeasurementError, match="its process was ended, as the system does where no memory is left"):
        alone(os._exit, 9)


def test_a_failed_measurement_is_one_line_for_a_user(monkeypatch, capsys):
    def ended(*arguments):
        raise MeasurementError("its process was ended")

    monkeypatch.setattr(attention_table, "alone", ended)
    error = refused(capsys, main, *ON_CPU, "--lengths", 128)
    assert error.startswith("error: a measurement in its own process failed: its process was ended. ")


def test_a_failure_is_one_line():
    def fail():
        raise ValueError("one line\nanother")

    assert _attempt(torch.empty, (1 << 60,)) == (None, "out of memory")
    assert _attempt(fail, ()) == (None, "ValueError: one line")
    assert _attempt(max, (1, 2)) == (2, None)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--lengths", "64,x"], ['--lengths: "x" is no positive number']),
        (["--lengths", "0"], ["--lengths"]),
        (["--lengths", "100"], ["100 is no multiple of two windows", "--compare sdpa"]),
        (["--heads", "8,"], ["--heads"]),
        (["--rounds", "1,2"], ["--rounds", "more than one"]),
        (["--mechanisms", "lhs"], ['there is no "lhs"', '"lsh"']),
        (["--compare", "flash"], ["--compare", 'no "flash"']),
        (["--write-crossover", "configs/reformer_64k.json", "--rounds", "3"], ["--rounds", "configuration"]),
        (["--write-crossover", "no/such.json"], ["no/such.json", "there is no file"]),
        (["--write-crossover", "configs/lha_wikitext103.json"], ["configs/lha_wikitext103.json", "lsh"]),
    ],
)
def test_a_wrong_request_is_one_line(given, words, capsys):
    reported = refused(capsys, main, *ON_CPU, *given)
    assert all(word in reported for word in words), reported


def test_a_peer_asked_for_and_not_installed_is_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"hf is not installed. pip install 'megasparse\[bench\]'"):
        settings("--compare", "sdpa,hf")
    assert settings().compare == ["sdpa"]
    assert settings("--compare", "none").compare == []


def settings(*options):
    return bench_attention.settings_from(parser_of("bench attention", bench_attention).parse_args([*ON_CPU, *options]))


CONFIG = """{
  "model": {"max_length": 64, "layers": 2, "d_model": 32, "heads": 4,
    "attention": {"pattern": ["local", "lsh"], "lsh": {"chunk": 8, "shared_qk": SHARED}}},
  "data": {"sequence_length": 64}
}
"""


@pytest.mark.parametrize("shared", [True, False])
def test_the_crossover_is_written_into_the_configuration(tmp_path, capsys, monkeypatch, here, shared):
    """Lengths are measured of the very mechanism that the configuration has, and of what would take its place."""
    path = tmp_path / "config.json"
    text = CONFIG.replace("SHARED", json.dumps(shared))
    path.write_text(text)
    seen = []

    def figures(case):
        built = attention.build_mechanism(case.implementation, case.model, case.model.heads)
        seen.append((type(built), built.shared_qk, case.model.max_length))
        median = 750.0 if case.implementation == "lsh" else case.model.max_length
        return {"forward_backward": {"median": median}}

    monkeypatch.setattr(attention_table, "figures", figures)
    monkeypatch.setattr(crossovers, "figures", figures)
    main([*ON_CPU, "--write-crossover", str(path)])
    assert path.read_text() == text.replace('{"pattern"', '{"full_below": 750, "pattern"')
    assert load_config(path).model.attention.full_below == 750
    assert seen[:2] == [(LSHAttention, shared, 512), (FullAttention, shared, 512)] and seen[-1][2] == 2048
    assert "full_below = 750, which is above its max_length" in capsys.readouterr().out
    monkeypatch.setattr(crossovers, "figures", lambda case: {"forward_backward": {"median": 1.0}})
    assert "Nothing is written" in refused(capsys, main, *ON_CPU, "--write-crossover", path)
    assert "750" in path.read_text()


def test_the_crossover_is_measured_in_earnest(tmp_path, capsys, here):
    path = tmp_path / "config.json"
    path.write_text(CONFIG.replace("SHARED", "true"))
    try:
        main([*ON_CPU, "--write-crossover", str(path), "--lengths", "16,32", "--repeat", "1"])
    except SystemExit:
        assert "full attention is faster up to 32 tokens" in capsys.readouterr().err
    else:
        assert load_config(path).model.attention.full_below <= 32
