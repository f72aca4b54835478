"""The least time that a GPU could take for an attention mechanism: by its arithmetic, and by what it must move."""

import torch

from megasparse.attention.contract import Attention
from megasparse.attention.costs import Passes
from megasparse.planning.hardware import GPUS, Hardware

PEAKS = {"A100-SXM4-80GB": GPUS["A100"], "H100 80GB HBM3": GPUS["H100"], "H200": GPUS["H200"]}
"""By a part of the name that torch.cuda.get_device_name gives; NVIDIA's data sheets of the SXM modules."""


def peaks_of(device_name: str) -> Hardware | None:
    return next((peaks for part, peaks in PEAKS.items() if part in device_name), None)


def least_seconds(mechanism: Attention, length: int, batch: int, dtype: torch.dtype, peaks: Hardware) -> Passes | None:
    """Least time of attention of `batch` sequences, without its projections, in each pass: the larger of FLOPs/peak and
    bytes/bandwidth. None for a mechanism without kernels.

    Pairs are those that see each other, in buckets that are filled equally; see `Traffic` for what is moved.
    """
    operators = mechanism.operators(length, dtype.itemsize)
    if operators is None:
        return None
    tokens, parts = batch * length, operators.values()
    peak = peaks.peak if dtype in (torch.bfloat16, torch.float16) else peaks.single

    def seconds(direction: str) -> float:
        flops = tokens * sum(getattr(part.flops, direction) for part in parts)
        return max(flops / peak, tokens * sum(getattr(part.moved, direction) for part in parts) / peaks.bandwidth)

    return Passes(seconds("forward"), seconds("backward"))
