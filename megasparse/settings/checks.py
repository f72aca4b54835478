"""Rules between the keys of a run and of a model. Each raises a ConfigError: the key, its value and a hint."""

import math
from typing import Any

from pydantic import BaseModel

from megasparse.config import deepspeed_section
from megasparse.config.finetuning import FinetuneConfig
from megasparse.config.messages import show
from megasparse.config.schema import (
    Config,
    MaskingConfig,
    ModelConfig,
    PositionsConfig,
    RunSettings,
    decoder_part,
    encoder_part,
    heads_of_layer,
    kinds,
)
from megasparse.errors import ConfigError


def check(config: RunSettings) -> None:
    """Raise ConfigError for the first rule that `config` breaks. Rules that need a slow import are checked last."""
    check_run(config)
    if isinstance(config, Config):
        check_model(config.model)
        _check_tokenizer(config)
        _check_lengths(config)
        _check_masking(config)
        check_targets(config.model, "model.attention", "token")
        if config.model.source is not None:
            check_targets(encoder_part(config.model), "model.source.attention", "answer")
        check_parallel(config)
    elif isinstance(config, FinetuneConfig):
        _check_start(config)
    from megasparse.optimizers import OPTIMIZERS  # imports torch

    if (name := config.optimizer.name) not in OPTIMIZERS:
        hint = f"It must be {' or '.join(map(show, OPTIMIZERS))}"
        raise ConfigError("optimizer.name", f"{show(name)} does not fit", hint)
    if OPTIMIZERS[name].separates_hidden and getattr(config, "lora", None) is not None:
        problem = f"{show(name)} updates whole matrices, and lora trains only adapters"
        raise ConfigError("optimizer.name", problem, 'Set it to "adamw", or remove lora')
    if config.run.engine == "deepspeed":  # the torch engine must work without DeepSpeed installed
        deepspeed_section.check_values(config.deepspeed)


def check_run(config: RunSettings) -> None:
    """Raise ConfigError for the first rule that `config` breaks, of the rules that need no attention mechanisms."""
    check_sizes("", config)
    if "://" in config.run.directory:
        problem = f"{show(config.run.directory)} is a URL: object storage can neither rename a folder nor lock a file"
        hint = "Choose a folder of a file system, such as NFS or Lustre, and set checkpoint.bucket to the URL"
        raise ConfigError("run.directory", problem, hint)
    bucket = config.checkpoint.bucket
    if bucket is not None and not bucket.startswith(BUCKETS):
        problem = f"{show(bucket)} is not a URL of an object store"
        raise ConfigError("checkpoint.bucket", problem, f"It must start with {' or '.join(BUCKETS)}")
    if isinstance(config, FinetuneConfig):
        _initial_models(config)
    training = config.training
    if training.global_batch % training.micro_batch:
        problem = f"{training.global_batch} is not a multiple of training.micro_batch = {training.micro_batch}"
        hint = "Make it a multiple of training.micro_batch times the number of ranks"
        raise ConfigError("training.global_batch", problem, hint)
    deepspeed_section.check_keys(config.deepspeed)


BUCKETS = ("s3://", "gs://", "az://", "file:///")


def _initial_models(config: FinetuneConfig) -> list[str]:
    """Return the keys that name the initial model. Raises ConfigError unless it is one key."""
    start = config.start
    present = {
        "model": config.model is not None,
        "start.checkpoint": start.checkpoint is not None,
        "start.huggingface": start.huggingface is not None,
    }
    names = [name for name in present if present[name]]
    if not names:
        hint = "Give one of start.checkpoint, start.huggingface, and model (without pretrained weights)"
        raise ConfigError("start", "nothing given", hint)
    if len(names) > 1:
        hint = f"Keep one of them, and set the other to null, such as --set {names[-1]}=null"
        raise ConfigError("start", f"{' and '.join(names)} given", hint)
    return names


def _check_start(config: FinetuneConfig) -> None:
    start, names = config.start, _initial_models(config)
    if config.model is None:
        if start.glove is not None:
            hint = f"Set it to null, or replace {names[0]} with `model`"
            raise ConfigError("start.glove", f"{show(start.glove)}, but the embeddings are pretrained", hint)
        return
    check_model(config.model)
    for key, value in (("attention", start.attention), ("activations", start.activations), ("sha256", start.sha256)):
        if value is not None:
            hint = "Set it to null, and configure `model` instead"
            raise ConfigError(f"start.{key}", "given, but no pretrained model is", hint)
    source = config.model.source
    key, longest = ("model.source.length", source.length) if source else ("model.max_length", config.model.max_length)
    if config.task.max_length > longest:
        problem = f"{config.task.max_length} tokens are more than {key} = {longest}"
        raise ConfigError("task.max_length", problem, f"Lower it, or raise {key}")


