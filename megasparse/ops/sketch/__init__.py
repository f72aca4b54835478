"""Smart Bird's sketch: a narrow single-head attention, and the keys that every head samples from its weights."""

from megasparse.ops.sketch.eager import Noise, chosen_keys, sketched_attention

__all__ = ["Noise", "chosen_keys", "sketched_attention"]
