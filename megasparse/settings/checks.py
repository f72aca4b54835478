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

Rule = tuple[bool, str, str, str]
"""True if it is broken, the key, the problem, and what to do."""


def require(*rules: Rule) -> None:
    """Raise ConfigError for the first broken rule."""
    for broken, key, problem, hint in rules:
        if broken:
            raise ConfigError(key, problem, hint)


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
        if (lora := getattr(config, "lora", None)) is not None and (lora.quantized or lora.dora):
            stage, key = config.deepspeed.get("zero_optimization", {}).get("stage", 0), "lora.dora"
            problem = "true is not supported under ZeRO stage 3, which splits the frozen weights"
            if lora.quantized:
                key, problem = "lora.quantized", problem.replace("true", show(lora.quantized))
            require((stage == 3, key, problem, "Set deepspeed.zero_optimization.stage to 2"))


def check_run(config: RunSettings) -> None:
    """Raise ConfigError for the first rule that `config` breaks, of the rules that need no attention mechanisms."""
    check_sizes("", config)
    directory, bucket, training = config.run.directory, config.checkpoint.bucket, config.training
    require(
        ("://" in directory, "run.directory",
         f"{show(directory)} is a URL: object storage can neither rename a folder nor lock a file",
         "Choose a folder of a file system, such as NFS or Lustre, and set checkpoint.bucket to the URL"),
        (bucket is not None and not bucket.startswith(BUCKETS), "checkpoint.bucket",
         f"{show(bucket)} is not a URL of an object store", f"It must start with {' or '.join(BUCKETS)}"),
    )  # fmt: skip
    if isinstance(config, FinetuneConfig):
        _initial_models(config)
    require((
        training.global_batch % training.micro_batch > 0, "training.global_batch",
        f"{training.global_batch} is not a multiple of training.micro_batch = {training.micro_batch}",
        "Make it a multiple of training.micro_batch times the number of ranks",
    ))  # fmt: skip
    deepspeed_section.check_keys(config.deepspeed)
    model, stage = getattr(config, "model", None), config.deepspeed.get("zero_optimization", {}).get("stage")
    if model is not None and model.checkpoint_layers > 1 and stage == 3 and config.run.engine == "deepspeed":
        problem = f"{model.checkpoint_layers}, but ZeRO 3 gathers the weights of one layer at a time"
        raise ConfigError("model.checkpoint_layers", problem, "Set it to 1, or use a lower stage")


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
    if config.lora is not None and config.lora.quantized is not None:
        problem = f"{show(config.lora.quantized)} is not supported in fine-tuning on tasks, only by pretrain"
        raise ConfigError("lora.quantized", problem, "Set it to null")
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
    name, vocabulary, padding = config.data.tokenizer, config.model.vocabulary, config.model.padding_token
    of_bytes = name in BYTE_TOKENS
    require(
        (not of_bytes and not name.endswith(TOKENIZER_FILES), "data.tokenizer", f"unknown tokenizer {show(name)}",
         'Write "bytes", "pixels", or the path of a tokenizer: FILE.model, FILE.json or FILE.txt'),
        (of_bytes and vocabulary < 256, "model.vocabulary",
         f"{vocabulary} is too small for {name}", "Set it to 256 or more"),
        (of_bytes and padding is not None and padding < 256, "model.padding_token",
         f"{padding} is also a token of {name}", "Set it to 256 or more"),
    )  # fmt: skip


BYTE_TOKENS = ("bytes", "pixels")
TOKENIZER_FILES = (".model", ".json", ".txt")


def _check_lengths(config: Config) -> None:
    model, length, longest, kind = (
        config.model, config.data.sequence_length, config.model.max_length, config.model.positions.kind,
    )  # fmt: skip
    before = model.source.length if model.source else 0
    sequences = {"data.sequence_length": length, "evaluation.sequence_length": config.evaluation_length}
    targets = {key: tokens - before for key, tokens in sequences.items()}
    targets["evaluation.sample_tokens"] = config.evaluation.sample_tokens
    require(
        (length <= before, "data.sequence_length",
         f"{length} leaves no target tokens after model.source.length = {before}",
         f"Set it to {before} plus the length of the target"),
        *((tokens > longest, key, f"{tokens} is longer than model.max_length = {longest}",
           f"Set {key} to {longest} or less, or raise model.max_length") for key, tokens in targets.items()),
        *((model.score_from >= tokens, "model.score_from",
           f"{model.score_from} leaves nothing of {key} = {tokens} to score",
           f"Set it below {tokens}; 0 scores every token") for key, tokens in sequences.items()),
        (config.evaluation_length > length and kind in ("learned", "axial"), "evaluation.sequence_length",
         f'{config.evaluation_length} is longer than data.sequence_length = {length}, but "{kind}" positions beyond it '
         "are not trained", f'Set it to {length} or less, or model.positions.kind to "rotary"'),
    )  # fmt: skip


