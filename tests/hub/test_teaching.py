"""Teach a decoder's key selection from its attention: recall rises, other weights stay, interruptions resume."""

import copy
from unittest.mock import MagicMock

import pytest
import torch
from safetensors.torch import save
from transformers import ByT5Tokenizer, Gemma3ForCausalLM

from megasparse.attention.observation import Call, calls
from megasparse.errors import HubError
from megasparse.evaluation.attention_quality import weights_of
from megasparse.hub.replace import replace_attention
from megasparse.hub.teaching import Teacher, full_attention, read_windows
from tests.helpers.cases import together
from tests.hub.test_replace_decoders import FURTHER, build, inputs

SEEN = {"chunk": 4, "local": True, "sinks": 1}
SKETCH = {"kind": "smart_bird", "keys": 6, "sketch": "heads", "sketch_heads": 2, "objective": "attention", **SEEN}
ONE = {"kind": "smart_bird", "keys": 6, "sketch": "attention", "objective": "attention", **SEEN}
HASH = {"kind": "lha", "joint": False, "utility": "collisions", **SEEN, "chunk": 8}
RANKED = {"kind": "ranked", "keys": 6, "sketch_heads": 2, "buckets": 4, "probes": 2, **SEEN}
MIXED = {"pattern": ["full", {"ranked": 2, "lha": 2}], "ranked": {**RANKED}, "lha": {**HASH}}
for own in ("ranked", "lha"):
    MIXED[own].pop("kind")


def taught(attention):
    layers = len(attention.get("pattern", [attention]))
    return replace_attention(build(dtype=torch.float32, num_hidden_layers=layers), attention)


def captured(model, tokens):
    """Share of the model's attention on the keys that the first mechanism of the last layer selects."""
    with torch.no_grad(), full_attention(model), calls(model) as full:
        model(tokens, use_cache=False)
    with torch.no_grad(), calls(model) as found:
        model(tokens, use_cache=False)
    own, count = found[-1], found[-1].inputs.q.shape[1]
    inputs = own.inputs._replace(q=full[-1].inputs.q[:, -count:], k=full[-1].inputs.k[:, -count:])
    call = Call(own.mechanism, full[-1].x, inputs, own.context)
    exact, sparse = (weights_of(call, mechanism) for mechanism in (call.exact(), call.mechanism))
    return float((exact * (sparse > 0)).sum(-1).mean())


@pytest.mark.parametrize(
    "attention",
    [SKETCH, ONE, HASH, RANKED, {**RANKED, "sketch_dim": 64, "sketch_signs": True}, MIXED],
    ids=["heads", "layer", "hash", "ranked", "signs", "mix"],
)
def test_the_taught_choice_captures_more_attention_and_nothing_else_moves(attention):
    model, tokens = taught(attention), inputs(batch=1, length=64)["input_ids"]
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    first, teacher = captured(model, tokens), Teacher(model)
    assert teacher.measure(tokens) == teacher.measure(tokens) and teacher.passes == 0  # a measurement teaches nothing
    losses = [teacher.learn(tokens) for _ in range(10)]
    assert losses[-1] < 0.8 * losses[0]
    assert captured(model, tokens) > first + 0.01
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]) != (".megasparse." in name), name
    assert all(p.grad is None for name, p in model.named_parameters() if ".megasparse." not in name)


def test_layers_between_windows_of_the_model_are_taught():
    model = replace_attention(Gemma3ForCausalLM(copy.deepcopy(FURTHER["Gemma3"])), {**SKETCH, "sketch_heads": 1})
    teacher = Teacher(model)
    tokens = inputs(batch=1, length=64)["input_ids"]
    losses = [teacher.learn(tokens) for _ in range(5)]
    assert {number for number, _ in teacher.optimizers} == {1, 3} and losses[-1] < losses[0]


def test_windows_of_a_slow_tokenizer_cover_the_text(tmp_path):
    (tmp_path / "text.txt").write_text("a" * 40)
    cut = read_windows(ByT5Tokenizer(), [tmp_path], 16)
    assert [len(tokens) for tokens in cut] == [16, 16, 9]  # 40 bytes and the end token
    assert read_windows(MagicMock(is_fast=False, return_value={"input_ids": []}), [tmp_path], 16) == [[]]


@together("attention", [SKETCH, HASH, RANKED])
def test_texts_inside_the_window_are_an_error(attention):
    texts = [[7] * 2 * attention["chunk"]]
    with pytest.raises(HubError, match=r"^length: \d+ tokens contain no key beyond the window of \d+"):
        Teacher(taught(attention)).teach(texts, texts, 1)


def test_a_stopped_teaching_resumes_bit_identically(tmp_path, monkeypatch):
    def course(passes, folder, seed=3):
        teacher = Teacher(taught(MIXED).half(), seed)
        texts = torch.randint(5, 60, (3, 32), generator=torch.Generator().manual_seed(1)).tolist()
        return teacher, teacher.teach(texts, texts[:1], passes, folder)

    whole, expected = course(5, None)
    learn = Teacher.learn

    def killed(self, *arguments):
        if self.passes == 2:
            raise KeyboardInterrupt
        return learn(self, *arguments)

    monkeypatch.setattr(Teacher, "learn", killed)
    with pytest.raises(KeyboardInterrupt):
        course(5, tmp_path / "part")
    monkeypatch.undo()
    again, found = course(5, tmp_path / "part")
    assert found == expected and found[1] < found[0] and again.passes == 5
    rates = {group["lr"] for group in again.optimizers[1, "ranked"].param_groups}
    assert rates == {3e-3, 1e-2 * (1 - 0.9 * 0.8)}  # sketch; buckets in the last of 5 passes
    one, other = (teacher.model.state_dict() for teacher in (whole, again))
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert sorted(path.name for path in (tmp_path / "part").iterdir()) == ["course.safetensors"]
    with pytest.raises(HubError, match="belongs to another training"):
        course(5, tmp_path / "part", seed=4)
    for content in (b"{", save({"x": torch.zeros(1)}, {"identity": "1"})):
        (tmp_path / "part" / "course.safetensors").write_bytes(content)
        with pytest.raises(HubError, match=r"course.safetensors: is damaged .*part to start again"):
            course(5, tmp_path / "part")
    with pytest.raises(HubError, match=r"course.safetensors: cannot be written .File exists"):
        course(5, tmp_path / "part" / "course.safetensors")
