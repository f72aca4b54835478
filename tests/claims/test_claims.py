"""Claims: what a trial measures holds against definitions, judges can refute, and an interrupted command goes on."""

import json
import math
import statistics
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megasparse.callbacks import silent
from megasparse.claims import learned, lsh, maps, reversible, trained, yoso
from megasparse.claims.claim import Claim, Judgement, Trial
from megasparse.claims.page import markdown, write_page
from megasparse.claims.registry import CLAIMS
from megasparse.claims.reproduction import reproduce, results
from megasparse.cli.main import door
from tests.helpers.commands import refused, run

program = door("reproduce")

DOCS = Path(__file__).parents[2] / "docs" / "claims"

SMALL = {
    "yoso_estimator": {"length": 64, "most_hashes": 64, "hashes": 8, "draws": 8},
    "yoso_lengths": {"lengths": [64, 128], "draws": 2},
    "yoso_gradient": {"length": 16, "draws": 64},
    "yoso_memory": {"lengths": [256, 512], "heads": 2},
    "lsh_rounds": {"length": 256, "chunk": 16, "rounds": [1, 2, 8]},
    "lsh_cost": {"lengths": [1024, 2048], "tokens": 2048, "heads": 2},
    "reversible_memory": {"layers": [2, 3], "length": 512},
    "reversible_gradients": {"layers": 2, "length": 256},
}
"""Smaller trials, where the rules hold that need no size."""


def trial(claim, folder, seed=0, **changes):
    return Trial({**claim.budgets["cpu"], **changes}, seed, folder, silent)


@pytest.mark.parametrize("name", [name for name in SMALL if name != "yoso_memory"])
def test_a_small_trial_is_verified_and_drawn(name, tmp_path):
    claim = next(claim for claim in CLAIMS if claim.name == name)
    runs = [claim.measure(trial(claim, tmp_path, seed, **SMALL[name])) for seed in claim.seeds]
    assert claim.judge(json.loads(json.dumps(runs))).verified
    assert claim.draw is None or claim.draw(runs).curves


def test_sampled_weights_are_shares_of_collisions(tmp_path):
    own = trial(yoso.ESTIMATOR, tmp_path, length=16)
    q, k = yoso.pair(own, 16)
    weights = yoso.collisions(own, q, k, hashes=4, draw=0)
    a, b = (yoso.codes(own, x, 4, 0)[0, 0] for x in (q, k))
    for i, j in ((0, 0), (3, 7), (15, 2)):
        assert weights[i, j] == sum(bool(a[h, i] == b[h, j]) for h in range(4)) / 4


def test_what_softmax_keeps_grows_with_the_square(tmp_path):
    kept = yoso.measure_memory(trial(yoso.MEMORY, tmp_path, **SMALL["yoso_memory"]))["kept"]
    assert kept["YOSO"][1] == 2 * kept["YOSO"][0]
    assert kept["softmax, whole matrix"][1] > 3 * kept["softmax, whole matrix"][0]


def test_bound_and_derivative_are_those_of_the_paper(tmp_path):
    found = yoso.measure_gradient(trial(yoso.GRADIENT, tmp_path, length=8, draws=2, code_bits=4))
    x = found["cosines"][30]
    probability = 1 - math.acos(x) / math.pi
    assert found["bound"][30] == pytest.approx(2 * probability**4)
    assert found["true"][30] == pytest.approx(4 * probability**3 / (math.pi * math.sqrt(1 - x * x)))


BIASED = {"hashes": [1, 2, 4], "error": [0.4, 0.4 * 2**-0.5, 0.2], "biases": [0.01, 0.011, 0.009], "mean_weight": 0.1}
UNBIASED = {**BIASED, "biases": [0.01, -0.011, 0.002]}
SLOW = {**UNBIASED, "error": [0.4, 0.35, 0.3]}
ROUNDS = {"rounds": [1, 8], **{f"{kind} {key}": [2.0, 1.0] for kind in lsh.INPUTS for key in ("error", "mass")}}
GROWING = {"lengths": [1, 2], "LSH, bytes": [1.0, 1.0], "LSH, FLOPs": [1.0, 1.3], "full, FLOPs": [1.0, 2.0]}
DEEP = {"layers": [2, 4], "reversible": [10, 12], "ordinary": [10, 20]}
GRADIENTS = {"shares": [1.0, 1.1, 0.9], "finite": True, "true_at_1": "inf", "bound_below": True}
KEPT = {"lengths": [512, 1024], "kept": {"YOSO": [10, 20], "softmax, whole matrix": [80, 300]}}


