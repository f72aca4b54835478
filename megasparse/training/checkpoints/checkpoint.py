"""Checkpoint format, and opening of checkpoints that may be damaged. saving.py writes them.

    RUN/checkpoints/00000500/manifest.json           step, data position, state of the loop, configuration, digests,
                                                     file and offset of each tensor
    RUN/checkpoints/00000500/rank-00000.safetensors  flat fp32 pieces of weights and optimizer state, of rank 0
    RUN/checkpoints/latest                           for people only: checkpoints are found by their folders

The format does not depend on the number of ranks or the ZeRO stage: tensors are assembled from their pieces.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from megasparse.config.finetuning import FinetuneConfig
from megasparse.config.schema import Config, LoRAConfig, ModelConfig, RunSettings
from megasparse.data.tokenizers import NAMED
from megasparse.errors import CheckpointError, ConfigError
from megasparse.files import Progress, file_sha256, silent
from megasparse.ops.quantised import is_quantised, quantise
from megasparse.settings.checks import check_model
from megasparse.settings.load import validated
from megasparse.training.checkpoints.manifest import (
    MANIFEST,
    RESTORE,
    find_checkpoint,
    read_manifest,
    size_of,
    weights_digest,
)

OTHER = "Build the model from the checkpoint's own configuration"
FORGED = "Do not trust it"
"""Hint for checkpoints that megasparse cannot have written."""


@dataclass(frozen=True)
class Fragment:
    """A flat piece of a tensor, in the memory that stores it.

    kind: `weight`, or the name of an optimizer state. shape: of the whole tensor. start: first element of the piece in
    the flattened tensor. memory: flat, fp32.
    """

    kind: str
    name: str
    shape: tuple[int, ...]
    start: int
    memory: Tensor

    def __post_init__(self) -> None:
        assert self.memory.dtype == torch.float32 and self.memory.ndim == 1

    @property
    def numel(self) -> int:
        return self.memory.numel()


class Checkpoint:
    """An open checkpoint: its manifest, and its tensors, read piece by piece on demand."""

    def __init__(self, path: Path, manifest: dict[str, Any]):
        self.path, self.manifest = path, manifest
        self._open_files: dict[str, Any] = {}

    @staticmethod
    def open(
        path: str | Path,
        rank: int = 0,
        world_size: int = 1,
        progress: Progress = silent,
        build: Callable[[ModelConfig], nn.Module] | None = None,
    ) -> "Checkpoint":
        """Open and verify a checkpoint. Raises CheckpointError, which names the first file that is missing, changed,
        unexpected or of the wrong size.

        The order is: the manifest's own digest, sizes and headers of files, the configuration, digests of files, so
        that a forged checkpoint fails before terabytes are hashed. Ranks that open it together share the digests.

        build: builds the pretrained model to load, whose weights must be those in the manifest; adapters are merged.
        """
        path = Path(path)
        manifest = read_manifest(path)
        checkpoint = Checkpoint(path, manifest)
        if path.name.isdecimal() and int(path.name) != checkpoint.step:
            raise CheckpointError(path, f"is the checkpoint of step {checkpoint.step}", "Restore the folder's name")
        for name, expected in sorted(manifest["files"].items()):
            if (size := size_of(path / name)) != expected["bytes"]:
                raise CheckpointError(path / name, f"{size} bytes instead of {expected['bytes']}", RESTORE)
        for entry in sorted(path.iterdir()):
            if entry.name not in manifest["files"] and entry.name != MANIFEST:
                raise CheckpointError(entry, "not part of this checkpoint", "Move it elsewhere")
        checkpoint._check_headers()
        if build is not None:
            checkpoint = merge_adapters(checkpoint)
            model = checkpoint.config.model

            def build_valid() -> nn.Module:
                check_model(model)
                return build(model)

            _matched(on_meta(checkpoint, model, build_valid), checkpoint)
        for name, expected in sorted(manifest["files"].items())[rank::world_size]:
            with CheckpointError.instead_of(OSError, path / name, "cannot be read ({})", RESTORE):
                digest = file_sha256(path / name, lambda: progress(f"verifying {path}"))
            if digest != expected["sha256"]:
                raise CheckpointError(path / name, "changed since it was written (sha256 differs)", RESTORE)
        return checkpoint

    @property
    def step(self) -> int:
        return int(self.manifest["step"])

    @property
    def sequences(self) -> int:
        """Global sample number of the first sequence of the next step."""
        return int(self.manifest["sequences"])

    @property
    def optimizer_steps(self) -> int:
        return int(self.manifest["optimizer_steps"])

    @property
    def state(self) -> dict[str, Any]:
        """State of the training loop; empty in checkpoints of older versions."""
        return dict(self.manifest.get("state", {}))

    @property
    def config(self) -> Config:
        """Configuration of its pretraining run, with paths in the run's folder, which may have been renamed."""
        settings = self.settings
        if not isinstance(settings, Config):
            raise CheckpointError(
                self.path, "belongs to a fine-tuned model", "Use megasparse evaluate --task, or predict"
            )
        run, data = self.path.absolute().parents[1], settings.data
        changes = {"tokenizer": tokenizer_copy(data.tokenizer, run)}
        if Path(data.path) == Path(settings.run.directory, "data") and (run / "data").is_dir():
            changes["path"] = str(run / "data")
        return settings.changed(data=changes)

    @property
    def settings(self) -> RunSettings:
        kind = FinetuneConfig if "task" in self.manifest["config"] else Config
        try:
            return validated(self.manifest["config"], kind)
        except ValidationError as error:
            first = error.errors()[0]
            problem = f"its configuration is from another version: {'.'.join(map(str, first['loc']))}: {first['msg']}"
            raise CheckpointError(self.path, problem, "Use the version of megasparse that wrote it") from None

    def check_base(self, digest: str) -> None:
        if (base := self.manifest.get("base")) not in (None, digest):
            problem = f"its adapters belong to weights {base[:12]}…, but the run's folder contains {digest[:12]}…"
            raise CheckpointError(self.path, problem, f"Restore {START.parts[0]}/ there")

    def tensor(self, kind: str, name: str) -> Tensor:
        """Read a whole tensor, fp32 on the CPU. `kind` is "weight" or an optimizer state."""
        shape = self.shape(kind, name)
        return self.read(kind, name, 0, math.prod(shape)).view(shape)

    def shape(self, kind: str, name: str) -> list[int]:
        return list(self._entry(kind, name)["shape"])

    def read(self, kind: str, name: str, start: int, numel: int) -> Tensor:
        """Read elements [start, start + numel) of the flattened tensor, and only these."""
        result, filled = torch.empty(numel, dtype=torch.float32), 0
        for piece in self._entry(kind, name)["pieces"]:
            first, last = max(start, piece["start"]), min(start + numel, piece["start"] + piece["numel"])
            if first < last:
                stored = self._file(piece["file"]).get_slice(piece["key"])
                result[first - start : last - start] = stored[first - piece["start"] : last - piece["start"]]
                filled += last - first
        if filled != numel:
            raise CheckpointError(self.path, f"contains {filled} of {numel} numbers of {kind} of {name}", RESTORE)
        return result

    def _entry(self, kind: str, name: str) -> dict[str, Any]:
        entry = self.manifest["tensors"].get(kind, {}).get(name)
        if entry is None:
            raise CheckpointError(self.path, f"{kind} of {name} is missing: it belongs to another model", OTHER)
        return entry

    def _check_headers(self) -> None:
        """Check that every file contains exactly the pieces in the manifest, as flat fp32."""
        listed: dict[str, dict[str, int]] = {name: {} for name in self.manifest["files"]}
        for tensors in self.manifest["tensors"].values():
            for tensor in tensors.values():
                for piece in tensor["pieces"]:
                    if piece["key"] in listed[piece["file"]]:
                        problem = f"lists {piece['key']} of {piece['file']} twice"
                        raise CheckpointError(self.path / MANIFEST, problem, FORGED)
                    listed[piece["file"]][piece["key"]] = piece["numel"]
        for name, pieces in listed.items():
            file = self._file(name)
            if file.metadata() or set(file.keys()) != pieces.keys():
                raise CheckpointError(self.path / name, "its tensors are not the ones in the manifest", FORGED)
            for key, numel in pieces.items():
                stored = file.get_slice(key)
                if (stored.get_dtype(), stored.get_shape()) != ("F32", [numel]):
                    raise CheckpointError(
                        self.path / name,
                        f"{key} is {stored.get_dtype()} {stored.get_shape()}, not F32 [{numel}]",
                        FORGED,
                    )

    def close(self) -> None:
        """Unmap the files, whose pages otherwise stay in memory."""
        self._open_files.clear()

    def _file(self, name: str) -> Any:
        if name not in self._open_files:
            path, hint = self.path / name, "Open it on a machine with more memory"
            with (
                CheckpointError.instead_of((SafetensorError, OSError), path, "not a safetensors file ({})", RESTORE),
                # torch maps the file; some systems cannot map files larger than memory
                CheckpointError.instead_of(RuntimeError, path, "cannot be mapped into memory ({})", hint),
            ):
                self._open_files[name] = safe_open(path, framework="pt")
        return self._open_files[name]


