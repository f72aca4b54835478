"""A replaced model's memory grows with the length of its input, not with the square."""

import pytest
import torch
import transformers
from transformers import BertConfig

from megasparse.hub.replace import replace_attention
from tests.helpers.peak_memory import PeakMemory
from tests.hub.test_replace import inputs


def peak(attention, length, longest):
    """Peak memory of a model that takes `longest` tokens, forward and backward on two sequences, one of them padded."""
    config = BertConfig(vocab_size=60, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8)
    torch.manual_seed(0)
    model = transformers.BertForSequenceClassification(config).train()
    replace_attention(model, attention, max_length=longest)
    given = inputs(batch=2, length=length)
    with PeakMemory() as memory:
        model(**given, labels=torch.tensor([0, 1])).loss.backward()
    assert model.bert.encoder.layer[0].attention.self.value.weight.grad.abs().sum() > 0
    return memory


def check_memory(attention, longest):
    half, whole = peak(attention, longest // 2, longest), peak(attention, longest, longest)
    print(f"{attention}: {half.peak / 1e6:.1f} MB at {longest // 2}, {whole.peak / 1e6:.1f} at {longest}")
    assert whole.peak <= 2.2 * half.peak
    assert whole.largest < longest**2, "a tensor of a size that grows with the square"


LONG = [{"kind": "lha", "chunk": 64}, {"kind": "yoso", "hashes": 4, "code_bits": 4}, {"kind": "lsh", "chunk": 64}]
BIRD = {"kind": "smart_bird", "keys": 8, "objective": "pooled", "labels": 2}
"""It compares all pairs, a tile at a time: the full lengths among the soak tests."""


@pytest.mark.slow
@pytest.mark.parametrize("attention", LONG, ids=str)
def test_memory_grows_with_the_length(attention):
    check_memory(attention, 8192)


def test_smart_birds_memory_grows_with_the_length():
    check_memory(BIRD, 4096)


def test_the_memory_check_sees_full_attention():
    assert peak({"kind": "full"}, 4096, 4096).largest >= 4096**2
