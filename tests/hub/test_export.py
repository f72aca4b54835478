import json
from itertools import pairwise

import pytest
import torch
from transformers import ReformerModelWithLMHead, YosoForMaskedLM

from megasparse import hub
from megasparse.config.attention import MECHANISMS
from megasparse.errors import CheckpointError, ConfigError, HubError
from megasparse.hub import export, tensor_file
from megasparse.hub.architectures import format_named
from megasparse.hub.export import text_tokens, to_hf
from megasparse.hub.formats import our_logits
from megasparse.hub.importing import write_checkpoint
from megasparse.hub.megasparse_format import FORMAT
from megasparse.hub.tensor_file import TensorFile
from megasparse.model.build import build_model
from megasparse.training.checkpoints.checkpoint import Checkpoint, load_weights
from tests.helpers.hub import SEED, checkpoint, decoder, encoder, load
from tests.helpers.models import NGRAMS, PARTS, attention, causal_names, encoder_names, random_tokens, small_pair
from tests.helpers.trained import prepared, trained


@pytest.mark.parametrize("kind", [decoder, encoder])
def test_every_mechanism_is_exported_with_all_its_weights(tmp_path, kind):
    """The function to_hf itself compares the logits of both models."""
    fits = encoder_names() if kind is encoder else causal_names()
    kinds = [name for name in MECHANISMS if name in fits]
    model, path = checkpoint(kind("full", attention=attention(*kinds), layers=len(kinds)), tmp_path / "run")
    folder = to_hf(path, tmp_path / "out")
    file = TensorFile.open(folder)
    state = {f"model.{name}": value for name, value in model.state_dict().items()}
    assert file.names() == sorted(state)
    assert all(torch.equal(file.read(name), value) for name, value in state.items())