def tokenizer_copy(tokenizer: str, run: Path) -> str:
    """Return the path of the copy of a tokenizer in a run's folder; the tokenizer itself without a copy."""
    paths = (run / folder / f"tokenizer{Path(tokenizer).suffix}" for folder in ("", "data", "start"))
    return next((str(path) for path in paths if tokenizer not in NAMED and path.is_file()), tokenizer)


def open_newest(directory: Path, **options: Any) -> Checkpoint:
    """Open the checkpoint that `find_checkpoint` returns, or the next newer one if its run deletes it meanwhile."""
    while True:
        path = find_checkpoint(directory)
        try:
            return Checkpoint.open(path, **options)
        except (CheckpointError, FileNotFoundError):
            if path.exists():
                raise


def persistent_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Return the persistent buffers by name: learned state other than parameters."""
    names = module.state_dict(keep_vars=True).keys() - dict(module.named_parameters(remove_duplicate=False)).keys()
    return {name: buffer for name, buffer in module.named_buffers() if name in names}


def load_weights(module: nn.Module, checkpoint: Checkpoint, buffers_only: bool = False) -> None:
    """Fill a freshly built module with the checkpoint's weights and persistent buffers, or only the buffers. Frozen
    parameters stay as they are.
    """
    names = persistent_buffers(module) if buffers_only else None
    for name, tensor in _matched(module, checkpoint).items():
        if names is None or name in names:
            tensor.data.copy_(checkpoint.tensor("weight", name))


def on_meta(checkpoint: Checkpoint, model: ModelConfig, build: Callable[[], nn.Module]) -> nn.Module:
    """Build a checkpoint's model on the meta device. Raises CheckpointError for an invalid configuration, or one with
    more layers than weights, which bounds the time that it costs.
    """
    weights = len(checkpoint.manifest["tensors"].get("weight", {}))
    layers = max(model.layers, (model.source and model.source.layers) or 0)
    if layers > weights:
        problem = f"its configuration has {layers} layers, more than its {weights} weights"
        raise CheckpointError(checkpoint.path, problem, FORGED)
    try:
        with torch.device("meta"):
            return build()
    except ConfigError as error:
        raise CheckpointError(checkpoint.path, f"its configuration: {error.key}: {error.problem}", FORGED) from None
    except (RuntimeError, TypeError, OverflowError) as error:  # sizes that do not fit 64 bits
        problem = f"its configuration describes no valid model ({' '.join(str(error).split())[:100]})"
        raise CheckpointError(checkpoint.path, problem, FORGED) from None


def _matched(module: nn.Module, checkpoint: Checkpoint) -> dict[str, Tensor]:
    """Return the module's trained parameters and persistent buffers, which the checkpoint must contain exactly."""
    trained = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
    parameters = {**trained, **persistent_buffers(module)}
    for name in checkpoint.manifest["tensors"].get("weight", {}):
        if name not in parameters:
            raise CheckpointError(checkpoint.path, f"contains a weight {name}, unknown to the model", OTHER)
    for name, parameter in parameters.items():
        if (shape := checkpoint.shape("weight", name)) != list(parameter.shape):
            problem = f"{name} has shape {shape}, in the model {list(parameter.shape)}"
            raise CheckpointError(checkpoint.path, problem, OTHER)
    return parameters


