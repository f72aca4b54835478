"""The schema of `model.attention`: which layer has which mechanism, and a section for each mechanism.

A mechanism registers itself and its section by `@mechanism`, from inside the package or from outside; its section is
then a key of `model.attention` like any other. The rules that mechanisms keep together are here, those of a single one
in its section's `check`.
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
    """Settings of one mechanism, and what the checks of a configuration have to know of it."""

    bidirectional_only: ClassVar[str | None] = None
    """Why decoders cannot have it, or None where they can."""
    causal_only: ClassVar[str | None] = None
    """Why encoders cannot have it, or None where they can."""
    no_probabilities: ClassVar[bool] = False
    """True if it forms no softmax over keys, so that there are no probabilities to drop."""
    rounds_key: ClassVar[str | None] = None
    """The key that holds the hash rounds (YOSO: hashes) of training, fewer of which take less memory; None where there
    are none."""

    @property
    def rounds_in_evaluation(self) -> Any:
        """Hash rounds (YOSO: hashes) in evaluation and generation: those of the key `evaluation_`
        and `rounds_key`, or, where it is null or missing, those of training. None where there are none."""
        key = self.rounds_key
        return None if key is None else getattr(self, f"evaluation_{key}", None) or getattr(self, key)

    @property
    def joined(self) -> str | None:
        """Why groups of a layer's heads cannot attend one after another, or None where they can."""
        return None

    @property
    def heads_together(self) -> int:
        """Number of neighbouring heads that choose their keys together, so that no group may part them."""
        return 1

    @property
    def predicts(self) -> Literal["token", "pooled", "answer"] | None:
        """Target of an objective of the mechanism's own: a token at each position, a label of each sequence, or
        the tokens of an answer; None without such an objective."""
        return None

    def with_labels(self, labels: int) -> "MechanismSection":
        """Return the section for fine-tuning on sequences of so many classes."""
        return self

    def check(self, key: str, model: "ModelConfig") -> None:
        """Raise ConfigError for the first rule that the settings break, beyond the types. key: of the section."""


MECHANISMS: dict[str, Any] = {}
"""Every mechanism's class (attention/contract.py) by the name that a configuration gives it."""


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
        raise ValueError(f'model.attention has a key "{kind}" already: choose another name for the mechanism')

    def register(cls: Mechanism) -> Mechanism:
        MECHANISMS[kind] = cls
        AttentionConfig.__pydantic_fields__[kind] = FieldInfo(annotation=section, default=section())
        rebuild_schemas()
        return cls

    return register


def rebuild_schemas() -> None:
    """Rebuild `AttentionConfig`, whose fields have changed, and all schemas that contain it."""
    kinds: Any = Literal[tuple(MECHANISMS)]
    split: Any = Annotated[dict[kinds, Positive], Field(min_length=1)]
    AttentionConfig.__pydantic_fields__["pattern"].annotation = list[kinds | split]  # type: ignore[assignment]
    rebuilt: dict[type[BaseModel], bool] = {}
    for schema in _subclasses(Section):
        _rebuild(schema, rebuilt)


def _rebuild(schema: type[BaseModel], rebuilt: dict[type[BaseModel], bool]) -> bool:
    """Rebuild a schema, those inside it first. Return True if it contains `model.attention`."""
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
    """`model.attention`. It has a field more for each registered mechanism, by its name."""

    pattern: list[str | dict[str, int]] = Field(default=["local", "local", "lsh", "local"], min_length=1)
    """Attention of each layer, repeated over the depth; as long as the depth, it is an explicit list. An entry is a
    kind, or the number of heads of each of several kinds, such as {"local": 4, "lha": 4}, in whatever order."""
    dropout: Rate = 0.0
    """Dropout of attention probabilities, after the softmax. It is computed by blocks: slower than a GPU's kernels."""
    head_groups: Positive = 1
    """Groups of each mechanism's heads, which attend one after another, backward included; the same losses."""

    if TYPE_CHECKING:

        def __getattr__(self, kind: str) -> Any: ...


def heads_of_layer(model: "ModelConfig", layer: int) -> dict[str, int]:
    """The mechanisms of a layer and how many heads each has, the first heads first.

    In the order in which they are registered: keys of a JSON object have none, and checkpoints sort them.
    """
    entry = model.attention.pattern[layer % len(model.attention.pattern)]
    if isinstance(entry, str):
        return {entry: model.heads}
    return {kind: entry[kind] for kind in MECHANISMS if kind in entry}


def layers_with(model: "ModelConfig", kind: str) -> int:
    """Number of layers that have heads of this kind."""
    return sum(kind in heads_of_layer(model, layer) for layer in range(model.layers))


def kinds(model: "ModelConfig") -> list[str]:
    """The mechanisms of a model, each once, in the order of their first layers."""
    layers = range(min(model.layers, len(model.attention.pattern)))
    return list(dict.fromkeys(kind for layer in layers for kind in heads_of_layer(model, layer)))


def evaluation_rounds(model: "ModelConfig") -> dict[str, int]:
    """Hash rounds (YOSO: hashes) in evaluation of each of a model's mechanisms that has any."""
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
            problem = f'{model.attention.dropout} is given, but "{kind}" forms no probabilities that could be dropped'
            raise ConfigError("model.attention.dropout", problem, "Set it to 0")


def check_heads(model: "ModelConfig") -> None:
    """Raise ConfigError for the first entry of the pattern that does not fit the heads of a stack, those that share
    keys or attend together, or its kind.
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
                problem = (
                    f"{heads} heads of {kind} are no whole groups of {shared}, which share keys by model.key_heads"
                )
                raise ConfigError(key, problem, f"Make it a multiple of {shared}")
            if groups > 1:
                _check_groups(model, layer, kind, heads, shared)


def _check_groups(model: "ModelConfig", layer: int, kind: str, heads: int, shared: int) -> None:
    """Raise ConfigError if `attention.head_groups` does not divide the heads of a mechanism, or what they share."""
    key, groups, settings = "model.attention.head_groups", model.attention.head_groups, getattr(model.attention, kind)
    if settings.joined is not None:
        problem = f"{groups} groups, but the heads of {show(kind)} are not independent: {settings.joined}"
        raise ConfigError(key, problem, "Set it to 1, or choose another mechanism")
    if heads // settings.heads_together % groups:
        problem = f"{groups} groups cannot share out the {heads} heads of {show(kind)} in layer {layer}"
        raise ConfigError(key, problem, "Set it to a divisor of the heads (or sketches) of every mechanism")
    if (size := heads // groups) % shared and shared % size:
        problem = f"groups of {size} heads divide the {shared} heads that share keys by model.key_heads"
        raise ConfigError(key, problem, f"Make them a divisor or a multiple of {shared}")


def check_targets(model: "ModelConfig", prefix: str, *targets: str) -> None:
    """Raise ConfigError for the first mechanism whose own objective predicts none of the targets.

    prefix: key of the model's attention in the configuration.
    """
    for kind in kinds(model):
        objective = getattr(model.attention, kind).predicts
        if objective is not None and objective not in targets:
            problem = f'"{objective}" is not what this stack learns to predict'
            raise ConfigError(f"{prefix}.{kind}.objective", problem, f'Set it to "{(*targets, "attention")[0]}"')
