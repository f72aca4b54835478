"""Folders of Hugging Face models: tensors are read one at a time from safetensors files, or loaded by transformers,
which must find every weight. Nothing is unpickled, and folders are written atomically.
"""

import json
import os
import shutil
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from megasparse.errors import HubError, one_line
from megasparse.files import json_object, open_file, read_file
from megasparse.system import sync_folder

LAYERS = {"layers", "num_hidden_layers", "num_layers", "n_layer", "n_layers", "encoder_layers", "decoder_layers"}
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
ADAPTER = "megasparse.safetensors"
"""File with the tensors of replaced attention, named as in the base model."""
QUANTISED = ("quantization_config", "compression_config", "quantization")
"""Keys of config.json of quantised weights (transformers, early compressed-tensors, MLX)."""
QUANTISED_FILES = ("quantize_config.json", "hf_quant_config.json")
"""Files of quantised weights (GPTQ, ModelOpt), whose config.json may not mention it."""
BUFFERS = (
    ".attn.bias", ".attn.masked_bias", ".attention.bias", ".attention.masked_bias", ".rotary_emb.inv_freq",
    "position_ids", "token_type_ids", "mask_value_float16", "mask_value_float32",
)  # fmt: skip
"""Suffixes of constants in old files."""
SHARD_BYTES = 5_000_000_000
"""Largest file of tensors, unless one tensor is larger, and bytes in memory while it is written."""
_AGAIN = "Copy or download it again"
OWN_CONFIG = "Use a complete model with its original config.json"


class TensorFile:
    """The tensors of a model.safetensors, or of the files that model.safetensors.index.json lists, and of ADAPTER."""

    def __init__(self, path: Path, files: dict[str, Any]):
        """path: the folder. files: the opened file of each tensor."""
        self.path, self._files = path, files

    @staticmethod
    def open(folder: str | Path) -> "TensorFile":
        """Open a folder's tensors. Raises HubError if there are none, if a file is missing, damaged or differs from the
        index, if the weights are quantised, if the tensors of replaced attention are there twice, and if config.json
        has more layers than there are tensors, because building them could exhaust memory.
        """
        folder = Path(folder)
        if not folder.is_dir():
            raise HubError(folder, "no such folder", "Use the folder of a Hugging Face model")
        values: dict[str, Any] = {}
        with suppress(OSError):  # errors of config.json are reported when it is parsed
            values = json_object(read_file(folder / "config.json"))
        refuse_quantised(folder, values)
        replaced = TensorFile.one(folder / ADAPTER)._files if (folder / ADAPTER).exists() else {}
        if (folder / WEIGHTS).exists() or (folder / INDEX).exists():
            files = TensorFile.one(folder / WEIGHTS)._files if (folder / WEIGHTS).exists() else _sharded(folder)
            if replaced and (newer := [name for name in files if ".megasparse." in name]):
                problem = f"contains {newer[0]}, although {ADAPTER} from before it was saved again is there, too"
                raise HubError(folder, problem, f"Delete {ADAPTER} to use the newer tensors")
            return TensorFile(folder, files | replaced)._checked(depth(values))
        pickled = sorted(path.name for ending in ("*.bin", "*.pt", "*.pth") for path in folder.glob(ending))
        if pickled:
            hint = "Convert it to safetensors with transformers' save_pretrained, if you trust the file"
            raise HubError(folder / pickled[0], "is a pickle, which could run any code when it is loaded", hint)
        raise HubError(folder, f"contains neither {WEIGHTS} nor {INDEX}", "Use the folder of a Hugging Face model")

    @staticmethod
    def one(path: Path) -> "TensorFile":
        file = _opened(path)
        return TensorFile(path, dict.fromkeys(file.keys(), file))

    def names(self) -> list[str]:
        return sorted(self._files)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._file(name).get_slice(name).get_shape())

    def read(self, name: str, shape: Iterable[int] | None = None, dtype: torch.dtype = torch.float32) -> Tensor:
        """Read a tensor, floating point as `dtype`."""
        if shape is not None:
            self._check_shape(name, shape)
        with HubError.instead_of((SafetensorError, OSError), self.path, f"{name} cannot be read ({{}})", _AGAIN):
            tensor: Tensor = self._file(name).get_tensor(name)
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    def check(self, expected: Mapping[str, Iterable[int]]) -> None:
        """Raise HubError unless the tensors and their shapes are exactly those in `expected`."""
        for name, shape in expected.items():
            self._check_shape(name, shape)
        for name in self.names():
            if name not in expected:
                raise HubError(self.path, f"contains a tensor {name}, unknown to its architecture", OWN_CONFIG)

    def check_tied(self, copy: str, of: str) -> None:
        if copy != of and {copy, of} <= self._files.keys() and not torch.equal(self.read(copy), self.read(of)):
            problem = f"{copy} and {of} differ, but are tied by its config.json"
            raise HubError(self.path, problem, 'Set "tie_word_embeddings" to false there, or remove the first one')

    def _checked(self, layers: int) -> "TensorFile":
        for name, file in self._files.items():
            if name.endswith(".weight") and (kind := file.get_slice(name).get_dtype())[0] in "IU":
                raise _quantised(self.path, f"{name} is of type {kind}")
        if layers > len(self._files):
            problem = f"contains {len(self._files)} tensors, but its config.json specifies {layers} layers"
            raise HubError(self.path, problem, OWN_CONFIG)
        return self

    def _file(self, name: str) -> Any:
        if name not in self._files:
            raise HubError(self.path, f"contains no tensor {name}", OWN_CONFIG)
        return self._files[name]

    def _check_shape(self, name: str, expected: Iterable[int]) -> None:
        if (shape := self.shape(name)) != tuple(expected):
            problem = f"{name} has shape {list(shape)}, but {list(expected)} by its config.json"
            raise HubError(self.path, problem, OWN_CONFIG)


