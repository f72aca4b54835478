"""The reproductions that docs/papers.md lists: what each command would train, and what the planner says that costs."""

import re
from dataclasses import dataclass

from megasparse.config.attention import AttentionConfig
from megasparse.config.finetuning import FinetuneConfig
from megasparse.config.load import load_config
from megasparse.config.schema import Config, ModelConfig
from megasparse.planning.flops import model_flops_per_token
from megasparse.planning.hardware import GPUS
from megasparse.planning.plan import MFU, Assumptions, Plan
from tests.helpers.documents import commands

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
