"""The compressors' figures against the command-line tools."""

import random
import shutil
import subprocess
import zlib
from pathlib import Path

import pytest
import torch

from megasparse.evaluation.compress import bits_per_byte, gzip_size, xz_size

TEXT = b"".join(sorted(path.read_bytes() for path in Path(torch.__file__).parent.glob("nn/**/*.py")))[:1_500_000]


def by_tool(*command: str) -> int:
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not installed")
    return len(subprocess.run(command, input=TEXT, capture_output=True, check=True).stdout)


def pieces(size: int) -> list[bytes]:
    return [TEXT[i : i + size] for i in range(0, len(TEXT), size)]


@pytest.mark.skipif("ng" in zlib.ZLIB_RUNTIME_VERSION, reason="zlib-ng searches for matches in its own way")
def test_gzip_is_the_tool_to_a_ten_thousandth():
    assert gzip_size(pieces(777_777)) == pytest.approx(by_tool("gzip", "-9", "-n", "-c"), rel=1e-4)


def test_xz_is_the_tool():
    assert xz_size(pieces(777_777)) == pytest.approx(by_tool("xz", "-9", "-T1", "-c"), abs=16)


def test_xz_sees_far_back():
    """What repeats after 9 MB is found again with the 64 MiB dictionary of -9, and not with the 8 MiB of -6."""
    block = random.Random(0).randbytes(50_000)
    assert xz_size([block, bytes(9_000_000), block]) < 60_000


def test_bits_per_byte_of_a_split_and_of_its_beginning():
    class Stream:
        tokens = 300_000

        def read(self, start: int, stop: int) -> torch.Tensor:
            return torch.frombuffer(bytearray(TEXT[start:stop]), dtype=torch.uint8).long()

    found = bits_per_byte(Stream())
    assert found == {"gzip": 8 * gzip_size([TEXT[:300_000]]) / 300_000, "xz": 8 * xz_size([TEXT[:300_000]]) / 300_000}
    assert bits_per_byte(Stream(), limit=1000)["gzip"] == 8 * gzip_size([TEXT[:1000]]) / 1000