def _check_masking(config: Config) -> None:
    model, masking, sample = config.model, config.model.masking, config.evaluation.sample_tokens
    encoder, token = model.kind == "encoder", masking.token
    require(
        (model.kind == "encoder_decoder" and sample > 0, "evaluation.sample_tokens",
         "an encoder–decoder needs a source to sample", "Set it to 0"),
        (not encoder and masking != MaskingConfig(), "model.masking",
         f'{masking.model_dump()} is given, but kind "{model.kind}" masks no tokens',
         'Remove it, or set model.kind to "encoder"'),
        (encoder and config.data.tokenizer in BYTE_TOKENS and token < 256, "model.masking.token",
         f"{token} is a byte value that may occur in text", "Set it to 256"),
        (encoder and token >= model.vocabulary, "model.vocabulary",
         f"{model.vocabulary} leaves no id for an encoder's mask token, model.masking.token = {token}",
         f"Set model.vocabulary to {token + 1}, or to the next multiple of 8"),
        *((encoder and value > 0, key, f'{value} is for decoders, but model.kind = "encoder"', "Set it to 0")
          for key, value in (("model.score_from", model.score_from), ("evaluation.sample_tokens", sample))),
    )  # fmt: skip


def check_parallel(config: Config) -> None:
    """Raise ConfigError if `parallel.sequence` ranks cannot split the sequences of the run."""
    size, model, length = config.parallel.sequence, config.model, config.data.sequence_length
    of_source = model.source.length if model.source else 0
    require(
        (size > 1 and config.run.engine == "torch", "parallel.sequence",
         f'{size} ranks per sequence, but run.engine = "torch" runs in one process',
         'Set run.engine to "deepspeed", or parallel.sequence to 1'),
        (size > 1 and model.sentence_order is not None, "model.sentence_order",
         f"given, but parallel.sequence = {size}: sequences of pairs cannot be split over ranks",
         "Set parallel.sequence to 1"),
        *((tokens % size > 0, key, f"{tokens} tokens cannot be divided evenly among parallel.sequence = {size} ranks",
           f"Set it to {max(1, round(tokens / size)) * size}, or parallel.sequence to a divisor")
          for key, tokens in (("data.sequence_length", length), ("model.source.length", of_source))),
    )  # fmt: skip


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
    heads, width, bert = model.heads, model.d_model, model.style == "bert"
    around = range(max(1, heads - 1000), heads + 1000)
    near = min((n for n in around if width % n == 0), key=lambda n: abs(n - heads), default=1)
    needs = {"reversible": "reversible", "checkpoint": "ordinary", "checkpoint_cpu": "ordinary"}
    blocks = needs.get(model.activations, model.blocks)
    fitting = '"reversible"' if blocks == "ordinary" else '"stored", "checkpoint" or "checkpoint_cpu"'
    layers = len(model.attention.pattern)
    require(
        (model.head_dim is None and width % heads > 0, "model.heads",
         f"{heads} heads do not divide model.d_model = {width}",
         f"Set model.heads to a divisor (such as {near}), or model.head_dim"),
        *((bert and value != needed, "model.style", f'"bert" needs model.{key} = "{needed}", but it is "{value}"',
           f'Set model.{key} to "{needed}", or model.style to "reformer"')
          for key, value, needed in (("kind", model.kind, "encoder"), ("blocks", model.blocks, "ordinary"))),
        (not bert and model.token_types > 0 and model.sentence_order is None, "model.token_types",
         f'{model.token_types} is given, but style "{model.style}" needs model.sentence_order for token types',
         'Set it to 0, or model.style to "bert"'),
        (blocks != model.blocks, "model.activations",
         f'"{model.activations}" needs {blocks} blocks, but model.blocks = "{model.blocks}"',
         f'Set model.activations to {fitting}, or model.blocks to "{blocks}"'),
        (model.checkpoint_layers > 1 and not model.activations.startswith("checkpoint"), "model.checkpoint_layers",
         f'{model.checkpoint_layers} needs model.activations = "checkpoint" or "checkpoint_cpu"', "Set it to 1"),
        (bert and model.residual_dtype == "bf16", "model.residual_dtype",
         'bf16, but model.style = "bert" normalises its stream after each addition, in fp32', 'Set it to "fp32"'),
        (layers > model.layers, "model.attention.pattern",
         f"{layers} layers are listed, but model.layers = {model.layers}",
         f"Shorten the pattern to {model.layers} or fewer, or raise model.layers"),
    )  # fmt: skip
    check_heads(model)
    _check_positions(model.positions, model)
    _check_rotary(model.positions, model)
    check_attention(model)


