import pytest

from megasparse.ops.operator import VARIABLE


@pytest.fixture(params=["blockwise", "triton"])
def implementation(request, monkeypatch):
    """The two implementations of an operator that models run; kernels take no float64."""
    monkeypatch.setenv(VARIABLE, request.param)
    return request.param