def _check_tokenizer(config: Config) -> None:
    name = config.data.tokenizer
    if name not in BYTE_TOKENS and not name.endswith(TOKENIZER_FILES):
        problem = f"unknown tokenizer {show(name)}"
        hint = 'Write "bytes", "pixels", or the path of a tokenizer: FILE.model, FILE.json or FILE.txt'
        raise ConfigError("data.tokenizer", problem, hint)
    if name in BYTE_TOKENS and config.model.vocabulary < 256:
        problem = f"{config.model.vocabulary} is too small for {name}"
        raise ConfigError("model.vocabulary", problem, "Set it to 256 or more")
    padding = config.model.padding_token
    if name in BYTE_TOKENS and padding is not None and padding < 256:
        raise ConfigError("model.padding_token", f"{padding} is also a token of {name}", "Set it to 256 or more")


BYTE_TOKENS = ("bytes", "pixels")
TOKENIZER_FILES = (".model", ".json", ".txt")


def _check_lengths(config: Config) -> None:
    model, data = config.model, config.data
    before = model.source.length if model.source else 0
    if data.sequence_length <= before:
        problem = f"{data.sequence_length} leaves no target tokens after model.source.length = {before}"
        raise ConfigError("data.sequence_length", problem, f"Set it to {before} plus the length of the target")
    for key, length in (
        ("data.sequence_length", data.sequence_length - before),
        ("evaluation.sequence_length", config.evaluation_length - before),
        ("evaluation.sample_tokens", config.evaluation.sample_tokens),
    ):
        if length > model.max_length:
            problem = f"{length} is longer than model.max_length = {model.max_length}"
            raise ConfigError(key, problem, f"Set {key} to {model.max_length} or less, or raise model.max_length")
    for key, length in (
        ("data.sequence_length", data.sequence_length),
        ("evaluation.sequence_length", config.evaluation_length),
    ):
        if model.score_from >= length:
            problem = f"{model.score_from} leaves nothing of {key} = {length} to score"
            raise ConfigError("model.score_from", problem, f"Set it below {length}; 0 scores every token")
    if config.evaluation_length > data.sequence_length and model.positions.kind in ("learned", "axial"):
        problem = f'{config.evaluation_length} is longer than data.sequence_length = {data.sequence_length}, but "'
        problem += f'{model.positions.kind}" positions beyond it are not trained'
        hint = f'Set it to {data.sequence_length} or less, or model.positions.kind to "rotary"'
        raise ConfigError("evaluation.sequence_length", problem, hint)


def _check_masking(config: Config) -> None:
    model, masking = config.model, config.model.masking
    if model.kind == "encoder_decoder" and config.evaluation.sample_tokens:
        raise ConfigError("evaluation.sample_tokens", "an encoder–decoder needs a source to sample", "Set it to 0")
    if model.kind != "encoder":
        if masking != MaskingConfig():
            problem = f'{masking.model_dump()} is given, but kind "{model.kind}" masks no tokens'
            raise ConfigError("model.masking", problem, 'Remove it, or set model.kind to "encoder"')
        return
    if config.data.tokenizer in BYTE_TOKENS and masking.token < 256:
        problem = f"{masking.token} is a byte value that may occur in text"
        raise ConfigError("model.masking.token", problem, "Set it to 256")
    if masking.token >= model.vocabulary:
        problem = f"{model.vocabulary} leaves no id for an encoder's mask token, model.masking.token = {masking.token}"
        hint = f"Set model.vocabulary to {masking.token + 1}, or to the next multiple of 8"
        raise ConfigError("model.vocabulary", problem, hint)
    for key, value in (
        ("model.score_from", model.score_from),
        ("evaluation.sample_tokens", config.evaluation.sample_tokens),
    ):
        if value:
            raise ConfigError(key, f'{value} is for decoders, but model.kind = "encoder"', "Set it to 0")


