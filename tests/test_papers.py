"""docs/papers.md: every table and figure of the four papers, with commands that work and the planner's costs."""

import re
import statistics
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pytest
import torch

from megasparse.config.attention import AttentionConfig
from megasparse.config.finetuning import FinetuneConfig
from megasparse.config.load import load_config
from megasparse.config.schema import Config, ModelConfig
from megasparse.model.build import empty_model
from megasparse.planning.flops import model_flops_per_token
from megasparse.planning.hardware import GPUS
from megasparse.planning.plan import MFU, Assumptions, Plan
from tests.helpers.documents import commands, runs
from tests.helpers.measured import assert_shown, read, spread

TEXT = (Path(__file__).parents[1] / "docs/papers.md").read_text(encoding="utf-8")
TABLES = {"Reformer": 4, "LHA": 5, "YOSO": 4, "Smart Bird": 5}
FIGURES = {"Reformer": 5, "LHA": 6, "YOSO": 5, "Smart Bird": 6}
WITHOUT_COST = "none"
FIELDS = ("data", "cost", "paper", "ours", "deviations")
EXAMPLES = {
    **{"cola": 8_551, "mnli": 392_702, "mrpc": 3_668, "qnli": 104_743, "qqp": 363_849},
    **{"rte": 2_490, "sst2": 67_349, "stsb": 5_749, "wikihop": 43_738},
    **{"ag_news": 108_000, "amazon_50k": 40_000, "imdb": 67_426, "mind_topics": 128_800, "mind": 2_232_748},
    **{"cnn_dm": 287_113, "pubmed": 119_924, "etth1": 8_593, "ettm1": 34_465},
}
"""Training examples of the official files, as their publishers count them."""
ROBERTA_BASE = ModelConfig(
    kind="encoder", style="bert", blocks="ordinary", activations="stored", vocabulary=50_265, max_length=512,
    layers=12, d_model=768, d_ff=3072, heads=12,
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class Reproduction:
    """One section of the document: a table or figure of a paper."""

    paper: str
    title: str
    commands: list[list[str]]
    """Words of each command, loops of the shell unrolled."""
    fields: dict[str, str]

    @property
    def name(self) -> str:
        return f"{self.paper}: {self.title}"

    @cached_property
    def trained(self) -> list[Config | FinetuneConfig]:
        return [run for words in self.commands for run in runs(words)]


def reproductions(text: str) -> list[Reproduction]:
    """The sections of docs/papers.md that have commands."""
    found, paper = [], ""
    for heading, title, body in re.findall(r"^(##+) (.+)\n((?:(?!##).*\n)*)", text, re.M):
        if heading == "##":
            paper = title
            continue
        fields = dict(re.findall(r"^- (\w+): ((?:.|\n(?!-|\n))+)", body, re.M))
        found.append(Reproduction(paper, title, commands(body), fields))
    return found


def gpu_hours(run: Config | FinetuneConfig) -> float:
    """A100 hours to compute a run at the planner's assumed utilisation, every sequence taken at its full length."""
    gpu = GPUS["A100"]
    if isinstance(run, Config):
        return Plan(run, Assumptions(gpu)).compute_seconds * run.training.steps / 3600
    model = model_of(run)
    length = run.task.max_length + _target_length(run)
    tokens = length
    if run.task.name == "mind":  # the candidates that are drawn and the clicked news, a title each
        tokens *= 1 + run.task.recommendation.negatives + run.task.recommendation.history
    if run.training.batch_unit == "tokens":
        total = run.training.steps * run.training.global_batch
    elif run.training.epochs:
        total = run.training.epochs * EXAMPLES[run.task.name] * tokens
    else:
        total = run.training.steps * run.training.global_batch * tokens
    return total * model_flops_per_token(model, length) / (MFU * gpu.peak) / 3600


def _target_length(run: FinetuneConfig) -> int:
    """Tokens that a decoder reads beside its source."""
    if run.model is None or run.model.source is None:
        return 0
    forecast = run.task.forecast
    return forecast.overlap + forecast.horizon if run.task.name in ("etth1", "ettm1") else run.model.max_length


def model_of(run: FinetuneConfig) -> ModelConfig:
    """The model of a fine-tuning run. A HuggingFace encoder stands for RoBERTa-base."""
    if run.model is not None:
        return run.model
    model = ROBERTA_BASE
    if run.start.checkpoint is not None:
        model = load_config(run.start.checkpoint.removeprefix("runs/")).model
    attention = run.start.attention
    if attention is None and run.start.huggingface:
        attention = AttentionConfig(pattern=["full"])
    return model if attention is None else model.model_copy(update={"attention": attention})


SECTIONS = reproductions(TEXT)


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
    models = [run.model if isinstance(run, Config) else model_of(run) for run in section.trained]
    for model in {model.model_dump_json(): model for model in models}.values():
        with torch.device("meta"):
            assert sum(weight.numel() for weight in empty_model(model).parameters()) > 0


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.name)
def test_costs_are_the_planners(section):
    hours = sum(gpu_hours(run) for run in section.trained)
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
