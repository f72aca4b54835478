"""Low-rank adapters on the body of a fine-tuned model, ours or HuggingFace's."""

from megasparse.config.lora import LoRAConfig
from megasparse.model import adapters
from megasparse.tasks.backbones import Backbone, HuggingFaceBody, MegasparseBody


def add_adapters(body: Backbone, config: LoRAConfig, seed: int) -> None:
    """`model.adapters.add_adapters` of a body, whose norm over the states, where it has one, is trained as well: it is
    not pretrained.
    """
    norm = body.norm if isinstance(body, MegasparseBody) else None
    new = () if norm is None else norm.parameters()
    adapters.add_adapters(
        body, config, seed, kinds=_kinds(body), new=new, draws=isinstance(body, HuggingFaceBody)
    )  # fmt: skip


def adapter_size(body: Backbone, config: LoRAConfig) -> int:
    """Number of weights that `add_adapters` would add. Raises ConfigError as it does."""
    return adapters.adapter_size(body, config, _kinds(body))


def _kinds(body: Backbone) -> adapters.Kinds:
    """The classes of linear layers: transformers has one for GPT-2."""
    if isinstance(body, MegasparseBody):
        return adapters.LINEAR
    from transformers.pytorch_utils import Conv1D

    return (*adapters.LINEAR, Conv1D)
