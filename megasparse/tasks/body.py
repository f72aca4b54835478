"""Models without their heads, tokens to final states. B batch, L length, E width."""

from abc import ABC, abstractmethod
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from megasparse.attention.contract import Targets
from megasparse.attention.heads import Padding
from megasparse.config.schema import LoRAConfig, ModelConfig, evaluation_rounds, kinds, predicts
from megasparse.errors import ConfigError
from megasparse.model import adapters
from megasparse.model.stack import Stack
from megasparse.ops.normalize import Norm
from megasparse.ops.random import RngContext
from megasparse.tasks.batches import Padded


class Backbone(nn.Module, ABC):
    """A model from sequences to states, the input of a head."""

    width: int  # width of a state, E
    causal: bool  # True if a token's state depends only on the token and earlier ones
    vocabulary: int
    longest: int  # longest sequence in tokens
    separators: int = 1  # number of separators between two segments
    task_weight: float = 1.0  # weight of the task's loss relative to the mechanisms'
    pooler: tuple[Tensor, Tensor] | None = None  # weight, bias of a pretrained layer on the first token's state

    @abstractmethod
    def forward(self, read: Padded, rng: RngContext, classes: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the states (B, L, E) fp32, and the sum of the mechanisms' auxiliary losses. classes: (B,) int64 labels
        for Smart Bird's sketch (objective "pooled").
        """

    @abstractmethod
    def attention(self) -> dict[str, Any] | None:
        """Return the settings of the self-attention as in a configuration; None for the original attention."""


class MegasparseBody(Backbone):
    """Embedding and blocks of a megasparse model, and a new norm on its final streams unless a pooler reads them."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.stack = Stack(config)
        self.causal, self.vocabulary, self.longest = config.kind != "encoder", config.vocabulary, config.max_length
        self.width = config.d_model * (2 if config.blocks == "reversible" else 1)
        self.norm: Norm | None = Norm("layer", self.width, config.norm_eps)
        self.task_weight = min(mechanism.task_weight for _, mechanism in self.stack.mechanisms())
        self.pooled_sketch = predicts(config, "pooled")

    def forward(self, read: Padded, rng: RngContext, classes: Tensor | None) -> tuple[Tensor, Tensor]:
        mask = read.mask
        if self.causal and mask is not None:  # the start vector precedes the first token
            mask = nn.functional.pad(mask, (1, 0), value=True)
        targets = Targets(classes, None) if classes is not None and self.pooled_sketch else None
        streams, auxiliary, _ = self.stack.streams(read.tokens, rng, Padding(mask), targets)
        states = torch.cat([x.float() for x in streams], dim=-1)
        states = states[:, 1:] if self.causal else states  # position p follows p tokens
        return states if self.norm is None else self.norm(states), auxiliary

    def attention(self) -> dict[str, Any]:
        return attention_settings(self.stack.config)


class HuggingFaceBody(Backbone):
    """A transformers model without its head and pooler, whose attention may be replaced.

    Its dropout uses torch's generators, seeded by step and samples in each pass, so that a resumed run draws the same.
    """

    def __init__(self, model: Any, causal: bool, longest: int, activations: str = "stored"):
        super().__init__()
        self.model = model.train()  # transformers loads models in evaluation mode, without dropout
        if hasattr(model, "pooler"):
            model.pooler = None  # the head reads the states; checkpoints contain no weights without gradients
        self.causal, self.longest, self.offload = causal, longest, False
        self.vocabulary, self.width = model.config.vocab_size, model.config.hidden_size
        self.separators = 2 if model.config.model_type in ("roberta", "xlm-roberta") else 1
        self.replaced = hasattr(model, "_megasparse")
        self.typed = getattr(model.config, "type_vocab_size", 0) > 1
        if self.replaced:
            from megasparse.hub.replace import mechanisms

            self.task_weight = min(mechanism.task_weight for mechanism in mechanisms(model))
        if activations != "stored":
            self.checkpoint_layers(offload_to_cpu=activations == "checkpoint_cpu")

    def forward(self, read: Padded, rng: RngContext, classes: Tensor | None) -> tuple[Tensor, Tensor]:
        mask = read.mask
        arguments: dict[str, Any] = {"input_ids": read.tokens, "attention_mask": None if mask is None else mask.long()}
        arguments |= {"token_type_ids": read.types} if self.typed else {}
        arguments |= {"use_cache": False} if self.causal else {}
        if self.replaced:
            from megasparse.hub.replace import DRAWS, TARGETS

            arguments |= {DRAWS: rng, TARGETS: None if classes is None else Targets(classes, None)}
        if not rng.training:
            return self._states(arguments)
        devices = [read.tokens.device] if read.tokens.device.type == "cuda" else []
        with torch.random.fork_rng(devices):
            key = rng.key(-1, f"transformers {rng.samples.tolist()}")
            assert isinstance(key, int), "transformers draws from torch's generator, not from the steps of a graph"
            torch.manual_seed(key >> 1)
            return self._states(arguments)

    def _states(self, arguments: dict[str, Any]) -> tuple[Tensor, Tensor]:
        with torch.autograd.graph.save_on_cpu() if self.offload and torch.is_grad_enabled() else nullcontext():
            states = self.model(**arguments).last_hidden_state.float()
        if not self.replaced:
            return states, torch.zeros((), device=states.device)
        from megasparse.hub.replace import auxiliary_loss

        return states, auxiliary_loss(self.model)

    def checkpoint_layers(self, offload_to_cpu: bool) -> None:
        """Recompute every layer in the backward pass. offload_to_cpu: store the layers' inputs in CPU memory."""
        if not self.model.supports_gradient_checkpointing:
            problem = f"{type(self.model).__name__} does not support recomputation of its layers"
            raise ConfigError("start.activations", problem, 'Set it to "stored"')
        self.model.activation_checkpointing_enable({"use_reentrant": False})
        self.offload = offload_to_cpu

    def attention(self) -> dict[str, Any] | None:
        from megasparse.hub.replace import ENTRY

        entry = getattr(self.model.config, ENTRY, None)
        return None if entry is None else entry["attention"]


def attention_settings(config: ModelConfig) -> dict[str, Any]:
    attention = config.attention.model_dump(mode="json", include={"pattern", *kinds(config)})
    return {**attention, "evaluation_rounds": evaluation_rounds(config)}


def add_adapters(body: Backbone, config: LoRAConfig, seed: int) -> None:
    """Add adapters to a body. A new norm on the states, which is not pretrained, is trained as well."""
    norm, kinds = getattr(body, "norm", None), adapters.LINEAR
    if not isinstance(body, MegasparseBody):
        from transformers.pytorch_utils import Conv1D  # GPT-2's linear layers

        norm, kinds = None, (*kinds, Conv1D)
    new = () if norm is None else norm.parameters()
    adapters.add_adapters(body, config, seed, kinds=kinds, new=new, draws=isinstance(body, HuggingFaceBody))