def duplication(**accuracies):
    """All at 100 %, but what is named, as LSH_4__LSH_8 for a model trained with 4 rounds and evaluated with 8."""
    columns = ["full", *(f"LSH-{rounds}" for rounds in trained.ROUNDS)]
    run = {f"{arm}; {column}": {"accuracy": 1.0} for arm in trained.TRAINED for column in columns}
    run["full; LSH-1"] = {"accuracy": 0.9}
    return run | {name.replace("__", "; ").replace("_", "-"): {"accuracy": x} for name, x in accuracies.items()}


def of_three_seeds(step, losses):
    """Losses of arms, whose three seeds are `step` apart."""
    return [{arm: {"loss": loss + number * step} for arm, loss in losses.items()} for number in range(3)]


BLOCKS = {"regular": 1.0, "shared QK": 1.19, "reversible": 1.0}
TRAINED = {"full": 1.0, "LSH-8": 1.04, "LSH-4": 1.05, "LSH-2": 1.1, "LSH-1": 1.2}
HALF = {"local": 1.0, "local and LSH": 1.1, "local and LHA": 1.019, "LHA": 1.3}
LISTOPS_BEHIND = {"full": [0.34, 0.36], "lsh": [0.33, 0.34]}
SAMPLED = [{"random": {"accuracy": 0.4}, "raw": {"accuracy": x}} for x in (0.39, 0.43)]


@pytest.mark.parametrize(
    ("judge", "numbers", "verified"),
    [
        (yoso.judge_estimator, UNBIASED, True),
        (yoso.judge_estimator, BIASED, False),
        (yoso.judge_estimator, SLOW, False),
        (yoso.judge_lengths, {"lengths": [1, 2], "error": [1.0, 1.19], "largest_error": [1.0, 1.5]}, True),
        (yoso.judge_lengths, {"lengths": [1, 2], "error": [1.0, 1.21], "largest_error": [1.0, 1.0]}, False),
        (yoso.judge_gradient, GRADIENTS, True),
        (yoso.judge_gradient, {**GRADIENTS, "shares": [1.1, 1.11, 1.12]}, False),
        (yoso.judge_gradient, {**GRADIENTS, "finite": False}, False),
        (yoso.judge_gradient, {**GRADIENTS, "bound_below": False}, False),
        (yoso.judge_memory, KEPT, True),
        (yoso.judge_memory, {**KEPT, "kept": {**KEPT["kept"], "YOSO": [10, 22]}}, False),
        (lsh.judge_rounds, ROUNDS, False),
        (lsh.judge_rounds, {**ROUNDS, "random mass": [0.1, 0.2], "clustered mass": [0.1, 0.2]}, True),
        (lsh.judge_cost, GROWING, False),
        (lsh.judge_cost, {**GROWING, "LSH, FLOPs": [1.0, 1.1]}, True),
        (reversible.judge_memory, DEEP, False),
        (reversible.judge_memory, {**DEEP, "reversible": [10, 10]}, True),
        (reversible.judge_gradients, dict.fromkeys(reversible.ARMS, 1e-6), True),
        (reversible.judge_gradients, dict.fromkeys(reversible.ARMS, 2e-5), False),
        (maps.judge, {"widths": [0.5, 0.62], "seeds": [0.7, 0.7], "heads": [0.1, 0.1]}, True),
        (maps.judge, {"widths": [0.5, 0.58], "seeds": [0.7, 0.7], "heads": [0.9, 0.9]}, False),
        (trained.judge_duplication, duplication(), True),
        (trained.judge_duplication, duplication(LSH_4__LSH_8=0.998), False),
        (trained.judge_duplication, duplication(LSH_1__LSH_1=0.89), False),
        (trained.judge_duplication, duplication(LSH_2__LSH_4=0.99), False),
        (trained.judge_blocks, of_three_seeds(0.1, BLOCKS), True),
        (trained.judge_blocks, of_three_seeds(0.1, {**BLOCKS, "shared QK": 1.21}), False),
        (trained.judge_rounds, of_three_seeds(0.01, TRAINED), True),
        (trained.judge_rounds, of_three_seeds(0.01, {**TRAINED, "LSH-8": 1.051}), False),
        # Worse than 1 round by less than 2 deviations of .01, and by more.
        (trained.judge_rounds, of_three_seeds(0.01, {**TRAINED, "LSH-2": 1.219}), True),
        (trained.judge_rounds, of_three_seeds(0.01, {**TRAINED, "LSH-2": 1.221}), False),
        (trained.judge_hybrid, of_three_seeds(0.01, HALF), True),  # behind by less than 2 deviations of .01
        (trained.judge_hybrid, of_three_seeds(0.01, {**HALF, "local and LHA": 1.021}), False),
        (trained.judge_hybrid, of_three_seeds(0.01, {**HALF, "local and LHA": 1.0, "local and LSH": 0.99}), False),
        (learned.judge_listops, LISTOPS_BEHIND, True),
        (learned.judge_listops, {**LISTOPS_BEHIND, "lsh": [0.33, 0.336]}, False),
        (learned.judge_samplers, SAMPLED, True),
        (learned.judge_samplers, SAMPLED[:1], False),
    ],
)
def test_judges_can_say_either(judge, numbers, verified):
    """numbers: of one seed, or a list of all of them."""
    assert judge(numbers if isinstance(numbers, list) else [numbers]).verified == verified


