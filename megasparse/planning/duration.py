"""Whether a run will take hours on a CPU: the arithmetic that it needs, and how fast matrices multiply here."""

import sys
import time
from collections.abc import Callable, Sequence

import torch

from megasparse.training.ranks import Ranks

SIDE = 768
"""Rows and columns of the matrices that are multiplied."""
SHARE = 0.3
"""Part of that speed which training is assumed to reach, as `plan.MFU`."""
LONG = 7200.0
"""Seconds from which on a run is worth a warning."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def product_speed(precision: str) -> float:
    """FLOPs a second of this process in a product of matrices, the best of three. precision: "fp32" or "bf16"."""
    matrix = torch.ones(SIDE, SIDE, dtype=DTYPES[precision])
    best = float("inf")
    for _ in range(3):
        began = time.perf_counter()
        matrix @ matrix
        best = min(best, time.perf_counter() - began)
    return 2.0 * SIDE**3 / best


def warn_if_long(flops: float, precision: str, changes: Sequence[str], ranks: Ranks) -> None:
    """Print what `long_run` says, on rank 0 of a run on CPUs. flops: of all ranks."""
    if (
        ranks.rank == 0
        and ranks.device.type == "cpu"
        and (warning := long_run(flops / ranks.world_size, precision, changes))
    ):
        print(warning, file=sys.stderr, flush=True)


def long_run(
    flops: float, precision: str, changes: Sequence[str], speed: Callable[[str], float] = product_speed
) -> str | None:
    """A line about a run that will take hours, and what would be quicker; None about a shorter one.

    flops: of one rank, for all steps. changes: what makes a run of this kind shorter. speed: of a
    precision, in FLOPs a second.
    """
    own = speed(precision)
    seconds = flops / (SHARE * own)
    if seconds < LONG:
        return None
    quicker = [*changes, "a GPU"]
    if precision == "bf16" and (gain := speed("fp32") / own) > 1.2:
        quicker.insert(0, f'training.precision="fp32", {gain:.1f} times as fast here')
    return (
        f"this run takes about {seconds / 3600:,.0f} hours on this machine: {flops:.1g} FLOPs a rank, at {SHARE:.0%} "
        f"of the {own / 1e9:,.0f} GFLOP/s of its matrix products in {precision}. Quicker: {'; '.join(quicker)}"
    )