def load_stored(loader: Any, folder: str | Path, new_head: bool = False, **settings: Any) -> Any:
    """Load the model of a folder by a class of transformers, or of megasparse with the same interface.

    transformers completes a folder that lacks weights with random ones, ignores tensors that it does not know, and does
    not tie weights that differ: such folders raise HubError. new_head: accept that the folder lacks weights outside the
    base model, and its pooler. settings: arguments of from_pretrained.
    """
    from transformers.utils import logging

    file, verbosity = TensorFile.open(folder), logging.get_verbosity()
    options = {"local_files_only": True, "use_safetensors": True, "trust_remote_code": False, **settings}
    options |= {"output_loading_info": True, "ignore_mismatched_sizes": True}
    try:
        logging.set_verbosity_error()  # its report of missing weights would come before the one line
        model, info = loader.from_pretrained(folder, **options)
    except (OSError, ValueError, LookupError, RuntimeError, ImportError, TypeError, AttributeError) as error:
        problem = f"transformers cannot load it ({one_line(' '.join(str(error).split()))})"
        raise HubError(folder, problem, "Use a model that transformers can load") from None
    finally:
        logging.set_verbosity(verbosity)
    stored, base, whole = file.names(), f"{model.base_model_prefix}.", model.base_model is model
    prefixed = any(name.startswith(base) for name in stored)

    def replaceable(name: str) -> bool:
        return name.removeprefix(base).startswith("pooler.") or not (whole or name.startswith(base))

    def known(name: str) -> bool:
        in_base = not prefixed or name.startswith(base) or base + name in stored
        constant = name.endswith(BUFFERS) or name.removeprefix(base).startswith("pooler.") or ".megasparse." in name
        return constant or not in_base

    for name, shape, expected in sorted(info["mismatched_keys"]):
        if new_head and replaceable(name) and settings.get("ignore_mismatched_sizes"):
            continue
        raise HubError(folder, f"{name} has shape {list(shape)}, but {list(expected)} by its config.json", OWN_CONFIG)
    if missing := sorted(name for name in info["missing_keys"] if not (new_head and replaceable(name))):
        raise HubError(folder, f"contains no tensor {missing[0]}", OWN_CONFIG)
    if unknown := sorted(name for name in info["unexpected_keys"] if not known(name)):
        raise HubError(folder, f"contains a tensor {unknown[0]}, unknown to its architecture", OWN_CONFIG)
    if getattr(model.config, "tie_word_embeddings", False) and isinstance(model._tied_weights_keys, dict):
        for copy, of in model._tied_weights_keys.items():
            file.check_tied(copy, of)
    return model


