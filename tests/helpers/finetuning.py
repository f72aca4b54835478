"""Tiny pretrained models, tables of examples, and runs, for tests of fine-tuning."""

import copy
import csv
import gzip
import json
import math
import random
from collections.abc import Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BertConfig, BertModel

from launch import finetune
from megasparse.config.finetuning import FinetuneConfig, TaskConfig
from megasparse.config.schema import ModelConfig
from megasparse.model.build import initialise
from megasparse.settings.load import build_settings
from megasparse.tasks import metrics
from megasparse.tasks import start as starts
from megasparse.tasks.body import MegasparseBody
from megasparse.tasks.catalog import build_task
from megasparse.tasks.form import Form
from megasparse.tasks.readers.series import Series
from megasparse.tasks.run import FORMS, TaskRun, open_run
from megasparse.tasks.start import Start
from megasparse.training.checkpoints.checkpoint import Checkpoint
from tests.helpers.tokenizers import wordpiece, written

WORDS = ["the", "attention", "of", "a", "model", "models", "unable", "mask", "in", "to", "we", "it", "go"]
TIMES = ("speed/", "memory/", "checkpoint/")
WIDTHS = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
ENCODER: dict[str, Any] = {
    "kind": "encoder", "vocabulary": 264, "max_length": 128, "layers": 2, "d_model": 32, "d_ff": 48, "heads": 4,
    "blocks": "ordinary", "activations": "stored", "dropout": 0.1, "positions": {"kind": "learned"},
    "attention": {"pattern": ["full"]},
}  # fmt: skip
"""A megasparse model for `model` of a fine-tuning configuration."""


def bert_tokenizer() -> dict[str, Any]:
    """A tokenizer.json that frames texts and pairs as published BERTs' do, and neither cuts nor pads."""
    values = copy.deepcopy(wordpiece())
    begin, end = {"SpecialToken": {"id": "[CLS]", "type_id": 0}}, {"id": "[SEP]"}
    first, second = {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}
    single = [begin, first, {"SpecialToken": {**end, "type_id": 0}}]
    pair = [*single, second, {"SpecialToken": {**end, "type_id": 1}}]
    values["post_processor"] |= {"single": single, "pair": pair}
    return {**values, "truncation": None, "padding": None}


def bert(folder: Path, **changes: Any) -> Path:
    """Writes a folder of a random BERT of 2 layers, 64 positions and 32 units, with its tokenizer."""
    folder.mkdir(parents=True)
    values = bert_tokenizer()
    torch.manual_seed(5)
    size = {"vocab_size": len(values["model"]["vocab"]), "max_position_embeddings": 64, **WIDTHS, **changes}
    model = BertModel(BertConfig(**size))
    with torch.no_grad():
        for parameter in model.parameters():  # freshly made models hardly attend
            parameter.mul_(2.0 if parameter.dim() > 1 else 1.0)
    model.save_pretrained(folder)
    write_tokenizer(folder, values)
    return folder


def write_tokenizer(folder: Path, values: dict[str, Any]) -> None:
    written(folder, values)
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **special, "mask_token": "[MASK]"}
    written(folder, settings, "tokenizer_config.json")


def reviews(file: Path, number: int, seed: int = 0, words: tuple[int, int] = (2, 20)) -> Path:
    """Writes a table of texts of so many words, from first to last, which praise where "able" is in them."""
    drawn = random.Random(seed)
    rows = []
    for i in range(number):
        some = drawn.choices(WORDS, k=drawn.randint(*words))
        some.insert(drawn.randrange(len(some)), "able" if i % 2 else "mask")
        rows.append([" ".join(some), "good" if i % 2 else "bad"])
    return table(file, rows)


def table(file: Path, rows: Sequence[Sequence[Any]], columns: tuple[str, ...] = ("text", "label")) -> Path:
    """Writes a table in the form that the file's name asks for."""
    opened = gzip.open if file.suffix == ".gz" else open
    with opened(file, "wt", encoding="utf-8", newline="") as stream:
        if file.suffix.lower() == ".jsonl":
            objects = [dict(zip(columns, row, strict=True)) for row in rows]
            stream.writelines(json.dumps(each, ensure_ascii=False) + "\n" for each in objects)
        elif file.suffix.lower() == ".tsv":
            stream.writelines("\t".join(map(str, row)) + "\n" for row in (columns, *rows))
        else:
            csv.writer(stream).writerows([columns, *rows])
    return file