def test_each_number_of_rounds_is_in_the_curves():
    curves = trained.draw_rounds(of_three_seeds(0.01, TRAINED)).curves
    assert [list(curve.x) for curve in curves] == [[8, 4, 2, 1]] * 4


def test_trials_of_trained_models_name_comparisons_whose_models_can_be_built():
    for claim in (
        trained.DUPLICATION,
        trained.BLOCKS,
        trained.TRAINED_ROUNDS,
        trained.HYBRID,
        learned.UTILITY,
        learned.LISTOPS,
        learned.SAMPLERS,
        maps.NARROW_MAPS,
    ):
        for settings in claim.budgets.values():
            claim.check(settings)
    evaluated = trained.comparison_of(trained.DUPLICATION.budgets["cpu"])["evaluate"]
    assert all(arguments[-2:] == ["--hash-seeds", "8"] for arguments in evaluated.values())


def windows(mean):
    """The utility of ten windows, whose 95 % interval is mean ± 0.0075."""
    return [mean - 0.01, mean + 0.01] * 5


FOUND = {
    "utility": {
        "random": windows(0.251), "smyrf": windows(0.3), "lsh": windows(0.4), "lha": windows(0.55),
        "bound": windows(0.9), "floor": [0.25] * 10,
    },
    "imbalance": {"lsh": {"ratio": 0.2, "size": 0.04}, "lha": {"ratio": 0.1, "size": 0.01}},
}  # fmt: skip


@pytest.mark.parametrize(
    ("part", "name", "value"),
    [
        ("utility", "lha", windows(0.414)),  # the intervals overlap
        ("utility", "bound", windows(0.5)),
        ("utility", "random", windows(0.34)),
        ("imbalance", "lha", {"ratio": 0.3, "size": 0.01}),
        ("imbalance", "lha", {"ratio": 0.1, "size": 0.08}),
    ],
)
def test_the_rule_of_utility(part, name, value):
    assert learned.judge_utility([FOUND, FOUND]).verified
    other = {**FOUND, part: {**FOUND[part], name: value}}
    assert not learned.judge_utility([FOUND, other]).verified


def test_correlations_are_pearsons():
    a, b = (torch.rand(5, 5, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))
    defined = statistics.correlation(a.flatten().tolist(), b.flatten().tolist())
    assert maps.pearson(a, b) == pytest.approx(defined)
    assert maps.pearson(a, 3 * a + 1) == pytest.approx(1.0)


