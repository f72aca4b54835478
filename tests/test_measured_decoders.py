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
    lora = "memory_smollm2_lora"
    for trained, file in (("all weights", "memory_smollm2"), ("adapters", lora), ("adapters, fp32", f"{lora}_fp32")):
        for row in read(f"measured/{file}.json")["rows"]:
            predicted, allocated = row["predicted"], row["allocated"]
            assert abs(predicted / allocated - 1) < 0.1
            sizes = f"{predicted / 1e9:.2f} GB | {allocated / 1e9:.2f} GB"
            yield f"| {trained} | {row['tokens']:,} | {sizes} | {(predicted / allocated - 1) * 100:+.1f} % |"
    for curves in (held_out("decoder_4k"), held_out("decoder_4k_adapters")):
        for name, (bits, seconds) in curves.items():
            yield f"| {name} | {' | '.join(f'{value:.3f}' for value in bits)} | {seconds:.0f} |"
    gaps = behind("decoder_4k")
    yield f"hashing is {gaps[2]} bits/dim behind full attention, {gaps[1]} after five, {gaps[0]} before"
    gaps = behind("decoder_4k_adapters")
    later = f"{', '.join(gaps[1:-1])} and {gaps[-1]} after 20, 40 and 60"
    yield f"LSH is {gaps[0]} bits/dim behind before the first step, {later}: "
    (_, full), (_, hashed) = held_out("decoder_4k_adapters").values()
    yield f"{1 - float(gaps[-1]) / float(gaps[0]):.0%} of what the change".replace("%", " %")
    yield f"({1 - hashed / full:.0%} less time)".replace("%", " %")


def held_out(stem):
    """Of either attention, before the first step and after: held-out bits/dim; and seconds of a step."""
    found = {}
    for name, arm in (("full", "full"), ("LSH beside a window", "lsh beside a window")):
        start = read(f"measured/{stem}_start_{arm.split()[0]}.json")["bits_per_token"]
        run = read(f"pictures/{stem}.json")[arm]["0"]
        found[name] = [start, *run["held_out"].values()], run["step_seconds"]
    return found


def behind(stem):
    """How far hashed attention is behind full attention, before the first step and after."""
    (full, _), (hashed, _) = held_out(stem).values()
    return [f"{h - f:.3f}".lstrip("0") for f, h in zip(full, hashed, strict=True)]


def budgets():
    rows = read("measured/decoder_budgets.json")["rows"]
    (full,) = (row["nats"] for row in rows if row["arm"] == "full")
    names = {
        "oracle": "oracle: the window's and the sinks' keys, and each head's best others",
        "Smart Bird, taught": "**Smart Bird, taught**, mean of 3 seeds",
        "LHA, taught": "LHA, taught (at 192 keys 3 seeds)",
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
    one, zero, two = (
        next(row for row in rows if (row["arm"], row["seed"]) == ("192 LHA, taught", n)) for n in (1, 0, 2)
    )
    lha = [f"{row['nats'] - full:.3f}".lstrip("0") for row in (one, zero, two)]
    yield f"{lha[0]}, {lha[1]} and {lha[2]} with seeds 1, 0 and 2"


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
