"""What must hold of the mechanisms of a stack, beyond the types."""

from megasparse.config.attention import LSHAttentionConfig, SmartBirdAttentionConfig, YOSOAttentionConfig
from megasparse.config.buckets import lsh_buckets
from megasparse.config.messages import show
from megasparse.config.parts import encoder_part
from megasparse.config.pattern import WITHOUT_WEIGHTS, heads_of_layer, kinds
from megasparse.config.schema import ModelConfig
from megasparse.errors import ConfigError


def check_attention(model: ModelConfig) -> None:
    """Raise ConfigError for the first rule that the attention of one stack breaks."""
    if "lsh" in kinds(model):
        check_lsh(model.attention.lsh, model)
    if "local" in kinds(model):
        _check_local(model)
    if "yoso" in kinds(model):
        _check_yoso(model.attention.yoso)
    if "smart_bird" in kinds(model):
        _check_smart_bird(model.attention.smart_bird)
    if model.attention.full_below is not None and not set(WITHOUT_WEIGHTS) & set(kinds(model)):
        raise ConfigError(
            "model.attention.full_below",
            f"{model.attention.full_below} is given, but no layer has {' or '.join(show(k) for k in WITHOUT_WEIGHTS)}",
            "Set it to null",
        )


BIDIRECTIONAL_ONLY = {
    "smyrf": "its balanced clusters depend on all tokens",
    "linformer": "it projects the whole sequence",
}


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
            if model.kind == "decoder" and kind in BIDIRECTIONAL_ONLY:
                raise ConfigError(
                    key,
                    f'"{kind}" cannot be causal: {BIDIRECTIONAL_ONLY[kind]}',
                    'Choose another mechanism, or set model.kind to "encoder"',
                )


def check_lsh(lsh: LSHAttentionConfig, model: ModelConfig) -> None:
    key = "model.attention.lsh"
    if lsh.chunk > model.max_length:
        raise ConfigError(
            f"{key}.chunk",
            f"{lsh.chunk} is longer than model.max_length = {model.max_length}",
            f"Set it to {model.max_length} or less",
        )
    if lsh.window == "band" and not lsh.same_bucket:
        raise ConfigError(
            f"{key}.same_bucket",
            'false with window = "band" is not causal: later tokens move the borders of what is seen',
            'Set same_bucket to true, or window to "chunk"',
        )
    if lsh.window == "chunk" and not lsh.shared_qk:
        raise ConfigError(
            f"{key}.window",
            '"chunk" is a window on tokens in one order, but with shared_qk = false queries and keys have buckets of '
            "their own",
            'Set window to "band", or shared_qk to true',
        )
    factors = lsh.buckets if isinstance(lsh.buckets, list) else [lsh.buckets] if lsh.buckets else []
    if isinstance(lsh.buckets, list) and len(factors) not in (1, 2):
        raise ConfigError(f"{key}.buckets", f"{factors} has {len(factors)} factors", "Give a number, or two factors")
    odd = [factor for factor in factors if factor % 2]
    if odd:
        raise ConfigError(
            f"{key}.buckets",
            f"{odd[0]} is odd, but a rotation R gives the buckets [xR; -xR], an even number",
            f"Write {odd[0] + 1} instead",
        )
    try:
        lsh_buckets(lsh, model.max_length)
    except ValueError as error:
        raise ConfigError(
            f"{key}.buckets", f"{error}, and as one rotation it would cost too much", "Take a multiple of 4"
        ) from None


def _check_local(model: ModelConfig) -> None:
    if model.attention.local.relative and model.positions.kind == "rotary":
        raise ConfigError(
            "model.attention.local.relative",
            'true gives distances to a layer whose queries and keys model.positions.kind = "rotary" has turned by them',
            "Set it to false, or model.positions.kind to another",
        )


def _check_smart_bird(bird: SmartBirdAttentionConfig) -> None:
    if (bird.objective == "pooled") != (bird.labels is not None):
        raise ConfigError(
            "model.attention.smart_bird.labels",
            f'{"null" if bird.labels is None else bird.labels} does not fit objective = "{bird.objective}"',
            'Give the number of labels with "pooled", null with others',
        )


def check_sketches(model: ModelConfig) -> None:
    """What Smart Bird's sketches learn in pretraining: a token a position, in the encoder of an encoder–decoder those
    of the answer. Fine-tuning sets it by the task.
    """
    stacks = [("model.attention", model, "token")]
    if model.source is not None:
        stacks.append(("model.source.attention", encoder_part(model), "answer"))
    for key, stack, wanted in stacks:
        objective = stack.attention.smart_bird.objective
        if "smart_bird" in kinds(stack) and objective != wanted:
            problem = f"{show(objective)} is not what pretraining can tell here"
            raise ConfigError(f"{key}.smart_bird.objective", problem, f"Set it to {show(wanted)}")


def _check_yoso(yoso: YOSOAttentionConfig) -> None:
    key = "model.attention.yoso"
    if yoso.code_bits is not None and yoso.code_bits > 30:
        raise ConfigError(
            f"{key}.code_bits", f"{yoso.code_bits} bits do not fit a 32-bit code", "Set it to 30 or less, or to null"
        )
    if yoso.convolution is not None and yoso.convolution % 2 == 0:
        raise ConfigError(
            f"{key}.convolution",
            f"{yoso.convolution} is even, so the kernel has no middle",
            f"Write {yoso.convolution + 1} instead",
        )