A, B, NORMS = (f".lora_{part}.default.weight" for part in ("A", "B", "magnitude_vector"))
"""Suffixes of the names of an adapter's weights; the last one is DoRA."""
START = Path("start", "checkpoints", "00000000")
"""Path in a run's folder of the weights that its adapters belong to."""


class Merged(Checkpoint):
    """A pretraining run's checkpoint with its adapters added to the frozen weights, when these are read.

    Weights that the run trained in full (mechanisms) come from the run, all others from its start, quantised and
    dequantised as in the run.
    """

    def __init__(self, adapters: Checkpoint, base: Checkpoint, lora: LoRAConfig):
        adapters.check_base(weights_digest(base.manifest))
        weights = base.manifest["tensors"]["weight"]
        config = {**adapters.manifest["config"], "lora": None}
        super().__init__(adapters.path, {**adapters.manifest, "config": config, "tensors": {"weight": weights}})
        self.base, self.lora = base, lora
        rounded = adapters.settings.training.precision == "bf16"
        self._dtype = torch.bfloat16 if rounded else torch.float32
        self.adapters, self._trained = adapters, adapters.manifest["tensors"]["weight"]
        layers = {name.removesuffix(A) for name in self._trained if name.endswith(A)}
        expected: dict[str, list[int]] = {name: entry["shape"] for name, entry in weights.items()}
        for layer in layers:
            rows, columns = expected.get(f"{layer}.weight", [0, 0])
            expected |= {f"{layer}{A}": [lora.rank, columns], f"{layer}{B}": [rows, lora.rank]}
            expected |= {f"{layer}{NORMS}": [rows]} if lora.dora else {}
        for name, entry in self._trained.items():
            if entry["shape"] != expected.get(name):
                raise CheckpointError(
                    adapters.path, f"{name} of shape {entry['shape']} fits no weight of {base.path}", FORGED
                )

    def read(self, kind: str, name: str, start: int, numel: int) -> Tensor:
        if name in self._trained:
            return self.adapters.read(kind, name, start, numel)
        layer = name.removesuffix(".weight")
        adapted = f"{layer}{A}" in self._trained
        if not (adapted or self._is_quantised(name)):
            return self.base.read(kind, name, start, numel)
        values = self.frozen(name)
        if adapted:
            a, b = (self.adapters.tensor(kind, f"{layer}{part}") for part in (A, B))
            values.addmm_(b, a, alpha=self.lora.scale)
        if adapted and self.lora.dora:
            norms = self.adapters.tensor(kind, f"{layer}{NORMS}")
            values *= (norms / values.norm(dim=1))[:, None]
        return values.view(-1)[start : start + numel]

    def frozen(self, name: str) -> Tensor:
        """Return a weight as the run computed with it, without its adapter."""
        values = self.base.tensor("weight", name)
        if not self._is_quantised(name):
            return values
        assert self.lora.quantized is not None
        return quantise(values, self.lora.quantized, self._dtype).dequantise().float()

    def _is_quantised(self, name: str) -> bool:
        return self.lora.quantized is not None and is_quantised(name, self.base.shape("weight", name))


def merge_adapters(checkpoint: Checkpoint) -> Checkpoint:
    """Return the merged checkpoint if `checkpoint` contains adapters, else `checkpoint`."""
    settings: Any = checkpoint.settings
    if not isinstance(settings, Config) or settings.lora is None:
        return checkpoint
    base = checkpoint.path.absolute().parents[1] / START
    problem = "contains only adapters, and the weights that they belong to cannot be read ({})"
    with CheckpointError.instead_of(CheckpointError, checkpoint.path, problem, "Copy the whole run folder again"):
        return Merged(checkpoint, Checkpoint.open(base), settings.lora)
