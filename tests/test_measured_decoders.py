"""Figures of docs/decoders.md are those of the files that commands wrote."""

import statistics

import pytest

from tests.helpers.measured import assert_shown, read


def arms():
    names = {
        "oracle": "oracle: window 96, sinks, each head's 96 best others",
        "window, sinks": "window 130, sinks",
        "Smart Bird taught": "Smart Bird, taught, K 128",
        "Smart Bird random": "Smart Bird, random",
        "LHA taught": "LHA, taught for 3 passes",
        "LHA random": "LHA, random",
        "LSH": "LSH, one round",
        "LSH, 4 rounds": "LSH, four rounds, a narrower window",
    }
    rows = {row["arm"]: row for row in read("measured/decoder_arms.json")["rows"]}
    full = rows.pop("full")
    assert rows.keys() == names.keys()
    yield f"| full | {full['keys']:,.0f} | 1 | {full['nats']:.3f} | | {full['seconds']:.0f} |"
    for arm, row in rows.items():
        captured, above = (f"{value:.3f}".lstrip("0") for value in (row["captured"], row["nats"] - full["nats"]))
        numbers = f"{row['keys']:.0f} | {captured} | {row['nats']:.3f} | {above} | {row['seconds']:.0f}"
        yield f"| {names[arm]} | {numbers} |"
    far = [f"{statistics.mean(rows[arm]['layers'][1:11]):.2f}".lstrip("0") for arm in ("window, sinks", "oracle")]
    taught = f"{statistics.mean(rows['Smart Bird taught']['layers'][1:11]):.2f}".lstrip("0")
    yield f"the window captures {far[0]} of the attention, taught sketches {taught}, the oracle {far[1]};"


def fine_tuned():
    for row in read("measured/decoder_fits.json")["rows"]:
        longest = " | ".join(f"{number // 1024:,}K" if number else "no" for number in row["longest"])
        sizes = f"{row['gpu'] / 1e9:.1f} | {row['cpu'] / 1e9:.1f}"
        yield f"| {row['shape']} | {row['trained']}, {row['weights']:,} | {sizes} | {longest} |"
    for trained, file in (("all weights", "memory_smollm2"), ("adapters", "memory_smollm2_lora")):
        for row in read(f"measured/{file}.json")["rows"]:
            predicted, allocated = row["predicted"], row["allocated"]
            assert abs(predicted / allocated - 1) < 0.1
            sizes = f"{predicted / 1e9:.2f} GB | {allocated / 1e9:.2f} GB"
            yield f"| {trained} | {row['tokens']:,} | {sizes} | {(predicted / allocated - 1) * 100:+.1f} % |"
    curves = {arm: seeds["0"] for arm, seeds in read("pictures/decoder_4k.json").items()}
    for name, arm in (("full", "full"), ("LSH beside a window", "lsh beside a window")):
        start = read(f"measured/decoder_4k_start_{arm.split()[0]}.json")["bits_per_token"]
        curves[arm]["held_out"] = {"0": start} | curves[arm]["held_out"]
        held_out = " | ".join(f"{value:.3f}" for value in curves[arm]["held_out"].values())
        yield f"| {name} | {held_out} | {curves[arm]['step_seconds']:.0f} |"
    gaps = [
        f"{hashed - full:.3f}".lstrip("0")
        for full, hashed in zip(*(curve["held_out"].values() for curve in curves.values()), strict=True)
    ]
    yield f"hashing is {gaps[2]} bits/dim behind full attention, {gaps[1]} after five, {gaps[0]} before"


def budgets():
    rows = read("measured/decoder_budgets.json")["rows"]
    (full,) = (row["nats"] for row in rows if row["arm"] == "full")
    names = {
        "oracle": "oracle: the window's and the sinks' keys, and each head's best others",
        "Smart Bird, taught": "**Smart Bird, taught**, mean of 3 seeds",
        "LHA, taught": "LHA, taught, seed 1",
        "window": "window, sinks",
        "LHA": "LHA, random",
        "LSH": "LSH, one round",
        "Smart Bird": "Smart Bird, random",
        "window, layer 0 full": "window, sinks, layer 0 full",
    }
    for arm, name in names.items():
        cells = []
        for budget in ("96", "192", "384"):
            own = [row for row in rows if row["arm"] == f"{budget} {arm}"]
            nats = f"{statistics.mean(row['nats'] - full for row in own):.3f}".lstrip("0") if own else ""
            cells.append(f"{nats} ({statistics.mean(row['keys'] for row in own):.0f})" if own else "")
        yield f"{name} | {' | '.join(cells)} |".replace("  ", " ")
    taught = [[row["nats"] - full for row in rows if row["arm"] == f"{n} Smart Bird, taught"] for n in (384, 192)]
    least, most = (f"{bound(taught[0]):.3f}".lstrip("0") for bound in (min, max))
    yield f"within {least} to {most} nats of full attention"
    least, most = (f"{bound(taught[1]):.3f}".lstrip("0") for bound in (min, max))
    yield f"at {least} to {most} with 190 keys"


def passkeys():
    """Rows of what is found at equal keys; nats of each seed above full attention's."""
    names = {
        "full": "full",
        "192 Smart Bird, taught with facts": "**Smart Bird, taught further on texts that ask**",
        "192 Smart Bird, taught": "Smart Bird, taught",
        "192 LHA, taught": "LHA, taught (seed 1)",
        "192 window": "window, sinks",
    }
    rows = read("measured/decoder_passkey.json")["rows"]
    full = next(row["nats"] for row in rows if row["arm"] == "full" and row["trial"] is None)
    for arm, name in names.items():
        own = [row for row in rows if row["arm"] == arm]
        found = [row["found"] for row in own if row["trial"] is not None]
        texts = sorted((row for row in own if row["trial"] is None), key=lambda row: row["seed"])
        above = ", ".join(f"{row['nats'] - full:.3f}".lstrip("0") for row in texts) if arm != "full" else "0"
        yield f"| {name} | {statistics.mean(x['keys'] for x in texts):,.0f} | {above} | {sum(found)} of {len(found)} |"


@pytest.mark.parametrize("rows", [arms, budgets, passkeys, fine_tuned])
def test_figures_are_those_of_the_measured_files(rows):
    assert_shown("decoders.md", rows())
