"""Files and overrides: valid ones load, invalid ones raise one line with the cause."""

import subprocess
import sys
from collections.abc import Iterator
from inspect import isclass
from pathlib import Path
from typing import get_args

import pytest
from pydantic import BaseModel

from megasparse.config.finetuning import FinetuneConfig
from megasparse.config.schema import Config
from megasparse.config.section import Section
from megasparse.errors import ConfigError
from megasparse.settings.load import build_config, load_config
from tests.helpers.cases import together
from tests.helpers.commands import refusal

ROOT = Path(__file__).parents[2]


@pytest.fixture
def write(tmp_path):
    def write(text: str | bytes) -> Path:
        path = tmp_path / "run.json"
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        return path

    return write


def refused(values: dict, *overrides: str) -> str:
    message = refusal(lambda: build_config(values, overrides), ConfigError)
    assert not any(word in message.lower() for word in ("pydantic", "http", "input should"))
    return message


def test_an_empty_file_is_all_defaults(write):
    assert load_config(write("{}")) == Config()


def test_reformer_64k_is_the_papers():
    config = load_config(ROOT / "configs" / "reformer_64k.json")
    model = config.model
    assert (config.data.sequence_length, model.d_model, model.d_ff) == (65536, 1024, 4096)
    assert (model.heads, model.layers, config.training.global_batch) == (8, 12, 8)
    assert model.attention.pattern == ["local", "local", "lsh", "local"]
    zero = config.deepspeed["zero_optimization"]
    assert (zero["stage"], zero["offload_param"]["device"], zero["offload_optimizer"]["device"]) == (3, "cpu", "cpu")


def test_overrides_are_json_and_a_bare_word_is_a_text(write):
    path = write('{"training": {"steps": 5, "micro_batch": 9}, "model": {"attention": {"lsh": {"chunk": 32}}}}')
    overrides = ["training.steps=7", "run.engine=torch", 'run.directory="runs/a b"', "data.path=some/folder"]
    overrides += ["optimizer.betas=[0.8, 0.9]", "optimizer.learning_rate=1", "model.attention.lsh.rounds=3"]
    overrides += ["model.tied_embeddings=true", "model.head_dim=null", "deepspeed.zero_optimization.stage=2"]
    config = load_config(path, [*overrides, "training.steps=8", "training.micro_batch=null"])
    assert (config.training.steps, config.training.micro_batch, config.run.engine) == (8, 1, "torch")
    assert (config.run.directory, config.data.path) == ("runs/a b", "some/folder")
    assert config.optimizer.betas == (0.8, 0.9) and config.model.tied_embeddings is True
    assert (config.model.attention.lsh.chunk, config.model.attention.lsh.rounds) == (32, 3)
    assert config.deepspeed == {"zero_optimization": {"stage": 2}}


def test_overrides_do_not_change_their_argument():
    values = {"deepspeed": {"zero_optimization": {"stage": 1}}}
    assert build_config(values, ["deepspeed.zero_optimization.stage=2"]).deepspeed["zero_optimization"]["stage"] == 2
    assert values == {"deepspeed": {"zero_optimization": {"stage": 1}}}


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ('{\n "run": {},}', 2, "comma"),
        ('{\n "training": {\n  "steps": 1 // many\n }\n}', 3, "does not allow comments"),
        ('{\n # all of it\n "run": {}}', 2, "does not allow comments"),
        ("{'run': {}}", 1, "double quotes"),
        ('{\n "run": {"seed": 1}', 2, "close the brackets"),
        ("", 1, "not JSON"),
        ("\n\n{} {}", 3, "not JSON"),
    ],
)
def test_invalid_json_is_named_with_its_line(write, text, line, words):
    path = write(text)
    with pytest.raises(ConfigError, match=words) as caught:
        load_config(path)
    assert str(caught.value).startswith(f"{path} line {line}: ")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"logging": {"every": 1}, "evaluation": {"every": 2, "every": 3}}', 'the key "every" is given twice'),
        ('{"run": {"seed": 1, "\\u0073eed": 3}}', 'the key "seed" is given twice'),
        ('{"optimizer": {"learning_rate": -Infinity}}', "-Infinity is not JSON"),
    ],
)
def test_json_that_only_python_accepts_is_rejected(write, text, words):
    path = write(text)
    refusal(lambda: load_config(path), ConfigError, f"{path}: {words}")


def test_keys_and_constants_inside_strings_are_ignored(write):
    path = write(r'{"run": {"directory": "{\"run\": NaN, \"run\": }"}, "data": {"path": "run\\"}}')
    assert load_config(path).data.path == "run\\"


@pytest.mark.parametrize("text", ["[]", "3", "null", '"run"', "true"])
def test_a_file_without_a_json_object_is_rejected(write, text):
    path = write(text)
    refusal(lambda: load_config(path), ConfigError, r"is not a configuration\. Write an object")


