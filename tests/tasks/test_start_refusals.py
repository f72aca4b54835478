"""What fine-tuning refuses to start from, each time by one line that names the key or file, the value and a hint."""

import json

import pytest
import torch
from transformers import (
    BartConfig,
    BartModel,
    BertModel,
)

from megasparse.config.finetuning import FinetuneConfig
from megasparse.errors import CheckpointError, ConfigError, HubError, UserError
from megasparse.hub.export import to_hf
from megasparse.tasks.start import rebuild
from megasparse.training.checkpoints.checkpoint import Checkpoint
from tests.helpers.finetuning import (
    ENCODER,
    bert,
    bert_tokenizer,
    config_of,
    form_for,
    open_start,
    write_tokenizer,
)
from tests.helpers.hub import checkpoint, decoder
from tests.helpers.models import small_pair


def refusal(config: FinetuneConfig) -> str:
    with pytest.raises(UserError) as caught:
        open_start(config, 2)
    assert "\n" not in str(caught.value) and isinstance(caught.value, ConfigError | CheckpointError | HubError)
    return str(caught.value)


def test_other_weights_are_refused(tmp_path):
    folder = bert(tmp_path / "bert")
    found = open_start(config_of(tmp_path, {"huggingface": str(folder)}), 2).sha256
    open_start(config_of(tmp_path, {"huggingface": str(folder), "sha256": found}), 2)
    wrong = config_of(tmp_path, {"huggingface": str(folder), "sha256": "0" * 64})
    assert refusal(wrong).startswith(f'start.sha256: "{"0" * 64}", but the weights have "{found}"')
    model = BertModel.from_pretrained(folder)
    with torch.no_grad():
        model.embeddings.word_embeddings.weight[0, 0] += 1.0
    model.save_pretrained(folder)
    assert "but the weights have" in refusal(config_of(tmp_path, {"huggingface": str(folder), "sha256": found}))


def test_too_short_a_model_is_refused(tmp_path):
    _, path = checkpoint(decoder("full", blocks="ordinary", activations="checkpoint"), tmp_path / "pretrained")
    found = refusal(config_of(tmp_path, {"checkpoint": str(path)}, task={"max_length": 129}))
    assert found.startswith("task.max_length: 129 tokens are more than the 128 that the model reads. Lower it")


def test_encoder_decoders_are_refused(tmp_path):
    _, path = checkpoint(small_pair(), tmp_path / "pretrained")
    assert "is of an encoder-decoder" in refusal(config_of(tmp_path, {"checkpoint": str(path)}))
    folder = to_hf(path, tmp_path / "exported")
    assert "encoder-decoder" in refusal(config_of(tmp_path, {"huggingface": str(folder)}))
    layers = {"encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    bart = BartConfig(vocab_size=60, d_model=16, max_position_embeddings=64, **layers, **heads)
    BartModel(bart).save_pretrained(tmp_path / "bart")
    write_tokenizer(tmp_path / "bart", bert_tokenizer())
    assert "encoder-decoder" in refusal(config_of(tmp_path, {"huggingface": str(tmp_path / "bart")}))


def test_other_mistakes_are_refused(tmp_path):
    folder = bert(tmp_path / "bert")
    of_bert = {"huggingface": str(folder)}
    assert "is no folder" in refusal(config_of(tmp_path, {"huggingface": str(tmp_path / "nowhere")}))
    assert "holds no checkpoint" in refusal(config_of(tmp_path, {"checkpoint": str(tmp_path / "nowhere")}))
    _, path = checkpoint(decoder("lsh"), tmp_path / "pretrained")
    found = refusal(config_of(tmp_path, {"checkpoint": str(path), "activations": "checkpoint"}))
    assert found.startswith("start.activations:")
    found = refusal(config_of(tmp_path, {"checkpoint": str(path), "attention": {"pattern": ["lha"]}}))
    assert "has no weight" in found and ".lha." in found
    (folder / "tokenizer.json").rename(folder / "hidden.json")
    assert "tokenizer.json: is missing" in refusal(config_of(tmp_path, of_bert))
    (folder / "hidden.json").rename(folder / "tokenizer.json")
    weights = folder / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[: len(content) // 2])
    assert "model.safetensors" in refusal(config_of(tmp_path, of_bert))
    weights.unlink()
    assert str(folder) in refusal(config_of(tmp_path, of_bert))


@pytest.mark.parametrize("content", [None, b"{", b"[]", b'{"kind": "megasparse"}', b"null"])
def test_a_damaged_record_is_refused(content, tmp_path):
    config = config_of(tmp_path, {}, model=ENCODER)
    open_start(config, 2).write(tmp_path)
    record = tmp_path / "start" / "body.json"
    if content is None:
        record.unlink()
    else:
        record.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"body\.json: cannot be read .*Copy the run's folder again"):
        rebuild(tmp_path, form_for(config), Checkpoint(tmp_path, {"tensors": {}}))


def test_more_layers_than_weights_are_refused_before_one_is_built(tmp_path):
    folder = bert(tmp_path / "bert")
    wanted = config_of(tmp_path, {"huggingface": str(folder)})
    start = open_start(wanted, 2)
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**values, "num_hidden_layers": 10**9}))
    assert "tensors, by its config.json 1000000000 layers. Give a model" in refusal(wanted)
    start.record["config"]["num_hidden_layers"] = 10**9
    start.write(tmp_path / "run")
    with pytest.raises(CheckpointError, match="has 1 weights, in the run's record 1000000000 layers"):
        rebuild(tmp_path / "run", form_for(wanted), Checkpoint(tmp_path, {"tensors": {"weight": {"body.x": {}}}}))


def test_an_export_of_ours_with_more_layers_than_weights_is_refused(tmp_path):
    _, path = checkpoint(decoder("full"), tmp_path / "pretrained")
    folder = to_hf(path, tmp_path / "exported")
    values = json.loads((folder / "config.json").read_text())
    values["model"]["layers"] = 10**9
    (folder / "config.json").write_text(json.dumps(values))
    assert "by its config.json 1000000000 layers" in refusal(config_of(tmp_path, {"huggingface": str(folder)}))
