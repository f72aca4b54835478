"""Time and memory of attention, heads in and heads out, beside its peers: a row per implementation and length."""

import math
import statistics
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from megasparse.benchmarks.attention import MECHANISMS, Case, crossover, measure, model_of
from megasparse.evaluation.outputs import write_json
from megasparse.planning.measure import MeasurementError, alone, machine

SEED = 0


@dataclass(frozen=True)
class Settings:
    """What is measured; `megasparse bench attention --help` explains each."""

    device: str
    mechanisms: list[str]
    lengths: list[int]
    heads: list[int]
    head_dim: list[int]
    rounds: int
    window: int
    dtype: str
    compare: list[str]
    repeat: int
    hashes: int = 32
    bidirectional: bool = False


def bench_attention(settings: Settings, command: str, json_file: Path | None = None) -> dict[str, Any]:
    """Measure everything. Returns all figures, which are also written to a file as they come in."""
    about = {"command": command, "machine": alone(machine, torch.device(settings.device)), "seed": SEED}
    rows: list[dict[str, Any]] = []
    found: dict[str, Any] = {}
    for row in measured(settings):
        rows.append(row)
        found = {**about, "settings": asdict(settings), **compared(rows, settings)}
        if json_file is not None:  # each time: what was measured is there even if the rest takes too long
            write_json(json_file, found)
    return found


def measured(settings: Settings) -> Iterator[dict[str, Any]]:
    """A row for each implementation and length as it is done. Lengths above one that ran out of memory are left out."""
    implementations = [*settings.compare, *settings.mechanisms]
    total = len(implementations) * len(settings.lengths) * len(settings.heads) * len(settings.head_dim)
    with tqdm(total=total, unit="measurement", disable=None) as progress:
        for heads in settings.heads:
            for dim in settings.head_dim:
                for name in implementations:
                    failed = None
                    for length in settings.lengths:
                        progress.set_description(f"{name}, {length:,} tokens")
                        row = {"implementation": name, "heads": heads, "head_dim": dim, "length": length}
                        found = {"error": failed} if failed else one(settings, name, heads, dim, length)
                        if "memory" in found.get("error", "") and not failed:
                            failed = f"not tried, after {length:,} tokens"
                        yield row | found
                        progress.update()


