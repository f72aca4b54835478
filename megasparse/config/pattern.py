"""The attention of each layer, read from `model.attention.pattern`."""

from megasparse.config.mechanism import MechanismSection
from megasparse.config.schema import ModelConfig


def heads_of_layer(model: ModelConfig, layer: int) -> dict[str, int]:
    """The mechanisms of a layer and how many heads each has, the first heads first.

    In the order of the sections in AttentionConfig: keys of a JSON object have none, and checkpoints sort them.
    """
    entry = model.attention.pattern[layer % len(model.attention.pattern)]
    if isinstance(entry, str):
        return {entry: model.heads}
    split = {str(kind): heads for kind, heads in entry.items()}
    return {kind: split[kind] for kind in type(model.attention).model_fields if kind in split}


def section(model: ModelConfig, kind: str) -> MechanismSection:
    """The settings of a mechanism."""
    found = getattr(model.attention, kind)
    assert isinstance(found, MechanismSection)
    return found


def layers_with(model: ModelConfig, kind: str) -> int:
    """Number of layers that have heads of this kind."""
    return sum(kind in heads_of_layer(model, layer) for layer in range(model.layers))


def replaceable_kinds(model: ModelConfig) -> list[str]:
    """The mechanisms whose place full attention can take, whether the model has them or not."""
    sections = [(kind, getattr(model.attention, kind)) for kind in type(model.attention).model_fields]
    return [kind for kind, own in sections if isinstance(own, MechanismSection) and own.replaceable_by_full]


def attends_fully(model: ModelConfig, kind: str) -> bool:
    """Whether full attention takes the place of this kind, by `model.attention.full_below`."""
    full_below = model.attention.full_below
    return section(model, kind).replaceable_by_full and full_below is not None and model.max_length < full_below


def kinds(model: ModelConfig) -> list[str]:
    """The mechanisms of a model, each once, in the order of their first layers."""
    layers = range(min(model.layers, len(model.attention.pattern)))
    return list(dict.fromkeys(kind for layer in layers for kind in heads_of_layer(model, layer)))


def evaluation_rounds(model: ModelConfig) -> dict[str, int]:
    """Hash rounds (YOSO: hashes) in evaluation of each of a model's mechanisms that has any."""
    rounds = {kind: section(model, kind).rounds_in_evaluation for kind in kinds(model)}
    return {kind: number for kind, number in rounds.items() if number is not None}
