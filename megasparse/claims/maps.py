"""The claim that narrow models attend as wide ones do: correlations of attention maps."""

import statistics
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from megasparse.claims.claim import Claim, Judgement, Numbers, Settings, Trial
from megasparse.claims.trained import fetch_corpus, train
from megasparse.config.load import load_config
from megasparse.data.reader import EvaluationStream
from megasparse.data.tokenizers import build_tokenizer
from megasparse.evaluation.attention_quality import record_calls, weights_of
from megasparse.evaluation.restore import restore
from megasparse.runs.comparison import spread
from megasparse.runs.data import open_folder

SPLIT = "validation"
OTHER_SEED = 1000
"""Added to a trial's seed, for the second model of the same width."""


def check(settings: Settings) -> None:
    for width in (settings["narrow"], settings["wide"]):
        load_config(settings["config"], [*settings["changes"], *_of_width(width)])


def measure(trial: Trial) -> Numbers:
    """Train a narrow and two wide models of a head each, and a wide one of narrow heads. Returns the correlations of
    their maps of held-out windows with the wide one's, {"widths": the narrow model's, "seeds": the other wide one's,
    "heads": that of narrow heads, their mean}, a number a window each, mean over layers.
    """
    settings = trial.settings
    fetch_corpus(trial, settings["corpus"])
    maps = {}
    narrow, wide = settings["narrow"], settings["wide"]
    for name, width, heads, seed in (
        ("narrow", narrow, 1, trial.seed),
        ("wide", wide, 1, trial.seed),
        ("wide again", wide, 1, trial.seed + OTHER_SEED),
        ("narrow heads", wide, wide // narrow, trial.seed),
    ):
        trial.progress(f"training, {width} wide, heads of {width // heads}, seed {seed}")
        run = trial.folder / f"{name.replace(' ', '_')}-{trial.seed}"
        train(trial, settings["config"], [*settings["changes"], *_of_width(width, heads)], run, seed)
        maps[name] = attention_maps(run, settings["windows"], settings["length"])
    others = {"widths": "narrow", "seeds": "wide again", "heads": "narrow heads"}
    return {name: _correlations(maps["wide"], maps[other]) for name, other in others.items()}


def _of_width(width: int, heads: int = 1) -> list[str]:
    return [f"model.d_model={width}", f"model.d_ff={4 * width}", f"model.heads={heads}"]


def attention_maps(run: Path, windows: int, length: int) -> list[Tensor]:
    """A model's attention matrices on windows spread over the validation split, of each layer: (layers, L, L)."""
    model, config, _, device = restore(str(run))
    index = open_folder(config.data.path, config, build_tokenizer(config.data.tokenizer))
    stream = EvaluationStream(index, SPLIT)
    found = []
    for number in range(windows):
        record = index.record or 1
        start = number * (stream.tokens - length) // max(1, windows - 1) // record * record
        tokens = stream.read(start, start + length).unsqueeze(0).to(device)
        calls = record_calls(model, tokens, config.run.seed)
        found.append(torch.stack([weights_of(call, call.exact())[0].mean(0) for call in calls]))
    stream.close()
    return found


def _correlations(ours: Sequence[Tensor], others: Sequence[Tensor]) -> list[float]:
    return [
        statistics.mean(pearson(a, b) for a, b in zip(one, other, strict=True))
        for one, other in zip(ours, others, strict=True)
    ]


def pearson(a: Tensor, b: Tensor) -> float:
    """Pearson's correlation of two matrices' numbers."""
    a, b = (x.double().flatten() - x.double().mean() for x in (a, b))
    return float((a * b).sum() / (a.norm() * b.norm()))


MOST_APART = 0.15
"""By which the correlation of two widths may be below that of two seeds; the paper's are 0.67 and 0.76."""


def judge(runs: Sequence[Numbers]) -> Judgement:
    means = {name: [statistics.mean(run[name]) for run in runs] for name in ("widths", "seeds", "heads")}
    behind = statistics.mean(means["seeds"]) - statistics.mean(means["widths"])
    shown = [spread(values) for values in means.values()]
    sentence = f"two widths {shown[0]}, two seeds of the wide one {shown[1]}; narrow heads in a wide model {shown[2]}"
    table = [["with a wide model", "narrow model", "wide, another seed", "wide, narrow heads"], ["Pearson's r", *shown]]
    return Judgement(behind <= MOST_APART, sentence, table)


NARROW_MAPS = Claim(
    name="sketch_ranks",
    paper="Smart Bird, section 1 and Figure 1",
    says="Attention maps of a model 4 wide correlate with those of one 256 wide (0.67) nearly as two seeds do (0.76).",
    rule="Pearson's r of the attention matrices of held-out windows, mean over layers, windows and seeds: that of a "
    "model 4 wide and a wide one is at most 0.15 below that of two seeds of the wide one. Encoders of two layers and a "
    "head each, full attention, on masked bytes in place of the paper's reviews. Added after the first trials, and not "
    "judged: narrow heads in a wide model.",
    budgets={
        "cpu": {
            "config": "masked_text", "corpus": "comparisons/lha_utility", "changes": ["training.steps=1200"],
            "narrow": 4, "wide": 64, "length": 256, "windows": 10, "minutes": 8,
        },
        "gpu": {
            "config": "masked_text", "corpus": "comparisons/lha_utility", "changes": ["training.steps=6000"],
            "narrow": 4, "wide": 256, "length": 256, "windows": 100, "minutes": 20,
        },
    },
    measure=measure,
    check=check,
    judge=judge,
)  # fmt: skip
