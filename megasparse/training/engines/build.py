"""The engine that a configuration asks for. Both kinds are imported here and only here, when they are needed."""

from torch import nn

from megasparse.config.schema import RunSettings
from megasparse.training.checkpoints.checkpoint import Checkpoint, load_weights
from megasparse.training.engines.contract import Engine, MakeRng
from megasparse.training.ranks import Ranks


def build_engine(
    model: nn.Module, config: RunSettings, make_rng: MakeRng, ranks: Ranks, checkpoint: Checkpoint | None = None
) -> Engine:
    """Build the engine that `config.run.engine` names, with `model`'s weights or with those of `checkpoint`.

    Raises ConfigError where the settings do not go together, CheckpointError where the checkpoint is of another model.
    """
    model.to(ranks.device)
    if checkpoint is not None:
        load_weights(model, checkpoint)  # before the engine makes its low-precision and partitioned copies
    engine = _engine_class(config)(model, config, make_rng, ranks)
    if checkpoint is not None:
        engine.load(checkpoint)
    return engine


def _engine_class(config: RunSettings) -> type[Engine]:
    if config.run.engine == "torch":
        from megasparse.training.engines.plain import TorchEngine

        return TorchEngine
    from megasparse.training.engines.deepspeed import DeepSpeedEngine  # takes seconds to import

    return DeepSpeedEngine
