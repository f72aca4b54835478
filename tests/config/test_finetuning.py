"""The configuration of a fine-tuning run: shipped files, defaults and rejected values."""

import importlib
from typing import Any

import pytest

from megasparse.config.finetuning import FinetuneConfig
from megasparse.errors import ConfigError
from megasparse.settings.load import build_settings
from megasparse.tasks.catalog import TASKS
from megasparse.tasks.readers import series
from tests.helpers.cases import together
from tests.helpers.commands import refusal

BERT = {"start": {"huggingface": "models/bert"}}
MODEL = {"model": {"kind": "encoder", "vocabulary": 264}}


def refused(values: dict[str, Any], *overrides: str) -> str:
    return refusal(lambda: build_settings(values, overrides, FinetuneConfig), ConfigError)


@together("name", [name for name, entry in TASKS.items() if isinstance(entry, str)])
def test_every_reader_has_the_name_of_its_row(name):
    module, _, kind = str(TASKS[name]).partition(":")
    reader = getattr(importlib.import_module(f"megasparse.tasks.readers.{module}"), kind)
    assert reader.name == name or name in series.OFFICIAL


def test_the_defaults():
    """BERT's own recipe for its downstream tasks (Devlin et al. 2019), as far as there is one."""
    config = build_settings(BERT, [], FinetuneConfig)
    optimizer, training = config.optimizer, config.training
    assert (optimizer.learning_rate, optimizer.schedule, optimizer.final_fraction) == (2e-5, "linear", 0.0)
    assert (optimizer.warmup_fraction, optimizer.betas, optimizer.weight_decay) == (0.1, (0.9, 0.999), 0.01)
    assert (training.epochs, training.global_batch, config.head.dropout) == (3.0, 32, 0.1)
    assert config.task.too_long == "cut" and config.task.empty == "refuse" and config.lora is None


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({}, "start: nothing given. Give one of start.checkpoint, start.huggingface, and model"),
        ({**BERT, **MODEL}, "start: model and start.huggingface given"),
        ({"start": {"huggingface": "x", "checkpoint": "y"}}, "start: start.checkpoint and start.huggingface given"),
    ],
)
def test_only_one_start_is_allowed(values, said):
    assert refused(values).startswith(said)


@together(
    ("values", "overrides", "said"),
    [
        (BERT, ["start.huggingfaec=x"], "start.huggingfaec: "),
        (BERT, ["task.max_length=0"], "task.max_length: 0"),
        (BERT, ["task.too_long=drop"], 'task.too_long: "drop"'),
        (
            BERT,
            ['task.text=["a","b","c"]'],
            'task.text: ["a", "b", "c"] does not fit. List should have at most 2 items',
        ),
        (BERT, ["task.text=review"], 'task.text: "review" does not fit. It must be a valid list. Write ["review"]'),
        (BERT, ["head.pooling=max"], 'head.pooling: "max"'),
        (BERT, ["training.global_batch=12"], "training.global_batch: 12 is not a multiple of training.micro_batch = 8"),
        (BERT, ["lora.targets=[]"], "lora.targets: []"),
        (BERT, ["lora.rank=0"], "lora.rank: 0"),
        (BERT, ["lora.quantized=nf4"], 'lora.quantized: "nf4" is not supported in fine-tuning on tasks'),
        (
            {**BERT, "run": {"engine": "deepspeed"}, "deepspeed": {"zero_optimization": {"stage": 3}}},
            ["lora.dora=true"],
            "lora.dora: true is not supported under ZeRO stage 3",
        ),
        (BERT, ["run.seed=99999999999999999999"], "run.seed: "),
        (BERT, ["task.limit=3000000000"], "task.limit: 3000000000 does not fit. It must be less than"),
        (BERT, ["data.path=x"], "data: "),
        (MODEL, ['start.attention.pattern=["lsh"]'], "start.attention: given, but no pretrained model is"),
        (MODEL, ["start.activations=stored"], "start.activations: given, but no pretrained model is"),
        (MODEL, ["model.max_length=64", "task.max_length=65"], "task.max_length: 65 tokens are more than model.max_l"),
        (MODEL, ["model.heads=7"], "model.heads: 7 heads do not divide"),
    ],
)
def test_invalid_settings_are_rejected(values, overrides, said):
    assert refused(values, *overrides).startswith(said)


def test_an_encoder_decoder_reads_as_much_as_its_encoder_does():
    values = {"model": {"kind": "encoder_decoder", "max_length": 2048, "source": {"length": 64}}}
    assert refused(values).startswith("task.max_length: 512 tokens are more than model.source.length = 64. Lower it")
    assert build_settings(values, ["task.max_length=64"], FinetuneConfig).task.max_length == 64