@pytest.mark.parametrize(
    "config",
    [
        decoder("local", tied_embeddings=True, activations="stored"),
        decoder("lsh", blocks="ordinary", activations="checkpoint_cpu", tied_embeddings=True),
        decoder("full", positions={"kind": "rotary"}, head_dim=8, score_from=3),
        decoder("lsh", **PARTS, start_token=3, ngrams=NGRAMS),
        decoder("full", max_length=700, positions={"kind": "learned"}, vocabulary=300),
        encoder("full", style="bert", blocks="ordinary", activations="stored", positions={"kind": "learned"}),
        small_pair(source={"shared_embedding": False}, tied_embeddings=True, ngrams=NGRAMS),
        small_pair(blocks="ordinary", activations="checkpoint", source={"attention": attention("smyrf", "lha")}),
    ],
    ids=["tied", "ordinary", "rotary", "parts", "long", "bert", "encoder-decoder", "encoder-decoder shared"],
)
def test_an_exported_model_is_imported_bit_identically(tmp_path, config):
    model, path = checkpoint(config, tmp_path / "run")
    folder = hub.to_hf(path, tmp_path / "out")
    imported = load(FORMAT, folder)
    whole = Checkpoint.open(path).config.model_copy(update={"model": config})
    again = Checkpoint.open(write_checkpoint(whole, imported.tensors, tmp_path / "again"))
    assert imported.config["model"] == json.loads(config.model_dump_json())
    assert imported.config["run"] == {"seed": SEED} and imported.config["data"] == {"tokenizer": "bytes"}
    other = build_model(config, 0).eval()
    load_weights(other, again)
    tokens = random_tokens(2, 60)
    assert torch.equal(our_logits(model, tokens, SEED), our_logits(other, tokens, SEED))
    loaded = hub.from_pretrained(folder).state_dict()
    assert all(torch.equal(value, loaded[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("limit", [20_000, pytest.param(30_000, marks=pytest.mark.slow)])
def test_large_models_are_written_in_shards(limit, tmp_path, monkeypatch):
    monkeypatch.setattr(tensor_file, "SHARD_BYTES", limit)
    model, path = checkpoint(decoder("local"), tmp_path / "run")
    folder = to_hf(path, tmp_path / "out")
    shards = sorted(file.name for file in folder.glob("*.safetensors"))
    assert len(shards) > 2 and shards[0] == f"model-00001-of-{len(shards):05}.safetensors"
    largest = max(4 * value.numel() for value in model.state_dict().values())
    assert all((folder / shard).stat().st_size < max(limit, largest) + 2_000 for shard in shards)
    sizes = [(folder / shard).stat().st_size for shard in shards]
    assert all(sum(pair) > limit for pair in pairwise(sizes)), "two shards would fit in one"
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(4 * value.numel() for value in model.state_dict().values())
    file = TensorFile.open(folder)
    assert all(torch.equal(file.read(f"model.{name}"), value) for name, value in model.state_dict().items())


DIFFER = r"not written: .* logits differ by [\d.e-]+ \(over 0\.0001\)"


@pytest.mark.parametrize(
    "name, factor, problem",
    [
        ("model.blocks.1.attention.attention.output.weight", 1.01, DIFFER),
        ("model.head.weight", 1.01, DIFFER),
        ("model.encoder.blocks.0.feed_forward.feed_forward.up", 1.01, DIFFER),
        ("model.encoder.norm.weight", 1.01, DIFFER),
        ("model.blocks.1.cross_attention.attention.value.weight", 1.01, DIFFER),
        ("model.embedding.start", None, "missing_keys"),
        ("other", 0.0, "unexpected_keys"),
    ],
)
def test_an_export_with_different_logits_is_not_written(tmp_path, monkeypatch, name, factor, problem):
    cross = "encoder" in name or "cross" in name
    _, path = checkpoint(small_pair() if cross else decoder("local"), tmp_path / "run")
    write = export.write_tensors

    def write_wrongly(tensors, folder):
        others = dict(tensors)
        value = others.pop(name, torch.zeros(1))
        write((others if factor is None else others | {name: factor * value}).items(), folder)

    monkeypatch.setattr(export, "write_tensors", write_wrongly)
    with pytest.raises(HubError, match=problem):
        to_hf(path, tmp_path / "out")
    assert [entry.name for entry in tmp_path.iterdir()] == ["run"]


def test_the_card_names_the_origin_of_the_model(tmp_path):
    data = prepared(tmp_path)
    trained(data, tmp_path / "run", ["local", "lsh"], 2)
    newest = Checkpoint.open(tmp_path / "run" / "checkpoints" / "00000002")
    protocol = {"split": "test", "sequence_length": 64, "stride": 32, "data_fingerprint": "abc", "checkpoint_step": 2}
    protocol["trained_on_fingerprint"] = newest.manifest["data_fingerprint"]
    result = {"bits_per_dim": 7.12345, "accuracy": 0.125, "dims": 400, "protocol": protocol}
    (tmp_path / "run" / "test.json").write_text(json.dumps(result))
    older = {**result, "bits_per_dim": 6.5, "protocol": {**protocol, "checkpoint_step": 1}}
    (tmp_path / "run" / "older.json").write_text(json.dumps(older))
    in_words = {"bits_per_token": 9.5, "bits_per_byte": 1.7, "token_perplexity": 724.1, "word_perplexity": None}
    in_words |= {"accuracy": 0.25, "dims": 90, "protocol": protocol}
    (tmp_path / "run" / "words.json").write_text(json.dumps(in_words))
    lossy = in_words | {"bits_per_token": 9.25, "protocol": {**protocol, "lossless": False}}
    (tmp_path / "run" / "lossy.json").write_text(json.dumps(lossy))
    of_targets = {"loss": 3.25, "accuracy": 0.5, "dims": 70, "protocol": {**protocol, "source_length": 8}}
    (tmp_path / "run" / "targets.json").write_text(json.dumps(of_targets))
    folder = to_hf(tmp_path / "run", tmp_path / "out")
    text = (folder / "README.md").read_text()
    assert "bits_per_token 9.5000, bits_per_byte 1.7000, token_perplexity 724.1000, accuracy 0.2500, over 90" in text
    assert "bits_per_token 9.2500, token_perplexity" in text
    assert "loss 3.2500, accuracy 0.5000, over 70 tokens of split" in text
    header = text.split("---")[1]
    assert "library_name: transformers" in header and "- lsh-attention" in header
    assert f"index {newest.manifest['data_fingerprint']}" in text
    assert "2 steps of 2 sequences of 64 tokens" in text and "strictly causal: no output" in text
    assert "bits_per_dim 7.1235, accuracy 0.1250, over 400 tokens" in text
    assert "6.5" not in text.split("## Configuration")[0]
    assert '"pattern": [' in text and "trust_remote_code=True" in text
    assert str(tmp_path) not in text
    with pytest.raises(HubError, match="was measured at step 1"):
        to_hf(tmp_path / "run", tmp_path / "other", evaluation=tmp_path / "run" / "older.json")
    with pytest.raises(HubError, match="is not a result"):
        to_hf(tmp_path / "run", tmp_path / "other", evaluation=tmp_path / "run" / "config.json")
    assert not (tmp_path / "other").exists()


def test_the_card_of_a_leaking_model_warns(tmp_path):
    _, path = checkpoint(decoder("lsh chunk"), tmp_path / "run")
    folder = to_hf(path, tmp_path / "out")
    assert "**It is not strictly causal** (layer 0: " in (folder / "README.md").read_text()
    assert json.loads((folder / "generation_config.json").read_text()) == {"use_cache": False}


def test_invalid_requests_are_rejected_and_leave_no_file(tmp_path):
    assert callable(hub.replace_attention)
    with pytest.raises(AttributeError, match="to_hub"):
        _ = hub.to_hub
    _, path = checkpoint(decoder("local"), tmp_path / "run")
    (tmp_path / "there").mkdir()
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    before = sorted(entry.name for entry in tmp_path.iterdir())
    for arguments, kind, problem in (
        ((path, tmp_path / "there"), HubError, "exists already"),
        ((path, tmp_path / "file"), HubError, "exists already"),
        ((path, tmp_path / "file" / "below"), HubError, "cannot be written"),
        ((tmp_path / "empty", tmp_path / "out"), CheckpointError, "contains no checkpoint"),
        ((path, tmp_path / "out", "reformr"), ConfigError, 'Did you mean "reformer"'),
    ):
        with pytest.raises(kind, match=problem):
            to_hf(*arguments)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == before


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A megasparse decoder, as written."""
    root = tmp_path_factory.mktemp("exported")
    _, path = checkpoint(decoder("local"), root / "run")
    return to_hf(path, root / "out")


@pytest.mark.parametrize(
    "change, problem",
    [
        (lambda config: config["model"].update(vocabulary=300), r"but \[300, 32\] by its config.json"),
        (lambda config: config["model"].update(flavour=1), "model.flavour: Extra inputs are not permitted"),
        (lambda config: config.pop("model"), "KeyError"),
        (lambda config: config.update(seed="x"), "ValueError"),
    ],
)
def test_an_export_that_does_not_fit_its_configuration_is_not_imported(exported, change, problem):
    config = json.loads((exported / "config.json").read_text())
    change(config)
    with pytest.raises(HubError, match=problem):
        FORMAT.load(config, TensorFile.open(exported))


def test_other_architectures_are_written_and_compared(tmp_path, monkeypatch):
    chunks = attention("local", "lsh", lsh={"window": "chunk", "same_bucket": False, "count_rounds": False})
    bert = {"style": "bert", "blocks": "ordinary", "activations": "stored", "tied_embeddings": True}
    positions = {"kind": "learned", "offset": 2}
    for to, config, architecture in (
        ("reformer", decoder("full", attention=chunks), ReformerModelWithLMHead),
        ("yoso", encoder("yoso", token_types=2, positions=positions, **bert), YosoForMaskedLM),
    ):
        _, path = checkpoint(config, tmp_path / f"{to}-run")
        folder = to_hf(path, tmp_path / to, to)
        _, info = architecture.from_pretrained(folder, output_loading_info=True)
        assert not info["missing_keys"] and not info["mismatched_keys"]
        assert set(info["unexpected_keys"]) <= format_named(to).unread
        assert architecture.__name__ in (folder / "README.md").read_text()
        monkeypatch.setattr(export, "our_logits", lambda *arguments: 1.01 * our_logits(*arguments))
        with pytest.raises(HubError, match="not written"):
            to_hf(path, tmp_path / "corrupted", to)
        monkeypatch.undo()


def test_both_sides_of_an_encoder_decoder_are_compared_with_their_padding(tmp_path):
    config = small_pair()
    texts = text_tokens(config)
    assert len(texts) == 3 and all(text.shape == (2, 40 + 128) for text in texts)
    for text in texts:
        source, target = (text[:, :40] == 258), (text[:, 40:] == 258)
        assert source.sum(1).tolist() == [0, 10] and target.sum(1).tolist() == [0, 32]
        assert source[1, 30:].all() and target[1, 96:].all()
    checkpoint(config, tmp_path / "run")
    card = (to_hf(tmp_path / "run", tmp_path / "out") / "README.md").read_text()
    assert "pipeline_tag: translation" in card and "AutoModelForSeq2SeqLM" in card and "num_beams=4" in card
    assert "2 and 3 layers" in card and "for up to 40 of source and 128 tokens" in card
