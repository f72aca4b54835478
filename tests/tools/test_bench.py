"""The scripts of tools/bench: one small run of each from end to end, and their arithmetic."""

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch
from scipy import stats
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from megasparse.errors import ConfigError, DataError
from megasparse.hub.replace import mechanisms, replace_attention, save_replaced
from megasparse.settings.load import build_config
from tests.helpers.cases import together
from tests.helpers.commands import refused, run
from tools import retrieval
from tools.bench import attention, decoders, gpu_check, jobs, kernels, measuring, operators, training
from tools.bench.attention import MECHANISMS, PEERS, Case, Inputs, crossover, measure, model_of

ROOT = Path(__file__).parents[2]


def case(name, length=64, heads=2, dim=8, **changes):
    settings = {"batch": 1, "dtype": "fp32", "device": "cpu", "repeats": 2, "seed": 0, **changes}
    return Case(name, model_of(MECHANISMS.get(name, "lsh"), length, heads, dim, rounds=2, window=8), **settings)


@pytest.fixture
def in_this_process(monkeypatch):
    """Measure in this process, where figures of memory mean nothing."""
    for module in (attention, training):
        monkeypatch.setattr(module, "alone", lambda function, *arguments: function(*arguments))


@together("script", [attention, training, decoders, kernels, gpu_check, retrieval])
def test_help_has_an_example(script, capsys):
    with pytest.raises(SystemExit) as ended:
        script.main(["--help"])
    assert ended.value.code == 0 and f"python {Path(script.__file__).relative_to(ROOT)}" in capsys.readouterr().out


