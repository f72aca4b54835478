"""Assumptions about machines, and sizes as people write them."""

import re
from dataclasses import dataclass, replace

from megasparse.config.messages import show
from megasparse.errors import ConfigError
from megasparse.training.reporting.monitor import PEAK_TFLOPS

UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12} | {
    f"{letter}iB": 1024**power for power, letter in enumerate("KMGT", start=1)
}


@dataclass(frozen=True)
class Hardware:
    """Speeds in FLOP/s and bytes/s, one way. Of one GPU: dense bf16 peak, `link` to the other GPUs of its node, `pcie`
    to CPU memory. Of a node, shared by its GPUs: `network` to other nodes, `nvme` to its drives.
    """

    name: str
    peak: float
    link: float
    pcie: float
    network: float = 200e9
    nvme: float = 7e9


GPUS = {
    "A100": Hardware("A100", PEAK_TFLOPS["A100"] * 1e12, 300e9, 32e9),
    "H100": Hardware("H100", PEAK_TFLOPS["H100"] * 1e12, 450e9, 64e9),
    "H200": Hardware("H200", PEAK_TFLOPS["H200"] * 1e12, 450e9, 64e9),
}
"""NVIDIA's data sheets of the SXM modules: half of the NVLink and PCIe bandwidth that counts both ways. The network is
8 HDR InfiniBand adapters of 200 Gb/s a node, NVMe one drive of PCIe 4."""


def hardware(name: str, peak_tflops: float | None) -> Hardware:
    """The hardware of a name. Raises ConfigError for an unknown GPU without a given peak."""
    known = next((gpu for key, gpu in GPUS.items() if key in name.upper()), None)
    if known is None and peak_tflops is None:
        problem = f"{show(name)} is not one of {', '.join(GPUS)}"
        raise ConfigError("--gpu", problem, "Give --peak-tflops too; its links are taken to be those of an A100")
    found = known or replace(GPUS["A100"], name=name)
    return found if peak_tflops is None else replace(found, peak=peak_tflops * 1e12)


def parse_bytes(option: str, text: str) -> int:
    """The bytes of "80GiB" or "0.5TB". Raises ConfigError for a size without a known unit, or not above 0."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?)\s*([A-Za-z]*)\s*", text)
    units = {unit.lower(): size for unit, size in UNITS.items()}
    number = float(match[1]) if match else 0.0
    if match is None or match[2].lower() not in units or number <= 0:
        problem = f"{show(text)} is no size with a unit" if match is None or match[2] else f"{show(text)} has no unit"
        raise ConfigError(option, problem, "Write a number above 0 and a unit, such as 80GiB or 85.9GB")
    return int(number * units[match[2].lower()])


def gigabytes(size: float) -> str:
    return f"{size / 1e9:,.2f} GB" if size >= 1e7 else f"{size / 1e6:,.3f} MB"
