"""An attention layer for a model of your own. B batch, L length, E width of the model."""

from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megasparse.attention.contract import AttentionContext
from megasparse.attention.heads import MultiHeadAttention, Padding
from megasparse.errors import ConfigError
from megasparse.functional import model_of, padding_mask, segments_of
from megasparse.ops import opaque
from megasparse.ops.random import RngContext


class AttentionLayer(MultiHeadAttention):
    """Multi-head attention with projections, for a model of your own.

    The output of `layer(x)` is a tensor. Random draws, such as LSH's rotations, are a function of the layer's seed and
    `step`. In training, `step` counts the forward passes that follow a backward pass, so passes whose gradients are
    computed together, and recomputation by activation checkpointing, use the same draws. In evaluation draws never
    change. The buffer `draws` stores seed and step.

    Args:
        mechanism: Name of the mechanism: "lsh", "local", "lha", "yoso", "smart_bird", "ranked", "ngram", "full", ...
        d_model: Width of the input and the output.
        heads: Number of attention heads.
        max_length: Longest sequence in tokens, which determines the number of buckets.
        causal: Attend only to the token itself and earlier ones.
        head_dim: Width of a head, by default d_model/heads.
        key_heads: Number of key and value heads, each used by heads/key_heads query heads; by default `heads`.
        bias: Add biases to the projections.
        dropout: Dropout rate of attention probabilities in training.
        rope_theta: Base of rotary positions; None for a model with other positions.
        seed: Seed of the initial weights and of all draws, below 2^63; None draws one from torch's generator.
        **settings: Settings of the mechanism, see the reference of `model.attention`. The sketch of "smart_bird" learns
            attention.

    Raises:
        ConfigError: The settings do not fit.

    Examples:
        >>> layer = megasparse.AttentionLayer("lsh", d_model=512, heads=8, max_length=16384, chunk=64, rounds=2)
        >>> x = torch.randn(2, 256, 512)  # (batch, length, d_model)
        >>> layer(x).shape
        torch.Size([2, 256, 512])
        >>> mask = torch.arange(256) < torch.tensor([[256], [100]])  # (batch, length), true for real tokens
        >>> layer(x, mask).shape
        torch.Size([2, 256, 512])
    """

    draws: Tensor

    def __init__(  # noqa: PLR0913  (settings, by keyword)
        self,
        mechanism: str,
        d_model: int,
        heads: int,
        max_length: int,
        *,
        causal: bool = True,
        head_dim: int | None = None,
        key_heads: int | None = None,
        bias: bool = False,
        dropout: float = 0.0,
        rope_theta: float | None = None,
        seed: int | None = None,
        **settings: Any,
    ):
        positions = {"kind": "none"} if rope_theta is None else {"kind": "rotary", "base": rope_theta}
        shape = {"d_model": d_model, "heads": heads, "head_dim": head_dim, "key_heads": key_heads}
        config = model_of(
            mechanism, settings, **shape, max_length=max_length, dropout=dropout, positions=positions,
            kind="decoder" if causal else "encoder", attention_biases="all" if bias else "none",
        )  # fmt: skip
        seed = int(torch.randint(2**63 - 1, (), device="cpu")) if seed is None else seed
        super().__init__(config, 0, seed)
        self.max_length, self.d_model = max_length, d_model
        self._state = [seed, 0]
        self.register_buffer("draws", torch.tensor(self._state))
        self._read: Tensor = self.draws
        self._differentiated = False
        self._auxiliary: Tensor | None = None
        self._number = _number(self)

    @property
    def seed(self) -> int:
        return self._numbers()[0]

    @property
    def step(self) -> int:
        """Number of the training step, on which random draws depend. May be set."""
        return self._numbers()[1]

    @step.setter
    def step(self, step: int) -> None:
        self._numbers()[1] = step
        self.draws[1] = step

    @property
    def auxiliary_loss(self) -> Tensor:
        """Loss of the last training pass by which learned hashes and sketches learn, a scalar to add to your loss.

        Take its mean over the layers of a model. 0 for mechanisms that learn nothing by themselves. With activation
        checkpointing use `use_reentrant=False`.
        """
        return self.draws.new_zeros((), dtype=torch.float32) if self._auxiliary is None else self._auxiliary

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        mask: Tensor | None = None,
        tokens: Tensor | None = None,
        *,
        cu_seqlens: Tensor | None = None,
        position_ids: Tensor | None = None,
    ) -> Tensor:
        """Return the layer's output (B, L, E).

        Args:
            x: (B, L, E).
            mask: Padding, (B, L) or (B, 1, 1, L). bool or integers: true or not 0 for real tokens. float: added to
                scores, 0 for real tokens and -inf, or -10,000 and less, for padding.
            tokens: (B, L) int64, the token id of each position, which "ngram" needs.
            cu_seqlens: (N + 1,), the limits of N documents packed in one sequence, B = 1.
            position_ids: (B, L), positions inside packed documents, instead of cu_seqlens.

        Raises:
            ValueError: A shape or a mask does not fit.
            ConfigError: The mechanism needs tokens.
        """
        if not torch.compiler.is_compiling():
            out, auxiliary = self._attend(x, mask, tokens, cu_seqlens, position_ids)
            if torch._C._current_graph_task_id() == -1:  # not recomputed in a backward pass
                self._auxiliary = auxiliary
            return out
        tensors = {  # not by `|=`, which torch.compile rejects before torch 2.10
            **{"x": x, "mask": mask, "tokens": tokens, "cu_seqlens": cu_seqlens, "position_ids": position_ids},
            "number": self._number,
        }
        out, auxiliary = opaque.call(_attend, {}, tensors, dict(self.named_parameters()))
        if any(self.mechanism(kind).has_auxiliary_loss for kind in self.split):
            self._auxiliary = auxiliary
        return out

    def _attend(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        tokens: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        position_ids: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        if x.dim() != 3 or x.shape[2] != self.d_model or x.shape[1] > self.max_length:
            raise ValueError(f"x has shape {(*x.shape,)}: give (batch, {self.max_length} or less, {self.d_model})")
        batch, length = x.shape[:2]
        if not batch * length:
            raise ValueError(f"x has shape {(*x.shape,)}, without tokens: give one row of one token or more")
        if tokens is None and any(self.mechanism(kind).reads_tokens for kind in self.split):
            raise ConfigError("tokens", f"None, but {', '.join(self.split)} reads token ids", "Give them, (B, L) int64")
        if tokens is not None and tokens.shape != (batch, length):
            raise ValueError(f"tokens of shape {(*tokens.shape,)}: give ({batch}, {length})")
        padding = Padding(padding_mask(mask, batch, length), segments_of(batch, length, cu_seqlens, position_ids))
        recomputed = torch._C._current_graph_task_id() != -1  # called from a backward pass
        if self.training and self._differentiated and not recomputed:
            self._advance()
        rng = RngContext.evaluation(self.seed, batch)
        if self.training:
            rng = RngContext(self.seed, self.step, torch.arange(batch), training=True)
        out, auxiliary, *_ = super().forward(x, AttentionContext(0, rng, tokens=tokens), padding)
        if self.training and out.requires_grad:
            out.register_hook(self._note_backward)
        return out, auxiliary

    def _rotary_start(self, first_position: int, padding: Padding) -> int | Tensor:
        """Count positions from the start of each document, because hashes depend on positions, not on distances."""
        if (segments := padding.segments) is None:
            return first_position
        starts = F.pad(segments[:, 1:] != segments[:, :-1], (1, 0))  # (B or 1, L)
        index = torch.arange(segments.shape[1], device=segments.device)
        return -(index * starts).cummax(1).values[:, None]

    def _advance(self) -> None:
        self.step += 1
        self._differentiated = False
        self._after_step(True)

    def _after_step(self, applied: bool) -> None:
        for kind in self.split:
            self.mechanism(kind).after_step(applied, lambda sums: sums)

    def _note_backward(self, grad: Tensor) -> None:
        self._differentiated = True

    def _numbers(self) -> list[int]:
        """Return seed and step. The buffer is read only after it was replaced, because that waits for the device."""
        if self._read is not self.draws:
            self._state, self._read = self.draws.tolist(), self.draws
        return self._state

    def _save_to_state_dict(self, *args: Any, **kwargs: Any) -> None:
        if self._differentiated:
            self._advance()  # so that a resumed layer starts with the next step
        super()._save_to_state_dict(*args, **kwargs)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self._state, self._read, self._differentiated = self.draws.tolist(), self.draws, False
        self._after_step(False)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_auxiliary": None}  # a tensor with a graph cannot be copied

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._number = _number(self)


_layers: WeakValueDictionary[int, AttentionLayer] = WeakValueDictionary()
_numbers = count()


def _number(layer: AttentionLayer) -> Tensor:
    """Return the number of a new layer, a tensor, because torch.compile would compile again for other integers."""
    number = next(_numbers)
    _layers[number] = layer
    return torch.tensor(number, device="cpu")


class _Attend(nn.Module):
    """Call of a layer with other weights, without its hooks."""

    def __init__(self, layer: AttentionLayer):
        super().__init__()
        self.layer = layer

    def forward(self, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor | None]:
        return self.layer._attend(**inputs)


def _attend(tensors: dict[str, Tensor], seed: int, step: int | None) -> tuple[Tensor, Tensor | None]:
    """Call a layer, given its number, inputs and weights, for `opaque.call`."""
    names = ("x", "mask", "tokens", "cu_seqlens", "position_ids")
    layer = _layers[int(tensors["number"])]
    inputs = {name: tensors[name] for name in names if name in tensors}
    weights = {f"layer.{name}": tensors[name] for name, _ in layer.named_parameters()}
    result: tuple[Tensor, Tensor | None] = torch.func.functional_call(_Attend(layer), weights, (inputs,))
    return result