def one(settings: Settings, name: str, heads: int, dim: int, length: int) -> dict[str, Any]:
    batch, own = (heads // 8, 8) if heads % 8 == 0 else (1, heads)
    kind = MECHANISMS.get(name, "lsh")
    model = model_of(
        kind, length, own, dim, settings.rounds, settings.window, settings.hashes, not settings.bidirectional
    )
    return figures(Case(name, model, batch, settings.dtype, settings.device, settings.repeat, SEED))


def figures(case: Case) -> dict[str, Any]:
    """The figures of one measurement, or the error that it ended with."""
    try:
        found = alone(measure, case)
    except MeasurementError as error:
        return {"error": error.problem}
    fewer = f"{len(found.both)} runs" if len(found.both) < case.repeats else ""
    return {
        "forward": spread(found.forward),
        "forward_backward": spread(found.both),
        "extra_bytes": found.extra_bytes,
        "testing_bytes": found.testing_bytes,
        "kept_bytes": found.kept_bytes,
        "note": ", ".join(filter(None, [found.note, fewer])),
    }


def spread(seconds: list[float]) -> dict[str, Any]:
    return {"median": statistics.median(seconds), "min": min(seconds), "max": max(seconds), "seconds": seconds}


def compared(rows: list[dict[str, Any]], settings: Settings) -> dict[str, Any]:
    """The rows with their ratios to each peer at the same length (how much faster ours is, forward and backward, and
    its memory as a fraction of the peer's), and the crossovers with SDPA.
    """
    at = {(row["implementation"], row["heads"], row["head_dim"], row["length"]): row for row in rows}
    reported = []
    for row in rows:
        beside = {}
        for peer in settings.compare:
            other = at.get((peer, row["heads"], row["head_dim"], row["length"]), {"error": ""})
            if row["implementation"] in settings.mechanisms and not ("error" in row or "error" in other):
                faster = other["forward_backward"]["median"] / row["forward_backward"]["median"]
                beside[peer] = {"faster": faster, "memory": row["extra_bytes"] / max(1, other["extra_bytes"])}
        reported.append(row | {"beside": beside})
    crossovers = [
        {"implementation": name, "heads": heads, "head_dim": dim, "length": crossover(*sides)}
        for name in settings.mechanisms
        for heads in settings.heads
        for dim in settings.head_dim
        if all(sides := [times(rows, who, heads, dim) for who in (name, "sdpa")])
    ]
    return {"rows": reported, "crossovers": crossovers}


def times(rows: list[dict[str, Any]], name: str, heads: int, dim: int) -> dict[int, float]:
    """Seconds forward and backward by length, infinite where it failed."""
    mine = [row for row in rows if (row["implementation"], row["heads"], row["head_dim"]) == (name, heads, dim)]
    return {row["length"]: math.inf if "error" in row else row["forward_backward"]["median"] for row in mine}


def report(found: dict[str, Any], settings: Settings) -> Iterator[str]:
    """Markdown: a table for every number of heads and head dim, and where ours crosses SDPA."""
    about = found["machine"]
    yield f"`{found['command']}` on {about['device']}, torch {about['torch']}, {about['threads']} threads"
    for heads in settings.heads:
        for dim in settings.head_dim:
            yield ""
            seen = "both sides" if settings.bidirectional else "causal"
            yield (
                f"batch × heads {heads}, head dim {dim}, {settings.dtype}, {settings.rounds} rounds, M = "
                f"{settings.window}, {seen}: median (least to greatest) of {settings.repeat}"
            )
            yield ""
            yield from table(
                [row for row in found["rows"] if (row["heads"], row["head_dim"]) == (heads, dim)], settings
            )
            for line in found["crossovers"]:
                if (line["heads"], line["head_dim"]) == (heads, dim):
                    yield ""
                    yield crossover_line(line, settings.lengths)


def table(rows: list[dict[str, Any]], settings: Settings) -> Iterator[str]:
    heading = [
        "attention",
        "tokens",
        "forward, ms",
        "forward + backward, ms",
        "ns a token",
        "extra memory, GB",
        "in testing, GB",
        "kept, GB",
    ]
    heading += [f"faster than {peer} × / its memory ×" for peer in settings.compare]
    yield f"| {' | '.join(heading)} |"
    yield "|" + "---|" * len(heading)
    for row in rows:
        cells = [row["implementation"] + (f" ({row['note']})" if row.get("note") else ""), f"{row['length']:,}"]
        if "error" in row:
            cells += [row["error"].replace("|", "/"), *[""] * (len(heading) - 3)]
        else:
            both = row["forward_backward"]["median"]
            cells += [milliseconds(row["forward"]), milliseconds(row["forward_backward"])]
            cells += [f"{both / row['length'] * 1e9:,.0f}"]
            cells += [f"{row[f'{name}_bytes'] / 1e9:.3f}" for name in ("extra", "testing", "kept")]
            cells += [beside(row["beside"].get(peer)) for peer in settings.compare]
        yield f"| {' | '.join(cells)} |"


def milliseconds(times: dict[str, Any]) -> str:
    low, middle, high = (f"{1000 * times[key]:.4g}" for key in ("min", "median", "max"))
    return f"{middle} ({low} to {high})"


def beside(ratio: dict[str, float] | None) -> str:
    return "" if ratio is None else f"{ratio['faster']:.3g} / {ratio['memory']:.3g}"


def crossover_line(line: dict[str, Any], lengths: list[int]) -> str:
    name, length = line["implementation"], line["length"]
    if length is None:
        return f"{name} is not faster than SDPA at {lengths[-1]:,} tokens."
    more = " or fewer" if length == lengths[0] else ""
    return f"{name} is faster than SDPA, forward + backward, from {length:,} tokens{more} on."
