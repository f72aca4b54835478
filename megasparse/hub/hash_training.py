"""LHA's hash functions of a replaced model, trained alone while everything else stays as it is (LHA section 4.2).

B batch, L length.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor
from transformers import PreTrainedModel

from megasparse.attention.hash_training import kept_attention, training
from megasparse.attention.heads import Padding
from megasparse.attention.lha import LHAAttention
from megasparse.attention.observation import Call, calls
from megasparse.errors import HubError
from megasparse.hub.replace import DECODERS, mechanisms
from megasparse.hub.replaced_attention import NAME
from megasparse.hub.replaced_layer import Mechanisms

Batch = Mapping[str, Tensor]
"""Output of a tokenizer: input_ids and attention_mask, (B, L) each, and whatever else the model takes."""


def train_hashes(model: PreTrainedModel, batches: Iterable[Batch], seed: int = 0) -> Iterator[float]:
    """Train the hash functions of every LHA of a model, in place, a step of Adam for each batch.

    They learn the attention that the pretrained model has: its queries and keys where every layer's attention is full.
    Yields the divergence KL_Q + KL_K of each step, mean over tokens, heads and layers. Raises HubError where there is
    nothing to train.
    """
    yield from training((_calls(model, batch) for batch in batches), _learners(model), seed)


def kept(model: PreTrainedModel, batches: Iterable[Batch], seed: int = 0) -> float:
    """The share of full attention that the hash functions of a model keep, mean over batches; see `kept_attention`."""
    found = [kept_attention(_calls(model, batch), _learners(model), seed) for batch in batches]
    return sum(found) / len(found)


def _learners(model: PreTrainedModel) -> list[LHAAttention]:
    if model.config.model_type in DECODERS:
        raise HubError(type(model).__name__, "is a decoder", "Teach it: megasparse convert teach")
    found = [each for each in mechanisms(model) if isinstance(each, LHAAttention) and each.config.hash != "random"]
    if not found:
        hint = 'Replace its attention by {"kind": "lha"} first'
        raise HubError(type(model).__name__, "no part of its attention has hash functions to train", hint)
    return found


@torch.no_grad()
def _calls(model: PreTrainedModel, batch: Batch) -> list[Call]:
    """The call of each learner as it would be, had every layer before it full attention."""
    layers = [module for module in model.modules() if isinstance(module, Mechanisms)]
    learners = _learners(model)
    with full_attention(model), calls(model) as found:
        model(**batch)
    return [
        Call(mechanism, call.x, inputs, context)
        for layer, call in zip(layers, found, strict=True)
        for mechanism, inputs, context in layer.split_heads_by_mechanism(
            *call.inputs[:3], Padding(call.inputs.key_mask), call.context
        )
        if any(mechanism is learner for learner in learners)
    ]


@contextmanager
def full_attention(model: PreTrainedModel) -> Iterator[None]:
    """Inside the `with`, every replaced attention is full attention again, and nothing is dropped."""
    replaced = [(module, getattr(module, NAME)) for module in model.modules() if hasattr(module, NAME)]
    was_training = model.training
    model.eval()
    try:
        for module, own in replaced:
            setattr(module, NAME, own.with_full_attention())
        yield
    finally:
        for module, own in replaced:
            setattr(module, NAME, own)
        model.train(was_training)
