"""`extends`: inherited values, the lookup of the base, and rejected files."""

import json

import pytest

from megasparse.config.files import find_config, read_values, shipped_configs
from megasparse.config.finetuning import FinetuneConfig
from megasparse.config.schema import Config
from megasparse.errors import ConfigError
from megasparse.settings.load import build_settings, load_config, load_settings
from megasparse.tasks.catalog import TASKS
from tests.helpers.cases import together
from tests.helpers.commands import refusal


@pytest.fixture
def write(tmp_path):
    def write(name, **values):
        path = tmp_path / f"{name}.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(values))
        return path

    return write


def refused(path, overrides=(), kind=Config):
    return refusal(lambda: load_settings(path, overrides, kind), ConfigError)


def test_objects_are_merged_and_anything_else_is_replaced(write):
    write("base", a={"x": 1, "y": {"z": 2}}, b=[1, 2], c={"d": 3}, e=4)
    own = write("own", extends="base", a={"y": {"w": 5}}, b=[6], c=7, e={"f": 8})
    assert read_values(own) == {"a": {"x": 1, "y": {"z": 2, "w": 5}}, "b": [6], "c": 7, "e": {"f": 8}}


def test_null_removes_a_value_of_the_base_and_stays_null_elsewhere(write):
    write("base", a={"x": 1, "y": 2}, b=3)
    assert read_values(write("own", extends="base", a={"x": None, "z": None}, b=None)) == {"a": {"y": 2, "z": None}}


def test_a_chain_is_merged_from_its_end(write):
    write("far", run={"seed": 1, "directory": "far"}, model={"layers": 9})
    write("near", extends="far", run={"seed": 2})
    config = load_config(write("own", extends="near.json", run={"directory": "own"}), ["model.heads=4"])
    assert (config.run.seed, config.run.directory, config.model.layers, config.model.heads) == (2, "own", 9, 4)


def test_a_neighbouring_file_takes_precedence_over_a_shipped_one(write):
    write("quickstart", run={"seed": 7})
    assert load_config(write("own", extends="quickstart")).run.seed == 7
    shipped = load_config(find_config("reformer_64k"))
    own = load_config(write("reformer_64k", extends="reformer_64k", run={"seed": 7}))
    assert own.model_dump(exclude={"run"}) == shipped.model_dump(exclude={"run"}) and own.run.seed == 7


def test_shipped_configurations_are_found_by_name(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    rte = shipped_configs()["finetune/glue_rte"]
    for name in ("finetune/glue_rte", "glue_rte", "configs/finetune/glue_rte.json"):
        assert find_config(name) == rte
    assert find_config("duplication") == shipped_configs()["duplication"] != find_config("comparisons/duplication")
    (tmp_path / "quickstart").mkdir()
    assert find_config("quickstart") == shipped_configs()["quickstart"]
    assert find_config(rte) == rte


def test_every_shipped_configuration_loads_and_survives_its_own_json():
    runs = {name: path for name, path in shipped_configs().items() if not name.startswith("comparisons/")}
    assert len(runs) > 50
    for name, path in runs.items():
        kind = FinetuneConfig if name.startswith("finetune/") else Config
        config = load_settings(path, [], kind)
        assert build_settings(json.loads(config.model_dump_json()), [], kind) == config
        assert kind is Config or config.task.name in TASKS


@together(("name", "near"), [("reformer_64", "reformer_64k"), ("glue_ret", "finetune/glue_rte")])
def test_a_name_nearly_right_has_a_hint(name, near):
    refusal(lambda: find_config(name), ConfigError, rf'no such shipped configuration\)\. Did you mean "{near}"\?')


def test_a_cycle_of_extends_is_rejected(write):
    first = write("first", extends="second")
    second = write("second", extends="first")
    assert refused(first).startswith(f"{second} extends: forms a cycle, first.json -> second.json -> first.json.")


@pytest.mark.parametrize("base", [3, "", ["quickstart"], {}, False])
def test_an_invalid_name_is_rejected(write, base):
    path = write("own", extends=base)
    assert refused(path).startswith(f"{path} extends: {json.dumps(base)} is not a configuration's name")


@together("base", ["nowhere", "../none.json", "nu\0ll", "quickstartt"])
def test_a_base_that_is_not_there_is_named_with_the_file_that_wants_it(write, base):
    path = write("own", extends=base)
    message = refused(path)
    assert message.startswith(f"{path} extends: {json.dumps(base)} cannot be read")
    assert base != "quickstartt" or 'Did you mean "quickstart"?' in message


def test_a_wrong_key_is_reported_with_the_file_that_gives_it(write):
    base = write("base", model={"layer": 3}, training={"steps": 0})
    own = write("own", extends="base", training={"steps": 5}, model={"dropoutt": 0.1})
    assert refused(own).startswith(f"{base} model.layer: unknown key (its value is 3). Did you mean")
    base.write_text("{}")
    assert refused(own).startswith(f"{own} model.dropoutt: unknown key")
    assert refused(write("fine", extends="base"), ["model.dropoutt=0.1"]).startswith("model.dropoutt: unknown key")
    own = write("own", extends="base", model={"attention": {"pattern": ["full", "lhs"]}})
    assert refused(own).startswith(f'{own} model.attention.pattern[1]: "lhs" does not fit. Did you mean "lsh"?')


@pytest.mark.parametrize("kind,base", [(FinetuneConfig, "quickstart"), (Config, "glue_rte")])
def test_a_configuration_of_another_kind_of_run_cannot_be_extended(write, kind, base):
    path = write("own", extends=base)
    message = refused(path, kind=kind)
    assert message.startswith(f"{find_config(base)} ") and "unknown key" in message


def test_the_saved_configuration_needs_no_other_file(write):
    config = load_config(write("own", extends="reformer_64k", run={"seed": 5}))
    saved = write("saved", **json.loads(config.model_dump_json()))
    assert "extends" not in saved.read_text() and load_config(saved) == config
