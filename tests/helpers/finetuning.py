"""Tiny pretrained models, tables of examples, and runs, for tests of fine-tuning."""

import copy
import csv
import gzip
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BertConfig, BertModel

from launch import finetune
from megasparse.config.finetuning import FinetuneConfig
from megasparse.config.load import build_settings
from megasparse.config.schema import ModelConfig
from megasparse.model.build import initialise
from megasparse.tasks import metrics
from megasparse.tasks import start as starts
from megasparse.tasks.backbones import MegasparseBody
from megasparse.tasks.catalog import build_task
from megasparse.tasks.form import Form, form_of
from megasparse.tasks.run import TaskRun, open_run
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
"""A model of ours for `model` of a fine-tuning run's configuration."""


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
    """ENCODER's, with initial weights that are no longer small; changes: of its configuration."""
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
    return form_of(build_task(config.task), config)


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
    """Metrics by step without those of the clock; of a step that was written twice the later one."""
    by_step = {line["step"]: line for line in lines if "step" in line}
    lines = [by_step[step] for step in sorted(by_step)]
    return [{k: v for k, v in line.items() if not k.startswith(TIMES) and k != "time"} for line in lines]


def assert_resumes(folder: Path, source: Path, stop: int, **sections: Any) -> list[dict[str, Any]]:
    """A run stopped at a step and resumed has the metrics, weights and states of one in a stretch, to the bit, in
    folder/stopped and folder/straight. Returns the metrics of the latter.
    """
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
