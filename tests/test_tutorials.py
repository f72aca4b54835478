"""The tutorials: their commands, one after another in an empty folder, with small stand-ins for the reader's files, few
steps and small models; and the first hour whole (an hour, and a network for the text)."""

import csv
import json
import os
import re
import shlex
import socket
import subprocess
import sys
from contextlib import nullcontext

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from megasparse.cli.main import main
from megasparse.data.index import Index
from megasparse.hub import load_replaced, replace_attention
from tests.cli.test_compare import SameThread
from tests.data.corpora.test_chats import conversation, lines_in
from tests.helpers.documents import commands
from tests.helpers.finetuning import WIDTHS, bert, bert_tokenizer, reviews, table, write_tokenizer
from tests.hub.test_decoders import saved
from tests.runs.test_decoder_finetuning import with_template
from tests.test_docs import ROOT

FIRST_HOUR = commands((ROOT / "docs/first-hour.md").read_text(encoding="utf-8"))
SIZE = {"max_length": 512, "layers": 2, "d_model": 32, "d_ff": 32, "heads": 2, "attention": {"pattern": ["local"]}}
QUICKSTART = {
    "run": {"directory": "runs/quickstart", "engine": "torch", "device": "cpu"},
    "model": SIZE,
    "data": {"path": "data/quickstart", "sequence_length": 512},
    "training": {"steps": 2, "global_batch": 2, "micro_batch": 2},
}
SMALLER = {
    "--vocabulary 8000": "--vocabulary 400",
    "--length 2048 --passes 8": "--length 256 --passes 1",
    "steps=600": "steps=2",
    "=100": "=1",
}
"""Parts of commands, and the smaller ones that take their place."""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty folder with text files and a configuration `quickstart`, which wins over the shipped one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("megasparse.runs.comparison.ThreadPoolExecutor", lambda jobs: nullcontext(SameThread()))
    monkeypatch.setattr("megasparse.runs.comparison.call", lambda *words, log: main([str(word) for word in words]))
    (tmp_path / "my_books").mkdir()
    for number, page in enumerate(sorted((ROOT / "docs").glob("*.md"))):
        (tmp_path / "my_books" / f"{number}.txt").write_bytes(page.read_bytes())
    (tmp_path / "quickstart").write_text(json.dumps(QUICKSTART))
    return tmp_path


def run(tutorial, *settings):
    """Run the commands of a tutorial in this process, with further settings for trainings; return its text."""
    text = (ROOT / f"docs/tutorials/{tutorial}.md").read_text(encoding="utf-8")
    for words in commands(text):
        line = shlex.join(words)
        for part, smaller in SMALLER.items():
            line = line.replace(part, smaller)
        trains = words[0] in ("finetune", "pretrain") and "--dry-run" not in words
        extra = [word for setting in settings for word in ("--set", setting)] if trains else []
        main([*shlex.split(line), *extra])
    return text


def code(text):
    """Run the Python code of a page; return its names."""
    names = dict[str, object]()
    exec(re.search("```python\n(.*?)```", text, re.S)[1], names)
    return names


def result(file):
    return json.loads(file.read_text())


@pytest.mark.slow
def test_own_text(folder):
    run("own-text")
    fingerprint = Index.load(folder / "data/books").fingerprint
    evaluation = result(folder / "books.json")
    protocol = evaluation["protocol"]
    assert protocol["data_fingerprint"] == protocol["trained_on_fingerprint"] == fingerprint
    assert 1 < evaluation["bits_per_dim"] < 12
    assert result(folder / "runs/books_8000/config.json")["model"]["vocabulary"] == 400
    assert "runs/books_ngram" in (folder / "both.html").read_text()


@pytest.mark.slow
def test_compare_trains_every_arm_on_the_readers_text(folder):
    text = (ROOT / "docs/tutorials/compare.md").read_text(encoding="utf-8")
    (folder / "mine.json").write_text(re.search("```json\n(.*?)```", text, re.S)[1])
    (line,) = (words for words in commands(text) if words[:2] == ["compare", "mine.json"])
    main([word.replace("steps=600", "steps=2").replace("=100", "=1") for word in line])
    fingerprint = Index.load(folder / "data/books").fingerprint
    protocols = [result(file)["protocol"] for file in folder.glob("runs/compared/*/evaluation.json")]
    assert len(protocols) == 9
    seeds = [result(file)["run"]["seed"] for file in folder.glob("runs/compared/*-*/config.json")]
    assert sorted(seeds) == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert {(each["trained_on_fingerprint"], each["split"]) for each in protocols} == {(fingerprint, "validation")}
    rows = (folder / "runs/compared/table.md").read_text().splitlines()[2:]
    assert {row.split(" | ")[0] for row in rows} == {"| window", "| lsh", "| n-gram"}
    assert "validation split" in (folder / "runs/compared/curves.svg").read_text()


@pytest.mark.slow
def test_classifier(folder):
    main(shlex.split("prepare-data text --source my_books/ --output data/books"))
    main(["pretrain", "quickstart", "--set", "data.path=data/books"])
    for name in ("mine.csv", "labelled.csv"):
        rows = [*csv.reader(reviews(folder / "reviews.csv", 40).open())][1:]
        table(folder / name, rows, ("review", "stars"))
    table(folder / "new.csv", [["a good model"], ["we go"]], ("review",))
    text = run("classifier", "training.epochs=0", "training.steps=2", "run.engine=torch", "run.device=cpu")
    assert 0 <= result(folder / "result.json")["metrics"]["accuracy"]["value"] <= 1
    predicted = [row["predicted"] for row in csv.DictReader((folder / "predictions.csv").open())]
    assert len(predicted) == 2 and {*predicted} <= {"good", "bad"}
    (best,) = code(text)["classify"]("a good model")
    assert best["label"] == predicted[0]


