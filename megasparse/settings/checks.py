"""Rules between the keys of a run and of a model. Each raises a ConfigError: the key, its value and a hint."""

import math
from functools import reduce

from megasparse.config import deepspeed_section
from megasparse.config.finetuning import FinetuneConfig
from megasparse.config.messages import show
from megasparse.config.schema import (
    Config,
    MaskingConfig,
    ModelConfig,
    RunSettings,
    decoder_part,
    encoder_part,
    heads_of_layer,
    kinds,
)
from megasparse.errors import ConfigError

BUCKETS = ("s3://", "gs://", "az://", "file:///")
BYTE_TOKENS = ("bytes", "pixels")
TOKENIZER_FILES = (".model", ".json", ".txt")
SOURCE_KEYS = ("layers", "positions", "attention")
IN_A_GRAPH = ("local", "full", "lsh", "lha", "yoso", "ngram")
"""Mechanisms in whose training passes the host takes no part."""
Rule = tuple[bool, str, str, str]
"""True if it is broken, the key, the problem, and what to do."""


def require(*rules: Rule) -> None:
    """Raise ConfigError for the first broken rule."""
    for broken, key, problem, hint in rules:
        if broken:
            raise ConfigError(key, problem, hint)


def require_used(model: ModelConfig, *rows: tuple[str, bool, str]) -> None:
    """Raise ConfigError for the first key of a model that is set but not used. rows: key, is it used, and by what."""
    for key, used, user in rows:
        *sections, name = key.split(".")
        section = reduce(getattr, sections, model)
        value = getattr(section, name)
        if not used and value != type(section).model_fields[name].get_default():
            raise ConfigError(f"model.{key}", f"{show(value)} is given, but only {user} uses it", "Remove it")


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
    if config.run.cuda_graph:
        _check_cuda_graph(config)
    from megasparse.optimizers import OPTIMIZERS  # imports torch

    name, lora = config.optimizer.name, getattr(config, "lora", None)
    hint = f"It must be {' or '.join(map(show, OPTIMIZERS))}"
    require((name not in OPTIMIZERS, "optimizer.name", f"{show(name)} does not fit", hint))
    problem = f"{show(name)} updates whole matrices, and lora trains only adapters"
    whole = OPTIMIZERS[name].separates_hidden and lora is not None
    require((whole, "optimizer.name", problem, 'Set it to "adamw", or remove lora'))
    if config.run.engine == "deepspeed":  # the torch engine must work without DeepSpeed installed
        deepspeed_section.check_values(config.deepspeed)
        for key in ("quantized", "dora"):
            value = getattr(lora, key, None)
            problem = f"{show(value)} is not supported under ZeRO stage 3, which splits the frozen weights"
            hint = "Set deepspeed.zero_optimization.stage to 2"
            require((bool(value) and config.zero.get("stage") == 3, f"lora.{key}", problem, hint))


def check_run(config: RunSettings) -> None:
    """Raise ConfigError for the first rule that `config` breaks, of the rules that need no attention mechanisms."""
    directory, bucket, training = config.run.directory, config.checkpoint.bucket, config.training
    require(
        ("://" in directory, "run.directory",
         f"{show(directory)} is a URL: object storage can neither rename a folder nor lock a file",
         "Choose a folder of a file system, such as NFS or Lustre, and set checkpoint.bucket to the URL"),
        (bucket is not None and not bucket.startswith(BUCKETS), "checkpoint.bucket",
         f"{show(bucket)} is not a URL of an object store", f"It must start with {' or '.join(BUCKETS)}"),
    )  # fmt: skip
    if isinstance(config, FinetuneConfig):
        _require_initial_model(config)
    require((
        training.global_batch % training.micro_batch > 0, "training.global_batch",
        f"{training.global_batch} is not a multiple of training.micro_batch = {training.micro_batch}",
        "Make it a multiple of training.micro_batch times the number of ranks",
    ))  # fmt: skip
    deepspeed_section.check_keys(config.deepspeed)
    layers = getattr(getattr(config, "model", None), "checkpoint_layers", 1)
    if layers > 1 and config.zero.get("stage") == 3:
        raise ConfigError("model.checkpoint_layers", f"{layers}, but ZeRO 3 gathers one layer at a time", "Set it to 1")