def check_parallel(config: Config) -> None:
    """Raise ConfigError if `parallel.sequence` ranks cannot split the sequences of the run."""
    size, model, length = config.parallel.sequence, config.model, config.data.sequence_length
    if size == 1:
        return
    if config.run.engine == "torch":
        problem = f'{size} ranks per sequence, but run.engine = "torch" runs in one process'
        raise ConfigError("parallel.sequence", problem, 'Set run.engine to "deepspeed", or parallel.sequence to 1')
    if model.sentence_order is not None:
        problem = f"given, but parallel.sequence = {size}: sequences of pairs cannot be split over ranks"
        raise ConfigError("model.sentence_order", problem, "Set parallel.sequence to 1")
    of_source = model.source.length if model.source else 0
    for key, tokens in (("data.sequence_length", length), ("model.source.length", of_source)):
        if tokens % size:
            nearest = max(1, round(tokens / size)) * size
            problem = f"{tokens} tokens cannot be divided evenly among parallel.sequence = {size} ranks"
            raise ConfigError(key, problem, f"Set it to {nearest}, or parallel.sequence to a divisor")


LARGEST = 2**31 - 1
"""Largest whole number in a configuration: the limit for tensor dimensions and positions."""


def check_sizes(section: str, values: BaseModel) -> None:
    """Raise ConfigError for a whole number that is too large. section: key of `values`, "" for a configuration."""

    def walk(key: str, value: Any) -> None:
        if isinstance(value, dict):
            for name, part in value.items():
                walk(f"{key}.{name}" if key else name, part)
        elif isinstance(value, list | tuple):
            for number, part in enumerate(value):
                walk(f"{key}[{number}]", part)
        elif isinstance(value, int) and value > (largest := 2**63 - 1 if key == "run.seed" else LARGEST):
            raise ConfigError(key, f"{show(value)} is too large", f"Set it to {largest} or less")

    walk(section, values.model_dump(exclude={"deepspeed"}))


def check_model(model: ModelConfig) -> None:
    """Raise ConfigError for the first rule that a model breaks, without rules about its data."""
    check_sizes("model", model)
    _check_tokens(model)
    _check_sentence_order(model)
    _check_source(model)
    if model.source is None:
        _check_stack(model)
        return
    _check_stack(decoder_part(model))
    try:
        _check_stack(encoder_part(model))
    except ConfigError as error:  # rename keys of the encoder to keys of model.source
        key = error.key.replace("model.", "model.source.", 1)
        raise ConfigError(key if key.split(".")[2] in SOURCE_KEYS else error.key, error.problem, error.hint) from None


SOURCE_KEYS = ("layers", "positions", "attention")


def _check_stack(model: ModelConfig) -> None:
    if model.head_dim is None and model.d_model % model.heads:
        around = range(max(1, model.heads - 1000), model.heads + 1000)
        near = min((n for n in around if model.d_model % n == 0), key=lambda n: abs(n - model.heads), default=1)
        problem = f"{model.heads} heads do not divide model.d_model = {model.d_model}"
        raise ConfigError("model.heads", problem, f"Set model.heads to a divisor (such as {near}), or model.head_dim")
    if model.style == "bert":
        for key, value, needed in (("kind", model.kind, "encoder"), ("blocks", model.blocks, "ordinary")):
            if value != needed:
                problem = f'"bert" needs model.{key} = "{needed}", but it is "{value}"'
                hint = f'Set model.{key} to "{needed}", or model.style to "reformer"'
                raise ConfigError("model.style", problem, hint)
    elif model.token_types and model.sentence_order is None:
        problem = f'{model.token_types} is given, but style "{model.style}" needs model.sentence_order for token types'
        raise ConfigError("model.token_types", problem, 'Set it to 0, or model.style to "bert"')
    fitting_blocks = {"reversible": "reversible", "checkpoint": "ordinary", "checkpoint_cpu": "ordinary"}
    blocks = fitting_blocks.get(model.activations, model.blocks)
    if blocks != model.blocks:
        fitting = '"reversible"' if blocks == "ordinary" else '"stored", "checkpoint" or "checkpoint_cpu"'
        problem = f'"{model.activations}" needs {blocks} blocks, but model.blocks = "{model.blocks}"'
        hint = f'Set model.activations to {fitting}, or model.blocks to "{blocks}"'
        raise ConfigError("model.activations", problem, hint)
    if model.residual_dtype == "bf16" and model.style == "bert":
        problem = 'bf16, but model.style = "bert" normalises its stream after each addition, in fp32'
        raise ConfigError("model.residual_dtype", problem, 'Set it to "fp32"')
    if len(model.attention.pattern) > model.layers:
        problem = f"{len(model.attention.pattern)} layers are listed, but model.layers = {model.layers}"
        hint = f"Shorten the pattern to {model.layers} or fewer, or raise model.layers"
        raise ConfigError("model.attention.pattern", problem, hint)
    check_heads(model)
    _check_positions(model.positions, model)
    _check_rotary(model.positions, model)
    check_attention(model)


