"""Rules that the mechanisms of a stack keep together; each one's own are in its section."""

from megasparse.config.messages import show
from megasparse.config.parts import encoder_part
from megasparse.config.pattern import heads_of_layer, kinds, replaceable_kinds, section
from megasparse.config.schema import ModelConfig
from megasparse.errors import ConfigError


def check_attention(model: ModelConfig) -> None:
    """Raise ConfigError for the first rule that the attention of one stack breaks."""
    for kind in kinds(model):
        section(model, kind).check(f"model.attention.{kind}", model)
        if model.attention.dropout > 0.0 and section(model, kind).no_probabilities:
            problem = f'{model.attention.dropout} is given, but "{kind}" forms no probabilities that could be dropped'
            raise ConfigError("model.attention.dropout", problem, "Set it to 0")
    replaceable = replaceable_kinds(model)
    if model.attention.full_below is not None and not set(replaceable) & set(kinds(model)):
        raise ConfigError(
            "model.attention.full_below",
            f"{model.attention.full_below} is given, but no layer has {' or '.join(show(k) for k in replaceable)}",
            "Set it to null",
        )


def check_heads(model: ModelConfig) -> None:
    for layer in range(len(model.attention.pattern)):
        split = heads_of_layer(model, layer)
        key = f"model.attention.pattern[{layer}]"
        if sum(split.values()) != model.heads:
            raise ConfigError(
                key,
                f"{split} has {sum(split.values())} heads, but model.heads = {model.heads}",
                f"Make the numbers sum to {model.heads}",
            )
        for kind in split:
            settings = section(model, kind)
            for own, other, why, lacking in (
                ("decoder", "encoder", settings.bidirectional_only, "be causal"),
                ("encoder", "decoder", settings.causal_only, "see both ways"),
            ):
                if model.kind == own and why:
                    hint = f'Choose another mechanism, or set model.kind to "{other}"'
                    raise ConfigError(key, f'"{kind}" cannot {lacking}: {why}', hint)


def check_head_groups(model: ModelConfig) -> None:
    """Raise ConfigError where `attention.head_groups` does not divide the heads of a mechanism, or what they share."""
    groups, shared = model.attention.head_groups, model.heads // (model.key_heads or model.heads)
    if groups == 1:
        return
    key = "model.attention.head_groups"
    for layer in range(len(model.attention.pattern)):
        for kind, heads in heads_of_layer(model, layer).items():
            if (joined := _joined(model, kind)) is not None:
                problem = f"{groups} groups, but the heads of {show(kind)} are not independent: {joined}"
                raise ConfigError(key, problem, "Set it to 1, or choose another mechanism")
            together = model.attention.smart_bird.sketch_heads if kind == "smart_bird" else 1
            if heads // together % groups:
                problem = f"{groups} groups cannot share out the {heads} heads of {show(kind)} in layer {layer}"
                raise ConfigError(key, problem, "Set it to a divisor of the heads (or sketches) of every mechanism")
            own = heads // groups
            if own % shared and shared % own:
                problem = f"groups of {own} heads divide the {shared} heads that share keys by model.key_heads"
                raise ConfigError(key, problem, f"Make them a divisor or a multiple of {shared}")


def _joined(model: ModelConfig, kind: str) -> str | None:
    """What all heads of a layer share that no group of them can compute by itself; None where there is nothing."""
    if kind == "smart_bird" and model.attention.smart_bird.sketch != "heads":
        return 'all have one sketch, unless sketch = "heads"'
    if kind == "lha" and model.attention.lha.project_positions:
        return "project_positions projects to all of them"
    return None


def check_pretraining(model: ModelConfig) -> None:
    """Raise ConfigError for the first mechanism that does not fit pretraining; fine-tuning has rules of its own."""
    for kind in kinds(model):
        section(model, kind).check_pretraining(f"model.attention.{kind}", "token")
    if model.source is not None:
        source = encoder_part(model)
        for kind in kinds(source):
            section(source, kind).check_pretraining(f"model.source.attention.{kind}", "answer")