@pytest.mark.slow
def test_a_script_runs_from_any_folder(tmp_path):
    command = [sys.executable, ROOT / "tools/bench/attention.py", "--device", "cpu", "--lengths", "0"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert ended.returncode == 2 and "is not a list of positive numbers" in ended.stderr


@pytest.mark.parametrize("name", [*MECHANISMS, *PEERS])
def test_every_implementation_runs_forward_and_backward(name):
    result = measure(case(name, batch=2))
    assert all(0 < forward < both for forward, both in zip(result.forward, result.both, strict=True))


@pytest.mark.parametrize("causal", [True, False])
def test_saved_tensors_are_counted_once(causal):
    """Queries, keys, values and the output, (1, 2, 64, 8) of 4 bytes each, and a log-sum-exp of every query."""
    sdpa = replace(case("sdpa"), model=model_of("lsh", 64, 2, 8, rounds=2, window=8, causal=causal))
    assert 4 * 4096 <= measure(sdpa).kept_bytes <= 4 * 4096 + 2 * 512


def test_all_implementations_have_the_same_inputs():
    ours, theirs = (Inputs(case(name), torch.device("cpu")) for name in ("lsh", "hf"))
    assert all(torch.equal(getattr(ours, x), getattr(theirs, x)) for x in "qkvg")


def test_the_crossover_is_interpolated_on_logarithmic_scales():
    quadratic = {n: 1e-6 * n**2 for n in (512, 1024, 2048, 4096)}
    linear = {n: 1500e-6 * n for n in (512, 1024, 2048, 4096)}
    assert crossover(linear, quadratic) == pytest.approx(1500, abs=1)
    assert crossover(quadratic, linear) is None
    assert crossover({64: 1.0}, {64: 2.0}) == 64
    assert crossover({64: 3.0, 128: 1.0}, {64: 2.0, 128: math.inf}) == 128


def test_attention_writes_a_table_and_all_its_figures(tmp_path, capsys, monkeypatch, in_this_process):
    def measured(case):
        if case.implementation == "sdpa" and case.model.max_length == 128:
            raise measuring.MeasurementError("out of memory")
        seconds = {"lsh": 1.0, "sdpa": 3.0}[case.implementation] * case.model.max_length
        return attention.Measurement([seconds], [seconds], 5, 4, 3, "")

    monkeypatch.setattr(attention, "measure", measured)
    out = tmp_path / "bench.json"
    words = ["--device", "cpu", "--lengths", "64,128,256", "--window", "8", "--compare", "sdpa", "--repeat", "1"]
    run(attention, *words, "--json", out)
    shown, result = capsys.readouterr().out, json.loads(out.read_text())
    rows = {(row["implementation"], row["length"]): row for row in result["rows"]}
    assert result["command"].startswith("python tools/bench/attention.py --device cpu") and len(rows) == 6
    assert rows["lsh", 64]["beside"] == {"sdpa": {"faster": 3.0, "memory": 1.0}}
    assert rows["sdpa", 256]["error"] == "not tried, after 128 tokens" and rows["lsh", 128]["beside"] == {}
    assert result["crossovers"] == [{"implementation": "lsh", "heads": 8, "head_dim": 64, "length": 64}]
    assert "| sdpa | 128 | out of memory |" in shown and "| 3 / 1 |" in shown
    assert len({line.count("|") for line in shown.splitlines() if line.startswith("|")}) == 1


@together(
    ("words", "message"),
    [
        (["--lengths", "100"], "100 is not a multiple of two windows"),
        (["--mechanisms", "lhs"], 'unknown name "lhs"'),
        (["--compare", "flash"], '--compare: unknown name "flash"'),
        (["--bidirectional", "--compare", "hf"], "hf is only measured with a causal mask"),
    ],
)
def test_a_wrong_request_is_one_line(words, message, capsys):
    assert message in refused(capsys, attention, "--device", "cpu", *words)


def test_a_failed_measurement_is_one_line():
    def fail():
        raise ValueError("one line\nanother")

    assert measuring._attempt(torch.empty, (1 << 60,)) == (None, "out of memory")
    assert measuring._attempt(fail, ()) == (None, "ValueError: one line")
    assert measuring._attempt(max, (1, 2)) == (2, None)


TINY = {
    "run": {"device": "cpu"},
    "model": {
        "max_length": 32, "layers": 2, "d_model": 16, "d_ff": 16, "heads": 2,
        "attention": {"pattern": ["local", "lsh"], "local": {"chunk": 8}, "lsh": {"chunk": 8}},
    },
    "data": {"sequence_length": 32},
    "training": {"global_batch": 1, "micro_batch": 1},
}  # fmt: skip


def test_training_measures_the_model_and_its_baselines(tmp_path, capsys, in_this_process):
    versions = training.models(build_config(TINY))
    assert versions["hashed layers full"]["model"]["attention"]["pattern"] == [{"local": 2}, {"full": 2}]
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    run(training, tmp_path / "config.json", "--steps", 1, "--json", tmp_path / "out.json")
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert [row["model"] for row in rows] == [*versions] and all(row["tokens_a_second"] > 0 for row in rows)
    assert all(f"| {name} |" in capsys.readouterr().out for name in ("20 layers",))
    run(training, tmp_path / "config.json", "--steps", 1, "--evaluate", "--json", tmp_path / "out.json")
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert [(row["model"], row["activation_bytes"]) for row in rows] == [
        ("as configured", None), ("all layers full", None)
    ]  # fmt: skip


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A small Llama."""
    folder = tmp_path_factory.mktemp("plain")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 32}
    LlamaForCausalLM(LlamaConfig(vocab_size=128, max_position_embeddings=64, **sizes)).save_pretrained(folder)
    return folder


def test_decoders_measure_nats_captured_attention_and_speed(plain, tmp_path, monkeypatch):
    tokens = torch.randint(41, (1, 60), generator=torch.Generator().manual_seed(0))
    model = AutoModelForCausalLM.from_pretrained(plain)
    with torch.no_grad():
        expected = float(model(tokens, labels=tokens).loss)
    texts = {"full": '{"kind": "full"}', "window": '{"kind": "local", "chunk": 8, "sinks": 2}'}
    texts |= {"oracle": '{"best": 10, "window": 8, "sinks": 2}', "all": '{"best": 64, "window": 1, "sinks": 0}'}
    arms = {name: decoders.arm_of(f"{name}={text}") for name, text in texts.items()}
    models = {name: arm.model(plain, 60, 0, tokens.device) for name, arm in arms.items()}
    rows = {name: decoders.measure(models[name], tokens, arm.oracle) for name, arm in arms.items()}
    assert rows["full"]["nats"] == pytest.approx(expected, abs=1e-5) == rows["all"]["nats"]
    assert rows["full"]["captured"] == pytest.approx(1.0) == rows["all"]["captured"]
    assert rows["window"]["captured"] < rows["oracle"]["captured"] < 1.0
    monkeypatch.setattr(decoders, "STEPS", 2)
    monkeypatch.setattr(decoders, "TURN", 8)
    save_replaced(models["window"], tmp_path / "taught")
    compared = [arms["full"], decoders.arm_of(f"window={tmp_path}/taught")]
    sdpa, full, window = decoders.speed(plain, compared, 40, 1, 1, torch.device("cpu"))
    assert (sdpa["arm"], sdpa["turn_ratio"], full["arm"], window["layers"]) == ("SDPA", 1.0, "full", 1)
    assert sdpa["cache_bytes"] == 2 * 4 * 50 * 32 <= full["cache_bytes"] and full["decode_ratio"] > 0.0
    for text in ("full", 'o={"best": 1}', 'o={"best": "a", "window": 1, "sinks": 0}'):
        with pytest.raises(ConfigError, match=r"--arm: .* is not an "):
            decoders.arm_of(text)
    assert [len(arm.seeds(3)) for arm in (arms["oracle"], decoders.Arm("", {"pattern": ["lsh"]}))] == [1, 3]
    assert decoders.arm_of("taught=runs/taught@64") == decoders.Arm("taught", Path("runs/taught"), 64)


def test_decoders_print_the_interval_over_texts_of_what_an_arm_loses():
    nats = {"full": [3.0, 2.0, 2.5], "taught": [3.1, 2.02, 2.51]}
    same = {"seed": 0, "trial": None, "keys": 8, "captured": 0.5, "seconds": 1.0}
    rows = [{"arm": arm, "text": str(i), "nats": x, **same} for arm, texts in nats.items() for i, x in enumerate(texts)]
    full, taught = (line.split(" | ")[4] for line in decoders.table(rows).splitlines()[2:])
    interval = stats.ttest_rel(nats["taught"], nats["full"]).confidence_interval()
    assert (full, taught) == ("", f"{interval.low:.4f} … {interval.high:.4f}")


def test_folders_of_one_name_are_measured_each_with_its_own_keys(plain, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(decoders, "load_tokenizer", MagicMock())
    monkeypatch.setattr(decoders, "_windows", lambda *_: [("a.txt", [*range(60)])])
    sketch = {"keys": 8, "sketch": "heads", "objective": "attention"}
    mixed = {"pattern": [{"full": 2, "smart_bird": 2}], "smart_bird": sketch}
    for parent, settings in (("a", mixed), ("b", mixed), ("c", {"kind": "ranked"})):
        model = replace_attention(AutoModelForCausalLM.from_pretrained(plain), settings)
        for weight in mechanisms(model)[-1].parameters():
            torch.nn.init.normal_(weight)
        save_replaced(model, tmp_path / parent / "taught")
    arms = [decoders.Arm("taught", tmp_path / f"{parent}/taught", int(page)) for parent, page in ("a1", "a4", "b4")]
    arguments = ([], 60, 1, 0, tmp_path / "rows.json", torch.device("cpu"))
    rows, tokens = decoders.measured(plain, arms, *arguments), torch.arange(60)[None]
    models = [arm.model(plain, 60, 0, arguments[-1]) for arm in arms]
    nats = [decoders.measure(model, tokens, None, arm.page)["nats"] for model, arm in zip(models, arms, strict=True)]
    assert [row["nats"] for row in rows] == nats and len({*nats}) == 3
    assert decoders.measured(plain, arms, *arguments) == rows
    for json_file in (arguments[4], tmp_path):
        with pytest.raises(DataError, match=r"with length 60 with model .*a/taught of this command"):
            decoders.measured(tmp_path / "a/taught", arms, *arguments[:4], json_file, arguments[5])
    with pytest.raises(ConfigError, match="pages of 4 keys need smart_bird"):
        decoders.measured(plain, [decoders.Arm("ranked", tmp_path / "c/taught", 4)], *arguments)
    words = ["--model", plain, "--json", arguments[4], "--arm", 'full={"kind": "full"}', "--speed", 40]
    assert "rows.json: does not contain rows with turn 512" in refused(capsys, decoders, *words)


class Letters:
    """A tokenizer of characters. decode: the text of its tokens, or letters for a model's random ones."""

    bos_token_id = None

    def __init__(self, first=0, letters=128):
        self.first, self.letters = first, letters

    def __call__(self, text, add_special_tokens, return_tensors=None):
        tokens = [ord(letter) for letter in text]
        return {"input_ids": torch.tensor([tokens]) if return_tensors else tokens}

    def decode(self, tokens):
        return "".join(chr(self.first + int(token) % self.letters) for token in tokens)


@pytest.mark.parametrize("task", retrieval.TASKS)
def test_the_text_of_a_haystack_answers_its_questions(task):
    """By the word that most often follows a question, and with room for question and answer."""
    haystacks = [retrieval.Haystack.draw(task, Letters(), 2500, number) for number in (0, 0, 1)]
    assert haystacks[0] == haystacks[1] != haystacks[2]
    for tokens, questions in ((stack.tokens, stack.questions) for stack in haystacks):
        prompts = [prompt for question in questions for prompt in question.prompts]
        longest = max(len(prompt.format("x" * retrieval.NEW)) + 2 * ("{" in prompt) for prompt in prompts)
        text = "".join(map(chr, tokens))
        assert len(tokens) == 2500 - retrieval.NEW - longest - 1 and len(questions) >= 5
        for question in questions:
            answer = ""
            for prompt in question.prompts:
                answer = Counter(re.findall(rf"{prompt.format(answer)} (\w+)[ .]", text)).most_common(1)[0][0]
            assert answer == question.answer
    with pytest.raises(DataError, match="too few for the facts"):
        retrieval.Haystack.draw(task, Letters(), 300, 0)


def test_the_command_skips_rows_that_exist_and_names_a_wrong_file(plain, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(retrieval, "load_tokenizer", lambda folder: Letters())
    (other := tmp_path / plain.name).symlink_to(plain)  # another folder of the same name
    for name, text in (("other.txt", "Another text. "), ("empty.txt", "\n")):
        (tmp_path / name).write_text(text)
    words = ["--length", 2500, "--model", plain, "--task", "keys", "--json", tmp_path / "rows.json"]
    for added, result in ((["--haystacks", 1], [1, 0]), ([], [1, 1]), (["--model", other], [0, 0])):
        monkeypatch.setattr(retrieval, "scores", lambda *_, result=result: result)
        run(retrieval, *words, *added)
    run(retrieval, *words, "--haystacks", 1, "--text", tmp_path / "other.txt")
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert [row["scores"] for row in rows] == [[1, 0], [1, 1], [0, 0], [0, 0], [0, 0]]
    shares = {"0.75 ± 0.22 of 4": plain, "0.00 ± 0.00 of 4": other, "0.00 ± 0.00 of 2": plain}
    printed = [f"{folder} {{'keys': '{share}'}}" for share, folder in shares.items()]
    assert capsys.readouterr().out.splitlines()[2:] == printed
    assert "no such file or folder" in refused(capsys, retrieval, *words, "--text", tmp_path / "none.txt")
    assert "contains no text" in refused(capsys, retrieval, *words, "--text", tmp_path / "empty.txt")
    assert "no such file or folder" in refused(capsys, retrieval, "--model", tmp_path / "none", *words)


def test_questions_are_answered_from_the_cache_as_from_the_whole_text(plain):
    model, tokenizer, text = AutoModelForCausalLM.from_pretrained(plain), Letters(97, 26), [*range(40)]
    answer = model.generate(torch.tensor([[*text, 10, 65]]), max_new_tokens=retrieval.NEW, do_sample=False)
    words = tokenizer.decode(answer[0, 42:]), "other"
    stack = retrieval.Haystack(text, [retrieval.Question(("A",), word) for word in (*words, words[0])])
    assert retrieval.scores(model, tokenizer, stack) == retrieval.scores(model, tokenizer, stack, False) == [1, 0, 1]
    assert retrieval.shares([{"task": "keys", "scores": [1, 0, 1, 0]}]) == {"keys": "0.50 ± 0.25 of 4"}


@pytest.mark.slow
def test_gpu_check_runs_at_tiny_sizes_and_resumes(tmp_path):
    command = [sys.executable, ROOT / "tools/bench/gpu_check.py", "--small", "--output", tmp_path]
    with subprocess.Popen(command, cwd=ROOT) as interrupted:
        while not any(row["name"] == "done" for row in jobs.rows_of(tmp_path / "results.jsonl")):
            time.sleep(0.1)
        interrupted.kill()
    before = (tmp_path / "results.jsonl").read_text()
    subprocess.run(command, check=True, cwd=ROOT)
    text = (tmp_path / "results.jsonl").read_text()
    rows = [json.loads(line) for line in text.splitlines()]
    done = [row["job"] for row in rows if row["name"] == "done"]
    assert text.startswith(before) and all(row["right"] is not False for row in rows)
    assert sorted(done) == sorted(job.name for phase in gpu_check.phases(True) for job in phase)
    assert {path.name for path in tmp_path.iterdir()} == {"results.jsonl", "table.md", "log.txt"}


def test_a_job_that_crashes_is_a_row_and_the_others_run(tmp_path):
    def crash(report):
        os.write(2, b"the last words\n")
        os.kill(os.getpid(), signal.SIGSEGV)

    work = [jobs.Job("bad", crash, 1, together=True), jobs.Job("good", lambda report: report.add("x", {"n": 1}), 1)]
    jobs.run_jobs([*work, jobs.Job("long", crash, 100)], tmp_path, time.monotonic() + 50)
    bad, figure, good = jobs.rows_of(tmp_path / "results.jsonl")
    assert bad["right"] is False and bad["note"].startswith("exit code -11: the last words / Fatal")
    assert (figure["job"], figure["figures"], good["name"]) == ("good", {"n": 1}, "done")


def test_a_process_that_dies_takes_one_task_with_it():
    def double(number):
        if number == 3:
            os._exit(1)
        return 2 * number

    results = {task: (result, problem) for task, result, problem in jobs.spread(double, range(9), 2)}
    assert results.pop(3) == (None, "its process died")
    assert results == {number: (2 * number, None) for number in (0, 1, 2, 4, 5, 6, 7, 8)}


def test_gpu_check_sees_a_wrong_or_unsteady_operator(monkeypatch):
    tiny = operators.Problem(7, 16, torch.device("cpu"))
    assert operators.check_smooth("unit_keys", tiny, torch.float32)[0]
    assert operators.check_exact("random_bits", tiny) == (True, 0.0, "")
    make, least = operators.EXACT["random_bits"]
    numbers = iter(range(9))
    monkeypatch.setitem(operators.EXACT, "random_bits", (lambda p: lambda: make(p)() + next(numbers), least))
    assert operators.check_exact("random_bits", tiny)[2] == "two runs differ"


def test_every_operator_with_kernels_is_checked_and_recorded():
    names = {path.stem.removesuffix("_kernels") for path in (ROOT / "megasparse/ops").glob("*_kernels.py")}
    checks = {"hashing": "angular_hash", "sketch": "sketched_attention"}
    checks |= {"normalize": "unit_keys", "random": "random_bits"}
    cases = {"hashing": "angular_hash", "normalize": "unit_keys", "random": "random_numbers"}
    assert len(names) > 8
    assert {checks.get(name, name) for name in names} <= operators.SMOOTH.keys() | operators.EXACT.keys()
    assert {cases.get(name, name) for name in names} <= kernels.CASES.keys()
