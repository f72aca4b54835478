"""The optimizers that `optimizer.name` can choose. A new one is a file in this folder and an entry in `OPTIMIZERS`."""

from megasparse.optimizers.adafactor import AdafactorSpec
from megasparse.optimizers.adamw import AdamWSpec
from megasparse.optimizers.spec import OptimizerSpec

OPTIMIZERS: dict[str, OptimizerSpec] = {"adamw": AdamWSpec(), "adafactor": AdafactorSpec()}
