"""Rules for runs whose ranks share a sequence."""

from megasparse.config.messages import show
from megasparse.config.parts import encoder_part
from megasparse.config.pattern import heads_of_layer
from megasparse.config.schema import Config, ModelConfig
from megasparse.errors import ConfigError


def check_parallel(config: Config) -> None:
    """Raise ConfigError for a run whose sequences `parallel.sequence` ranks cannot share."""
    size, model, length = config.parallel.sequence, config.model, config.data.sequence_length
    if size == 1:
        return
    if config.run.engine == "torch":
        problem = f'{size} ranks are to share a sequence, but run.engine = "torch" runs in one process'
        raise ConfigError("parallel.sequence", problem, 'Set run.engine to "deepspeed", or parallel.sequence to 1')
    if model.sentence_order is not None:
        problem = f"given, but parallel.sequence = {size}: such sequences cannot be shared"
        raise ConfigError("model.sentence_order", problem, "Set parallel.sequence to 1")
    _check_length("data.sequence_length", length, size)
    _check_heads(model, size)
    if model.source is not None:
        _check_length("model.source.length", model.source.length, size)
        _check_heads(encoder_part(model), size, " of model.source")


def _check_length(key: str, length: int, size: int) -> None:
    if length % size:
        nearest = max(1, round(length / size)) * size
        problem = f"{length} tokens do not divide among parallel.sequence = {size} ranks"
        raise ConfigError(key, problem, f"Set it to {nearest}, or parallel.sequence to a divisor")


def _check_heads(model: ModelConfig, size: int, stack: str = "") -> None:
    """Raise ConfigError for a stack whose heads so many ranks cannot share out. stack: which one, for the message."""
    groups = model.attention.head_groups
    for layer in range(min(model.layers, len(model.attention.pattern))):
        for kind, heads in heads_of_layer(model, layer).items():
            shared = model.attention.smart_bird.sketch_heads if kind == "smart_bird" else 1
            if heads // shared // groups % size:
                where = f"layer {layer}{stack}" + (f", in {groups} model.attention.head_groups" if groups > 1 else "")
                raise ConfigError(
                    "parallel.sequence",
                    f"{size} ranks cannot share out the {heads} heads of {show(kind)} in {where}",
                    "Set it to a divisor of the heads (or sketches) of every mechanism, or change the pattern",
                )