def refuse_quantised(folder: Path, values: dict[str, Any]) -> None:
    """Raise HubError for a folder of quantised weights. values: of its config.json."""
    for name in QUANTISED_FILES:
        if (folder / name).exists():
            raise _quantised(folder, name)
    for key in QUANTISED:
        if value := values.get(key):
            method = value.get("quant_method") if isinstance(value, dict) else None
            raise _quantised(folder, f"{key} of config.json" if method is None else one_line(str(method), 60))


def _quantised(folder: Path, method: str) -> HubError:
    hint = "Use the model that was not quantised, or dequantise it first and save it as fp32, bf16 or fp16"
    return HubError(folder, f"its weights are quantised ({method}), which megasparse does not read", hint)


def depth(values: Any) -> int:
    """Return the largest number of layers in a configuration, nested sections included."""
    if not isinstance(values, dict):
        return 0
    layers = (value for key, value in values.items() if key in LAYERS and isinstance(value, int))
    return max([*layers, *map(depth, values.values())], default=0)


def _sharded(folder: Path) -> dict[str, Any]:
    index = folder / INDEX
    damages = (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError)
    with HubError.instead_of(damages, index, "is not an index of safetensors files", _AGAIN):
        listed = json.loads(read_file(index))["weight_map"]
        file_of = {str(name): str(file) for name, file in listed.items()}
    files: dict[str, Any] = {}
    present = {path.name for path in folder.iterdir()}
    for name in sorted(set(file_of.values())):
        usable = name.endswith(".safetensors") and name.isprintable() and len(name) < 256
        if Path(name).name != name or not usable:
            raise HubError(index, f"lists {name[:200]!a}, which is not a safetensors file here", "Do not trust it")
        if name not in present:
            raise HubError(folder / name, "missing", _AGAIN)
        file = _opened(folder / name)
        files |= dict.fromkeys(file.keys(), file)
        if odd := sorted(set(file.keys()) ^ {tensor for tensor, other in file_of.items() if other == name}):
            raise HubError(folder / name, f"contains other tensors than {INDEX} lists, first {odd[0]}", _AGAIN)
    return files


def _opened(path: Path) -> Any:
    with HubError.instead_of((SafetensorError, OSError), path, "damaged safetensors file ({})", _AGAIN):
        open_file(path).close()  # reject a pipe, which would block
        return safe_open(path, framework="pt")


def refuse_existing(output: Path) -> None:
    if os.path.lexists(output):
        raise HubError(output, "exists already", "Choose a new folder")


@contextmanager
def appearing(output: Path) -> Iterator[Path]:
    """Yield a temporary folder; sync it and rename it to `output` on exit, or delete it on an error."""
    refuse_existing(output)
    temporary = output.with_name(f".{output.name}-{uuid.uuid4().hex}")
    try:
        temporary.mkdir(parents=True)
        yield temporary
        for folder, _, files in os.walk(temporary, topdown=False):
            for name in files:
                with open(Path(folder, name), "rb") as file:
                    os.fsync(file.fileno())
            sync_folder(Path(folder))
        temporary.rename(output)
        sync_folder(output.parent)
    except OSError as error:
        raise HubError(output, f"cannot be written ({error.strerror or error})", "Choose another folder") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def write_tensors(tensors: Iterable[tuple[str, Tensor]], folder: Path) -> None:
    """Write model.safetensors, or several files of SHARD_BYTES and their index, and ADAPTER."""
    shards: list[list[str]] = []
    total, size, shard, replaced = 0, 0, dict[str, Tensor](), dict[str, Tensor]()

    def write() -> None:
        shards.append(list(shard))
        save_file(shard, folder / f"{len(shards)}.safetensors", metadata={"format": "pt"})
        shard.clear()

    for name, tensor in tensors:
        if ".megasparse." in name:
            replaced[name.partition(".")[2]] = tensor.contiguous()  # named as in the base model
            continue
        if shard and size + tensor.nbytes > SHARD_BYTES:
            write()
            size = 0
        shard[name] = tensor.contiguous()
        size, total = size + tensor.nbytes, total + tensor.nbytes
    write()
    if replaced:
        save_file(replaced, folder / ADAPTER, metadata={"format": "pt"})
    if len(shards) == 1:
        (folder / "1.safetensors").rename(folder / WEIGHTS)
        return
    files: dict[str, str] = {}
    for number, names in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        (folder / f"{number}.safetensors").rename(folder / file)
        files |= {name: file for name in names}
    index = {"metadata": {"total_size": total}, "weight_map": files}
    (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")
