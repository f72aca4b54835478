"""Claims on what learned hashes and sketches find: LHA's utility and balance, ListOps, Smart Bird's sampling."""

import json
import statistics
from collections.abc import Sequence
from typing import Any

from megasparse.claims.claim import Claim, Judgement, Numbers, Settings, Trial
from megasparse.claims.interval import Interval
from megasparse.claims.trained import check as check_comparison
from megasparse.claims.trained import fetch_corpus, train
from megasparse.claims.trained import measure as measure_comparison
from megasparse.config.load import load_config
from megasparse.config.shipped import find_config
from megasparse.runs.comparison import call, spread
from megasparse.runs.sweep import combine, load_grid, read

METHODS = ("random", "smyrf", "lsh", "lha", "bound")
IMBALANCES = ("ratio", "size")
"""Shares of buckets whose queries and keys are not within 1:2 … 2:1, and whose size is off by more than 2 times."""


def check_utility(settings: Settings) -> None:
    load_config(settings["config"], settings["changes"])


def measure_utility(trial: Trial) -> Numbers:
    """Train a model with full attention, then hashes on the frozen model. Returns by method the utility of each
    held-out window (Eq. 5, a query's share; mean over layers), and the shares of unbalanced buckets of LSH and LHA.
    """
    settings, run = trial.settings, trial.folder / f"run-{trial.seed}"
    result = trial.folder / f"quality-{trial.seed}.json"
    if settings.get("corpus"):
        fetch_corpus(trial, settings["corpus"])
    trial.progress("training a model with full attention")
    train(trial, settings["config"], settings["changes"], run, trial.seed)
    trial.progress("training hashes")
    numbers = [word for key in ("length", "windows", "hash_steps") for word in (_option(key), settings[key])]
    call("attention-quality", "--checkpoint", run, *numbers, "--json", result, log=result.with_suffix(".log"))
    found = json.loads(result.read_text())["all"]
    return {
        "utility": {method: found["utility"][method]["windows"] for method in (*METHODS, "floor")},
        "imbalance": {
            method: {share: found["imbalance"][method][share]["mean"] for share in IMBALANCES}
            for method in ("lsh", "lha")
        },
    }


def _option(key: str) -> str:
    return f"--{key.replace('_', '-')}"


def judge_utility(runs: Sequence[Numbers]) -> Judgement:
    found = [{method: Interval.of(run["utility"][method]) for method in METHODS} for run in runs]
    utility = {method: [each[method].mean for each in found] for method in METHODS}
    floor = runs[0]["utility"]["floor"][0]
    unbalanced = {
        method: {share: statistics.mean(run["imbalance"][method][share] for run in runs) for share in IMBALANCES}
        for method in ("lsh", "lha")
    }
    verified = (
        all(each["lha"].mean - each["lha"].half > each["lsh"].mean + each["lsh"].half for each in found)
        and all(each["bound"].mean >= each["lha"].mean for each in found)
        and all(abs(each["random"].mean - floor) < 2 * each["random"].half for each in found)
        and all(unbalanced["lha"][share] < unbalanced["lsh"][share] for share in IMBALANCES)
    )
    shares = "; ".join(
        f"{method.upper()} {unbalanced[method]['ratio']:.1%} and {unbalanced[method]['size']:.1%}"
        for method in unbalanced
    )
    sentence = f"utility {spread(utility['lha'])}, LSH's {spread(utility['lsh'])}; unbalanced buckets: {shares}"
    table = [["", *METHODS], ["utility", *(spread(utility[method]) for method in METHODS)]]
    return Judgement(verified, sentence, table)


UTILITY = Claim(
    name="lha_utility",
    paper="LHA, Figures 1, 2 and 6",
    says="Learned hashes find more attention than LSH and fill their buckets more evenly.",
    rule="In every seed LHA's utility is above LSH's, their 95 % intervals over held-out windows apart, and not above "
    "the bound; random buckets have 1/B, within twice that interval; fewer of LHA's buckets than of LSH's have a "
    "query:key ratio outside 1:2 … 2:1, and fewer a size off by more than 2 times.",
    budgets={
        "cpu": {
            "config": "quickstart_relu",
            "corpus": "comparisons/lha_utility",
            "changes": [
                'model.attention.pattern=["full"]', "model.max_length=512", "data.sequence_length=512",
                "training.steps=600", "training.global_batch=4", "training.micro_batch=4", "evaluation.every=0",
                "run.engine=torch",
            ],
            "length": 512, "windows": 10, "hash_steps": 250, "minutes": 8,
        },
        "gpu": {
            "config": "lha_wikitext103_dense", "changes": [], "length": 1024, "windows": 100, "hash_steps": 300,
            "minutes": 60,
        },
    },
    measure=measure_utility,
    check=check_utility,
    judge=judge_utility,
)  # fmt: skip