def _check_tokens(model: ModelConfig) -> None:
    special = {
        "model.padding_token": model.padding_token,
        "model.start_token": model.start_token,
        "model.document_separator": model.document_separator,
        "model.sentence_order.separator": model.sentence_order.separator if model.sentence_order else None,
    }
    for key, token in special.items():
        if token is not None and token >= model.vocabulary:
            hint = f"Set it below {model.vocabulary}, or raise model.vocabulary"
            raise ConfigError(key, f"{token} is outside model.vocabulary = {model.vocabulary}", hint)
        if token is not None and key.endswith("separator") and token == model.padding_token:
            raise ConfigError(key, f"{token} is also model.padding_token", "Choose different ids")
        if token is not None and model.kind == "encoder" and token == model.masking.token:
            raise ConfigError(key, f"{token} is also model.masking.token", "Choose different ids")
    if model.start_token is not None and model.kind != "decoder":
        problem = f'{model.start_token} is given, but model.kind = "{model.kind}"'
        raise ConfigError("model.start_token", problem, "Set it to null")
    if model.ngrams is not None and len(set(lengths := model.ngrams.lengths)) < len(lengths):
        problem = f"{lengths} lists a length twice: both tables would get the same rows"
        raise ConfigError("model.ngrams.lengths", problem, "List each length once")
    cutoffs = model.adaptive_cutoffs
    if cutoffs != sorted(set(cutoffs)) or (cutoffs and cutoffs[-1] >= model.vocabulary):
        problem = f"{cutoffs} does not ascend below model.vocabulary = {model.vocabulary}"
        hint = "Give the first id of each cluster, such as [20000, 40000, 200000]"
        raise ConfigError("model.adaptive_cutoffs", problem, hint)
    for key, present in (
        ("model.label_smoothing", model.label_smoothing > 0),
        ("model.output_bias", model.output_bias),
        ("model.style", model.style == "bert"),
    ):
        if cutoffs and present:
            raise ConfigError(key, "cannot be combined with model.adaptive_cutoffs", "Remove one of them")


def _check_sentence_order(model: ModelConfig) -> None:
    if model.sentence_order is None:
        return
    kind, padding, separator, length = model.kind, model.padding_token, model.document_separator, model.max_length
    for key, broken, problem, hint in (
        ("sentence_order", kind != "encoder", f'is for encoders, but model.kind = "{kind}"', "Set it to null"),
        ("padding_token", padding is None, "null, but pairs of model.sentence_order are padded", "Give its id"),
        ("document_separator", separator is not None, f"{separator} would mask segments of a pair", "Set it to null"),
        ("max_length", length < 5, f"{length} is too short for two segments", "Set it to 5 or more"),
    ):
        if broken:
            raise ConfigError(f"model.{key}", problem, hint)


def _check_source(model: ModelConfig) -> None:
    if (model.kind == "encoder_decoder") != (model.source is not None):
        problem = f'{"null" if model.source is None else "given"}, but model.kind = "{model.kind}"'
        raise ConfigError("model.source", problem, 'Give it only for "encoder_decoder", such as {"length": 512}')
    if model.source is not None:
        for key, value in (("score_from", model.score_from), ("document_separator", model.document_separator)):
            if value:
                raise ConfigError(f"model.{key}", f'{value} is not supported for kind "encoder_decoder"', "Remove it")
        check_targets(encoder_part(model), "model.source.attention", "answer", "pooled")


