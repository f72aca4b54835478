"""Rules for runs whose ranks share a sequence."""

from megasparse.config.messages import show
from megasparse.config.pattern import heads_of_layer
from megasparse.config.schema import Config
from megasparse.errors import ConfigError


def check_parallel(config: Config) -> None:
    """Raise ConfigError for a run whose sequences `parallel.sequence` ranks cannot share."""
    size, model, length = config.parallel.sequence, config.model, config.data.sequence_length
    if size == 1:
        return
    if config.run.engine == "torch":
        problem = f'{size} ranks are to share a sequence, but run.engine = "torch" runs in one process'
        raise ConfigError("parallel.sequence", problem, 'Set run.engine to "deepspeed", or parallel.sequence to 1')
    for key, given in (
        ("model.kind", show(model.kind) if model.source else None),
        ("model.sentence_order", "given" if model.sentence_order else None),
    ):
        if given is not None:
            problem = f"{given}, but parallel.sequence = {size}: such sequences cannot be shared"
            raise ConfigError(key, problem, "Set parallel.sequence to 1")
    if length % size:
        nearest = max(1, round(length / size)) * size
        problem = f"{length} tokens do not divide among parallel.sequence = {size} ranks"
        raise ConfigError("data.sequence_length", problem, f"Set it to {nearest}, or parallel.sequence to a divisor")
    groups = model.attention.head_groups
    for layer in range(min(model.layers, len(model.attention.pattern))):
        for kind, heads in heads_of_layer(model, layer).items():
            shared = model.attention.smart_bird.sketch_heads if kind == "smart_bird" else 1
            if heads // shared // groups % size:
                where = f"layer {layer}" + (f", in {groups} model.attention.head_groups" if groups > 1 else "")
                raise ConfigError(
                    "parallel.sequence",
                    f"{size} ranks cannot share out the {heads} heads of {show(kind)} in {where}",
                    "Set it to a divisor of the heads (or sketches) of every mechanism, or change the pattern",
                )
