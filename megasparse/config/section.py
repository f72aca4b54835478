"""The base class of the schema's sections, the types of their numbers, and the removed keys of earlier releases.

A checkpoint stores its whole configuration, so old keys must still load. A row of DROPPED drops a key whose value
requests the current behaviour; with any other value the key is unknown.
"""

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from typing_extensions import Self

Rate = Annotated[float, Field(ge=0.0, lt=1.0)]
LARGEST = 2**31 - 1
"""Largest whole number: the limit of tensor dimensions and positions."""
Positive = Annotated[int, Field(ge=1, le=LARGEST)]
Count = Annotated[int, Field(ge=0, le=LARGEST)]
Location = Annotated[str, Field(min_length=1)]  # path or URL
JSON_LIST = BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value)
"""Lets a tuple field of a strict schema accept a list, because JSON does not distinguish them."""

ANY = object()
"""Any value of the key is accepted, because it does not affect the current behaviour."""

DROPPED: dict[str, Any] = {
    "YOSOAttentionConfig.normalization": "length",
    "LHAAttentionConfig.samples": 256,
    "LHAAttentionConfig.sampled_keys": 1024,
    "LHAAttentionConfig.weight": 0.05,
    "SmartBirdAttentionConfig.weight": 1.0,
    "SentenceOrderConfig.weight": 1.0,
    "AttentionConfig.full_below": None,
    "AttentionConfig.output_dropout": None,
    "SourceConfig.cross_attention": "full",
    "ModelConfig.residual_bits": None,
    "DataConfig.prefetch": ANY,
    "TrainingConfig.max_skipped_steps": 20,
    "TrainingConfig.skip_loss_spikes": False,
    "LoggingConfig.profile_steps": None,
    "LoggingConfig.peak_tflops": ANY,
    "GenerationConfig.length_penalty": 0.6,
    "RecommendationConfig.negatives": 4,
    "TaskConfig.max_skipped": 0.01,
    "RotaryScalingConfig.low_frequency": 1.0,
    "RotaryScalingConfig.high_frequency": 4.0,
    "RotaryScalingConfig.fast": 32.0,
    "RotaryScalingConfig.slow": 1.0,
    "DataConfig.split": "train",
    "EvaluationConfig.split": "validation",
    "DataConfig.max_damaged": 0,
    "RunConfig.corruption_check_every": 0,
}
""""Class.key" of the schema -> accepted value, or ANY."""


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

    def changed(self, **changes: Any) -> Self:
        """Return a copy with other values, not validated. The changes of a section may be a dictionary."""
        for name, value in changes.items():
            if isinstance(value, dict) and isinstance(section := getattr(self, name), Section):
                changes[name] = section.changed(**value)
        return self.model_copy(update=changes)

    @model_validator(mode="before")
    @classmethod
    def _drop_old_keys(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        names = [base.__name__ for base in cls.__mro__]
        accepted = {key: DROPPED[f"{name}.{key}"] for name in names for key in values if f"{name}.{key}" in DROPPED}
        return {key: value for key, value in values.items() if accepted.get(key, values) not in (ANY, value)}
