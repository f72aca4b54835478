"""Rules between the keys of a run. Each raises a ConfigError that names the key, its value and a hint."""

from megasparse.config import deepspeed_section
from megasparse.config.attention import check_targets
from megasparse.config.finetuning import FinetuneConfig
from megasparse.config.messages import show
from megasparse.config.model_checks import check_model, check_sizes
from megasparse.config.schema import Config, MaskingConfig, RunSettings, encoder_part
from megasparse.errors import ConfigError
from megasparse.optimizers import OPTIMIZERS


def check(config: RunSettings) -> None:
    """Raise ConfigError for the first rule that `config` breaks. The rules that need an import of seconds come last."""
    check_sizes("", config)
    _check_directory(config)
    _check_bucket(config)
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
    _check_batches(config)
    deepspeed_section.check_keys(config.deepspeed)
    _check_optimizer(config)
    if config.run.engine == "deepspeed":  # plain torch must load the configuration where DeepSpeed is not installed
        deepspeed_section.check_values(config.deepspeed)


def _check_directory(config: RunSettings) -> None:
    if "://" in config.run.directory:
        problem = f"{show(config.run.directory)} is a URL: object storage can neither rename a folder nor lock a file"
        hint = "Choose a folder of a file system, such as NFS or Lustre, and set checkpoint.bucket to the URL"
        raise ConfigError("run.directory", problem, hint)


BUCKETS = ("s3://", "gs://", "az://", "file:///")


def _check_bucket(config: RunSettings) -> None:
    bucket = config.checkpoint.bucket
    if bucket is not None and not bucket.startswith(BUCKETS):
        problem = f"{show(bucket)} is no URL of an object store"
        raise ConfigError("checkpoint.bucket", problem, f"It begins with {', '.join(BUCKETS)}")


def _check_start(config: FinetuneConfig) -> None:
    start = config.start
    present = {
        "model": config.model is not None,
        "start.checkpoint": start.checkpoint is not None,
        "start.huggingface": start.huggingface is not None,
    }
    names = [name for name in present if present[name]]
    if not names:
        hint = "Give one of start.checkpoint, start.huggingface, and model (trained from its initial weights)"
        raise ConfigError("start", "nothing given", hint)
    if len(names) > 1:
        hint = f"Keep one of them, and set the other to null, such as --set {names[-1]}=null"
        raise ConfigError("start", f"{' and '.join(names)} given", hint)
    if config.model is None:
        if start.glove is not None:
            hint = "Set it to null, or give `model` in place of what it starts from"
            raise ConfigError("start.glove", f"{show(start.glove)}, but the embeddings are pretrained", hint)
        return
    check_model(config.model)
    for key, value in (("attention", start.attention), ("activations", start.activations), ("sha256", start.sha256)):
        if value is not None:
            raise ConfigError(
                f"start.{key}", "given, but nothing to start from", "Set it to null, and in `model` what you need"
            )
    source = config.model.source
    key, longest = ("model.source.length", source.length) if source else ("model.max_length", config.model.max_length)
    if config.task.max_length > longest:
        problem = f"{config.task.max_length} tokens are more than {key} = {longest}"
        raise ConfigError("task.max_length", problem, f"Lower it, or raise {key}")


def _check_tokenizer(config: Config) -> None:
    name = config.data.tokenizer
    if name not in BYTE_TOKENS and not name.endswith(TOKENIZER_FILES):
        problem = f"{show(name)} is none"
        hint = 'Write "bytes", "pixels", or the path of a tokenizer: FILE.model, FILE.json or FILE.txt'
        raise ConfigError("data.tokenizer", problem, hint)
    if name in BYTE_TOKENS and config.model.vocabulary < 256:
        problem = f"{config.model.vocabulary} is too small for {name}"
        raise ConfigError("model.vocabulary", problem, "Set it to 256, the number of their values")
    padding = config.model.padding_token
    if name in BYTE_TOKENS and padding is not None and padding < 256:
        raise ConfigError("model.padding_token", f"{padding} is a token of {name} itself", "Set it to 256 or more")


BYTE_TOKENS = ("bytes", "pixels")
TOKENIZER_FILES = (".model", ".json", ".txt")


def _check_lengths(config: Config) -> None:
    model, data = config.model, config.data
    before = model.source.length if model.source else 0
    if data.sequence_length <= before:
        problem = f"{data.sequence_length} leaves no target behind the {before} tokens of model.source.length"
        raise ConfigError("data.sequence_length", problem, f"Set it to {before} and the target's length")
    for key, length in (
        ("data.sequence_length", data.sequence_length - before),
        ("evaluation.sample_tokens", config.evaluation.sample_tokens),
    ):
        if length > model.max_length:
            problem = f"{length} is longer than model.max_length = {model.max_length}"
            raise ConfigError(key, problem, f"Set {key} to {model.max_length} or less, or raise model.max_length")
    if model.score_from >= data.sequence_length:
        problem = f"{model.score_from} leaves nothing of data.sequence_length = {data.sequence_length} to score"
        raise ConfigError("model.score_from", problem, f"Set it below {data.sequence_length}; 0 scores every token")


def _check_masking(config: Config) -> None:
    model, masking = config.model, config.model.masking
    if model.kind == "encoder_decoder" and config.evaluation.sample_tokens:
        raise ConfigError("evaluation.sample_tokens", "a sample needs a source, and evaluation has none", "Set it to 0")
    if model.kind != "encoder":
        if masking != MaskingConfig():
            problem = f'{masking.model_dump()} is given, but kind "{model.kind}" masks no tokens'
            raise ConfigError("model.masking", problem, 'Remove it, or set model.kind to "encoder"')
        return
    if config.data.tokenizer in BYTE_TOKENS and masking.token < 256:
        raise ConfigError(
            "model.masking.token", f"{masking.token} is a byte, which the text itself may have", "Set it to 256"
        )
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


def _check_batches(config: RunSettings) -> None:
    training = config.training
    if training.global_batch % training.micro_batch:
        problem = f"{training.global_batch} is no multiple of training.micro_batch = {training.micro_batch}"
        hint = "Make it a multiple of training.micro_batch times the number of ranks"
        raise ConfigError("training.global_batch", problem, hint)


def _check_optimizer(config: RunSettings) -> None:
    """The optimizer exists."""
    name = config.optimizer.name
    if name not in OPTIMIZERS:
        hint = f"It must be {' or '.join(map(show, OPTIMIZERS))}"
        raise ConfigError("optimizer.name", f"{show(name)} does not fit", hint)


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
    if model.source is not None:
        _check_length("model.source.length", model.source.length, size)


def _check_length(key: str, length: int, size: int) -> None:
    if length % size:
        nearest = max(1, round(length / size)) * size
        problem = f"{length} tokens do not divide among parallel.sequence = {size} ranks"
        raise ConfigError(key, problem, f"Set it to {nearest}, or parallel.sequence to a divisor")
