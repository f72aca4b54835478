"""Every command of docs/lab/papers.md, run for two steps at a small size on files in the form of its corpora.

Runs that differ only in seeds, rates, lengths or the task's labels are one run here.
"""

import itertools
import json
import re
import shlex
from glob import glob
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import (
    BertConfig,
    BertForMaskedLM,
    LlamaConfig,
    LlamaForCausalLM,
    RobertaConfig,
    RobertaForMaskedLM,
)

from megasparse.cli.main import main, parser_of, split
from megasparse.config.finetuning import FinetuneConfig
from megasparse.config.schema import Config
from megasparse.runs import comparison
from megasparse.tasks import metrics
from megasparse.tasks.readers import series
from tests.data.corpora.pictures import draw, png, write_files
from tests.helpers.documents import commands, runs, shell_lines
from tests.helpers.finetuning import HOUR, bert_tokenizer, mind, news_row, numbers, write, write_tokenizer
from tests.helpers.tokenizers import PROSE, byte_level, written
from tests.planning.test_configs import LENGTH, VOCABULARY, reduced, reduced_attention, reduced_model
from tests.tasks.readers.test_long_range_arena import CLASSES
from tools import significance, study_attention
from tools.bench import attention, training

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "lab" / "papers.md").read_text(encoding="utf-8")
LONGER = 2 * LENGTH
"""Tokens of a model that continues one of LENGTH tokens."""
ON_CPU = {"engine": "torch", "device": "cpu"}
SHORT = f"--steps 1 --set model.max_length={LENGTH} --set data.sequence_length={LENGTH}"
TOOLS = {
    "tools/bench/attention.py": (attention, "--repeat 1 --compare none"),
    "tools/bench/training.py": (training, SHORT),
    "tools/study_attention.py": (study_attention, "--hash-steps 2 --set run.device=cpu"),
    "tools/significance.py": (significance, ""),
}
"""Script -> module, and options that its commands have here beside the page's."""
SMALLER = {
    "--length": str(LENGTH), "--lengths": "64", "--heads": "2", "--head-dim": "4", "--window": "8",
    "--vocabulary": str(VOCABULARY), "--sequences": "32",
}  # fmt: skip
"""Options of commands and their values here."""


def shrunk(words: list[str]) -> list[str]:
    return [SMALLER.get(words[i - 1], word) if word != "4096" else str(LONGER) for i, word in enumerate(words)]


def small(config: Config | FinetuneConfig) -> dict[str, Any]:
    """The values of a run of two steps of two examples."""
    steps: dict[str, Any] = {"global_batch": 2, "micro_batch": 2, "steps": 2}
    if isinstance(config, Config):
        continues = config.model.style == "bert" and config.model.max_length == 4096
        values = reduced(config, LONGER if continues else LENGTH).model_dump(mode="json")
        values["evaluation"] |= {"every": 0, "sequences": 1}
        if "imagenet64" in config.data.path:  # its records are whole images of 12,288 tokens
            values["data"] |= {"path": "data/enwik8", "tokenizer": "bytes"}
    else:
        values = config.model_dump(mode="json")
        if config.training.batch_unit == "tokens":
            steps |= {"global_batch": 4 * LENGTH, "micro_batch": 4 * LENGTH}
        steps["epochs"] = 0.0
        task = values["task"]
        task |= {"max_length": LENGTH, "too_long": "cut", "generation": {"target_length": 8, "beams": 2}}
        task["forecast"] |= {"horizon": 4, "overlap": 8}
        task["recommendation"]["history"] = 4
        values["evaluation"] |= {"every": 2, "batch": 64}
        if config.model is not None:
            values["model"] = reduced_model(config.model)
        if config.start.attention is not None:
            values["start"]["attention"] = reduced_attention(config.start.attention)
    values["run"] |= ON_CPU
    values["training"] |= steps
    values["checkpoint"] |= {"every": 2}
    values["logging"] |= {"every": 1}
    return values


