"""Sections of a configuration without pydantic: values that were checked before they were written are only held."""

from typing import Any

Fraction, Positive, Count = float, int, int


def Field(default: Any = None, **rule: Any) -> Any:
    """The default of a key; rules are not checked."""
    return default


class Section:
    """Keys with defaults: attributes of the class, in place of which an object has its own values."""

    @classmethod
    def model_validate(cls, values: dict[str, Any]) -> "Section":
        """Raises ValueError for a key that this version does not know."""
        section = cls()
        for key, value in values.items():
            if not hasattr(cls, key):
                raise ValueError(f"{cls.__name__} has no {key}: its code is of another version")
            default = getattr(cls, key)
            own = type(default).model_validate(value) if isinstance(default, Section) else value
            setattr(section, key, own)
        return section