def _check_tokens(model: ModelConfig) -> None:
    vocabulary, start, cutoffs = model.vocabulary, model.start_token, model.adaptive_cutoffs
    special = {
        "model.padding_token": model.padding_token,
        "model.start_token": start,
        "model.document_separator": model.separator_id,
        "model.sentence_order.separator": model.sentence_order.separator if model.sentence_order else None,
    }
    for key, token in special.items():
        if token is not None:
            require(
                (token >= vocabulary, key, f"{token} is outside model.vocabulary = {vocabulary}",
                 f"Set it below {vocabulary}, or raise model.vocabulary"),
                (key.endswith("separator") and token == model.padding_token, key,
                 f"{token} is also model.padding_token", "Choose different ids"),
                (model.kind == "encoder" and token == model.masking.token, key,
                 f"{token} is also model.masking.token", "Choose different ids"),
            )  # fmt: skip
    lengths = model.ngrams.lengths if model.ngrams else []
    excluded = {
        "model.label_smoothing": model.label_smoothing > 0,
        "model.output_bias": model.output_bias,
        "model.style": model.style == "bert",
    }
    require(
        (start is not None and model.kind != "decoder", "model.start_token",
         f'{start} is given, but model.kind = "{model.kind}"', "Set it to null"),
        (len(set(lengths)) < len(lengths), "model.ngrams.lengths",
         f"{lengths} lists a length twice: both tables would get the same rows", "List each length once"),
        (cutoffs != sorted(set(cutoffs)) or cutoffs[-1:] >= [vocabulary], "model.adaptive_cutoffs",
         f"{cutoffs} does not ascend below model.vocabulary = {vocabulary}",
         "Give the first id of each cluster, such as [20000, 40000, 200000]"),
        *((bool(cutoffs) and present, key, "cannot be combined with model.adaptive_cutoffs", "Remove one of them")
          for key, present in excluded.items()),
    )  # fmt: skip


def _check_sentence_order(model: ModelConfig) -> None:
    if model.sentence_order is None:
        return
    kind, padding, separator, length = model.kind, model.padding_token, model.document_separator, model.max_length
    require(
        (kind != "encoder", "model.sentence_order", f'is for encoders, but model.kind = "{kind}"', "Set it to null"),
        (padding is None, "model.padding_token",
         "null, but pairs of model.sentence_order are padded", "Give its id"),
        (separator is not None, "model.document_separator",
         f"{separator} would mask segments of a pair", "Set it to null"),
        (length < 5, "model.max_length", f"{length} is too short for two segments", "Set it to 5 or more"),
    )  # fmt: skip


def _check_source(model: ModelConfig) -> None:
    if (model.kind == "encoder_decoder") != (model.source is not None):
        problem = f'{"null" if model.source is None else "given"}, but model.kind = "{model.kind}"'
        raise ConfigError("model.source", problem, 'Give it only for "encoder_decoder", such as {"length": 512}')
    if model.embedding_twice and (model.source is None or model.blocks != "reversible"):
        problem = "true is for encoder-decoders of reversible blocks"
        raise ConfigError("model.embedding_twice", problem, "Set it to false")
    if model.source is not None:
        for key, value in (("score_from", model.score_from), ("document_separator", model.document_separator)):
            if value:
                raise ConfigError(f"model.{key}", f'{value} is not supported for kind "encoder_decoder"', "Remove it")
        check_targets(encoder_part(model), "model.source.attention", "answer", "pooled")