@pytest.mark.slow
def test_a_small_trial_of_maps_trains_four_models(tmp_path, monkeypatch):
    text, folder = tmp_path / "text.txt", str(tmp_path / "data")
    text.write_text("the same words come again, and the same words go. " * 2000)
    run(door("prepare-data"), "text", "--source", text, "--output", folder)
    monkeypatch.setattr(maps, "fetch_corpus", lambda trial, corpus: None)
    changes = [f"data.path={folder}", "training.steps=2", "checkpoint.every=2", "model.max_length=64"]
    own = {"changes": [*changes, "data.sequence_length=64"], "wide": 16, "windows": 2, "length": 32}
    found = maps.measure(trial(maps.NARROW_MAPS, tmp_path, **own))
    assert {name: len(values) for name, values in found.items()} == {"widths": 2, "seeds": 2, "heads": 2}
    (one, other), (wide, _) = (maps.attention_maps(tmp_path / f"{name}-0", 2, 32) for name in ("narrow", "wide"))
    assert one.shape == (2, 32, 32) and not torch.equal(one, other)
    torch.testing.assert_close(one.sum(-1), torch.ones(2, 32))
    defined = [
        statistics.correlation(a.flatten().tolist(), b.flatten().tolist()) for a, b in zip(one, wide, strict=True)
    ]
    assert found["widths"][0] == pytest.approx(statistics.mean(defined), abs=1e-6)


