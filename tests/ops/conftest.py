import numpy as np
import pytest
from triton.runtime.interpreter import InterpreterBuilder

from megasparse.ops.kernels import INTERPRETED, observed
from megasparse.ops.operator import VARIABLE


@pytest.fixture(params=["blockwise", "triton"])
def implementation(request, monkeypatch):
    """The two implementations of an operator that models run; kernels take no float64."""
    monkeypatch.setenv(VARIABLE, request.param)
    return request.param


@pytest.fixture
def kernels(monkeypatch):
    monkeypatch.setenv(VARIABLE, "triton")


@pytest.fixture(autouse=True)
def checked_addresses(monkeypatch):
    """Fail a kernel in the interpreter whose load or store leaves the tensors that it is given: a GPU may not notice.

    An address in another tensor of the same launch is not found."""
    if not INTERPRETED.value:
        yield
        return
    ranges = []  # first addresses and ends of the tensors of the running kernel, in order

    def start(launch):
        tensors = [x for x in launch.arguments if hasattr(x, "data_ptr") and x.numel() and not x.is_meta]
        pairs = sorted((x.data_ptr(), x.data_ptr() + extent(x)) for x in tensors)
        if pairs:
            starts, ends = np.array(pairs, dtype=np.uint64).T
            ranges[:] = starts, np.maximum.accumulate(ends)
        try:
            launch.start()
        finally:
            ranges.clear()

    def check(pointers, mask):
        if ranges:
            starts, ends = ranges
            addresses = pointers.data[mask.data.astype(bool)].astype(np.uint64)
            number = np.searchsorted(starts, addresses, side="right") - 1
            size = np.uint64(max(1, pointers.get_element_ty().primitive_bitwidth // 8))
            assert (number >= 0).all() and (addresses + size <= ends[number]).all(), "an address outside all tensors"

    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store

    def checked_load(builder, pointers, mask, *others):
        check(pointers, mask)
        return load(builder, pointers, mask, *others)

    def checked_store(builder, pointers, value, mask, *others):
        check(pointers, mask)
        return store(builder, pointers, value, mask, *others)

    monkeypatch.setattr(InterpreterBuilder, "create_masked_load", checked_load)
    monkeypatch.setattr(InterpreterBuilder, "create_masked_store", checked_store)
    with observed(start):
        yield


def extent(x):
    """Return the bytes from the first to the last element of x."""
    return (1 + sum((n - 1) * abs(step) for n, step in zip(x.shape, x.stride(), strict=True))) * x.element_size()