def our_body(**changes: Any) -> MegasparseBody:
    """Like ENCODER with larger initial weights; changes: to its configuration."""
    config = ModelConfig.model_validate_json(json.dumps({**ENCODER, **changes}))
    body = MegasparseBody(config)
    initialise(body.stack, config, 5)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in body.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return body


def settings(run: Path, source: Path, /, **sections: Any) -> dict[str, Any]:
    """Settings of 6 steps of 8 examples, 4 at once, validated on a quarter of the table every 2; sections: changes."""
    values: dict[str, Any] = {
        "run": {"directory": str(run), "engine": "torch", "device": "cpu"},
        "task": {"name": "table", "source": str(source), "max_length": 48, "validation_fraction": 0.25},
        "training": {"epochs": 0, "steps": 6, "global_batch": 8, "micro_batch": 4},
        "optimizer": {"learning_rate": 3e-3},
        "evaluation": {"every": 2, "batch": 4},
        "logging": {"every": 1},
    }
    for name, section in sections.items():
        values[name] = {**values.get(name, {}), **section} if isinstance(section, dict) else section
    return values


def configured(run: Path, source: Path, /, **sections: Any) -> FinetuneConfig:
    return build_settings(settings(run, source, **sections), [], FinetuneConfig)


def form_for(config: FinetuneConfig) -> Form:
    task = build_task(config.task)
    return FORMS[task.form](task, config)


def opened(run: Path, source: Path, /, **sections: Any) -> TaskRun:
    return open_run(configured(run, source, **sections), lambda line: None)


def launch(run: Path, source: Path, /, *arguments: str, **sections: Any) -> list[dict[str, Any]]:
    file = run.with_suffix(".json")
    file.write_text(json.dumps(settings(run, source, **sections)))
    typed(finetune, "--config", file, *arguments)
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def typed(launcher: Any, *arguments: Any) -> None:
    """Run a command of launch/, with few resamples: scikit-learn's metrics take a millisecond each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["launcher", *map(str, arguments)])
        patch.setattr(metrics, "RESAMPLES", 20)
        launcher.main()


def plain(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Metrics by step without times; the later one of a step that was written twice."""
    by_step = {line["step"]: line for line in lines if "step" in line}
    lines = [by_step[step] for step in sorted(by_step)]
    return [{k: v for k, v in line.items() if not k.startswith(TIMES) and k != "time"} for line in lines]


def assert_resumes(folder: Path, source: Path, stop: int, **sections: Any) -> list[dict[str, Any]]:
    """A run stopped at a step and resumed has the metrics, weights and states of one in a stretch, to the bit, in
    folder/stopped and folder/straight. Returns the metrics of the latter."""
    straight = launch(folder / "straight", source, **sections)
    launch(folder / "stopped", source, "--stop-at", str(stop), **sections)
    assert not (folder / "stopped" / "best.json").exists()
    assert plain(launch(folder / "stopped", source, **sections)) == plain(straight)
    paths = [folder / name / "checkpoints" / f"{plain(straight)[-1]['step']:08d}" for name in ("straight", "stopped")]
    one, other = map(Checkpoint.open, paths)
    assert one.sequences == other.sequences
    for kind, tensors in one.manifest["tensors"].items():
        for name in tensors:
            assert torch.equal(one.tensor(kind, name), other.tensor(kind, name)), (kind, name)
    best = [json.loads((folder / name / "best.json").read_text()) for name in ("straight", "stopped")]
    for found in best:
        found["scalars"] = {name: value for name, value in found["scalars"].items() if not name.startswith(TIMES)}
    assert best[0] == best[1]
    return straight


def config_of(folder: Path, start: dict[str, Any], **sections: Any) -> FinetuneConfig:
    task = {"labels": ["bad", "good"], **sections.pop("task", {})}
    return configured(folder / "run", folder / "table.csv", start=start, task=task, **sections)


def open_start(config: FinetuneConfig, labels: int) -> Start:
    return starts.open_start(config, form_for(config), labels)


