"""docs/papers.md: every table and figure of the four papers, with commands that work and the planner's costs."""

import re
import statistics
from functools import cache
from pathlib import Path

import pytest
import torch

from megasparse.config.schema import Config
from megasparse.model.build import empty_model
from tests.helpers.documents import runs
from tests.helpers.measured import assert_shown, read, spread
from tests.helpers.papers import FIELDS, Reproduction, gpu_hours, model_of, reproductions

TEXT = (Path(__file__).parents[1] / "docs/papers.md").read_text(encoding="utf-8")
SECTIONS = reproductions(TEXT)
TABLES = {"Reformer": 4, "LHA": 5, "YOSO": 4, "Smart Bird": 5}
FIGURES = {"Reformer": 5, "LHA": 6, "YOSO": 5, "Smart Bird": 6}
WITHOUT_COST = "none"


@cache
def trained(section: Reproduction):
    return [run for words in section.commands for run in runs(words)]


@pytest.mark.parametrize("paper", TABLES)
def test_every_table_and_figure_has_a_section_or_a_sentence(paper):
    chapter = next(part for part in re.split(r"^## ", TEXT, flags=re.M) if part.startswith(f"{paper}\n"))
    for kind, count in (("Table", TABLES[paper]), ("Figure", FIGURES[paper])):
        named = {int(n) for many in re.findall(rf"{kind}s? ([\d, and]+)", chapter) for n in re.findall(r"\d+", many)}
        assert named >= set(range(1, count + 1)), f"{paper}: {kind}s {set(range(1, count + 1)) - named} are not named"


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.name)
def test_a_section_has_all_its_fields_and_its_models_can_be_built(section):
    assert tuple(section.fields) == FIELDS
    assert section.commands
    models = [run.model if isinstance(run, Config) else model_of(run) for run in trained(section)]
    for model in {model.model_dump_json(): model for model in models}.values():
        with torch.device("meta"):
            assert sum(weight.numel() for weight in empty_model(model).parameters()) > 0


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.name)
def test_costs_are_the_planners(section):
    hours = sum(gpu_hours(run) for run in trained(section))
    said = re.match(r"([\d.,]+|none)", section.fields["cost"])[1]
    assert said == (f"{float(f'{hours:.2g}'):,g}" if hours else WITHOUT_COST)


def losses(claim):
    """Nats a token of each arm of a claim's trials, a number a seed."""
    trials = next(found["trials"] for found in read("claims/claims.json") if found["name"] == claim)
    return {arm: [trial["numbers"][arm]["loss"] for trial in trials] for arm in trials[0]["numbers"]}


def test_losses_in_small_are_those_of_the_claims():
    rounds = {arm: statistics.mean(seeds) for arm, seeds in losses("trained_rounds").items()}
    regular, shared, reversible, local, lsh, lha, alone = (
        spread(seeds).replace("± 0.", "± .")
        for claim in ("shared_queries_reversible", "lha_wikitext")
        for seeds in losses(claim).values()
    )
    four = "{:.3f}, {:.3f}, {:.3f} and {:.3f} nats".format(*(rounds[f"LSH-{n}"] for n in (1, 2, 4, 8)))
    behind = f"{rounds['LSH-8'] - rounds['full']:.3f}".removeprefix("0")
    blocks = f"regular {regular} nats, shared queries and keys {shared}, reversible {reversible}"
    hybrid = (
        f"local attention {local} nats, with LSH in half of the heads {lsh}, with LHA there {lha}, LHA alone {alone}"
    )
    assert_shown("papers.md", [four, f"{behind} behind full attention's {rounds['full']:.3f}", blocks, hybrid])