class Papers:
    """The commands of the page, run in the current folder. failures: those that ended with an error."""

    def __init__(self, page: str):
        self.lines = list(shell_lines(page))
        self.commands = commands(page)
        self.failures: list[str] = []
        self.done: set[str] = set()
        """Folders that were prepared, tasks, and code paths of runs."""
        self.needed = set(re.findall(r" --(?:checkpoint|start|other) (runs/\S+)", "\n".join(self.lines)))
        """Runs that other commands start from or evaluate."""
        for words in self.commands:
            if words[0] == "finetune":
                self.needed |= {str(run.start.checkpoint) for run in runs(words) if isinstance(run, FinetuneConfig)}

    def call(self, program: Any, words: list[str]) -> None:
        try:
            program(words)
        except SystemExit as error:
            if error.code:
                self.failures.append(f"exit {error.code}: {shlex.join(words)}")

    def prepare(self, words: list[str]) -> None:
        output = words[words.index("--output") + 1]
        if output in self.done:
            return
        self.done.add(output)
        if words[1] == "enwik8" or output == "data/quickstart":  # the official file, and one to download
            words = ["prepare-data", "text", "--source", "data/books_and_wikipedia", "--output", output]
        if words[1] == "duplication":
            words = [*words, "--length", "", "--sequences", ""]
        self.call(main, shrunk(words))

    def train(self, config: Config | FinetuneConfig, start: list[str]) -> bool:
        """Train unless a run like it was trained. Return True if it was not."""
        values = small(config)
        path: dict[str, Any] = {key: values.get(key) for key in ("model", "start", "head", "deepspeed")}
        path |= {"optimizer": config.optimizer.name, "from": start}
        path |= {key: values.get("task", {}).get(key) for key in ("recommendation", "forecast")}
        key = re.sub(r'"labels": \d+', "", json.dumps(path))
        task = values["task"]["name"] if "task" in values else key
        folder = config.run.directory
        if {key, task} <= self.done and (folder not in self.needed or folder in self.done):
            return False
        self.done |= {key, task, folder}
        file = Path("small.json")
        file.write_text(json.dumps(values))
        self.call(main, ["pretrain" if isinstance(config, Config) else "finetune", "--config", str(file), *start])
        return True

    def run(self, words: list[str]) -> None:
        name, rest = split(words)
        args = parser_of(str(name)).parse_args(rest)
        if name in ("prepare-data", "train-tokenizer"):
            self.prepare(words)
        elif name in ("pretrain", "finetune"):
            start = ["--start", args.start] if getattr(args, "start", None) else []
            for config in runs(words):
                self.train(config, start)
        elif name == "compare":
            for part in comparison.load(args.comparison, args.corpora).values():
                self.prepare(["prepare-data", *part["prepare"]])
                output = args.output or Path("runs") / Path(args.comparison).name
                for arm in comparison.runs_of(part, output, args.arms, args.seeds, args.set):
                    if self.train(runs(arm.training)[0], []):
                        for evaluation in arm.evaluations.values():
                            self.call(main, evaluation)
        else:
            self.call(main, [name for word in words for name in sorted(glob(word)) or [word]])


