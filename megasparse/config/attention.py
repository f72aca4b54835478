"""The schema of `model.attention`: the mechanism of each layer, and a section for each mechanism.

A mechanism registers itself and its section with `@mechanism`, from inside or outside the package; the section becomes
a key of `model.attention`. Rules across mechanisms are in this file, rules of one mechanism in its section's `check`.
"""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeVar, get_args

from pydantic import BaseModel, Field
from pydantic.fields import FieldInfo

from megasparse.config.messages import show
from megasparse.config.section import Positive, Rate, Section
from megasparse.errors import ConfigError

if TYPE_CHECKING:
    from megasparse.config.schema import ModelConfig

Mechanism = TypeVar("Mechanism", bound=type)


class MechanismSection(Section):
    """Settings of one mechanism, and its properties that the checks of a configuration need."""

    bidirectional_only: ClassVar[str | None] = None
    """Reason why decoders cannot use it; None if they can."""
    causal_only: ClassVar[str | None] = None
    """Reason why encoders cannot use it; None if they can."""
    no_probabilities: ClassVar[bool] = False
    """True if it computes no softmax over keys, so that dropout of probabilities does not apply."""
    rounds_key: ClassVar[str | None] = None
    """Key of the hash rounds (YOSO: hashes) in training, fewer of which take less memory; None without rounds."""

    @property
    def rounds_in_evaluation(self) -> Any:
        """Hash rounds (YOSO: hashes) in evaluation and generation: the value of `evaluation_` + `rounds_key`, or the
        rounds of training if it is null or missing. None without rounds."""
        key = self.rounds_key
        return None if key is None else getattr(self, f"evaluation_{key}", None) or getattr(self, key)

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
        """Target of the mechanism's auxiliary objective: the token at each position, the label of each sequence, or
        the tokens of an answer; None without an objective."""
        return None

    def with_labels(self, labels: int) -> "MechanismSection":
        """Return the section for fine-tuning on sequences with this number of classes."""
        return self

    def check(self, key: str, model: "ModelConfig") -> None:
        """Raise ConfigError for the first rule that the settings break, beyond the types. key: the section's key."""


POSTPONE = False
"""True if `schema` is imported without the mechanisms, whose import takes a second, to check other keys first."""
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
        rebuild_schemas()
        return cls

    return register


def rebuild_schemas() -> None:
    """Rebuild `AttentionConfig` after its fields have changed, and all schemas that contain it."""
    kinds: Any = Literal[tuple(MECHANISMS)]
    split: Any = Annotated[dict[kinds, Positive], Field(min_length=1)]
    AttentionConfig.__pydantic_fields__["pattern"].annotation = list[kinds | split]  # type: ignore[assignment]
    rebuilt: dict[type[BaseModel], bool] = {}
    for schema in _subclasses(Section):
        _rebuild(schema, rebuilt)


def _rebuild(schema: type[BaseModel], rebuilt: dict[type[BaseModel], bool]) -> bool:
    """Rebuild a schema, nested schemas first. Return True if it contains `model.attention`."""
    if schema not in rebuilt:
        annotations = [field.annotation for field in schema.model_fields.values()]
        inside = [part for annotation in annotations for part in (annotation, *get_args(annotation))]
        sections = [part for part in inside if isinstance(part, type) and issubclass(part, Section)]
        rebuilt[schema] = any([_rebuild(part, rebuilt) for part in sections]) or schema is AttentionConfig
        if rebuilt[schema]:
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
    """Dropout of attention probabilities, after the softmax. Computed block by block, slower than the GPU kernels."""
    head_groups: Positive = 1
    """Number of groups of each mechanism's heads that attend one after another, backward included, to save memory.
    Losses do not change."""

    if TYPE_CHECKING:

        def __getattr__(self, kind: str) -> Any: ...


def heads_of_layer(model: "ModelConfig", layer: int) -> dict[str, int]:
    """Return mechanism -> number of heads for a layer, the first heads first.

    They are in registration order, because the keys of a JSON object are unordered and checkpoints sort them.
    """
    entry = model.attention.pattern[layer % len(model.attention.pattern)]
    if isinstance(entry, str):
        return {entry: model.heads}
    return {kind: entry[kind] for kind in MECHANISMS if kind in entry}


def layers_with(model: "ModelConfig", kind: str) -> int:
    """Return the number of layers with heads of this kind."""
    return sum(kind in heads_of_layer(model, layer) for layer in range(model.layers))


