"""What must hold between keys. Each rule raises a ConfigError that names the key, its value and a hint."""

import math
from typing import Any

from megasparse.config import deepspeed_section
from megasparse.config.attention_checks import check_attention, check_heads, check_lsh, check_sketches
from megasparse.config.finetuning import FinetuneConfig
from megasparse.config.messages import show
from megasparse.config.parallel import check_parallel
from megasparse.config.parts import decoder_part, encoder_part
from megasparse.config.pattern import kinds
from megasparse.config.schema import Config, MaskingConfig, ModelConfig, PositionsConfig, RunSettings
from megasparse.errors import ConfigError

LONGEST_TRACE = 10
"""Steps."""


def check(config: RunSettings) -> None:
    """Raise ConfigError for the first rule that `config` breaks. What takes an import of seconds to tell comes last."""
    _check_sizes(config)
    if isinstance(config, Config):
        check_model(config.model)
        _check_tokenizer(config)
        _check_lengths(config)
        _check_masking(config)
        check_sketches(config.model)
        check_parallel(config)
    elif isinstance(config, FinetuneConfig):
        _check_start(config)
    _check_batches(config)
    _check_profile(config)
    deepspeed_section.check_keys(config.deepspeed)
    _check_optimizer(config)
    deepspeed_section.check_values(config.deepspeed)


def check_model(model: ModelConfig) -> None:
    """The rules that concern the model alone, whatever it reads."""
    _check_tokens(model)
    _check_sentence_order(model)
    _check_source(model)
    if model.source is None:
        _check_stack(model)
        return
    _check_stack(decoder_part(model))
    if model.source.cross_attention == "lsh":
        longest = max(model.max_length, model.source.length)
        check_lsh(model.attention.lsh, model.model_copy(update={"max_length": longest}))
    try:
        _check_stack(encoder_part(model))
    except ConfigError as error:  # the encoder's keys are those of model.source
        own = error.key.replace("model.", "model.source.", 1)
        raise ConfigError(own if own.split(".")[2] in SOURCE_KEYS else error.key, error.problem, error.hint) from None


SOURCE_KEYS = ("layers", "positions", "attention")


def _check_stack(model: ModelConfig) -> None:
    _check_model(model)
    _check_positions(model.positions, model)
    check_attention(model)


def _check_start(config: FinetuneConfig) -> None:
    start = config.start
    given = {
        "model": config.model is not None,
        "start.checkpoint": start.checkpoint is not None,
        "start.huggingface": start.huggingface is not None,
    }
    names = [name for name in given if given[name]]
    if not names:
        hint = "Give one of start.checkpoint, start.huggingface, and model (trained from its initial weights)"
        raise ConfigError("start", "nothing given", hint)
    if len(names) > 1:
        hint = f"Keep one of them, and set the other to null, such as --set {names[-1]}=null"
        raise ConfigError("start", f"{' and '.join(names)} given", hint)
    if config.model is None:
        return
    check_model(config.model)
    for key, value in (
        ("attention", start.attention),
        ("activations", start.activations),
        ("sha256", start.sha256),
    ):
        if value is not None:
            raise ConfigError(
                f"start.{key}", "given, but nothing to start from", "Set it to null, and in `model` what you need"
            )
    source = config.model.source
    key, longest = ("model.source.length", source.length) if source else ("model.max_length", config.model.max_length)
    if config.task.max_length > longest:
        problem = f"{config.task.max_length} tokens are more than {key} = {longest}"
        raise ConfigError("task.max_length", problem, f"Lower it, or raise {key}")


LARGEST = 2**31 - 1
"""Of every whole number: what a tensor's side and a position can be."""


def _check_sizes(config: RunSettings) -> None:
    def walk(key: str, value: Any) -> None:
        if isinstance(value, dict):
            for name, part in value.items():
                walk(f"{key}.{name}" if key else name, part)
        elif isinstance(value, list | tuple):
            for number, part in enumerate(value):
                walk(f"{key}[{number}]", part)
        elif isinstance(value, int) and value > (largest := 2**63 - 1 if key == "run.seed" else LARGEST):
            raise ConfigError(key, f"{show(value)} is too large", f"Set it to {largest} or less")

    walk("", config.model_dump(exclude={"deepspeed"}))