@pytest.mark.slow
def test_a_small_trial_of_utility_trains_a_model_and_hashes(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("the same words come again, and the same words go. " * 2000)
    folder = str(tmp_path / "data")
    run(door("prepare-data"), "text", "--source", text, "--output", folder)
    own = {
        "corpus": None, "length": 64, "windows": 2, "hash_steps": 2,
        "changes": [
            *learned.UTILITY.budgets["cpu"]["changes"], f"data.path={folder}", "training.steps=2", "model.layers=1",
            "model.d_model=32", "model.heads=2",
        ],
    }  # fmt: skip
    found = learned.measure_utility(trial(learned.UTILITY, tmp_path, **own))
    assert len(found["utility"]["lha"]) == 2 and found["utility"]["floor"] == [0.25, 0.25]
    assert all(0.25 <= bound <= 1.0 for bound in found["utility"]["bound"])
    assert found["imbalance"].keys() == {"lsh", "lha"}


def test_a_sweep_gives_every_mechanism_its_seeds(tmp_path, monkeypatch):
    def call(*words, log):
        if words[0] == "sweep":
            (tmp_path / "sweep").mkdir()
            runs = [{"value": 0.3}, {"value": 0.4}]
            found = [{"settings": {"model.attention": {"pattern": [kind]}}, "runs": runs} for kind in ("full", "lsh")]
            (tmp_path / "sweep" / "sweep.json").write_text(json.dumps({"combinations": found}))

    monkeypatch.setattr(learned, "call", call)
    assert learned.measure_sweep(trial(learned.LISTOPS, tmp_path)) == {"full": [0.3, 0.4], "lsh": [0.3, 0.4]}


@pytest.fixture
def counted():
    """A claim whose trials write down their seeds."""
    called = []

    def measure(trial):
        called.append(trial.seed)
        return {"x": trial.seed}

    return called, Claim(
        "counted",
        "a paper",
        "says <this>",
        "a rule",
        {"cpu": {"minutes": 1}},
        measure,
        lambda runs: Judgement(sum(run["x"] for run in runs) == 3, "the sum is 3", [["x"], ["3"]]),
    )


def test_what_is_done_is_not_done_again_unless_its_settings_change(counted, tmp_path):
    called, claim = counted
    reproduce([replace(claim, seeds=(0, 1))], "cpu", tmp_path, silent)
    reproduce([claim], "cpu", tmp_path, silent)
    assert called == [0, 1, 2]
    reproduce([replace(claim, budgets={"cpu": {"minutes": 2}})], "cpu", tmp_path, silent)
    assert called == [0, 1, 2, 0, 1, 2]
    reproduce([claim], "gpu", tmp_path, silent)
    assert len(called) == 6
    record = json.loads((tmp_path / "counted" / "seed-1.json").read_text())
    assert record["seed"] == 1 and record["numbers"] == {"x": 1} and record["machine"]["torch"] == torch.__version__


def test_a_claim_is_judged_when_all_of_its_seeds_are_there(counted, tmp_path):
    _, claim = counted
    reproduce([replace(claim, seeds=(0, 2))], "cpu", tmp_path, silent)
    (known,) = results([claim], "cpu", tmp_path)
    assert (known["status"], known["missing"]) == ("not attempted", "2 of 3 seeds")
    reproduce([claim], "cpu", tmp_path, silent)
    (known,) = results([claim], "cpu", tmp_path)
    assert (known["status"], known["sentence"]) == ("verified", "the sum is 3")
    assert results([claim], "gpu", tmp_path)[0]["status"] == "not attempted"
    paths = write_page([claim], [known], tmp_path)
    texts = [path.read_text() for path in paths]
    assert json.loads(texts[0])[0]["trials"][2]["numbers"] == {"x": 2}
    assert "| ✓ | counted | a paper | the sum is 3 |" in texts[1] and "says &lt;this&gt;" in texts[2]


def test_the_command_lists_measures_and_refuses(capsys, tmp_path, monkeypatch, counted):
    monkeypatch.setattr("megasparse.claims.registry.CLAIMS", (counted[1],))
    run(program, "--list")
    run(program, "--dry-run", "--output", tmp_path)
    assert counted[0] == []
    run(program, "--output", tmp_path)
    said = capsys.readouterr().out
    assert "rule: a rule" in said and "counted, seed 2: {'minutes': 1}" in said
    assert "verified       counted: the sum is 3" in said and (tmp_path / "claims.html").exists()
    assert 'there is no claim "other"' in refused(capsys, program, "--only", "other")


def test_the_published_page_is_what_the_rules_say_of_its_numbers(tmp_path):
    published = json.loads((DOCS / "claims.json").read_text())
    for known in published:
        for one in known["trials"]:
            path = tmp_path / known["name"] / f"seed-{one['seed']}.json"
            path.parent.mkdir(exist_ok=True)
            path.write_text(json.dumps(one))
    found = json.loads(json.dumps(results(CLAIMS, "cpu", tmp_path)))
    assert found == [{key: value for key, value in known.items() if key != "picture"} for known in published]
    assert (DOCS / "claims.md").read_text().rstrip() == markdown(published)


LISTOPS = {"full": "full", "LHA": "lha", "LSH": "lsh", "Smart Bird": "smart_bird", "YOSO": "yoso"}
SAMPLERS = {
    "random": "random", "top K": "top_k", "raw": "raw", "inverse log": "inverse_log",
    "inverse log squared": "inverse_log_squared",
}  # fmt: skip


def test_the_documents_quote_the_claims():
    claims = json.loads((DOCS / "claims.json").read_text())
    runs = {claim["name"]: [trial["numbers"] for trial in claim["trials"]] for claim in claims}
    papers, results = (" ".join((DOCS.parent / name).read_text().split()) for name in ("papers.md", "results.md"))
    listops = {name: _percent(runs["listops"][0][arm]) for name, arm in LISTOPS.items()}
    samplers = {name: _percent([run[arm]["accuracy"] for run in runs["samplers"]]) for name, arm in SAMPLERS.items()}
    for name, found in (listops | samplers).items():
        assert f"{name} {found}" in papers
    rounds = {
        arm: statistics.mean(run[arm]["loss"] for run in runs["trained_rounds"]) for arm in runs["trained_rounds"][0]
    }
    one, two, four, eight = (f"{rounds[f'LSH-{n}']:.3f}" for n in (1, 2, 4, 8))
    behind = f"{rounds['LSH-8'] - rounds['full']:.3f}".lstrip("0")
    assert f"{one}, {two}, {four} and {eight} nats with 1, 2, 4 and 8" in papers
    assert f"8 are still {behind} behind full attention's {rounds['full']:.3f}" in papers
    sixteen = json.loads((DOCS.parent / "measured" / "rounds_16.json").read_text())
    behind = sixteen["nats"] / sixteen["dims"] - runs["trained_rounds"][0]["full"]["loss"]
    assert f"seed 0 is {behind:.3f} behind".replace("0.", ".") in papers
    largest = (
        statistics.mean(each) for each in zip(*(run["largest_error"] for run in runs["yoso_lengths"]), strict=True)
    )
    assert f"from 128 to 4,096 tokens: {', '.join(f'{error:.2f}' for error in largest)} " in papers
    assert f"| {' | '.join(listops.values())} |" in results


def _percent(shares):
    return f"{100 * statistics.mean(shares):.1f} ± {100 * statistics.stdev(shares):.1f}"
