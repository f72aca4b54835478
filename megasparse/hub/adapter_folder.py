"""Export of a run's adapters to a folder that peft, transformers and vLLM load on top of the original model."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import save_file
from torch import Tensor

from megasparse.config.schema import LoRAConfig
from megasparse.errors import HubError
from megasparse.hub.architectures import hf_class
from megasparse.hub.decoders import DecoderFormat
from megasparse.hub.export import texts_with_logits
from megasparse.hub.formats import Weight, require_agreement
from megasparse.hub.importing import HFModel
from megasparse.hub.replace import load_whole
from megasparse.hub.tensor_file import appearing, refuse_existing
from megasparse.model.build import empty_model
from megasparse.training.checkpoints.checkpoint import NORMS, A, B, Merged, open_newest

FILE, PREFIX = "adapter_model.safetensors", "base_model.model."
WHOLE = "Export all weights, for example with --to llama"


def to_peft(checkpoint: str | Path, output: str | Path, base: str | Path) -> Path:
    """Export the adapters of a run as a PEFT folder, and return it.

    Before the folder is renamed to `output`, peft loads it on top of `base`, the folder of the Hugging Face decoder
    that the run started from, and the logits are compared with the trained model in fp32. Raises HubError if the run
    trained no adapters or other weights, too, if `base` differs from the weights that it started from, or if the logits
    differ.
    """
    output = Path(output)
    refuse_existing(output)
    merged, foreign = open_newest(Path(checkpoint), build=empty_model), HFModel.open(base)
    if not isinstance(merged, Merged):
        raise HubError(checkpoint, "contains no adapters", WHOLE)
    format, sizes = foreign.format, merged.config.model
    if not isinstance(format, DecoderFormat):
        raise HubError(base, f"is of the type {format.name}, but adapters are exported only for decoders", WHOLE)
    weights = [weight for weight in format.weights(sizes) if weight.ours]
    tensors = dict(_tensors(merged, {weight.ours[0]: weight for weight in weights}))
    for name in merged.manifest["tensors"]["weight"]:
        if name not in foreign.tensors or not torch.equal(foreign.tensors[name](), merged.base.tensor("weight", name)):
            problem = f"its {name} is not the weight that the adapters of {checkpoint} belong to"
            raise HubError(base, problem, "Give the folder of the model that the run started from")
    with appearing(output) as folder:
        save_file(tensors, folder / FILE, {"format": "pt"})
        _settings(merged.lora, str(base), {*tensors}, weights).save_pretrained(str(folder))
        texts, seed = texts_with_logits(merged, format), merged.config.run.seed
        theirs = _adapted(foreign, folder, merged, weights)
        pairs = ((logits, format.logits(theirs, tokens, seed)) for tokens, logits in texts)
        require_agreement(pairs, output)
    return output


def _tensors(merged: Merged, weights: Mapping[str, Weight]) -> Iterator[tuple[str, Tensor]]:
    """Yield peft's name and value of each weight that the run trained. Raises HubError for others than adapters."""
    parts = {A: ".lora_A.weight", B: ".lora_B.weight", NORMS: ".lora_magnitude_vector"}
    for name in merged.adapters.manifest["tensors"]["weight"]:
        part = next((part for part in parts if name.endswith(part)), "")
        weight = weights.get(f"{name.removesuffix(part)}.weight")
        if not part or weight is None or len(weight.ours) > 1:
            raise HubError(merged.path, f"a PEFT folder cannot express {name}, which it trained", WHOLE)
        module = weight.theirs.removesuffix(".weight")
        yield f"{PREFIX}{module}{parts[part]}", merged.adapters.tensor("weight", name)


def _settings(lora: LoRAConfig, base: str, names: set[str], weights: Iterable[Weight]) -> Any:
    """Return the content of adapter_config.json. names: of the tensors."""
    from peft import LoraConfig

    modules = {name.removeprefix(PREFIX).rpartition(".lora_")[0] for name in names}
    short = {module.rpartition(".")[2] for module in modules}
    named = {weight.theirs.removesuffix(".weight") for weight in weights if len(weight.shape) == 2}
    if {module for module in named if module.rpartition(".")[2] in short} == modules:
        modules = short
    return LoraConfig(
        base_model_name_or_path=base,
        task_type="CAUSAL_LM",
        inference_mode=True,
        r=lora.rank,
        lora_alpha=int(lora.alpha) if lora.alpha.is_integer() else cast(int, lora.alpha),
        lora_dropout=lora.dropout,
        use_rslora=lora.rslora,
        use_dora=lora.dora,
        target_modules=sorted(modules),
    )


@torch.no_grad()
def _adapted(foreign: HFModel, folder: Path, merged: Merged, weights: Iterable[Weight]) -> Any:
    """Load the original model in fp32, with the frozen weights of the run, and its adapters."""
    from peft import PeftModel

    model = load_whole(hf_class("AutoModelForCausalLM"), foreign.folder, dtype=torch.float32, **foreign.format.loading)
    for weight in weights:
        model.get_parameter(weight.theirs).copy_(weight.write(merged.frozen))
    return PeftModel.from_pretrained(model, str(folder)).eval()
