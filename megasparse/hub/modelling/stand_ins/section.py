"""Sections of a configuration without pydantic: values that were checked before they were written are only held."""

import copy
from collections.abc import Callable
from typing import Any, ClassVar, get_args, get_type_hints

Rate, Positive, Count = float, int, int


def Field(default: Any = None, **rule: Any) -> Any:
    """The default of a key; rules are not checked."""
    return default


def model_validator(**when: Any) -> Callable[[Any], Any]:
    """A rule that is not checked."""
    return lambda rule: rule


class Section:
    """Keys with defaults: attributes of the class, in place of which an object has its own values.

    `model_fields` has the keys in the order of their definition, as pydantic's models have.
    """

    model_fields: ClassVar[dict[str, None]] = {}

    def __init_subclass__(cls) -> None:
        own = {key: None for key, kind in vars(cls).get("__annotations__", {}).items() if "ClassVar" not in str(kind)}
        cls.model_fields = {**cls.model_fields, **own}

    @classmethod
    def model_validate(cls, values: dict[str, Any]) -> "Section":
        """Raises ValueError for a key that this version does not know."""
        section, hints = cls(), get_type_hints(cls)
        for key, value in values.items():
            if key not in hints:
                raise ValueError(f"{cls.__name__} has no {key}: its code is of another version")
            kinds = (kind for kind in (hints[key], *get_args(hints[key])) if isinstance(kind, type))
            part = next((kind for kind in kinds if issubclass(kind, Section)), None)
            setattr(section, key, part.model_validate(value) if part and value is not None else value)
        return section

    def model_copy(self, *, update: dict[str, Any]) -> "Section":
        """Another one, with other values."""
        other = copy.copy(self)
        for key, value in update.items():
            setattr(other, key, value)
        return other