def _check_cuda_graph(config: RunSettings) -> None:
    """Raise ConfigError if the passes of a run cannot be one CUDA graph, because the host takes part in them."""

    def rule(broken: bool, reason: str) -> Rule:
        return broken, "run.cuda_graph", f"true, but {reason}", "Set it to false"

    require(rule(config.run.engine != "torch", f"run.engine = {show(config.run.engine)} takes part in the backward"))
    if not isinstance(config, Config):
        raise ConfigError("run.cuda_graph", "true, but the batches of tasks differ in size", "Set it to false")
    model = config.model
    attention = model.attention
    sizes = f"model.padding_token = {show(model.padding_token)}, model.document_separator = "
    require(
        rule(model.kind != "decoder" or model.source is not None, "only decoders without a source are supported"),
        rule((model.padding_token, model.document_separator) != (None, None),
             f"{sizes}{show(model.document_separator)}: token counts depend on the data"),
        rule(config.lora is not None, "adapters (lora) are not supported"),
        rule(attention.dropout > 0, f"model.attention.dropout = {attention.dropout} reads sizes back from the GPU"),
        rule(model.adaptive_cutoffs != [], "model.adaptive_cutoffs selects tokens by their targets"),
        rule(model.activations == "checkpoint_cpu", 'model.activations = "checkpoint_cpu" copies to CPU memory'),
        rule(model.ngrams is not None and config.optimizer.name == "muon",
             'optimizer.name = "muon" updates the rows of model.ngrams that a batch reads'),
        *(rule(kind not in IN_A_GRAPH, f"the host takes part in {show(kind)} attention") for kind in kinds(model)),
        rule("lha" in kinds(model) and (attention.lha.window, attention.lha.utility) != ("band", "sampled"),
             "model.attention.lha needs window = \"band\" and utility = \"sampled\""),
    )  # fmt: skip


def _require_initial_model(config: FinetuneConfig) -> None:
    start = config.start
    models = {"model": config.model, "start.checkpoint": start.checkpoint, "start.huggingface": start.huggingface}
    names = [name for name, model in models.items() if model is not None]
    require(
        (not names, "start", "nothing given",
         "Give one of start.checkpoint, start.huggingface, and model (without pretrained weights)"),
        (len(names) > 1, "start", f"{' and '.join(names)} given",
         f"Keep one of them, and set the other to null, such as --set {''.join(names[-1:])}=null"),
    )  # fmt: skip


def _check_start(config: FinetuneConfig) -> None:
    if config.lora is not None and config.lora.quantized is not None:
        problem = f"{show(config.lora.quantized)} is not supported in fine-tuning on tasks, only by pretrain"
        raise ConfigError("lora.quantized", problem, "Set it to null")
    start, model = config.start, config.model
    if model is None:
        problem = f"{show(start.glove)}, but the embeddings are pretrained"
        require((start.glove is not None, "start.glove", problem, "Set it to null, or train a `model`"))
        return
    check_model(model)
    for key in ("attention", "activations", "sha256"):
        hint = "Set it to null, and configure `model` instead"
        require((getattr(start, key) is not None, f"start.{key}", "given, but no pretrained model is", hint))
    key, longest = "model.max_length", model.max_length
    if model.source is not None:
        key, longest = "model.source.length", model.source.length
    problem = f"{config.task.max_length} tokens are more than {key} = {longest}"
    require((config.task.max_length > longest, "task.max_length", problem, f"Lower it, or raise {key}"))


def _check_tokenizer(config: Config) -> None:
    name, vocabulary, padding = config.data.tokenizer, config.model.vocabulary, config.model.padding_token
    of_bytes, hint = name in BYTE_TOKENS, "Set it to 256 or more"
    require(
        (not of_bytes and not name.endswith(TOKENIZER_FILES), "data.tokenizer", f"unknown tokenizer {show(name)}",
         'Write "bytes", "pixels", or the path of a tokenizer: FILE.model, FILE.json or FILE.txt'),
        (of_bytes and vocabulary < 256, "model.vocabulary", f"{vocabulary} is too small for {name}", hint),
        (of_bytes and padding is not None and padding < 256, "model.padding_token",
         f"{padding} is also a token of {name}", hint),
    )  # fmt: skip