@pytest.mark.slow
def test_decoder(folder):
    torch.manual_seed(0)
    values = bert_tokenizer()
    size = {**WIDTHS, "num_key_value_heads": 2, "max_position_embeddings": 4096}
    config = LlamaConfig(vocab_size=len(values["model"]["vocab"]), **size)
    LlamaForCausalLM(config).save_pretrained(folder / "MODEL_DIR")
    write_tokenizer(folder / "MODEL_DIR", values)
    text = run("decoder")
    assert code(text)["tokens"].shape[1] > 64


@pytest.mark.slow
def test_long_chats(folder):
    saved("llama as SmolLM", folder / "MODEL_DIR")
    with_template(folder / "MODEL_DIR")
    lines_in(folder / "chats.jsonl", [conversation("Tell me.", f"the sea {number}") for number in range(40)])
    sizes = ("model.max_length=64", "data.sequence_length=64", "training.steps=2", "evaluation.every=2")
    text = run("long-chats", *sizes, "run.engine=torch", "run.device=cpu")
    names = code(text)
    start = len(names["prompt"]["input_ids"][0])
    assert start < names["answer"].shape[1] <= start + 64
    assert (folder / "export/adapters/adapter_config.json").exists()


@pytest.mark.slow
def test_several_gpus(folder):
    """Its commands under torchrun, the two nodes at the same time."""
    main(shlex.split("prepare-data text --source my_books/ --output data/quickstart"))
    run_section = {"directory": "runs/quickstart_relu", "device": "cpu"}
    sections = {**QUICKSTART, "run": run_section, "data": {"path": "data/quickstart", "sequence_length": 512}}
    sections["training"] = {"steps": 4, "global_batch": 2, "micro_batch": 1}
    (folder / "quickstart_relu").write_text(json.dumps({**sections, "deepspeed": {"zero_optimization": {"stage": 1}}}))
    text = (ROOT / "docs/tutorials/several-gpus.md").read_text(encoding="utf-8").replace("\\\n", " ")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        text = text.replace("--master-addr", f"--master-port {probe.getsockname()[1]} --master-addr")
    lines = [shlex.split(line, comments=True) for line in re.findall("^(?:torchrun|megasparse) .*", text, re.M)]
    python = {"torchrun": ["-m", "torch.distributed.run"], "megasparse": ["-m", "megasparse"]}
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    started = []
    for words in lines:
        words = [word.replace("0", "") if "steps=" in word else word for word in words]
        command = [sys.executable, *python[words[0]], *words[1:]]
        started.append(subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True))
        if "--node-rank" not in words:
            assert started[-1].wait() == 0, started[-1].stderr.read()[-2000:]
    assert [process.wait() for process in started] == [0] * 5
    steps = [json.loads(line)["step"] for line in (folder / "runs/quickstart_relu/metrics.jsonl").open()]
    assert steps == [1, 2, 3, 4]


@pytest.mark.slow
def test_long_documents(folder):
    bert(folder / "models/encoder", max_position_embeddings=512)
    reviews(folder / "reviews.csv", 40)
    reviews(folder / "labelled.csv", 20)
    reviews(folder / "new.csv", 4)
    run("long-documents", "training.epochs=0", "training.steps=2", "run.engine=torch", "deepspeed={}")
    for name in ("long", "short"):
        assert 0 <= result(folder / f"{name}.json")["metrics"]["accuracy"]["value"] <= 1


@pytest.mark.soak
@pytest.mark.parametrize("words", FIRST_HOUR, ids=lambda words: shlex.join(words)[:60])
def test_a_command_of_the_first_hour_ends_well(words, tmp_path_factory):
    folder = tmp_path_factory.getbasetemp() / "first_hour"
    folder.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "megasparse", *words]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def test_every_command_of_the_first_hour_needs_only_results_of_earlier_ones():
    made = {"runs/first", "runs/reviews"}
    for words in FIRST_HOUR:
        if words[0] == "quickstart":
            made.add("runs/quickstart_small" if "--small" in words else "runs/quickstart")
        assert {word for word in words if word.startswith("runs/")} <= made, shlex.join(words)


def test_replaced_attention_trains_in_trl(folder, monkeypatch):
    """The script of the page with adapters in bf16, packed rows and recomputed layers, on a small model."""
    pytest.importorskip("trl")
    model_folder = folder / "llama"
    saved("llama as SmolLM", model_folder)
    with_template(model_folder)
    lines_in(folder / "chats.jsonl", [conversation("Tell me.", f"the sea {number}") for number in range(8)])
    script = re.search("```python\n(.*?)```", (ROOT / "docs/reference/trainers.md").read_text(encoding="utf-8"), re.S)[
        1
    ]
    smaller = {"length = 4096": "length = 64", '"chunk": 64': '"chunk": 16', "bf16=True,": "bf16=True, packing=True,"}
    for part, small in smaller.items():
        assert part in script
        script = script.replace(part, small)
    monkeypatch.setattr(sys, "argv", ["sft.py", str(model_folder), "chats.jsonl", "out"])
    made = dict[str, object]()
    exec(script, made)
    trained, tokens = load_replaced(folder / "out" / "merged"), torch.randint(3, 250, (1, 40))
    start = replace_attention(LlamaForCausalLM.from_pretrained(model_folder), made["hashed"], max_length=64)
    with torch.no_grad():
        logits, before = (model.eval()(tokens).logits.float() for model in (trained, start))
        expected = made["trainer"].model.eval()(tokens).logits.float()
    torch.testing.assert_close(logits, expected, rtol=0.05, atol=0.05)
    assert (logits - before).abs().max() > 1e-3
