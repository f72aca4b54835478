"""The base class of the schema's sections, the types of their numbers, and the removed keys of earlier releases.

A checkpoint stores its whole configuration, so old keys must still load. A row of REMOVED drops a key whose value
requests the current behaviour; any other value is an error with the row's hint.
"""

import json
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

Rate = Annotated[float, Field(ge=0.0, lt=1.0)]
Positive = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]
Location = Annotated[str, Field(min_length=1)]  # path or URL
JSON_LIST = BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value)
"""Lets a tuple field of a strict schema accept a list, because JSON does not distinguish them."""

ANY = object()
"""Any value of the key is accepted, because it does not affect the current behaviour."""

REMOVED: dict[str, tuple[Any, str]] = {
    "YOSOAttentionConfig.backward": ("auto", "The cheaper way is taken: remove the key"),
    "SMYRFAttentionConfig.evaluation_rounds": (None, "Evaluation takes `rounds`: remove the key"),
    "YOSOAttentionConfig.normalization": ("length", "Outputs are scaled to length 1, as in the paper: remove the key"),
    "LHAAttentionConfig.features": (ANY, "Remove the key"),
    "LHAAttentionConfig.samples": (256, "256 queries per step are sampled: remove the key"),
    "LHAAttentionConfig.sampled_keys": (1024, "1,024 keys per document are sampled: remove the key"),
    "LHAAttentionConfig.weight": (0.05, "The weight is 0.05, as in the paper: remove the key"),
    "SmartBirdAttentionConfig.weight": (1.0, "The sketch's objective has weight 1: remove the key"),
    "SentenceOrderConfig.weight": (1.0, "The order's nats have weight 1: remove the key"),
    "AttentionConfig.full_below": (None, 'Set the pattern to "full", with full.shared_qk for lsh, and remove the key'),
    "AttentionConfig.output_dropout": (None, "Attention's output has `model.dropout`: remove the key"),
    "LHAAttentionConfig.visible_utility": (False, "The utility counts all keys, as in the paper: remove the key"),
    "ModelConfig.embedding_once": (
        lambda model: model.get("kind") == "encoder_decoder" and model.get("blocks", "reversible") == "reversible",
        "It is true in encoder–decoders of reversible blocks, false in all others: remove the key",
    ),
    "SourceConfig.cross_attention": ("full", "Every target token attends to every source token: remove the key"),
    "ModelConfig.residual_bits": (None, "Reversible streams are floating-point numbers: remove the key"),
    "DataConfig.prefetch": (ANY, "Remove the key"),
    "TrainingConfig.max_skipped_steps": (20, "A run stops after 20 skipped steps in a row: remove the key"),
    "TrainingConfig.skip_loss_spikes": (False, "Loss spikes are reported and applied: remove the key"),
    "LoggingConfig.profile_steps": (None, "SIGUSR2 to a rank's process traces its next 3 steps: remove the key"),
    "LoggingConfig.peak_tflops": (ANY, "Remove the key"),
    "GenerationConfig.length_penalty": (0.6, "The exponent is 0.6, as in the paper: remove the key"),
    "RecommendationConfig.negatives": (4, "Four negatives are drawn, as in the paper: remove the key"),
    "TaskConfig.max_skipped": (0.01, "1% of a file's rows may be malformed: remove the key"),
    "RotaryScalingConfig.low_frequency": (1.0, "It is 1, as in Llama 3: remove the key"),
    "RotaryScalingConfig.high_frequency": (4.0, "It is 4, as in Llama 3: remove the key"),
    "RotaryScalingConfig.fast": (32.0, "It is 32, as in the paper: remove the key"),
    "RotaryScalingConfig.slow": (1.0, "It is 1, as in the paper: remove the key"),
    "DataConfig.split": ("train", 'Training reads the split "train": name it so, and remove the key'),
    "EvaluationConfig.split": ("validation", 'Runs score "validation"; evaluate has --split: remove the key'),
    "DataConfig.max_damaged": (0, "A damaged shard is an error that names it: remove the key"),
    "RunConfig.corruption_check_every": (0, "The check for silent corruption was removed: remove the key"),
}
""""Class.key" of the schema -> (accepted value, hint for other values). The accepted value is a value, a tuple of
several, a function of the section's values that returns one, or ANY; for a whole section it is ANY or null."""

REMOVED_VALUES: dict[str, dict[Any, str]] = {
    "LHAAttentionConfig.utility": dict.fromkeys(("features", "exact"), 'Set it to "sampled"')
}
""""Class.key" of a current key -> removed value -> hint."""


def removed_error(key: str, value: Any, hint: str) -> PydanticCustomError:
    """Return the error of a removed key or value, which messages.py turns into a ConfigError."""
    message = "{key}: {text} was removed from megasparse. {hint}"
    text = json.dumps(value, default=str)[:80]
    return PydanticCustomError("removed", message, {"key": key, "value": value, "text": text, "hint": hint})


class Section(BaseModel):
    """Base class of the sections: unknown keys are errors, values are not coerced, instances are immutable."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        frozen=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        defer_build=True,  # until its first use, when the attention mechanisms have added their sections
    )

    @model_validator(mode="before")
    @classmethod
    def _drop_removed_keys(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        remaining = dict(values)
        for key, value in values.items():
            for name in (base.__name__ for base in cls.__mro__):
                accepted, hint = REMOVED.get(f"{name}.{key}", (None, ""))
                if hint:
                    if callable(accepted):
                        accepted = accepted(values)
                    if accepted is not ANY and value not in (accepted if isinstance(accepted, tuple) else (accepted,)):
                        raise removed_error(key, value, hint)
                    del remaining[key]
                lost = REMOVED_VALUES.get(f"{name}.{key}", {})
                if isinstance(value, str | int | float) and value in lost:
                    raise removed_error(key, value, lost[value])
        return remaining
