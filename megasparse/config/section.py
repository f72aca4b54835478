"""The base class of the schema's sections, and the types of their numbers."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Rate = Annotated[float, Field(ge=0.0, lt=1.0)]
Positive = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]


class Section(BaseModel):
    """A part of the configuration: unknown keys are errors, values are not coerced, nothing changes after loading."""

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, allow_inf_nan=False, use_attribute_docstrings=True
    )
