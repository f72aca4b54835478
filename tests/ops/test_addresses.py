"""The fixture that checks addresses detects violations; all other kernel tests run under it."""

import pytest
import torch
import triton
import triton.language as tl

from megasparse.ops.kernels import INTERPRETED, launch


@triton.jit
def copy(x, out, count, MASKED: tl.constexpr, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    tl.store(out + i, tl.load(x + i, mask=(i < count) if MASKED else None), mask=i < count)


@pytest.mark.skipif(not INTERPRETED.value, reason="reads beyond a tensor")
def test_a_load_beyond_a_tensor_is_found():
    memory = torch.arange(64.0)
    x, out = memory[:5], torch.zeros(5)
    launch(copy, (1,), x=x, out=out, count=5, MASKED=True, SIZE=8)
    assert torch.equal(out, x)
    with pytest.raises(Exception, match="outside all tensors"):
        launch(copy, (1,), x=x, out=out, count=5, MASKED=False, SIZE=8)


@pytest.mark.skipif(not INTERPRETED.value, reason="writes beyond a tensor")
def test_a_store_beyond_a_tensor_is_found():
    memory = torch.zeros(64)
    with pytest.raises(Exception, match="outside all tensors"):
        launch(copy, (1,), x=torch.ones(8), out=memory[:5], count=8, MASKED=True, SIZE=8)
    assert (memory == 0).all()
