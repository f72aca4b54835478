from importlib import import_module

import pytest
import torch

from megasparse.errors import ConfigError
from megasparse.ops.backend import VARIABLE, implementation
from tests.ops.test_autocast import HEADS, made


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


@pytest.mark.parametrize("forced", ["reference", "blockwise", "triton"])
@pytest.mark.parametrize(
    "case,operator",
    [
        ("bucketed", "bucketed_attention.bucketed_attention"),
        ("bucketed, own codes", "bucketed_attention.bucketed_attention"),
        ("cluster", "cluster_attention.cluster_attention"),
        ("gathered", "gathered_attention.gathered_attention"),
        ("hash tables", "hash_table_attention.hash_table_attention"),
        ("relative local", "local_attention.relative_local_attention"),
    ],
)
def test_an_operator_runs_the_implementation_that_is_forced(case, operator, forced, monkeypatch):
    monkeypatch.setenv(VARIABLE, forced)
    heads = [made(1, 2, 24, 16) for _ in range(3)]
    expected = HEADS[case](*heads)
    package, name = operator.split(".")
    module = import_module(f"megasparse.ops.{package}.{'gpu' if forced == 'triton' else forced}")
    own, calls = getattr(module, name), []
    monkeypatch.setattr(module, name, lambda *x, **named: calls.append(1) or own(*x, **named))
    for a, b in zip(HEADS[case](*heads), expected, strict=True):
        assert torch.equal(a, b)
    assert calls == [1]
