"""Assumptions about machines, and sizes as people write them."""

import re
from dataclasses import dataclass, replace

from megasparse.config.messages import show
from megasparse.errors import ConfigError
from megasparse.training.reporting.tracker import PEAK_TFLOPS

REACH = 0.4
"""Share of the peak that products and attention of an H100 are assumed to reach. With it, and the A100's .55, the
published steps of docs/scaling.md come out; none of our own was measured."""
UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12} | {
    f"{letter}iB": 1024**power for power, letter in enumerate("KMGT", start=1)
}


@dataclass(frozen=True)
class Hardware:
    """Speeds in FLOP/s and bytes/s, one way. Of one GPU: dense bf16 peak and that of fp32 (`single`), `link` to the
    other GPUs of its node, `pcie` to CPU memory, bytes of `memory` and their `bandwidth`, and the share of the peak
    that its products `reach`. Of a node, shared by its GPUs: `network` to other nodes, `nvme` to its drives, `host` to
    and from its CPU memory.
    """

    name: str
    peak: float
    link: float
    pcie: float
    network: float = 200e9
    nvme: float = 7e9
    memory: int = 80 * 10**9
    bandwidth: float = 2.04e12
    single: float = 19.5e12
    reach: float = 0.55
    host: float = 410e9


GPUS = {
    "A100": Hardware("A100", PEAK_TFLOPS["A100"] * 1e12, 300e9, 32e9),
    "H100": Hardware(
        "H100", PEAK_TFLOPS["H100"] * 1e12, 450e9, 64e9, 400e9, bandwidth=3.35e12, single=67e12, reach=REACH,
        host=614e9,
    ),
    "H200": Hardware(
        "H200", PEAK_TFLOPS["H200"] * 1e12, 450e9, 64e9, 400e9,
        memory=141 * 10**9, bandwidth=4.8e12, single=67e12, reach=REACH, host=614e9,
    ),
}  # fmt: skip
"""NVIDIA's data sheets of the SXM modules, the A100's of 80 GB: half of the NVLink and PCIe bandwidth that counts both
ways. Of their DGX nodes: 8 InfiniBand adapters, HDR of 200 Gb/s or NDR of 400 Gb/s; 16 channels of DDR4-3200 or
DDR5-4800. NVMe is one drive of PCIe 4."""


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