def _check_positions(positions: PositionsConfig, model: ModelConfig) -> None:
    head_dim = model.head_dim or model.d_model // model.heads
    if positions.kind == "rotary" and head_dim % 2:
        problem = f'"rotary" rotates pairs of coordinates, but the head dimension is {head_dim}'
        raise ConfigError("model.positions.kind", problem, "Set model.head_dim to an even number")
    if positions.offset and positions.kind != "learned":
        problem = f'{positions.offset} is given, but model.positions.kind = "{positions.kind}" does not use a table'
        raise ConfigError("model.positions.offset", problem, 'Set it to 0, or model.positions.kind to "learned"')
    shape, dims = positions.axial_shape, positions.axial_dims
    axial = positions.kind == "axial"
    for key, value in (("axial_shape", shape), ("axial_dims", dims)):
        if not axial and value is not None:
            problem = f'{value} is given, but model.positions.kind = "{positions.kind}"'
            hint = f'Set model.positions.kind to "axial", or {key} to null'
            raise ConfigError(f"model.positions.{key}", problem, hint)
        if axial and not value:
            problem = f"{'null' if value is None else value} does not fit axial positions"
            hint = "Give one number per axis, such as axial_shape [128, 512] with axial_dims [256, 768]"
            raise ConfigError(f"model.positions.{key}", problem, hint)
    if not axial:
        return
    assert shape and dims
    if len(shape) != len(dims):
        problem = f"{len(dims)} widths {dims} for the {len(shape)} axes of axial_shape = {shape}"
        raise ConfigError("model.positions.axial_dims", problem, "Give one width per axis")
    if math.prod(shape) < model.max_length:
        problem = f"{shape} covers {math.prod(shape)} positions, but model.max_length = {model.max_length}"
        hint = "Make the product of axial_shape at least model.max_length, or lower model.max_length"
        raise ConfigError("model.positions.axial_shape", problem, hint)
    if sum(dims) != model.d_model:
        problem = f"{dims} sums to {sum(dims)}, but model.d_model = {model.d_model}"
        raise ConfigError("model.positions.axial_dims", problem, f"Make the widths sum to {model.d_model}")


def _check_rotary(positions: PositionsConfig, model: ModelConfig) -> None:
    for key, value in (("base", positions.base), ("scaling", positions.scaling)):
        if positions.kind != "rotary" and value != PositionsConfig.model_fields[key].default:
            problem = f'given, but model.positions.kind = "{positions.kind}" does not use frequencies'
            raise ConfigError(f"model.positions.{key}", problem, 'Remove it, or set model.positions.kind to "rotary"')
    if (scaling := positions.scaling) is None:
        return
    section = "model.positions.scaling"
    by_length = scaling.kind in ("yarn", "llama3")
    for key, value, belongs in (
        ("original_length", scaling.original_length, by_length),
        ("attention_factor", scaling.attention_factor, scaling.kind == "yarn"),
    ):
        if value is not None and not belongs:
            problem = f'{value} is given, but "{scaling.kind}" does not use it'
            raise ConfigError(f"{section}.{key}", problem, "Remove it")
    if by_length and scaling.original_length is None:
        problem = f'null, but "{scaling.kind}" needs the sequence length of the original training'
        raise ConfigError(f"{section}.original_length", problem, "Give this length in tokens")
    if scaling.kind == "ntk" and (model.head_dim or model.d_model // model.heads) < 4:
        raise ConfigError(f"{section}.kind", '"ntk" needs a head dimension of 4 or more', "Raise model.head_dim")


def check_attention(model: ModelConfig) -> None:
    """Raise ConfigError for the first rule that the attention of one stack breaks."""
    for kind in kinds(model):
        getattr(model.attention, kind).check(f"model.attention.{kind}", model)
        if model.attention.dropout > 0.0 and getattr(model.attention, kind).no_probabilities:
            problem = f'{model.attention.dropout} is given, but "{kind}" computes no attention probabilities'
            raise ConfigError("model.attention.dropout", problem, "Set it to 0")


def check_heads(model: ModelConfig) -> None:
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


def _check_groups(model: ModelConfig, layer: int, kind: str, heads: int, shared: int) -> None:
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


def check_targets(model: ModelConfig, prefix: str, *targets: str) -> None:
    """Raise ConfigError for the first mechanism whose objective predicts none of the targets.

    prefix: key of the model's attention in the configuration.
    """
    for kind in kinds(model):
        objective = getattr(model.attention, kind).predicts
        if objective is not None and objective not in targets:
            problem = f'"{objective}" is not a target of this stack'
            raise ConfigError(f"{prefix}.{kind}.objective", problem, f'Set it to "{(*targets, "attention")[0]}"')
