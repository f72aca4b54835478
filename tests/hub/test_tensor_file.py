import json

import pytest
import torch
from safetensors.torch import save_file

from megasparse.errors import HubError
from megasparse.hub.tensor_file import TensorFile
from tests.helpers.cases import together

A, B = torch.arange(6.0).view(2, 3), torch.ones(4, dtype=torch.bfloat16) / 3
NUMBER, LIST = '{"weight_map": 3}', '{"weight_map": []}'


def sharded(folder):
    save_file({"a": A}, folder / "model-00001-of-00002.safetensors")
    save_file({"b": B}, folder / "model-00002-of-00002.safetensors")
    places = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


@pytest.mark.parametrize("several", [False, True])
def test_tensors_are_read_as_fp32_from_one_file_or_several(tmp_path, several):
    sharded(tmp_path) if several else save_file({"a": A, "b": B}, tmp_path / "model.safetensors")
    file = TensorFile.open(tmp_path)
    assert file.names() == ["a", "b"] and file.shape("a") == (2, 3)
    assert torch.equal(file.read("a", (2, 3)), A)
    assert file.read("b").dtype == torch.float32 and torch.equal(file.read("b"), B.float())
    file.check({"a": (2, 3), "b": [4]})


def test_missing_unexpected_and_wrong_shaped_tensors_are_named(tmp_path):
    save_file({"a": A, "b": B}, tmp_path / "model.safetensors")
    file = TensorFile.open(tmp_path)
    for expected, problem in (
        ({"a": (2, 3), "b": (4,), "c": (1,)}, "contains no tensor c"),
        ({"a": (2, 3)}, "contains a tensor b, unknown to its architecture"),
        ({"a": (3, 2), "b": (4,)}, r"a has shape \[2, 3\], but \[3, 2\] by its config.json"),
    ):
        with pytest.raises(HubError, match=problem) as error:
            file.check(expected)
        assert "\n" not in str(error.value)
    with pytest.raises(HubError, match=r"a has shape"):
        file.read("a", (6,))
    with pytest.raises(HubError, match="contains no tensor d"):
        file.read("d")


def test_a_torn_file_is_rejected_by_name(tmp_path):
    save_file({"a": A, "b": B}, tmp_path / "model.safetensors")
    whole = (tmp_path / "model.safetensors").read_bytes()
    for length in (0, 4, 40, len(whole) - 1):
        (tmp_path / "model.safetensors").write_bytes(whole[:length])
        with pytest.raises(HubError, match=r"model.safetensors: damaged safetensors file"):
            TensorFile.open(tmp_path)


def test_missing_empty_and_pickle_folders_are_rejected(tmp_path):
    with pytest.raises(HubError, match="contains neither"):
        TensorFile.open(tmp_path)
    with pytest.raises(HubError, match="no such folder"):
        TensorFile.open(tmp_path / "nowhere")
    (tmp_path / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'exit 1'\ntR.")
    with pytest.raises(HubError, match=r"pytorch_model.bin: is a pickle.*Convert it to safetensors"):
        TensorFile.open(tmp_path)


@together(
    "places, problem",
    [
        ({"a": "model-00001-of-00002.safetensors", "b": "model-3.safetensors"}, "model-3.safetensors: missing"),
        ({"a": "model-00001-of-00002.safetensors", "c": "model-00002-of-00002.safetensors"}, "first b"),
        ({"a": "../model.safetensors"}, "which is not a safetensors file"),
        ({"a": "/etc/passwd"}, "which is not a safetensors file"),
        ({"a": "model.bin"}, "which is not a safetensors file"),
        ({"a": "x\n.safetensors"}, r"lists 'x\\n.safetensors', which is not a safetensors file"),
        ({"a": "x" * 5000 + ".safetensors"}, "lists 'x{200}', which is not a safetensors file"),
        *((text, "is not an index of safetensors") for text in ("", "{", "[]", "null", NUMBER, LIST, "[" * 100_000)),
    ],
)
def test_a_wrong_or_missing_index_is_rejected(tmp_path, places, problem):
    sharded(tmp_path)
    text = places if isinstance(places, str) else json.dumps({"weight_map": places})
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(HubError, match=problem):
        TensorFile.open(tmp_path)
