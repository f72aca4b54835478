import pytest
import torch

from megasparse.ops.counting_sort import counting_sort
from tests.helpers.definitions import counting_sort as defined
from tests.helpers.operators import DEVICE


def keys(rows, length, bits, dtype=torch.int16):
    generator = torch.Generator().manual_seed(length + bits)
    return torch.randint(0, 1 << bits, (rows, length), generator=generator).to(DEVICE, dtype)


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize(
    "rows,length,bits,dtype",
    [
        (2, 300, 3, torch.int16),
        (1, 1200, 8, torch.int16),  # two tiles
        pytest.param(1, 4200, 11, torch.int16, marks=pytest.mark.kernels),  # one pass, two wide tiles
        pytest.param(1, 40, 31, torch.int32, marks=pytest.mark.kernels),  # three passes
        (1, 200, 12, torch.int16),  # two passes
        (2, 130, 15, torch.int32),
        (3, 1, 1, torch.int32),
        (2, 0, 4, torch.int16),
    ],
)
def test_order_is_the_definition(rows, length, bits, dtype):
    x = keys(rows, length, bits, dtype)
    ordered = torch.empty_like(x)
    order = counting_sort(x, bits, ordered)
    assert order.dtype == torch.int32 and torch.equal(order, defined(x, bits))
    assert torch.equal(ordered, x.sort().values) and torch.equal(counting_sort(x, bits), order)
    assert torch.equal(counting_sort(x, bits, ordered, reverse=True), order.flip(-1))
    assert torch.equal(ordered, x.sort(descending=True).values)


@pytest.mark.usefixtures("implementation")
def test_equal_keys_keep_their_order_and_strided_keys_are_read_right():
    x = keys(300, 2, 2).mT  # (2, 300), one column after the other in memory
    assert torch.equal(counting_sort(x, 2), defined(x, 2))
    same = torch.full((1, 300), 3, dtype=torch.int16, device=DEVICE)
    assert torch.equal(counting_sort(same, 2), torch.arange(300, dtype=torch.int32, device=DEVICE)[None])


@pytest.mark.kernels
@pytest.mark.parametrize("length", [1, 17, 100, 1024, 1025, 3000])
@pytest.mark.parametrize("bits", [1, 4, 8, 11, 17])
def test_kernels_at_every_length_and_number_of_passes(length, bits, monkeypatch):
    monkeypatch.setenv("MEGASPARSE_OPS", "triton")
    x = keys(2, length, bits, torch.int32)
    assert torch.equal(counting_sort(x, bits), defined(x, bits))
    few = x % 3
    assert torch.equal(counting_sort(few, bits), defined(few, bits))
