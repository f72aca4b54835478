"""In exported code operators run in blockwise torch: kernels stay in megasparse."""

from typing import Any, Literal

from torch import Tensor


def implementation(x: Tensor, *accepted: Any, **limits: Any) -> Literal["blockwise"]:
    return "blockwise"


def drop(*arguments: Any) -> Tensor:
    """What nobody calls, as `implementation` never says so."""
    raise NotImplementedError("dropout as a kernel")
