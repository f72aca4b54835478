"""Smart Bird's sketch: a narrow single-head attention, and the keys that every head samples from its weights."""

from megasparse.ops.sketch.draws import Noise
from megasparse.ops.sketch.operator import chosen_keys, exact_projection, sketched_attention
from megasparse.ops.sketch.specification import KeyChoiceSpec

__all__ = ["KeyChoiceSpec", "Noise", "chosen_keys", "exact_projection", "sketched_attention"]