def _check_lengths(config: Config) -> None:
    model, length, longest = config.model, config.data.sequence_length, config.model.max_length
    kind, before = model.positions.kind, model.source.length if model.source else 0
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
           f"{model.score_from} leaves nothing of {key} = {tokens} to score", f"Set it below {tokens}")
          for key, tokens in sequences.items()),
        (config.evaluation_length > length and kind in ("learned", "axial"), "evaluation.sequence_length",
         f'{config.evaluation_length} is longer than data.sequence_length = {length}, but "{kind}" positions beyond it '
         "are not trained", f'Set it to {length} or less, or model.positions.kind to "rotary"'),
    )  # fmt: skip


def _check_masking(config: Config) -> None:
    model, token, sample = config.model, config.model.masking.token, config.evaluation.sample_tokens
    encoder = model.kind == "encoder"
    require(
        (model.kind != "decoder" and sample > 0, "evaluation.sample_tokens",
         f'{sample}, but a model of kind "{model.kind}" writes no samples', "Set it to 0"),
        (not encoder and model.masking != MaskingConfig(), "model.masking",
         f'{model.masking.model_dump()} is given, but kind "{model.kind}" masks no tokens',
         'Remove it, or set model.kind to "encoder"'),
        (encoder and config.data.tokenizer in BYTE_TOKENS and token < 256, "model.masking.token",
         f"{token} is a byte value that may occur in text", "Set it to 256"),
        (encoder and token >= model.vocabulary, "model.vocabulary",
         f"{model.vocabulary} leaves no id for an encoder's mask token, model.masking.token = {token}",
         f"Set model.vocabulary to {token + 1}, or to the next multiple of 8"),
    )  # fmt: skip


def check_parallel(config: Config) -> None:
    """Raise ConfigError if `parallel.sequence` ranks cannot split the sequences of the run."""
    size, model, length = config.parallel.sequence, config.model, config.data.sequence_length
    require(
        (size > 1 and config.run.engine == "torch", "parallel.sequence",
         f'{size} ranks per sequence, but run.engine = "torch" runs in one process',
         'Set run.engine to "deepspeed", or parallel.sequence to 1'),
        (size > 1 and model.sentence_order is not None, "model.sentence_order",
         f"given, but parallel.sequence = {size}: sequences of pairs cannot be split over ranks",
         "Set parallel.sequence to 1"),
        *((tokens % size > 0, key, f"{tokens} tokens cannot be divided evenly among parallel.sequence = {size} ranks",
           f"Set it to {max(1, round(tokens / size)) * size}, or parallel.sequence to a divisor")
          for key, tokens in (
              ("data.sequence_length", length), ("model.source.length", model.source.length if model.source else 0),
          )),
    )  # fmt: skip


def check_model(model: ModelConfig) -> None:
    """Raise ConfigError for the first rule that a model breaks, without rules about its data."""
    decoder, encoder, bert = model.kind == "decoder", model.kind == "encoder", model.style == "bert"
    if (model.kind == "encoder_decoder") != (model.source is not None):
        problem = f'{"null" if model.source is None else "given"}, but model.kind = "{model.kind}"'
        raise ConfigError("model.source", problem, 'Give it only for "encoder_decoder", such as {"length": 512}')
    two_streams = model.source is not None and model.blocks == "reversible"
    require_used(
        model,
        ("start_token", decoder, "a decoder"),
        ("score_from", decoder, "a decoder"),
        ("sentence_order", encoder, "an encoder"),
        ("document_separator", model.source is None and model.sentence_order is None, "running text"),
        ("embedding_twice", two_streams, "an encoder-decoder of reversible blocks"),
        ("token_types", bert or model.sentence_order is not None, 'style "bert" or model.sentence_order'),
        ("checkpoint_layers", model.activations.startswith("checkpoint"), 'activations "checkpoint"'),
    )
    _check_tokens(model)
    if model.source is None:
        _check_stack(model)
        return
    check_targets(encoder_part(model), "model.source.attention", "answer", "pooled")
    _check_stack(decoder_part(model))
    try:
        _check_stack(encoder_part(model))
    except ConfigError as error:  # rename keys of the encoder to keys of model.source
        key = error.key.replace("model.", "model.source.", 1)
        raise ConfigError(key if key.split(".")[2] in SOURCE_KEYS else error.key, error.problem, error.hint) from None