def _check_model(model: ModelConfig) -> None:
    if model.head_dim is None and model.d_model % model.heads:
        around = range(max(1, model.heads - 1000), model.heads + 1000)
        near = min((n for n in around if model.d_model % n == 0), key=lambda n: abs(n - model.heads), default=1)
        raise ConfigError(
            "model.heads",
            f"{model.heads} heads do not divide model.d_model = {model.d_model}",
            f"Set model.heads to a divisor (such as {near}), or model.head_dim",
        )
    _check_style(model)
    if model.activations == "reversible" and model.blocks != "reversible":
        raise ConfigError(
            "model.activations",
            f'"reversible" needs reversible blocks, but model.blocks = "{model.blocks}"',
            'Set model.activations to "stored", "checkpoint" or "checkpoint_cpu", or model.blocks to "reversible"',
        )
    if model.activations.startswith("checkpoint") and model.blocks != "ordinary":
        raise ConfigError(
            "model.activations",
            f'"{model.activations}" needs ordinary blocks, but model.blocks = "{model.blocks}"',
            'Set model.activations to "reversible", or model.blocks to "ordinary"',
        )
    if len(model.attention.pattern) > model.layers:
        raise ConfigError(
            "model.attention.pattern",
            f"{len(model.attention.pattern)} layers are listed, but model.layers = {model.layers}",
            f"Shorten the pattern to {model.layers} or fewer, or raise model.layers",
        )
    check_heads(model)


def _check_style(model: ModelConfig) -> None:
    if model.style == "bert":
        for key, value, wanted in (("kind", model.kind, "encoder"), ("blocks", model.blocks, "ordinary")):
            if value != wanted:
                raise ConfigError(
                    "model.style",
                    f'"bert" needs model.{key} = "{wanted}", but it is "{value}"',
                    f'Set model.{key} to "{wanted}", or model.style to "reformer"',
                )
    elif model.token_types and model.sentence_order is None:
        raise ConfigError(
            "model.token_types",
            f'{model.token_types} is given, but model.style = "{model.style}" has none without model.sentence_order',
            'Set it to 0, or model.style to "bert"',
        )


def _check_tokens(model: ModelConfig) -> None:
    separator = model.sentence_order.separator if model.sentence_order else None
    special = {
        "model.padding_token": model.padding_token,
        "model.document_separator": model.document_separator,
        "model.sentence_order.separator": separator,
    }
    for key, token in special.items():
        if token is not None and token >= model.vocabulary:
            hint = f"Set it below {model.vocabulary}, or raise model.vocabulary"
            raise ConfigError(key, f"{token} is no token of model.vocabulary = {model.vocabulary}", hint)
        if token is not None and key != "model.padding_token" and token == model.padding_token:
            raise ConfigError(key, f"{token} is model.padding_token too", "Give each its own id")
        if token is not None and model.kind == "encoder" and token == model.masking.token:
            raise ConfigError(key, f"{token} is model.masking.token too", "Give each its own id")
    cutoffs = model.adaptive_cutoffs
    if cutoffs != sorted(set(cutoffs)) or (cutoffs and cutoffs[-1] >= model.vocabulary):
        raise ConfigError(
            "model.adaptive_cutoffs",
            f"{cutoffs} does not ascend below model.vocabulary = {model.vocabulary}",
            "Give where each cluster begins, such as [20000, 40000, 200000]",
        )
    for key, given in (
        ("model.label_smoothing", model.label_smoothing > 0),
        ("model.output_bias", model.output_bias),
        ("model.style", model.style == "bert"),
    ):
        if cutoffs and given:
            raise ConfigError(key, "does not go together with model.adaptive_cutoffs", "Leave one of them out")


def _check_sentence_order(model: ModelConfig) -> None:
    if model.sentence_order is None:
        return
    if model.kind != "encoder":
        raise ConfigError("model.sentence_order", f'is for encoders, but model.kind = "{model.kind}"', "Set it to null")
    if model.padding_token is None:
        raise ConfigError(
            "model.padding_token", "null, but the pairs of model.sentence_order are padded", "Give the padding's id"
        )
    if model.document_separator is not None:
        raise ConfigError(
            "model.document_separator",
            f"{model.document_separator} would hide the two segments of model.sentence_order from each other",
            "Set it to null",
        )
    if model.max_length < 5:
        raise ConfigError(
            "model.max_length", f"{model.max_length} is too short for two segments", "Set it to 5 or more"
        )


