"""Checkpointed layers of transformers' models: the same numbers, the same names, and less memory."""

import copy
import warnings

import pytest
import torch
from transformers import BertConfig, BertModel, DistilBertConfig, DistilBertModel, GPT2Config, GPT2Model

from megasparse.config.finetuning import HeadConfig
from megasparse.hub.replace import replace_attention
from megasparse.ops.random import RngContext
from megasparse.tasks.backbones import HuggingFaceBody, checkpoint_layers
from megasparse.tasks.batches import Inputs, Padded
from megasparse.tasks.forms.labels import TaskModel
from tests.helpers.peak_memory import PeakMemory

BERT = BertConfig(
    vocab_size=60, max_position_embeddings=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
    intermediate_size=48,
)  # fmt: skip
MODELS = {
    "bert": lambda: BertModel(copy.deepcopy(BERT), add_pooling_layer=False),
    "distilbert": lambda: DistilBertModel(
        DistilBertConfig(vocab_size=60, max_position_embeddings=64, dim=32, n_layers=2, n_heads=4, hidden_dim=48)
    ),
    "gpt2": lambda: GPT2Model(GPT2Config(vocab_size=60, n_positions=64, n_embd=32, n_layer=2, n_head=4)),
}
ATTENTION = {
    "lha": {"kind": "lha", "chunk": 8},
    "smart_bird": {"kind": "smart_bird", "keys": 6, "objective": "pooled", "labels": 3},
    "routing": {"kind": "routing", "chunk": 8},
}
CASES = [(name, None) for name in MODELS] + [("bert", kind) for kind in ATTENTION]
LENGTHS = torch.tensor([40, 29, 17])


def inputs():
    tokens = torch.randint(5, 60, (3, 40), generator=torch.Generator().manual_seed(1))
    return Inputs((Padded(tokens, torch.zeros_like(tokens), LENGTHS),), torch.tensor([0, 2, 1]))


def built(name, kind=None):
    torch.manual_seed(0)
    model = MODELS[name]()
    if kind is not None:
        replace_attention(model, ATTENTION[kind], max_length=64, seed=1)
    whole = TaskModel(HuggingFaceBody(model, name == "gpt2", 64), 3, HeadConfig(), False, 0)
    with torch.no_grad():
        for weight in model.parameters():  # freshly made models hardly attend
            weight.mul_(3.0 if weight.dim() > 1 else 1.0)
    return whole.train()


def one_pass(model, passes=1):
    """The objective, and every gradient by name."""
    for number in range(passes):
        objective = model(inputs(), RngContext(3, number, torch.arange(3), training=True))[0]
        objective.backward()
    return objective.detach(), {name: w.grad for name, w in model.named_parameters() if w.grad is not None}


@pytest.mark.parametrize(("name", "kind"), CASES)
@pytest.mark.parametrize("offload", [False, True])
def test_gradients_are_those_of_stored_activations(name, kind, offload):
    stored, again = built(name, kind), built(name, kind)
    checkpoint_layers(again.body.model, offload)
    assert stored.state_dict().keys() == again.state_dict().keys()
    (loss, expected), (own_loss, own) = one_pass(stored, passes=2), one_pass(again, passes=2)
    torch.testing.assert_close(own_loss, loss, rtol=1e-6, atol=1e-6)
    assert own.keys() == expected.keys()
    for key, gradient in expected.items():
        torch.testing.assert_close(own[key], gradient, rtol=1e-6, atol=1e-6 * gradient.abs().max().item())


@pytest.mark.parametrize("kind", ["lha", "smart_bird"])
def test_what_mechanisms_learn_from_is_counted_once(kind):
    model = built("bert", kind)
    checkpoint_layers(model.body.model, False)
    rng = RngContext(3, 0, torch.arange(3), training=True)
    auxiliary = [model.predicted(inputs(), rng, inputs().labels)[1] for _ in range(2)]
    assert auxiliary[0].requires_grad and auxiliary[0] == auxiliary[1] > 0
    names = {name for name in one_pass(model)[1] if "megasparse" in name}
    assert names and names == {name for name, _ in model.named_parameters() if "megasparse" in name}


def test_frozen_embeddings_and_frozen_layers():
    stored, again = built("bert"), built("bert")
    checkpoint_layers(again.body.model, False)
    for model in (stored, again):
        model.body.requires_grad_(False)
        model.body.model.encoder.layer[1].output.dense.requires_grad_(True)
    expected = one_pass(stored)[1]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        own = one_pass(again)[1]
    assert own.keys() == expected.keys() and "body.model.encoder.layer.1.output.dense.weight" in own
    for key, gradient in expected.items():
        torch.testing.assert_close(own[key], gradient, rtol=1e-6, atol=1e-7)


def test_only_inputs_of_layers_are_kept():
    model = built("bert")

    def kept():
        with PeakMemory() as memory:
            objective = model(inputs(), RngContext(3, 0, torch.arange(3), training=True))[0]
            live = memory.live
            objective.backward()
        model.zero_grad()
        return live

    stored = kept()
    checkpoint_layers(model.body.model, False)
    checkpointed = kept()
    assert checkpointed < 0.35 * stored
