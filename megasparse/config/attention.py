"""The schema of `model.attention`: the mechanism of each layer, and a section for each mechanism.

A mechanism registers itself and its section with `@mechanism`; the section becomes a key of `model.attention`. Rules of
one mechanism are in its section's `check`, rules across mechanisms in settings/checks.py.
"""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeVar, get_args

from pydantic import BaseModel, Field
from pydantic.fields import FieldInfo

from megasparse.config.section import Positive, Rate, Section

Mechanism = TypeVar("Mechanism", bound=type)


class MechanismSection(Section):
    """Settings of one mechanism, and its properties that the checks of a configuration need."""

    bidirectional_only: ClassVar[str | None] = None
    """Reason why decoders cannot use it; None if they can."""
    causal_only: ClassVar[str | None] = None
    """Reason why encoders cannot use it; None if they can."""
    no_probabilities: ClassVar[bool] = False
    """True if it computes no softmax over keys, to which dropout could apply."""

    def hash_rounds(self, training: bool) -> int | None:
        """Return the hash rounds (YOSO: hashes) per pass, in training or else in evaluation; None without rounds."""
        return None

    @property
    def joined(self) -> str | None:
        """Reason why groups of a layer's heads cannot attend one after another; None if they can."""
        return None

    @property
    def heads_together(self) -> int:
        """Number of neighbouring heads that choose their keys together and cannot be split between groups."""
        return 1

    @property
    def predicts(self) -> Literal["token", "pooled", "answer"] | None:
        """Target of the mechanism's auxiliary objective: the token at each position, the label of each sequence, or the
        tokens of an answer; None without an objective.
        """
        return None

    def with_labels(self, labels: int) -> "MechanismSection":
        """Return the section for fine-tuning on sequences with this number of classes."""
        return self

    def check(self, key: str, model: Any) -> None:
        """Raise ConfigError for the first rule that the settings break, beyond the types. key: the section's key.
        model: the ModelConfig that contains it.
        """


MECHANISMS: dict[str, Any] = {}
"""Name in the configuration -> the mechanism's class (attention/contract.py)."""


def mechanism(kind: str, section: type[MechanismSection]) -> Callable[[Mechanism], Mechanism]:
    """Register a class of attention mechanisms, built as `cls(section, spec)`, with the section of its settings.

    Args:
        kind: Name in `model.attention.pattern`, and key of the section in `model.attention`.
        section: Class of the settings; all of its keys have defaults.

    Raises:
        ValueError: The name belongs to another mechanism or key.

    Example:
        >>> @mechanism("mean", MeanSection)
        ... class MeanAttention(Attention): ...
    """
    if kind in AttentionConfig.model_fields:
        raise ValueError(f'model.attention already contains a key "{kind}": choose another name for the mechanism')

    def register(cls: Mechanism) -> Mechanism:
        MECHANISMS[kind] = cls
        AttentionConfig.__pydantic_fields__[kind] = FieldInfo(annotation=section, default=section())
        if _complete:
            rebuild_schemas()
        return cls

    return register


_complete = False
"""True once the mechanisms of the package are registered: each later one changes the schemas."""


def rebuild_schemas() -> None:
    """Add the registered mechanisms to `AttentionConfig`, and to all schemas in use that contain it."""
    global _complete
    _complete = True
    kinds: Any = Literal[tuple(MECHANISMS)]
    split: Any = Annotated[dict[kinds, Positive], Field(min_length=1)]
    AttentionConfig.__pydantic_fields__["pattern"].annotation = list[kinds | split]  # type: ignore[assignment]
    rebuilt: dict[type[BaseModel], bool] = {}
    for schema in _subclasses(Section):
        _rebuild(schema, rebuilt)


def _rebuild(schema: type[BaseModel], rebuilt: dict[type[BaseModel], bool]) -> bool:
    """Rebuild a schema in use, nested schemas first. Return True if it contains `model.attention`."""
    if schema not in rebuilt:
        annotations = [field.annotation for field in schema.model_fields.values()]
        inside = [part for annotation in annotations for part in (annotation, *get_args(annotation))]
        sections = [part for part in inside if isinstance(part, type(Section)) and issubclass(part, Section)]
        rebuilt[schema] = any([_rebuild(part, rebuilt) for part in sections]) or schema is AttentionConfig
        if rebuilt[schema] and schema.__pydantic_complete__:
            schema.model_rebuild(force=True)
    return rebuilt[schema]


def _subclasses(section: type[Section]) -> Iterator[type[Section]]:
    for child in section.__subclasses__():
        yield child
        yield from _subclasses(child)


class AttentionConfig(Section):
    """`model.attention`. Each registered mechanism adds a field with its name."""

    pattern: list[str | dict[str, int]] = Field(default=["local", "local", "lsh", "local"], min_length=1)
    """Attention of each layer, repeated over the depth. An entry is a mechanism, or the number of heads of several
    mechanisms, such as {"local": 4, "lha": 4}, in any order."""
    dropout: Rate = 0.0
    """Dropout of attention probabilities. Computed block by block, slower than the GPU kernels."""
    head_groups: Positive = 1
    """Number of groups of each mechanism's heads that attend one after another, backward included, to save memory."""

    if TYPE_CHECKING:

        def __getattr__(self, kind: str) -> Any: ...