def _check_source(model: ModelConfig) -> None:
    if (model.kind == "encoder_decoder") != (model.source is not None):
        given = "null" if model.source is None else "given"
        raise ConfigError(
            "model.source",
            f'{given}, but model.kind = "{model.kind}"',
            'Give it with "encoder_decoder", such as {"length": 512}, and only with that',
        )
    if model.source is not None:
        for key, value in (("score_from", model.score_from), ("document_separator", model.document_separator)):
            if value:
                raise ConfigError(f"model.{key}", f'{value} does not go with kind "encoder_decoder"', "Leave it out")
        objective = model.source.attention.smart_bird.objective
        if "smart_bird" in kinds(encoder_part(model)) and objective == "token":
            raise ConfigError(
                "model.source.attention.smart_bird.objective",
                '"token" learns the choice of keys from a token to tell at each position, and the encoder has none',
                'Set it to "answer"',
            )


def _check_positions(positions: PositionsConfig, model: ModelConfig) -> None:
    head_dim = model.head_dim or model.d_model // model.heads
    if positions.kind == "rotary" and head_dim % 2:
        raise ConfigError(
            "model.positions.kind",
            f'"rotary" turns pairs of coordinates, but a head has {head_dim}',
            "Set model.head_dim to an even number",
        )
    if positions.offset and positions.kind != "learned":
        raise ConfigError(
            "model.positions.offset",
            f'{positions.offset} is given, but model.positions.kind = "{positions.kind}" has no table',
            'Set it to 0, or model.positions.kind to "learned"',
        )
    shape, dims = positions.axial_shape, positions.axial_dims
    if positions.kind != "axial":
        for key, value in (("axial_shape", shape), ("axial_dims", dims)):
            if value is not None:
                raise ConfigError(
                    f"model.positions.{key}",
                    f'{value} is given, but model.positions.kind = "{positions.kind}"',
                    f'Set model.positions.kind to "axial", or {key} to null',
                )
        return
    for key, value in (("axial_shape", shape), ("axial_dims", dims)):
        if not value:
            raise ConfigError(
                f"model.positions.{key}",
                f"{'null' if value is None else value} does not fit axial positions",
                "Give one number an axis, such as axial_shape [128, 512] with axial_dims [256, 768]",
            )
    assert shape and dims
    if len(shape) != len(dims):
        raise ConfigError(
            "model.positions.axial_dims",
            f"{dims} has {len(dims)} axes, axial_shape = {shape} has {len(shape)}",
            "Give as many widths as axes",
        )
    if math.prod(shape) < model.max_length:
        raise ConfigError(
            "model.positions.axial_shape",
            f"{shape} holds {math.prod(shape)} positions, but model.max_length = {model.max_length}",
            "Make the product of axial_shape at least model.max_length, or lower model.max_length",
        )
    if sum(dims) != model.d_model:
        raise ConfigError(
            "model.positions.axial_dims",
            f"{dims} sums to {sum(dims)}, but model.d_model = {model.d_model}",
            f"Make the widths sum to {model.d_model}",
        )


def _check_tokenizer(config: Config) -> None:
    name = config.data.tokenizer
    if name not in BYTE_TOKENS and not name.endswith(TOKENIZER_FILES):
        raise ConfigError(
            "data.tokenizer",
            f"{show(name)} is none",
            'Write "bytes", "pixels", or the path of a tokenizer: FILE.model, FILE.json or FILE.txt',
        )
    if name in BYTE_TOKENS and config.model.vocabulary < 256:
        raise ConfigError(
            "model.vocabulary",
            f"{config.model.vocabulary} is too small for {name}",
            "Set it to 256, the number of their values",
        )
    padding = config.model.padding_token
    if name in BYTE_TOKENS and padding is not None and padding < 256:
        raise ConfigError("model.padding_token", f"{padding} is a token of {name} itself", "Set it to 256 or more")


