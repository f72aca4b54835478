"""Layer normalisation, with the conversion to the dtype of what reads it."""

from megasparse.ops.layer_norm.operator import layer_norm

__all__ = ["layer_norm"]
