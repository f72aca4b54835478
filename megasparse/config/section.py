"""The base class of the schema's sections, and the types of their numbers."""

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from megasparse.config.removed import without_removed

Rate = Annotated[float, Field(ge=0.0, lt=1.0)]
Positive = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]
JSON_LIST = BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value)
"""Lets a field of a strict schema read its tuple from a list, the only notation that JSON has for it."""


class Section(BaseModel):
    """A part of the configuration: unknown keys are errors, values are not coerced, nothing changes after loading."""

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    @model_validator(mode="before")
    @classmethod
    def _drop_removed_keys(cls, values: Any) -> Any:
        return without_removed(cls, values) if isinstance(values, dict) else values
