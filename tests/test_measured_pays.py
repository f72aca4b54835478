"""Figures of docs/when-hashing-pays.md are those of the files that commands wrote."""

import statistics

import pytest

from tests.helpers.measured import assert_shown, read, spread


def pays():
    curves = {corpus: read(f"pictures/pays_{corpus}.json") for corpus in ("client", "wikipedia", "recall")}
    tests = {
        arm: [[seed["test"] for seed in found[arm].values()] for found in curves.values()]
        for arm in ("window 64", "n-gram")
    }
    assert all(len(seeds) == 3 for corpora in tests.values() for seeds in corpora)
    yield f"| window 64 in every layer, 350 steps | {' | '.join(map(spread, tests['window 64']))} |"
    yield f"| `ngram` in every other layer, 250 steps | {' | '.join(f'**{spread(x)}**' for x in tests['n-gram'])} |"
    gains = [
        statistics.mean(window) - statistics.mean(ours)
        for window, ours in zip(tests["window 64"], tests["n-gram"], strict=True)
    ]
    yield f"| gain of `ngram` | {' | '.join(f'{gain:.3f}' for gain in gains)} |"
    bounds = read("measured/pays_bounds.json")["runs"]
    full = [{**curves[corpus], **bounds[corpus]}["full by turns"] for corpus in curves]
    names = ("window 64 in every layer", "full attention in every other layer (seed 0)", "`ngram` in every other layer")
    bold = ("", "", "**")
    for name, mark, arm in zip(names, bold, ("window 64", None, "n-gram"), strict=True):
        seeds = full if arm is None else [found[arm] for found in curves.values()]
        means = (statistics.mean(run["held_out"]["250"] for run in each.values()) for each in seeds)
        yield f"| {name} | {' | '.join(f'{mark}{each:.3f}{mark}' for each in means)} |"
    yield f"on `wikipedia`, seed 0, 128 has {bounds['wikipedia']['window 128']['0']['test']:.3f} on test"
    everywhere = bounds["client"]["full"]["0"]["held_out"]["250"]
    yield f"| full attention in every layer | 250 | | {everywhere:.3f} | not run |"
    for name, arm in (
        ("window 256", "window 256"),
        ("`ngram` in every layer", "n-gram in every layer"),
        ("`lha` beside a window, by turns", "lha beside a window"),
    ):
        run = bounds["client"][arm]["0"]
        yield f"| {name} | {run['steps']} | | {run['held_out']['250']:.3f} | {run['test']:.3f} |"
    names = {
        "window 64": "window 64",
        "window 128": "window 128",
        "`ngram` by turns": "n-gram",
        "`lsh` beside a window, by turns": "lsh beside a window",
        "full attention by turns": "full by turns",
    }
    for name, arm in names.items():
        run = curves["client"][arm]["0"]
        quiet = min(seed["step_seconds"] for seed in curves["client"][arm].values())
        numbers = quiet, run["held_out"]["250"], run["test"]
        yield f"| {name} | {run['steps']} | {numbers[0]:.2f} | {numbers[1]:.3f} | {numbers[2]:.3f} |"
    trained = read("measured/quickstart_attention.json")
    window, ngram, lsh = (
        trained[arm]["test_bits_per_dim"] for arm in ("window 64 in every layer", "n-gram by turns", "LSH by turns")
    )
    yield f"| {window:.3f} | **{ngram:.3f}** | {lsh:.3f} |"
    for corpus in ("client", "code", "wikipedia"):
        places = read(f"measured/repetitions_{corpus}.json")["12"]
        right = [place["right"] for place in places]
        shares = " | ".join(f"{place['share']:.1%}".replace("%", " %") for place in places)
        yield f"| `{corpus}` | {shares} | {min(right) * 100:.0f} to {max(right) * 100:.0f} % |"


def dense():
    """Mechanisms whose time grows with the square of the length."""
    for arm, runs in read("measured/pays_dense.json")["runs"]["client"].items():
        kind, _, rest = arm.partition(" ")
        first = runs["0"]
        numbers = first["step_seconds"], first["held_out"]["250"], first["test"]
        yield f"| `{kind}` {rest}, by turns | 250 | {numbers[0]:.2f} | {numbers[1]:.3f} | {numbers[2]:.3f} |"
        assert len(runs) == 3
        yield f"| `{kind}` {rest} | {held_out_and_test(runs)} |"


def three_seeds():
    """Arms beside a window, and full attention: seed 0 of the two earlier files, seeds 1 and 2 of their own."""
    picture, bounds = read("pictures/pays_client.json"), read("measured/pays_bounds.json")["runs"]["client"]
    means = {}
    names = {"lsh beside a window": "`lsh` beside a window", "lha beside a window": "`lha` beside a window"}
    for arm, later in read("measured/pays_seeds.json")["runs"]["client"].items():
        runs = {**{"0": {**bounds, **picture}[arm]["0"]}, **later}
        assert len(runs) == 3
        yield f"| {names.get(arm, 'full attention')} | {held_out_and_test(runs)} |"
        means[arm] = statistics.mean(run["held_out"]["250"] for run in runs.values())
    heads = {
        "lsh and lha by heads beside a window": "`lsh` in 2 heads, `lha` in 2, beside a window",
        "routing beside a window": "`routing` beside a window",
    }
    for arm, runs in read("measured/pays_heads.json")["runs"]["client"].items():
        assert len(runs) == 3
        yield f"| {heads[arm]} | {held_out_and_test(runs)} |"
    yield f"| window 64 (test: after 350 steps) | {held_out_and_test(picture['window 64'])} |"
    window = statistics.mean(run["held_out"]["250"] for run in picture["window 64"].values())
    lsh, lha, full = means.values()
    yield f"behind the window alone by {lsh - window:.2f} and {lha - window:.2f} bits at step 250"
    yield f"ahead of full attention by {full - lsh:.2f} and {full - lha:.2f}"


def held_out_and_test(runs):
    return " | ".join(spread(x) for x in zip(*((r["held_out"]["250"], r["test"]) for r in runs.values()), strict=True))


def published_reformers():
    rows = read("measured/peers_client.json")["rows"]
    small, given = (
        [row["curve"][-1]["bits_per_dim"] for row in rows if (row["peer"], row["learning_rate"]) == (peer, 0.003)]
        for peer in ("huggingface-small-positions", "huggingface")
    )
    yield f"default start costs it {statistics.mean(given) - statistics.mean(small):.1f} bits"
    yield f"at step 250 are {spread(small)} in place of {spread(given)}"
    for peer, rate in sorted({(row["peer"], row["learning_rate"]) for row in rows}):
        own = [row for row in rows if (row["peer"], row["learning_rate"]) == (peer, rate)]
        bits, seconds, moved = ([row[key] for row in own] for key in ("bits_per_dim", "step_seconds", "moved"))
        leaks = ", ".join(f"{row['leak']:+.4f} ± {row['standard_error']:.4f}" for row in own).replace("0.", ".")
        many = " to ".join(f"{x * 100:.0f}" for x in sorted({min(moved), max(moved)})) + " %"
        name = peer.replace("-small-positions", ", small start")
        yield f"| {name} | {rate:g} | {statistics.median(seconds):.1f} | {spread(bits)} | {leaks} | {many} |"


@pytest.mark.parametrize("rows", [pays, dense, three_seeds, published_reformers])
def test_figures_are_those_of_the_measured_files(rows):
    assert_shown("when-hashing-pays.md", rows())