def write_corpora(folder: Path) -> None:
    """Write the corpora of the page's *data* lines and the files of its tasks."""
    pages = [page.read_text(encoding="utf-8") for page in sorted((ROOT / "docs" / "lab").glob("*.md"))]
    names = ("books_and_wikipedia", "stories", "realnews")
    files = {f"{name}/{i}.txt": page for name in names for i, page in enumerate(pages)}
    files |= {f"wikitext-103/wiki.{name}.tokens": PROSE[:2000] for name in ("train", "valid", "test")}
    files |= {f"aclImdb/train/unsup/{i}_0.txt": page for i, page in enumerate(pages)}
    for name in ("train", "newstest2013", "newstest2014"):
        files |= {f"wmt14/{name}.{language}": PROSE for language in ("en", "de")}
    for name in ("train", "val", "test"):
        files |= {f"cnn_dm/{name}.{side}": PROSE for side in ("source", "target")}
    paper = {"article_text": ["the model ."], "abstract_text": ["<S> a mask </S>"]}
    files |= {
        f"pubmed/{name}.txt": "".join(json.dumps({**paper, "article_id": str(i)}) + "\n" for i in range(8))
        for name in ("train", "val", "test")
    }
    files["pubmed/train.lines"] = PROSE  # of jq
    texts, pair = ("the model", "a mask"), ("the model\twe go", "a mask\tit")
    glue = {
        "CoLA": ("", [f"gj04\t{i}\t\t{text}" for i, text in enumerate(texts)]),
        "MNLI": ("index\tsentence1\tsentence2\tgold_label", [f"0\t{text}\tneutral" for text in pair]),
        "MRPC": ("Quality\t#1 ID\t#2 ID\t#1 String\t#2 String", [f"{i}\t1\t2\t{text}" for i, text in enumerate(pair)]),
        "QNLI": ("index\tquestion\tsentence\tlabel", [f"0\t{text}\tentailment" for text in pair]),
        "QQP": ("id\tquestion1\tquestion2\tis_duplicate", [f"{i}\t{text}\t{i}" for i, text in enumerate(pair)]),
        "RTE": ("index\tsentence1\tsentence2\tlabel", [f"0\t{text}\tnot_entailment" for text in pair]),
        "SST-2": ("sentence\tlabel", [f"{text}\t{i}" for i, text in enumerate(texts)]),
        "STS-B": ("index\tsentence1\tsentence2\tscore", [f"0\t{text}\t{i}.5" for i, text in enumerate(pair)]),
    }
    for name, (header, rows) in glue.items():
        splits = ("train", "dev_matched", "dev_mismatched") if name == "MNLI" else ("train", "dev")
        files |= {f"glue/{name}/{part}.tsv": "\n".join([header] * bool(header) + rows * 4) + "\n" for part in splits}
    for part in ("train", "val", "test"):
        files[f"listops/basic_{part}.tsv"] = "Source\tTarget\n" + "( ( ( [MIN 0 ) 7 ) ] )\t0\n" * 4
    for part in ("train", "eval", "test"):
        files[f"lra_release/tsv_data/new_aan_pairs.{part}.tsv"] = "1\ta\tb\tb'x y'\tb'z'\n0\tc\td\tb'y'\tb'z x'\n"
    for part in ("train", "dev", "test"):
        files[f"imdb/imdb.{part}.txt.ss"] = "".join(f"u\t\tp\t\t{i}\t\tthe model <sssss> a mask\n" for i in range(1, 9))
    for part, side in itertools.product(("train", "test"), ("neg", "pos")):
        files |= {f"aclImdb/{part}/{side}/{i}_{i}.txt": f"the {side} model" for i in range(8)}
        files[f"ag_news/{part}.csv"] = "".join(f'"{i}","the model","of a mask"\n' for i in (1, 2, 3, 4))
    review = [json.dumps({"reviewText": f"the model {i}", "overall": 1.0 + i % 5}) for i in range(990)]
    files["amazon/reviews_Electronics_5.json"] = "\n".join(review) + "\n"
    files["mind_topics/news.tsv"] = "".join(news_row(f"N{i}", "the model", "sports") for i in range(30))
    question = {"query": "of a mask", "candidates": ["mask", "model"], "supports": ["the model ."], "answer": "mask"}
    for part in ("train", "dev"):
        files[f"wikihop/{part}.json"] = json.dumps([{"id": str(i), **question} for i in range(4)])
    drawn = np.random.default_rng(0).normal(size=(len(texts) * 40, 300))
    words = ("the", "model", "of", "a", "mask", *"bcdefgh")
    lines = [" ".join([word, *(f"{x:.3f}" for x in row)]) for word, row in zip(words, drawn, strict=False)]
    files["glove.6B.300d.txt"] = "\n".join(lines) + "\n"
    contents = {name: content.encode() for name, content in files.items()}
    for part, number in (("train", 130), ("valid", 2)):
        contents |= {f"imagenet64_files/{part}_64x64/{i}.png": png(image) for i, image in enumerate(draw(number, 64))}
    write_files(folder, contents)
    mind(folder / "mind", 8, 4)
    for name, steps in (("ETTh1", 1), ("ETTm1", 4)):
        (folder / "ett").mkdir(exist_ok=True)
        write(folder / "ett" / f"{name}.csv", numbers(480 * steps), step=HOUR / steps)
    for part in ("train", "test"):
        for name in CLASSES:
            (folder / "cifar10" / part / name).mkdir(parents=True)
            Image.fromarray(draw(1, 32)[0]).save(folder / "cifar10" / part / name / "0001.png")


