"""Rules for runs whose ranks share a sequence."""

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
