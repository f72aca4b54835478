"""Selection of the engine. The engines are imported lazily, and only here."""

from collections.abc import Callable

from torch import nn

from megasparse.config.schema import RunSettings
from megasparse.training.checkpoints.checkpoint import Checkpoint, load_weights
from megasparse.training.engines.contract import Engine, Initial, MakeRng, Weights
from megasparse.training.ranks import Ranks


def build_engine(
    model: nn.Module, config: RunSettings, make_rng: MakeRng, ranks: Ranks, checkpoint: Checkpoint | None = None,
    initial: Initial | None = None,
) -> Engine:  # fmt: skip
    """Build the engine `config.run.engine` with the weights of `checkpoint`, or of `model` without one. initial: values
    of parameters on the meta device. Raises ConfigError and CheckpointError.
    """
    if checkpoint is not None:
        load_weights(model, checkpoint, buffers_only=True)
    weights = Weights(model, initial, checkpoint)
    engine_class: Callable[[nn.Module, RunSettings, MakeRng, Ranks, Weights], Engine]
    if config.run.engine == "torch":
        from megasparse.training.engines.plain import TorchEngine as engine_class
    else:
        from megasparse.training.engines.deepspeed import DeepSpeedEngine as engine_class  # takes seconds to import
    engine = engine_class(model, config, make_rng, ranks, weights)
    if checkpoint is not None:
        engine.load(checkpoint)
    return engine
