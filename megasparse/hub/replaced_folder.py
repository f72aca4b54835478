"""A folder of a model whose attention is replaced: transformers' own files, where config.json says what replaced it.

Read by transformers alone it is the model with full attention.
"""

from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, PreTrainedModel

from megasparse.errors import HubError
from megasparse.hub.output_folder import appearing
from megasparse.hub.replace import ENTRY, SELF_ATTENTION, replace_attention
from megasparse.hub.replaced_attention import NAME
from megasparse.hub.tensor_file import TensorFile


def save_replaced(model: PreTrainedModel, directory: str | Path, tokenizer: Any = None) -> None:
    """Write what `model.save_pretrained` does, whole or not at all. Raises HubError where the folder exists."""
    with appearing(Path(directory)) as folder:
        model.save_pretrained(folder)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)


def load_replaced(
    directory: str | Path, model_class: type[PreTrainedModel] | None = None, **settings: Any
) -> PreTrainedModel:
    """The model of a folder that `save_pretrained` of a replaced model wrote, with its attention replaced.

    model_class: such as transformers.BertForSequenceClassification, to give it another head; the one that was saved
    where left out. settings: of transformers' from_pretrained, such as num_labels.
    Raises HubError for a folder without such a model, and for missing, unexpected and wrong-shaped tensors.
    """
    directory = Path(directory)
    file = TensorFile.open(directory)
    entry = replacement_of(directory)
    own = model_class or _saved_class(directory)
    model = _without_complaints(own).from_pretrained(directory, local_files_only=True, use_safetensors=True, **settings)
    model.__class__ = own
    replace_attention(model, entry["attention"], max_length=entry["max_length"], seed=entry["seed"])
    _read_mechanisms(model, file)
    return model


def replacement_of(directory: str | Path) -> dict[str, Any]:
    """The entry of config.json that says what replaced the attention. Raises HubError where there is none."""
    entry = getattr(_config(Path(directory)), ENTRY, None)
    if not isinstance(entry, dict) or entry.keys() != {"attention", "max_length", "seed"}:
        hint = "Replace its attention: megasparse replace-attention"
        raise HubError(directory, f"config.json has no entry {ENTRY} as replace_attention writes it", hint)
    return entry


def load_plain(directory: str | Path) -> PreTrainedModel:
    """The model of a folder as transformers has it, of the class that was saved. Nothing is downloaded or unpickled."""
    directory = Path(directory)
    TensorFile.open(directory)
    model: PreTrainedModel = _saved_class(directory).from_pretrained(
        directory, local_files_only=True, use_safetensors=True
    )
    return model


def _config(directory: Path) -> Any:
    try:
        return AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        problem = " ".join(str(error).split())[:200]
        raise HubError(directory, f"config.json cannot be read ({problem})", "Give the folder of a model") from None


def _saved_class(directory: Path) -> type[PreTrainedModel]:
    config = _config(directory)
    name = (config.architectures or [""])[0]
    found = getattr(transformers, name, None) if config.model_type in SELF_ATTENTION else None
    if not (isinstance(found, type) and issubclass(found, PreTrainedModel) and found.config_class is type(config)):
        problem = f'config.json names the architecture "{name}" of type "{config.model_type}"'
        raise HubError(directory, problem, f"Attention can be replaced in these: {', '.join(SELF_ATTENTION)}")
    return found


def _without_complaints(own: type[PreTrainedModel]) -> Any:
    """The same class, which does not report the mechanisms' tensors as unexpected."""
    known = [*(own._keys_to_ignore_on_load_unexpected or []), rf"\.{NAME}\."]
    return type(own.__name__, (own,), {"_keys_to_ignore_on_load_unexpected": known, "__module__": own.__module__})


@torch.no_grad()
def _read_mechanisms(model: PreTrainedModel, file: TensorFile) -> None:
    prefix = f"{model.base_model_prefix}."
    saved = {name.removeprefix(prefix): name for name in file.names() if f".{NAME}." in name}
    for name, tensor in model.base_model.state_dict().items():
        if f".{NAME}." in name:
            tensor.copy_(file.read(saved.pop(name, name), tensor.shape))
    if saved:
        name = next(iter(saved.values()))
        raise HubError(
            file.path, f"has a tensor {name} that its {ENTRY} does not", "Give a model with its own config.json"
        )