def write_models(folder: Path) -> None:
    """Write a BERT, a RoBERTa and a Llama of the small models' sizes, with their tokenizers."""
    pieces = bert_tokenizer()
    vocabulary = pieces["model"]["vocab"]
    places = {"[PAD]": 0, "[UNK]": 100, "[CLS]": 101, "[SEP]": 102, "[MASK]": 103}  # as in published BERTs
    rest = iter(number for number in range(VOCABULARY) if number not in places.values())
    names = [*(name for name in vocabulary if name not in places), *(f"[unused{i}]" for i in range(VOCABULARY))]
    pieces["model"]["vocab"] = places | {name: number for name, number in zip(names, rest, strict=False)}
    for token in pieces["added_tokens"]:
        token["id"] = places[token["content"]]
    for name, token in pieces["post_processor"]["special_tokens"].items():
        token["ids"] = [places[name]]
    sizes = {"num_hidden_layers": 1, "hidden_size": 48, "num_attention_heads": 12, "intermediate_size": 8}
    torch.manual_seed(5)
    bert = BertForMaskedLM(BertConfig(vocab_size=VOCABULARY, max_position_embeddings=LENGTH, **sizes))
    pairs = tuple(itertools.product("abcdefghijklm", repeat=2))
    roberta_pieces = byte_level(pairs[: VOCABULARY - len(byte_level(())["model"]["vocab"])])
    kinds = {"vocab_size": VOCABULARY, "max_position_embeddings": LENGTH + 2, "type_vocab_size": 1}
    roberta = RobertaForMaskedLM(RobertaConfig(**kinds, **sizes))
    llama = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=LONGER, **sizes))
    models = {"bert-base-uncased": (bert, pieces), "roberta-base": (roberta, roberta_pieces)}
    for name, (model, values) in {**models, "smollm2": (llama, roberta_pieces)}.items():
        model.save_pretrained(folder / "models" / name)
        write_tokenizer(folder / "models" / name, values)
    (folder / "tokenizers").mkdir()
    written(folder / "tokenizers", pieces, "bert.json")


@pytest.mark.slow
def test_every_command_of_the_papers_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for module in (attention, training):
        monkeypatch.setattr(module, "alone", lambda function, *arguments: function(*arguments))
    monkeypatch.setattr(metrics, "RESAMPLES", 5)
    monkeypatch.setitem(series.OFFICIAL, "etth1", ("ETTh1.csv", 24))
    monkeypatch.setitem(series.OFFICIAL, "ettm1", ("ETTm1.csv", 24 * 4))
    write_corpora(tmp_path / "data")
    write_models(tmp_path)
    papers = Papers(PAGE)
    order = ["train-tokenizer", "prepare-data", "compare", "pretrain", "convert", "finetune", "evaluate", "report"]
    for words in sorted(papers.commands, key=lambda words: order.index(words[0])):
        papers.run(words)
    tools = [shlex.split(line, comments=True) for line in papers.lines if line.startswith("python ")]
    for words in {re.sub(r"\d+", "", shlex.join(words)): words for words in tools}.values():
        module, options = TOOLS[words[1]]
        papers.call(module.main, [*shrunk(words[2:]), *options.split()])
    assert not papers.failures, "\n".join(papers.failures)


def test_the_table_of_rows_is_complete_and_counted():
    parts = re.findall(r"^\| [\w ]+, (\d+) Y, (\d+) p \| ([^|]+) \| ([\d, ]+) \|$", PAGE, re.M)
    there = [int(row.split()[0]) for *_, rows, _ in parts for row in rows.split("; ")]
    missing = {int(number): state for number, state in re.findall(r"^\| (\d+) \| [^|]+ \| ([^|]+) \|$", PAGE, re.M)}
    assert sorted([*there, *missing]) == list(range(1, 103))
    assert [*missing] == [int(number) for *_, numbers in parts for number in numbers.split(", ")]
    assert all(len(state.split()) <= 20 for state in missing.values())
    counts = [(len(rows.split("; ")), len(numbers.split(", "))) for *_, rows, numbers in parts]
    assert counts == [(int(y), int(p)) for y, p, *_ in parts]
    assert f"Together {len(there)} Y, {len(missing)} p, 0 missing." in " ".join(PAGE.split())