def check_sweep(settings: Settings) -> None:
    read(find_config(settings["config"]))
    combine(load_grid(find_config(settings["grid"])), [], 1)


def measure_sweep(trial: Trial) -> Numbers:
    """Fine-tune with each combination of a grid. Returns by mechanism its best values on held-out rows, a seed each."""
    settings, folder = trial.settings, trial.folder
    if "prepare" in settings:
        call(*settings["prepare"], log=folder / "prepare.log")
    names = ["--config", settings["config"], "--grid", settings["grid"], "--seeds", settings["seeds"]]
    trial.progress("fine-tuning every combination")
    call("sweep", *names, "--output", folder / "sweep", log=folder / "sweep.log")
    found = json.loads((folder / "sweep" / "sweep.json").read_text())
    return {_mechanism(each["settings"]): [run["value"] for run in each["runs"]] for each in found["combinations"]}


def _mechanism(settings: dict[str, Any]) -> str:
    return str(settings["model.attention"]["pattern"][0])


def judge_listops(runs: Sequence[Numbers]) -> Judgement:
    points = {name: [100 * value for value in values] for name, values in runs[0].items()}
    full = statistics.mean(points["full"])
    behind = {name: full - statistics.mean(values) for name, values in points.items() if name != "full"}
    table = [["", *points], ["accuracy, %", *(spread(values, 1) for values in points.values())]]
    said = ", ".join(f"{name} {-difference:+.1f}" for name, difference in behind.items())
    return Judgement(max(behind.values()) <= 1.5, f"full {full:.1f} %; points apart: {said}", table)


LISTOPS = Claim(
    name="listops",
    paper="LHA, Table 3; YOSO, Table 5",
    says="On ListOps hashed attention is within 1.5 points of full attention.",
    rule="The mean accuracy over three seeds of every mechanism is at most 1.5 points below that of our own full "
    "attention. (One trial, with its three seeds inside.)",
    budgets={
        "cpu": {
            "prepare": [
                "listops", "--train", "10000", "--validation", "1000", "--test", "1000", "--min-length", "10",
                "--max-length", "200", "--output", "data/listops_200",
            ],
            "config": "finetune/small_listops", "grid": "finetune/grids/small_mechanisms", "seeds": 3, "minutes": 40,
        },
        "gpu": {
            "prepare": ["listops", "--output", "data/listops"],
            "config": "finetune/lra_listops", "grid": "finetune/grids/mechanisms", "seeds": 3, "minutes": 600,
        },
    },
    measure=measure_sweep,
    check=check_sweep,
    judge=judge_listops,
    seeds=(0,),
)  # fmt: skip


def judge_samplers(runs: Sequence[Numbers]) -> Judgement:
    accuracy = {name: [100 * run[name]["accuracy"] for run in runs] for name in runs[0]}
    means = {name: statistics.mean(values) for name, values in accuracy.items()}
    others = [name for name in means if name != "random"]
    worst = min(others, key=means.__getitem__)
    table = [["", *accuracy], ["accuracy, %", *(spread(values, 1) for values in accuracy.values())]]
    sentence = f"random keys {means['random']:.1f} %, the worst sampling by the sketch ({worst}) {means[worst]:.1f} %"
    return Judgement(means["random"] < means[worst], sentence, table)


SAMPLERS = Claim(
    name="samplers",
    paper="Smart Bird, Figure 4",
    says="Sampling by the sketch beats random keys; (1/log α)² is the best of the samplings.",
    rule="Random keys have the lowest mean accuracy over seeds of the five samplings, on duplicated sequences of 128, "
    "20 keys a query. No order of the others is asked for.",
    budgets={"cpu": {"comparison": "smart_bird_samplers", "minutes": 12}},
    measure=measure_comparison,
    check=check_comparison,
    judge=judge_samplers,
)