@together("text", [b"\xff\xfe{}", b"\xef\xbb\xbf{}", b"[" * 100_000, b'{"run": {"seed": 1' + b"0" * 5000 + b"}}"])
def test_odd_bytes_are_one_clear_line(write, text):
    with pytest.raises(ConfigError) as caught:
        load_config(write(text))
    assert "run.json" in str(caught.value)


def test_a_file_that_cannot_be_read(tmp_path):
    for path in (tmp_path / "none.json", tmp_path, "nu\0ll.json"):
        with pytest.raises(ConfigError, match=r"cannot be read.*configs/"):
            load_config(path)


@together(
    ("override", "message"),
    [
        ("training.stepz=3", 'training.stepz: unknown key (its value is 3). Did you mean "steps"?'),
        ("model.sequence_length=4", 'unknown key (its value is 4). Did you mean "data.sequence_length"?'),
        ("model.attention.lsh.chunks=4", 'attention.lsh.chunks: unknown key (its value is 4). Did you mean "chunk"?'),
        ('training.steps="100"', 'training.steps: "100" does not fit. It must be a valid integer'),
        ("training.steps=1.5", "training.steps: 1.5 does not fit. It must be a valid integer"),
        ("training.steps=true", "training.steps: true does not fit. It must be a valid integer"),
        ("run.engine=torchh", 'run.engine: "torchh" does not fit. It must be "deepspeed" or "torch"'),
        ("run.directory=5", "run.directory: 5 does not fit. It must be a valid string"),
        ("data.path=", 'data.path: "" does not fit. String should have at least 1 character'),
        ("run.directory=", 'run.directory: "" does not fit. String should have at least 1 character'),
        ("model.tied_embeddings=yes", 'model.tied_embeddings: "yes" does not fit. It must be a valid boolean'),
        ("optimizer.learning_rate=NaN", 'optimizer.learning_rate: "NaN" does not fit. It must be a valid number'),
        ("optimizer.learning_rate=1e999", "optimizer.learning_rate: Infinity does not fit. It must be a finite number"),
        ("optimizer.betas=[0.9, 1]", "optimizer.betas[1]: 1 does not fit. It must be less than 1"),
        ("model.dropout=1", "model.dropout: 1 does not fit. It must be less than 1"),
        ('model.attention.pattern=["lsg"]', 'model.attention.pattern[0]: "lsg" does not fit. Did you mean "lsh"?'),
        ('model.attention.pattern=[{"lhs": 8}]', "pattern[0].lhs: unknown key (its value is 8). Did you"),
        ("model.attention.pattern=[]", "model.attention.pattern: [] does not fit. List should have at least 1 item"),
        ("model.attention.lsh.buckets=many", 'attention.lsh.buckets: "many" does not fit. It must be a valid integer'),
        ('data.mixture={"a": -1}', "data.mixture.a: -1 does not fit. It must be greater than 0"),
        ('model.attention.pattern=[{"lsh": "lsh"}]', 'pattern[0].lsh: "lsh" does not fit. It must be a valid integer'),
        ("model=3", "model: 3 does not fit. It must be an object {...}"),
        ("training", '--set: "training" is not of the form section.key=value'),
        ("=3", '--set: "=3" is not of the form'),
        ("model..heads=3", '--set: "model..heads=3" is not of the form'),
        ("run.seed.x=3", "--set run.seed.x: run.seed is 4, which is not a section. Set run.seed itself"),
        ('data={"path": "a", "path": "b"}', '--set data: the key "path" is given twice'),
        ("optimizer.betas=[0.9, 0.98,]", "--set optimizer.betas line 1: not JSON"),
    ],
)
def test_a_wrong_override_is_one_line_with_key_value_and_hint(override, message):
    assert message in refused({"run": {"seed": 4}}, override)


def test_several_problems_are_counted_and_long_values_cut():
    assert "(2 more such problems)" in refused({}, "training.steps=0", "run.engine=x", "model.layers=0")
    assert len(refused({}, f'run.engine="{"x" * 10_000}"')) < 250


def test_the_list_of_commands_imports_no_torch():
    command = [sys.executable, "-X", "importtime", "-m", "megasparse", "--help"]
    imported = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True).stderr
    assert "megasparse.cli" in imported and "torch" not in imported


def test_every_key_is_described_for_the_reference():
    def keys(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
        for name, field in model.model_fields.items():
            kinds = [kind for kind in (field.annotation, *get_args(field.annotation)) if isclass(kind)]
            sections = [kind for kind in kinds if issubclass(kind, BaseModel)]
            fields = [base.model_fields.get(name) for base in model.__mro__ if issubclass(base, Section)]
            described = any(field and field.description for field in fields)
            yield from [] if described or sections else [prefix + name]
            for section in sections:
                yield from keys(section, f"{prefix}{name}.")

    assert [*keys(Config), *keys(FinetuneConfig)] == []


def test_a_changed_copy_keeps_all_other_values():
    config, changes = Config(), {"model": {"layers": 3, "attention": {"dropout": 0.5}}, "deepspeed": {"zero": {}}}
    assert config.changed(**changes).model_dump() == Config.model_validate(changes).model_dump()
    assert config == Config()