def _check_tokens(model: ModelConfig) -> None:
    vocabulary, cutoffs, pairs = model.vocabulary, model.adaptive_cutoffs, model.sentence_order
    special = {
        "model.padding_token": model.padding_token,
        "model.start_token": model.start_token,
        "model.document_separator": model.separator_id,
        "model.sentence_order.separator": pairs.separator if pairs else None,
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
        (len(set(lengths)) < len(lengths), "model.ngrams.lengths",
         f"{lengths} lists a length twice: both tables would get the same rows", "List each length once"),
        (cutoffs != sorted(set(cutoffs)) or cutoffs[-1:] >= [vocabulary], "model.adaptive_cutoffs",
         f"{cutoffs} does not ascend below model.vocabulary = {vocabulary}",
         "Give the first id of each cluster, such as [20000, 40000, 200000]"),
        *((bool(cutoffs) and present, key, "cannot be combined with model.adaptive_cutoffs", "Remove one of them")
          for key, present in excluded.items()),
        (pairs is not None and model.padding_token is None, "model.padding_token",
         "null, but pairs of model.sentence_order are padded", "Give its id"),
        (pairs is not None and model.max_length < 5, "model.max_length",
         f"{model.max_length} is too short for two segments", "Set it to 5 or more"),
    )  # fmt: skip


def _check_stack(model: ModelConfig) -> None:
    heads, width, bert, layers = model.heads, model.d_model, model.style == "bert", len(model.attention.pattern)
    around = range(max(1, heads - 1000), heads + 1000)
    near = min((n for n in around if width % n == 0), key=lambda n: abs(n - heads), default=1)
    needs = {"reversible": "reversible", "checkpoint": "ordinary", "checkpoint_cpu": "ordinary"}
    blocks = needs.get(model.activations, model.blocks)
    fitting = '"reversible"' if blocks == "ordinary" else '"stored", "checkpoint" or "checkpoint_cpu"'
    require(
        (model.head_dim is None and width % heads > 0, "model.heads",
         f"{heads} heads do not divide model.d_model = {width}",
         f"Set model.heads to a divisor (such as {near}), or model.head_dim"),
        *((bert and value != needed, "model.style", f'"bert" needs model.{key} = "{needed}", but it is "{value}"',
           f'Set model.{key} to "{needed}", or model.style to "reformer"')
          for key, value, needed in (("kind", model.kind, "encoder"), ("blocks", model.blocks, "ordinary"))),
        (blocks != model.blocks, "model.activations",
         f'"{model.activations}" needs {blocks} blocks, but model.blocks = "{model.blocks}"',
         f'Set model.activations to {fitting}, or model.blocks to "{blocks}"'),
        (bert and model.residual_dtype == "bf16", "model.residual_dtype",
         'bf16, but model.style = "bert" normalises its stream after each addition, in fp32', 'Set it to "fp32"'),
        (layers > model.layers, "model.attention.pattern",
         f"{layers} layers are listed, but model.layers = {model.layers}",
         f"Shorten the pattern to {model.layers} or fewer, or raise model.layers"),
    )  # fmt: skip
    _check_heads(model)
    _check_positions(model)
    for kind in kinds(model):
        section = getattr(model.attention, kind)
        section.check(f"model.attention.{kind}", model)
        problem = f'{model.attention.dropout} is given, but "{kind}" computes no attention probabilities'
        without = model.attention.dropout > 0.0 and section.no_probabilities
        require((without, "model.attention.dropout", problem, "Set it to 0"))