def kinds(model: "ModelConfig") -> list[str]:
    """Return the mechanisms of a model without duplicates, in the order of their first layers."""
    layers = range(min(model.layers, len(model.attention.pattern)))
    return list(dict.fromkeys(kind for layer in layers for kind in heads_of_layer(model, layer)))


def evaluation_rounds(model: "ModelConfig") -> dict[str, int]:
    """Return mechanism -> hash rounds (YOSO: hashes) in evaluation, for mechanisms of the model that hash."""
    rounds = {kind: getattr(model.attention, kind).rounds_in_evaluation for kind in kinds(model)}
    return {kind: number for kind, number in rounds.items() if number is not None}


def predicts(model: "ModelConfig", target: str) -> bool:
    """Return True if a mechanism of the model learns to predict this target, see `MechanismSection.predicts`."""
    return any(getattr(model.attention, kind).predicts == target for kind in kinds(model))


def check_attention(model: "ModelConfig") -> None:
    """Raise ConfigError for the first rule that the attention of one stack breaks."""
    for kind in kinds(model):
        getattr(model.attention, kind).check(f"model.attention.{kind}", model)
        if model.attention.dropout > 0.0 and getattr(model.attention, kind).no_probabilities:
            problem = f'{model.attention.dropout} is given, but "{kind}" computes no attention probabilities'
            raise ConfigError("model.attention.dropout", problem, "Set it to 0")


def check_heads(model: "ModelConfig") -> None:
    """Raise ConfigError for the first entry of the pattern that does not fit the stack's kind, number of heads, shared
    key heads or head groups.
    """
    if model.heads % (key_heads := model.key_heads or model.heads):
        problem = f"{key_heads} does not divide model.heads = {model.heads}"
        raise ConfigError("model.key_heads", problem, "Set it to a divisor, or to null")
    groups, shared = model.attention.head_groups, model.heads // key_heads
    for layer in range(len(model.attention.pattern)):
        split = heads_of_layer(model, layer)
        key = f"model.attention.pattern[{layer}]"
        if (total := sum(split.values())) != model.heads:
            problem = f"{split} has {total} heads, but model.heads = {model.heads}"
            raise ConfigError(key, problem, f"Make the numbers sum to {model.heads}")
        for kind, heads in split.items():
            settings = getattr(model.attention, kind)
            for stack, other, why, lacking in (
                ("decoder", "encoder", settings.bidirectional_only, "be causal"),
                ("encoder", "decoder", settings.causal_only, "see both ways"),
            ):
                if model.kind == stack and why:
                    hint = f'Choose another mechanism, or set model.kind to "{other}"'
                    raise ConfigError(key, f'"{kind}" cannot {lacking}: {why}', hint)
            if heads % shared:
                problem = f"{heads} heads of {kind} cannot be divided into groups of {shared} that share a key head"
                raise ConfigError(key, problem, f"Make it a multiple of {shared} (model.heads / model.key_heads)")
            if groups > 1:
                _check_groups(model, layer, kind, heads, shared)


def _check_groups(model: "ModelConfig", layer: int, kind: str, heads: int, shared: int) -> None:
    """Raise ConfigError if `attention.head_groups` does not divide the heads of a mechanism or its shared key heads."""
    key, groups, settings = "model.attention.head_groups", model.attention.head_groups, getattr(model.attention, kind)
    if settings.joined is not None:
        problem = f"{groups} groups, but the heads of {show(kind)} are not independent: {settings.joined}"
        raise ConfigError(key, problem, "Set it to 1, or choose another mechanism")
    if heads // settings.heads_together % groups:
        problem = f"{groups} groups cannot divide the {heads} heads of {show(kind)} in layer {layer} evenly"
        raise ConfigError(key, problem, "Set it to a divisor of the heads (or sketches) of every mechanism")
    if (size := heads // groups) % shared and shared % size:
        problem = f"groups of {size} heads split {shared} heads that share a key head (model.key_heads)"
        raise ConfigError(key, problem, f"Choose groups whose size is a divisor or a multiple of {shared}")


def check_targets(model: "ModelConfig", prefix: str, *targets: str) -> None:
    """Raise ConfigError for the first mechanism whose objective predicts none of the targets.

    prefix: key of the model's attention in the configuration.
    """
    for kind in kinds(model):
        objective = getattr(model.attention, kind).predicts
        if objective is not None and objective not in targets:
            problem = f'"{objective}" is not a target of this stack'
            raise ConfigError(f"{prefix}.{kind}.objective", problem, f'Set it to "{(*targets, "attention")[0]}"')
