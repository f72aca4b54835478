"""Checkpoints of adapters, opened as those of the whole model: W + α/r·B·A in place of W, A and B (Hu et al. 2021)."""

from pathlib import Path
from typing import Any

from torch import Tensor

from megasparse.config.lora import LoRAConfig
from megasparse.config.schema import Config
from megasparse.errors import CheckpointError
from megasparse.training.checkpoints.checkpoint import FORGED, Checkpoint

A, B = ".lora_A.default.weight", ".lora_B.default.weight"
"""Ends of the names of an adapter's two weights."""
START = Path("start", "checkpoints", "00000000")
"""Path, in a run's folder, of the weights that its adapters belong to."""


class Merged(Checkpoint):
    """A pretraining run's checkpoint with its adapters added to the frozen weights, and no section `lora`.

    Each weight is computed when it is read. Weights that the run trained whole, those of mechanisms, are its own, all
    others those of its start. Raises CheckpointError where the two do not belong together.
    """

    def __init__(self, adapters: Checkpoint, base: Checkpoint, lora: LoRAConfig):
        weights = base.manifest["tensors"]["weight"]
        config = {**adapters.manifest["config"], "lora": None}
        super().__init__(adapters.path, {**adapters.manifest, "config": config, "tensors": {"weight": weights}})
        self._base, self._scale = base, lora.alpha / lora.rank
        self._adapters, self._trained = adapters, adapters.manifest["tensors"]["weight"]
        layers = {name.removesuffix(A) for name in self._trained if name.endswith(A)}
        expected: dict[str, list[int]] = {name: entry["shape"] for name, entry in weights.items()}
        for layer in layers:
            rows, columns = expected.get(f"{layer}.weight", [0, 0])
            expected |= {f"{layer}{A}": [lora.rank, columns], f"{layer}{B}": [rows, lora.rank]}
        for name, entry in self._trained.items():
            if entry["shape"] != expected.get(name):
                problem = f"{name} with shape {entry['shape']} belongs to no weight of {base.path}"
                raise CheckpointError(adapters.path, problem, FORGED)

    def read(self, kind: str, name: str, start: int, numel: int) -> Tensor:
        if name in self._trained:
            return self._adapters.read(kind, name, start, numel)
        found = self._base.read(kind, name, start, numel)
        layer = name.removesuffix(".weight")
        if f"{layer}{A}" not in self._trained:
            return found
        product = self._adapters.tensor(kind, f"{layer}{B}") @ self._adapters.tensor(kind, f"{layer}{A}")
        return found.add_(product.view(-1)[start : start + numel], alpha=self._scale)


def whole(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint itself, or with adapters the merged one. Raises CheckpointError where the weights that these
    belong to are not in the run's folder.
    """
    settings: Any = checkpoint.settings
    if not isinstance(settings, Config) or settings.lora is None:
        return checkpoint
    base = checkpoint.path.absolute().parents[1] / START
    try:
        return Merged(checkpoint, Checkpoint.open(base), settings.lora)
    except CheckpointError as error:
        problem = f"has adapters alone, and the weights that they belong to cannot be read ({error})"
        raise CheckpointError(checkpoint.path, problem, "Copy the run's folder again, whole") from None