def _check_positions(model: ModelConfig) -> None:
    positions, head_dim, key = model.positions, model.head_dim or model.d_model // model.heads, "model.positions"
    kind, axial, scaling = positions.kind, positions.kind == "axial", positions.scaling
    shape, dims = positions.axial_shape or [], positions.axial_dims or []
    require_used(
        model,
        *((f"positions.{name}", kind == user, f'kind "{user}"') for name, user in (
            ("offset", "learned"), ("axial_shape", "axial"), ("axial_dims", "axial"), ("base", "rotary"),
            ("scaling", "rotary"),
        )),
    )  # fmt: skip
    require(
        (kind == "rotary" and head_dim % 2 > 0, f"{key}.kind",
         f'"rotary" rotates pairs of coordinates, but the head dimension is {head_dim}',
         "Set model.head_dim to an even number"),
        *((axial and not value, f"{key}.{name}", f"{show(value)} does not fit axial positions",
           "Give one number per axis, such as axial_shape [128, 512] with axial_dims [256, 768]")
          for name, value in (("axial_shape", positions.axial_shape), ("axial_dims", positions.axial_dims))),
        (len(shape) != len(dims), f"{key}.axial_dims",
         f"{len(dims)} widths {dims} for the {len(shape)} axes of axial_shape = {shape}", "Give one width per axis"),
        (axial and math.prod(shape) < model.max_length, f"{key}.axial_shape",
         f"{shape} covers {math.prod(shape)} positions, but model.max_length = {model.max_length}",
         "Make the product of axial_shape at least model.max_length, or lower model.max_length"),
        (axial and sum(dims) != model.d_model, f"{key}.axial_dims",
         f"{dims} sums to {sum(dims)}, but model.d_model = {model.d_model}",
         f"Make the widths sum to {model.d_model}"),
    )  # fmt: skip
    if scaling is None:
        return
    by_length = scaling.kind in ("yarn", "llama3")
    require_used(
        model,
        ("positions.scaling.original_length", by_length, 'scaling of kind "yarn" or "llama3"'),
        ("positions.scaling.attention_factor", scaling.kind == "yarn", 'scaling of kind "yarn"'),
    )
    require(
        (by_length and scaling.original_length is None, f"{key}.scaling.original_length",
         f'null, but "{scaling.kind}" needs the sequence length of the original training',
         "Give this length in tokens"),
        (scaling.kind == "ntk" and head_dim < 4, f"{key}.scaling.kind",
         '"ntk" needs a head dimension of 4 or more', "Raise model.head_dim"),
    )  # fmt: skip


def _check_heads(model: ModelConfig) -> None:
    """Check that each entry of the pattern fits the stack's kind, number of heads, shared key heads and groups."""
    if model.heads % (key_heads := model.key_heads or model.heads):
        problem = f"{key_heads} does not divide model.heads = {model.heads}"
        raise ConfigError("model.key_heads", problem, "Set it to a divisor, or to null")
    groups, shared = model.attention.head_groups, model.heads // key_heads
    for layer in range(len(model.attention.pattern)):
        split, key = heads_of_layer(model, layer), f"model.attention.pattern[{layer}]"
        if (total := sum(split.values())) != model.heads:
            problem = f"{split} has {total} heads, but model.heads = {model.heads}"
            raise ConfigError(key, problem, f"Make the numbers sum to {model.heads}")
        for kind, heads in split.items():
            section, size, of_groups = getattr(model.attention, kind), max(1, heads // groups), groups > 1
            require(
                *((model.kind == stack and bool(why), key, f'"{kind}" cannot {lacking}: {why}',
                   f'Choose another mechanism, or set model.kind to "{other}"')
                  for stack, other, why, lacking in (
                      ("decoder", "encoder", section.bidirectional_only, "be causal"),
                      ("encoder", "decoder", section.causal_only, "see both ways"),
                  )),
                (heads % shared > 0, key,
                 f"{heads} heads of {kind} cannot be divided into groups of {shared} that share a key head",
                 f"Make it a multiple of {shared} (model.heads / model.key_heads)"),
                (of_groups and section.joined is not None, "model.attention.head_groups",
                 f"{groups} groups, but the heads of {show(kind)} are not independent: {section.joined}",
                 "Set it to 1, or choose another mechanism"),
                (of_groups and heads // section.heads_together % groups > 0, "model.attention.head_groups",
                 f"{groups} groups cannot divide the {heads} heads of {show(kind)} in layer {layer} evenly",
                 "Set it to a divisor of the heads (or sketches) of every mechanism"),
                (of_groups and size % shared > 0 and shared % size > 0, "model.attention.head_groups",
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
