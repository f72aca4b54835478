"""The options of `megasparse plan`: GPUs by name, their number, and sizes in bytes; importable without torch."""

import re
from contextlib import suppress
from dataclasses import dataclass, replace

from pydantic import ByteSize, TypeAdapter, ValidationError

from megasparse.config.messages import show
from megasparse.config.schema import Config
from megasparse.errors import ConfigError
from megasparse.training.reporting import PEAK_TFLOPS

REACH = 0.49
"""Assumed fraction of the peak for matrix products and attention on an H100 or H200; 0.55 on an A100. Predictions are
within 20 % of published steps and within 10 % of measured steps of reformer_64k, hashed and full."""


@dataclass(frozen=True)
class Hardware:
    """One GPU: dense bf16 `peak` in FLOP/s, `memory` in bytes, `bandwidth` in bytes/s, and the fraction of the peak
    that products `reach`. host: bytes/s of a node's CPU memory. link: bytes/s between the two.
    """

    name: str
    peak: float
    memory: int = 80 * 10**9
    bandwidth: float = 2.04e12
    reach: float = 0.55
    host: float = 410e9
    link: float = 25e9


GPUS = {
    "A100": Hardware("A100", PEAK_TFLOPS["A100"] * 1e12),
    "H100": Hardware("H100", PEAK_TFLOPS["H100"] * 1e12, bandwidth=3.35e12, reach=REACH, host=614e9, link=50e9),
    "H200": Hardware("H200", PEAK_TFLOPS["H200"] * 1e12, 141 * 10**9, 4.8e12, REACH, 614e9, 50e9),
}
"""From NVIDIA's data sheets of SXM modules (A100: 80 GB); 16 channels of DDR4-3200 or DDR5-4800 per node; 80 % of
PCIe 4 or 5 with 16 lanes."""


def hardware(name: str, peak_tflops: float | None) -> Hardware:
    gpu = next((gpu for key, gpu in GPUS.items() if key in name.upper()), None)
    if gpu is None and peak_tflops is None:
        raise ConfigError(
            "--gpu", f"{show(name)} is not one of {', '.join(GPUS)}", "Also give --peak-tflops; the rest is an A100's"
        )
    gpu = gpu or replace(GPUS["A100"], name=name)
    return gpu if peak_tflops is None else replace(gpu, peak=peak_tflops * 1e12)


def parse_bytes(option: str, text: str) -> int:
    """Return the bytes of "80GiB" or "0.5TB"."""
    size = 0
    if re.fullmatch(r"\s*\d+(\.\d+)?\s*[A-Za-z]*[Bb]\s*", text):
        with suppress(ValidationError):
            size = TypeAdapter(ByteSize).validate_python(text)
    if size <= 0:
        problem = f"{show(text)} needs a unit" if re.fullmatch(r"[\s\d.]+", text) else f"{show(text)} is not a size"
        raise ConfigError(option, problem, "Write a number above 0 and a unit, such as 80GiB or 85.9GB")
    return size


def micro_batches(config: Config, gpus: int, per_node: int) -> int:
    """Return the micro-batches per rank and step. Raises ConfigError if `gpus` does not divide them."""
    training, sequence = config.training, config.parallel.sequence
    if gpus > per_node and gpus % per_node:
        hint = "Give a multiple of it, or another --gpus-per-node"
        raise ConfigError("--gpus", f"{gpus} is not a multiple of --gpus-per-node = {per_node}", hint)
    if gpus % sequence:
        problem = f"{gpus} is not a multiple of parallel.sequence = {sequence}"
        raise ConfigError("--gpus", problem, "Give a multiple of it, or change parallel.sequence")
    share = training.micro_batch * (gpus // sequence)
    if training.global_batch % share:
        problem = f"{show(gpus)} GPUs process {share} sequences at once, and training.global_batch = "
        problem += f"{training.global_batch} is not a multiple of {share}"
        most = training.global_batch // training.micro_batch * sequence
        hint = f"Use at most {most} GPUs, or raise training.global_batch or parallel.sequence"
        raise ConfigError("--gpus", problem, hint)
    return training.global_batch // share
