"""Activation checkpointing without fairscale: there is none, all activations are stored."""

from typing import Any


def checkpoint_wrapper(module: Any, offload_to_cpu: bool = False) -> Any:
    return module