START = datetime(2019, 12, 30, 5)
HOUR = timedelta(hours=1)
COLUMNS = ("load", "wind", "OT")
FORECASTER: dict[str, Any] = {
    "kind": "encoder_decoder", "vocabulary": 1, "max_length": 16, "layers": 1, "d_model": 16, "d_ff": 24, "heads": 2,
    "blocks": "ordinary", "activations": "stored", "dropout": 0.1, "attention": {"pattern": ["full"]},
    "source": {"length": 24, "layers": 2, "attention": {"pattern": [{"local": 1, "lha": 1}], "lha": {"chunk": 4}}},
}  # fmt: skip
"""For `model` of a run that reads 12 rows."""
TASK: dict[str, Any] = {"name": "series", "max_length": 12, "forecast": {"horizon": 4, "overlap": 6, "targets": ["OT"]}}


def numbers(rows: int, seed: int = 0) -> list[list[float]]:
    """A day's wave with noise, of three columns of different means and spreads."""
    drawn = random.Random(seed)
    waves = ([math.sin(i * math.pi / 12 + c) + drawn.gauss(0, 0.2) for c in range(3)] for i in range(rows))
    return [[10 * c + (c + 1) * value for c, value in enumerate(wave)] for wave in waves]


def write(file: Path, values: list[list[Any]], start: datetime = START, step: timedelta = HOUR) -> Path:
    with open(file, "w", encoding="utf-8", newline="") as stream:
        out = csv.writer(stream)
        out.writerow(["date", *COLUMNS])
        out.writerows([str(start + step * i), *row] for i, row in enumerate(values))
    return file


def series(file: Path, **changes: Any) -> Series:
    """The task of a training file: of 12 rows read, 4 are forecast. changes: of `forecast`, or of max_length."""
    settings = {"horizon": 4, "overlap": 6, **changes}
    length = settings.pop("max_length", 12)
    return Series(TaskConfig.model_validate({"source": str(file), "max_length": length, "forecast": settings}))


TOPICS = {
    "sports": ["match", "goal", "team", "coach", "league", "striker"],
    "food": ["soup", "bread", "recipe", "oven", "salad", "cook"],
    "weather": ["storm", "rain", "sun", "cloud", "snow", "wind"],
}


def news_row(name: str, title: str, category: str = "news") -> str:
    return "\t".join([name, category, f"{category}all", title, "", f"https://x.y/{name}.html", "[]", "[]"]) + "\n"


def behaviors_row(name: str, history: str, impressions: str) -> str:
    return "\t".join([name, "U1", "11/11/2019 9:05:58 AM", history, impressions]) + "\n"


def split_folder(folder: Path, news: list[str], behaviors: list[str]) -> Path:
    """Writes rows of both files. Returns behaviors.tsv."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "news.tsv").write_text("".join(news), encoding="utf-8")
    (folder / "behaviors.tsv").write_text("".join(behaviors), encoding="utf-8")
    return folder / "behaviors.tsv"


def mind(folder: Path, train: int, dev: int, seed: int = 0, each: int = 20, cold: float = 0.1) -> Path:
    """Writes train/, dev/ and an unlabelled test/. A user likes one topic: all clicks, before and now, are of it. each:
    news of a topic. cold: share of impressions without a history."""
    drawn = random.Random(seed)
    titles = {}
    for topic, words in enumerate(TOPICS.values()):
        titles |= {f"N{topic}{number}": " ".join(drawn.sample(words, 3)) for number in range(each)}
    news = [news_row(name, title) for name, title in titles.items()]
    for inner, count in (("train", train), ("dev", dev), ("test", 5)):
        rows = []
        for number in range(count):
            topic = drawn.randrange(len(TOPICS))
            own = [name for name in titles if name.startswith(f"N{topic}")]
            other = [name for name in titles if name not in own]
            history = [] if drawn.random() < cold else drawn.choices(own, k=drawn.randint(1, 8))
            clicked, shown = drawn.sample(own, drawn.randint(1, 2)), drawn.sample(other, drawn.randint(2, 9))
            fields = [f"{name}-1" for name in clicked] + [f"{name}-0" for name in shown]
            if inner == "test":
                fields = [*clicked, *shown]
            drawn.shuffle(fields)
            rows.append(behaviors_row(str(number + 1), " ".join(history), " ".join(fields)))
        split_folder(folder / inner, news, rows)
    return folder