BYTE_TOKENS = ("bytes", "pixels")
TOKENIZER_FILES = (".model", ".json", ".txt")


def _check_lengths(config: Config) -> None:
    model, data = config.model, config.data
    before = model.source.length if model.source else 0
    if data.sequence_length <= before:
        raise ConfigError(
            "data.sequence_length",
            f"{data.sequence_length} leaves no target behind the {before} tokens of model.source.length",
            f"Set it to {before} and the target's length",
        )
    for key, length in (
        ("data.sequence_length", data.sequence_length - before),
        ("evaluation.sample_tokens", config.evaluation.sample_tokens),
    ):
        if length > model.max_length:
            raise ConfigError(
                key,
                f"{length} is longer than model.max_length = {model.max_length}",
                f"Set {key} to {model.max_length} or less, or raise model.max_length",
            )
    if model.score_from >= data.sequence_length:
        raise ConfigError(
            "model.score_from",
            f"{model.score_from} leaves nothing of data.sequence_length = {data.sequence_length} to score",
            f"Set it below {data.sequence_length}; 0 scores every token",
        )


def _check_masking(config: Config) -> None:
    model, masking = config.model, config.model.masking
    if model.kind == "encoder_decoder" and config.evaluation.sample_tokens:
        raise ConfigError("evaluation.sample_tokens", "a text needs a source to be told from", "Set it to 0")
    if model.kind != "encoder":
        if masking != MaskingConfig():
            raise ConfigError(
                "model.masking",
                f'{masking.model_dump()} is given, but kind "{model.kind}" masks no tokens',
                'Remove it, or set model.kind to "encoder"',
            )
        return
    if config.data.tokenizer in BYTE_TOKENS and masking.token < 256:
        raise ConfigError(
            "model.masking.token", f"{masking.token} is a byte, which the text itself may have", "Set it to 256"
        )
    if masking.token >= model.vocabulary:
        raise ConfigError(
            "model.vocabulary",
            f"{model.vocabulary} leaves no id for an encoder's mask token, model.masking.token = {masking.token}",
            f"Set model.vocabulary to {masking.token + 1}, or to the next multiple of 8",
        )
    for key, value in (
        ("model.score_from", model.score_from),
        ("evaluation.sample_tokens", config.evaluation.sample_tokens),
    ):
        if value:
            raise ConfigError(key, f'{value} is for decoders, but model.kind = "encoder"', "Set it to 0")


def _check_batches(config: RunSettings) -> None:
    training = config.training
    if training.global_batch % training.micro_batch:
        raise ConfigError(
            "training.global_batch",
            f"{training.global_batch} is no multiple of training.micro_batch = {training.micro_batch}",
            "Make it a multiple of training.micro_batch times the number of ranks",
        )


def _check_profile(config: RunSettings) -> None:
    """A step of a large model is a trace of tens of megabytes."""
    steps = config.logging.profile_steps
    if steps is not None and not steps[0] <= steps[1] < steps[0] + LONGEST_TRACE:
        problem = f"{list(steps)} is no range of 1 to {LONGEST_TRACE} steps"
        raise ConfigError("logging.profile_steps", problem, "Give the first and the last step, such as [100, 102]")


def _check_optimizer(config: RunSettings) -> None:
    """Adafactor factors each matrix' second moment and scales by its RMS; a flat partition of ZeRO or of bf16's master
    weights has lost the matrices, and the update changes with the number of ranks."""
    if config.optimizer.name != "adafactor" or config.run.engine != "deepspeed":
        return
    if config.training.precision == "bf16":
        raise ConfigError(
            "optimizer.name",
            '"adafactor" is wrong on the flattened master weights of training.precision = "bf16"',
            'Set optimizer.name to "adamw", training.precision to "fp32", or run.engine to "torch"',
        )
    zero = config.deepspeed.get("zero_optimization", {})
    if zero.get("stage", 0) != 0:
        raise ConfigError(
            "optimizer.name",
            f'"adafactor" is wrong on flattened partitions, and zero_optimization.stage = {zero["stage"]}',
            'Set optimizer.name to "adamw", or deepspeed.zero_optimization.stage to 0',
        )
