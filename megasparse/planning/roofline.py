"""The least time that a GPU could take for an attention mechanism: by its arithmetic, and by what it must move."""

from dataclasses import dataclass

import torch

from megasparse.attention.contract import Attention
from megasparse.attention.costs import Passes
from megasparse.planning.hardware import GPUS


@dataclass(frozen=True)
class Peaks:
    """Peaks of one device: dense FLOP/s in half precision and in IEEE fp32, bytes/s of its memory."""

    half: float
    single: float
    bandwidth: float

    def seconds(self, flops: float, moved: float, dtype: torch.dtype) -> float:
        peak = self.half if dtype in (torch.bfloat16, torch.float16) else self.single
        return max(flops / peak, moved / self.bandwidth)


PEAKS = {
    "A100-SXM4-80GB": Peaks(GPUS["A100"].peak, GPUS["A100"].single, GPUS["A100"].bandwidth),
    "H100 80GB HBM3": Peaks(GPUS["H100"].peak, GPUS["H100"].single, GPUS["H100"].bandwidth),
    "H200": Peaks(GPUS["H200"].peak, GPUS["H200"].single, GPUS["H200"].bandwidth),
}
"""By a part of the name that torch.cuda.get_device_name gives; NVIDIA's data sheets of the SXM modules."""


def peaks_of(device_name: str) -> Peaks | None:
    return next((peaks for part, peaks in PEAKS.items() if part in device_name), None)


def least_seconds(mechanism: Attention, length: int, batch: int, dtype: torch.dtype, peaks: Peaks) -> Passes | None:
    """Least time of attention of `batch` sequences, without its projections, in each pass: the larger of FLOPs/peak and
    bytes/bandwidth. None for a mechanism without kernels.

    Pairs are those that see each other, in buckets that are filled equally; see `Traffic` for what is moved.
    """
    operators = mechanism.operators(length, dtype.itemsize)
    if operators is None:
        return None
    tokens, parts = batch * length, operators.values()

    def seconds(direction: str) -> float:
        flops = tokens * sum(getattr(part.flops, direction) for part in parts)
        return peaks.seconds(flops, tokens * sum(getattr(part.moved, direction) for part in parts), dtype)

    return Passes(seconds("forward"), seconds("backward"))
