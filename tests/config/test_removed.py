"""Configurations of earlier releases load if their removed keys request the current behaviour."""

import pytest

from megasparse.config.schema import Config
from megasparse.config.section import DROPPED, Section
from megasparse.errors import ConfigError
from megasparse.settings.load import build_config
from tests.helpers.cases import together
from tests.helpers.commands import refusal


@together(
    "values",
    [
        {"model": {"residual_bits": None}},
        {"model": {"kind": "encoder_decoder", "source": {"attention": {"lha": {"samples": 256}}}}},
        {"data": {"prefetch": 7}},
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
        ({"model": {"residual_bits": 16}}, "model.residual_bits: unknown key (its value is 16)"),
        ({"model": {"attention": {"lha": {"samples": 2}}}}, "attention.lha.samples: unknown key (its value is 2)"),
    ],
)
def test_with_another_value_it_is_unknown(values, message):
    assert message in refusal(lambda: build_config(values), ConfigError)


def test_every_row_names_a_section():
    def names(section):
        return {section.__name__}.union(*map(names, section.__subclasses__()))

    assert {key.partition(".")[0] for key in DROPPED} <= names(Section)
