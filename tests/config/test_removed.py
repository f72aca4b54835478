"""Configurations of earlier releases load, or one line names the removed feature that they use."""

import pytest

from megasparse.config.schema import Config
from megasparse.config.section import ANY, REMOVED, REMOVED_VALUES, Section
from megasparse.errors import ConfigError
from megasparse.settings.load import build_config
from tests.helpers.commands import refusal


@pytest.fixture(autouse=True)
def rows(monkeypatch):
    monkeypatch.setitem(REMOVED, "ModelConfig.twice", (False, "Leave it out"))
    monkeypatch.setitem(REMOVED, "LSHAttentionConfig.depth", ((None, 1), "Leave it out"))
    monkeypatch.setitem(REMOVED, "Config.sweep", (ANY, "Leave it out"))
    monkeypatch.setitem(REMOVED_VALUES, "RunConfig.engine", {"horovod": 'Set it to "deepspeed"'})


@pytest.mark.parametrize(
    "values",
    [
        {"model": {"twice": False}},
        {"model": {"kind": "encoder_decoder", "source": {"attention": {"lsh": {"depth": 1}}}}},
        {"model": {"attention": {"lsh": {"depth": None}}}},
        {"sweep": {"lr": [1, 2]}},
        {"model": {"embedding_once": False}},
        {"model": {"kind": "encoder_decoder", "source": {}, "embedding_once": True}},
        {"optimizer": {"betas": [0.9, 0.98]}},
    ],
)
def test_a_removed_key_with_the_remaining_behaviour_is_dropped(values):
    config = build_config(values)
    kind = values.get("model", {}).get("kind", "decoder")
    assert config.model.kind == kind
    if kind == "decoder":
        assert config == Config()


@pytest.mark.parametrize(
    "values,message",
    [
        ({"model": {"twice": True}}, "model.twice: true was removed from megasparse. Leave it out"),
        (
            {"model": {"attention": {"lsh": {"depth": 2}}}},
            "model.attention.lsh.depth: 2 was removed from megasparse. Leave it out",
        ),
        (
            {"model": {"kind": "encoder_decoder", "source": {}, "embedding_once": False}},
            "model.embedding_once: false was removed from megasparse. It is true in encoder–decoders of reversible "
            "blocks, false in all others: remove the key",
        ),
        ({"run": {"engine": "horovod"}}, 'run.engine: "horovod" was removed from megasparse. Set it to "deepspeed"'),
    ],
)
def test_another_value_is_one_error(values, message):
    assert refusal(lambda: build_config(values), ConfigError) == message


def test_every_row_has_a_hint_and_names_a_section():
    def names(section):
        return {section.__name__}.union(*map(names, section.__subclasses__()))

    for key, (_, hint) in REMOVED.items():
        assert hint and key.partition(".")[0] in names(Section), key
