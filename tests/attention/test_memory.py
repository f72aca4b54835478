"""Memory grows with the length, not with its square, forward and backward, counted allocation by allocation."""

import pytest
import torch

import megasparse.attention.full as attention
from tests.helpers.models import CASES, SMALL, VARIANTS, Single, by_path, kind_of, randomise
from tests.helpers.operators import smaller_blocks
from tests.helpers.peak_memory import PeakMemory

LONG, PART = 2048, 1 / 8
"""Tokens, and the part of their usual size that blocks have, so that these many tokens fill several."""
QUADRATIC_TIME = ["smart_bird", "yoso expectation"]
"""They compare all pairs, a tile at a time: longer ones are among the soak tests."""
NOT_LINEAR = ["full", "full shared", "synthesizer"]
"""Baselines of quadratic memory; torch's kernel defines full attention's."""
LINEAR = [case for case in CASES if case[0] not in NOT_LINEAR and not case[0].startswith("smart_bird ")]


def peak(name: str, causal: bool, length: int, longest: int) -> PeakMemory:
    """One head of width 8, forward and backward, of a mechanism built for `longest` tokens."""
    kind = kind_of(name)
    wide = {"chunk": 64, "keys": 8, "stride": 128, "projected": 32, "features": 16, "hashes": 4, "code_bits": 4}
    settings = {key: wide[key] for key in {*SMALL.get(kind, {}), *VARIANTS.get(name, (kind, {}))[1]} & wide.keys()}
    single = Single(name, causal, 0.0, settings, max_length=longest, d_model=8, heads=1, positions={"kind": "none"})
    generator = randomise(single.mechanism)
    x = torch.randn(1, length, 8, generator=generator)
    q, k, v = (torch.randn(1, 1, length, 8, generator=generator).requires_grad_() for _ in range(3))
    with PeakMemory() as memory, smaller_blocks(PART):
        result = single(x, q, k, v, training=True)
        (result.out.sum() + (0 if result.auxiliary_loss is None else result.auxiliary_loss)).backward()
    return memory


def check(name: str, causal: bool, longest: int) -> None:
    half, whole = (peak(name, causal, length, longest) for length in (longest // 2, longest))
    print(
        f"{name}, {'causal' if causal else 'both'}: {half.peak / 1e6:.1f} MB at {longest // 2}, {whole.peak / 1e6:.1f}"
    )
    assert whole.peak < 2.2 * half.peak
    assert whole.largest < longest**2, "as many bytes as a mask of all pairs"


@by_path("name,causal", LINEAR)
def test_peak_memory_is_linear(name, causal):
    check(name, causal, LONG)


@pytest.mark.soak
@pytest.mark.parametrize("name,causal", [case for case in LINEAR if case[0] in QUADRATIC_TIME])
def test_peak_memory_is_linear_in_the_length(name, causal):
    check(name, causal, 16 * LONG)


def masks_of(length: int, device: str) -> dict[str, torch.Tensor]:
    """Two documents, and padding."""
    position = torch.arange(length, device=device)[None]
    return {"key_mask": position < length - 3, "segments": (position > length // 3).long()}


def full(name: str, length: int, device: str, dtype: torch.dtype) -> PeakMemory:
    single = Single(name, True, max_length=length, positions={"kind": "none"})
    leaves = [torch.ones(1, 2, length, 16, device=device, dtype=dtype).requires_grad_() for _ in range(3)]
    with PeakMemory() as memory:
        out = single(torch.empty(0), *leaves, **masks_of(length, device), tokens=torch.empty(0)).out
        out.backward(torch.ones_like(out))
    return memory


@pytest.mark.parametrize("name", ["full", "full shared"])
def test_full_attention_of_documents_has_no_mask_of_all_pairs(name, monkeypatch):
    """A CPU has some queries' rows at a time, backward included; a GPU, counted on the meta device, none."""
    monkeypatch.setattr(attention, "_MASK", 1 << 16)
    half, whole = (full(name, length, "cpu", torch.float32) for length in (1024, 2048))
    assert whole.peak < 2.2 * half.peak and whole.largest <= 4 << 16
    length = 65536
    largest = full(name, length, "meta", torch.bfloat16).largest
    assert largest <= 4 * 2 * length * 16, "no tensor is larger than a head's vectors in fp32"


def test_the_check_sees_a_mask_of_all_pairs():
    with PeakMemory() as memory:
        torch.ones(LONG, LONG, dtype=torch.bool)
    assert memory.largest >= LONG**2
