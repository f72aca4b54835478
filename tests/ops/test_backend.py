import pytest
import torch

from megasparse.errors import ConfigError
from megasparse.ops.backend import implementation


def test_a_cpu_runs_blockwise_torch_unless_another_is_forced(monkeypatch):
    monkeypatch.delenv("MEGASPARSE_OPS", raising=False)
    x = torch.zeros(1, 1, 4, 64)
    assert implementation(x) == "blockwise"
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    for name in ("reference", "blockwise", "triton"):
        monkeypatch.setenv("MEGASPARSE_OPS", name)
        assert implementation(x) == name


@pytest.mark.parametrize(
    ("value", "x", "said"),
    [
        ("cuda", torch.zeros(4, 64), "'cuda' is no implementation. Set reference, blockwise or triton"),
        ("triton", torch.zeros(4, 64, dtype=torch.float64), "not float64 of 64"),
        ("triton", torch.zeros(4, 257), "not float32 of 257"),
    ],
)
def test_what_cannot_be_forced_is_refused(value, x, said, monkeypatch):
    monkeypatch.setenv("MEGASPARSE_OPS", value)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(ConfigError, match=said):
        implementation(x)


def test_kernels_on_a_cpu_need_the_interpreter(monkeypatch):
    monkeypatch.setenv("MEGASPARSE_OPS", "triton")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ConfigError, match="TRITON_INTERPRET=1"):
        implementation(torch.zeros(4, 64))