def _check_positions(positions: PositionsConfig, model: ModelConfig) -> None:
    head_dim, kind, offset = model.head_dim or model.d_model // model.heads, positions.kind, positions.offset
    axial, shape, dims = kind == "axial", positions.axial_shape or [], positions.axial_dims or []
    require(
        (kind == "rotary" and head_dim % 2 > 0, "model.positions.kind",
         f'"rotary" rotates pairs of coordinates, but the head dimension is {head_dim}',
         "Set model.head_dim to an even number"),
        (offset > 0 and kind != "learned", "model.positions.offset",
         f'{offset} is given, but model.positions.kind = "{kind}" does not use a table',
         'Set it to 0, or model.positions.kind to "learned"'),
    )  # fmt: skip
    for key, value in (("axial_shape", positions.axial_shape), ("axial_dims", positions.axial_dims)):
        require(
            (not axial and value is not None, f"model.positions.{key}",
             f'{value} is given, but model.positions.kind = "{kind}"',
             f'Set model.positions.kind to "axial", or {key} to null'),
            (axial and not value, f"model.positions.{key}",
             f"{'null' if value is None else value} does not fit axial positions",
             "Give one number per axis, such as axial_shape [128, 512] with axial_dims [256, 768]"),
        )  # fmt: skip
    require(
        (len(shape) != len(dims), "model.positions.axial_dims",
         f"{len(dims)} widths {dims} for the {len(shape)} axes of axial_shape = {shape}", "Give one width per axis"),
        (axial and math.prod(shape) < model.max_length, "model.positions.axial_shape",
         f"{shape} covers {math.prod(shape)} positions, but model.max_length = {model.max_length}",
         "Make the product of axial_shape at least model.max_length, or lower model.max_length"),
        (axial and sum(dims) != model.d_model, "model.positions.axial_dims",
         f"{dims} sums to {sum(dims)}, but model.d_model = {model.d_model}",
         f"Make the widths sum to {model.d_model}"),
    )  # fmt: skip


def _check_rotary(positions: PositionsConfig, model: ModelConfig) -> None:
    kind, section = positions.kind, "model.positions.scaling"
    require(
        *((kind != "rotary" and value != PositionsConfig.model_fields[key].default, f"model.positions.{key}",
           f'given, but model.positions.kind = "{kind}" does not use frequencies',
           'Remove it, or set model.positions.kind to "rotary"')
          for key, value in (("base", positions.base), ("scaling", positions.scaling))),
    )  # fmt: skip
    if (scaling := positions.scaling) is None:
        return
    by_length, original = scaling.kind in ("yarn", "llama3"), scaling.original_length
    require(
        *((value is not None and not belongs, f"{section}.{key}",
           f'{value} is given, but "{scaling.kind}" does not use it', "Remove it")
          for key, value, belongs in (
              ("original_length", original, by_length),
              ("attention_factor", scaling.attention_factor, scaling.kind == "yarn"),
          )),
        (by_length and original is None, f"{section}.original_length",
         f'null, but "{scaling.kind}" needs the sequence length of the original training',
         "Give this length in tokens"),
        (scaling.kind == "ntk" and (model.head_dim or model.d_model // model.heads) < 4, f"{section}.kind",
         '"ntk" needs a head dimension of 4 or more', "Raise model.head_dim"),
    )  # fmt: skip


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
    size = max(1, heads // groups)
    require(
        (settings.joined is not None, key,
         f"{groups} groups, but the heads of {show(kind)} are not independent: {settings.joined}",
         "Set it to 1, or choose another mechanism"),
        (heads // settings.heads_together % groups > 0, key,
         f"{groups} groups cannot divide the {heads} heads of {show(kind)} in layer {layer} evenly",
         "Set it to a divisor of the heads (or sketches) of every mechanism"),
        (size % shared > 0 and shared % size > 0, key,
         f"groups of {size} heads split {shared} heads that share a key head (model.key_heads)",
         f"Choose groups whose size is a divisor or a multiple of {shared}"),
    )  # fmt: skip


def check_targets(model: ModelConfig, prefix: str, *targets: str) -> None:
    """Raise ConfigError for the first mechanism whose objective predicts none of the targets.

    prefix: key of the model's attention in the configuration.
    """
    for kind in kinds(model):
        objective = getattr(model.attention, kind).predicts
        if objective is not None and objective not in targets:
            problem = f'"{objective}" is not a target of this stack'
            raise ConfigError(f"{prefix}.{kind}.objective", problem, f'Set it to "{(*targets, "attention")[0]}"')
