"""HuggingFace's YOSO, and BERT, in and out."""

import copy
import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    BertConfig,
    BertForMaskedLM,
    BertForPreTraining,
    RobertaConfig,
    RobertaForMaskedLM,
    YosoConfig,
    YosoForMaskedLM,
)

from megasparse.attention.heads import Padding
from megasparse.config.schema import Config
from megasparse.errors import ConfigError, HubError
from megasparse.hub.architectures import format_named
from megasparse.hub.formats import difference, our_logits
from megasparse.hub.replace import load_whole
from megasparse.hub.tensor_file import TensorFile
from megasparse.model.build import build_model
from megasparse.ops.random import RngContext
from megasparse.settings.load import build_config
from megasparse.training.checkpoints.checkpoint import Checkpoint
from megasparse.training.checkpoints.manifest import find_checkpoint
from tests.helpers.cases import together
from tests.helpers.hub import assert_same_bits, load
from tests.helpers.models import random_tokens
from tests.helpers.trained import prepared, trained

ODD = dict(
    vocab_size=301, hidden_size=30, num_hidden_layers=3, num_attention_heads=5, intermediate_size=17,
    max_position_embeddings=41, hidden_dropout_prob=0.1,
)  # fmt: skip
CLASSES = {
    "yoso": (YosoConfig, YosoForMaskedLM, format_named("yoso")),
    "bert": (BertConfig, BertForMaskedLM, format_named("bert")),
    "roberta": (RobertaConfig, RobertaForMaskedLM, format_named("roberta")),
}
SHAPES = {
    "yoso": ("yoso", {}),
    "yoso with convolution": ("yoso", {"conv_window": 5, "hash_code_len": 7, "type_vocab_size": 3}),
    "yoso sampled": ("yoso", {"use_expectation": False, "num_hash": 6, "use_fast_hash": False, "mask_token_id": 260}),
    "yoso untied": ("yoso", {"tie_word_embeddings": False, "layer_norm_eps": 1e-5}),
    "bert": ("bert", {}),
    "roberta": ("roberta", {"max_position_embeddings": 43}),
    "bert untied": ("bert", {"tie_word_embeddings": False, "num_hidden_layers": 1}),
}


def theirs(name):
    """HuggingFace's model, every weight random; and its format."""
    kind, changes = SHAPES[name]
    config_class, model_class, form = CLASSES[kind]
    torch.manual_seed(0)
    model = model_class(config_class(**{**ODD, **changes})).eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
        if not model.config.tie_word_embeddings:
            model.cls.predictions.bias.copy_(model.cls.predictions.decoder.bias)  # nothing reads the first one
    return model, form


def saved(model, folder):
    model.save_pretrained(folder)
    return folder


def ours(imported, form=None):
    """The megasparse model of an import; with a format, as it is compared."""
    config = build_config(imported.config)
    config = form.comparable(config) if hasattr(form, "comparable") else config
    model = build_model(config.model, 0)
    parameters = dict(model.named_parameters())
    assert parameters.keys() == imported.tensors.keys()
    with torch.no_grad():
        for name, read in imported.tensors.items():
            assert parameters[name].shape == read().shape
            parameters[name].copy_(read())
    return model.eval()


@pytest.mark.parametrize("name", SHAPES)
def test_in_and_out_again_is_the_same_bit_for_bit(tmp_path, name):
    model, form = theirs(name)
    imported = load(form, saved(model, tmp_path))
    config = build_config(imported.config)
    exported = form.export(config, lambda name: imported.tensors[name]())
    assert_same_bits(dict(exported.tensors()), load_file(tmp_path / "model.safetensors"))
    again = AutoConfig.for_model(**exported.config).to_dict()
    for key, value in model.config.to_dict().items():
        if key not in ("attention_probs_dropout_prob", "bos_token_id", "eos_token_id", "pad_token_id", "dtype"):
            assert again[key] == value, key
    assert exported.config["mask_token_id"] == config.model.masking.token == getattr(model.config, "mask_token_id", 300)


@pytest.mark.parametrize("name", SHAPES)
def test_the_logits_are_the_same(tmp_path, name):
    model, form = theirs(name)
    mine = ours(load(form, saved(model, tmp_path)), form)
    tokens = random_tokens(2, 41, vocabulary=301).clamp_min(2)  # RoBERTa counts no position for its padding, 1
    before = copy.deepcopy(model.state_dict())
    logits = our_logits(mine, tokens, 0)
    assert difference(logits, form.logits(model, tokens, 0)) < 1e-5
    if name != "yoso sampled":
        torch.testing.assert_close(model(tokens).logits, logits, rtol=0, atol=1e-5)
    assert_same_bits(model.state_dict(), before)
    with torch.no_grad():
        mine.blocks[-1].feed_forward.feed_forward.down[0, 0] += 1.0
    assert difference(our_logits(mine, tokens, 0), form.logits(model, tokens, 0)) > 1e-4


def test_huggingface_attends_to_padding_and_megasparse_does_not(tmp_path):
    """Padding is treated as YOSOFormat describes; if this fails, transformers has fixed it."""
    model, form = theirs("yoso")
    mine = ours(load(form, saved(model, tmp_path)))
    tokens, rng = random_tokens(2, 41, vocabulary=301), RngContext.evaluation(0, 2)
    real = torch.arange(41) < torch.tensor([[41], [20]])
    with torch.no_grad():
        padded, plain = model(tokens, attention_mask=real.long()).logits, model(tokens).logits
        alone = model(tokens[1:, :20]).logits
        found = mine.logits(mine.streams(tokens, rng, Padding(real))[0])
    assert torch.equal(padded, plain)
    torch.testing.assert_close(found[:1], plain[:1], rtol=0, atol=1e-5)
    torch.testing.assert_close(found[1:, :20], alone, rtol=0, atol=1e-5)


def test_samples_approach_the_expectation(tmp_path):
    """The hashes of an imported model are those that its config.json names, of the same expectation."""
    model, form = theirs("yoso sampled")
    imported = load(form, saved(model, tmp_path))
    section = imported.config["model"]["attention"]["yoso"]
    assert section == {"expectation": False, "hashes": 6, "code_bits": 9, "projection": "gaussian", "convolution": None}
    section["code_bits"] = 2
    tokens = random_tokens(1, 41, vocabulary=301)
    errors = []
    for hashes in (6, 2000):
        section["hashes"] = hashes
        sampled, expected = (our_logits(model, tokens, 0) for model in (ours(imported), ours(imported, form)))
        errors.append((sampled - expected).norm() / expected.norm())
    assert errors[1] < 0.05 and errors[1] < errors[0] / 5


MODEL = {
    "kind": "encoder", "style": "bert", "vocabulary": 264, "max_length": 64, "layers": 2, "d_model": 32, "d_ff": 64,
    "heads": 4, "blocks": "ordinary", "activations": "stored", "dropout": 0.1, "tied_embeddings": True,
    "positions": {"kind": "learned"},
    "attention": {"pattern": ["yoso"], "yoso": {"hashes": 4, "expectation": True, "convolution": 3}},
}  # fmt: skip


@pytest.mark.parametrize("changes", [{}, {"token_types": 2, "positions": {"kind": "learned", "offset": 2}}])
def test_a_model_trained_here_goes_out_and_in_again(tmp_path, changes):
    data = prepared(tmp_path)
    trained(data, tmp_path / "run", ["yoso"] * 2, 2, model={**MODEL, **changes})
    checkpoint = Checkpoint.open(find_checkpoint(tmp_path / "run"))
    exported = format_named("yoso").export(checkpoint.config, lambda name: checkpoint.tensor("weight", name))
    assert exported.config["hash_code_len"] == 6  # log2 of 64 positions
    assert exported.config["mask_token_id"] == 256
    model = YosoForMaskedLM(YosoConfig.from_dict(exported.config)).eval()
    missing, unexpected = model.load_state_dict(dict(exported.tensors()), strict=False)
    assert not unexpected and set(missing) == {"cls.predictions.decoder.weight", "cls.predictions.decoder.bias"}
    imported = load(format_named("yoso"), saved(model, tmp_path / "out"))
    mine = ours(imported)
    assert mine.config.masking.token == 256
    names = set(checkpoint.manifest["tensors"]["weight"])
    assert imported.tensors.keys() == names | {"embedding.token_types"}
    for name in names:
        weight, value = checkpoint.tensor("weight", name), imported.tensors[name]()
        assert torch.equal(value[len(value) - len(weight) :], weight), name
    tokens = random_tokens(2, 64)
    assert difference(our_logits(mine, tokens, 0), format_named("yoso").logits(model, tokens, 0)) < 1e-5


@together(
    ("changes", "key"),
    [
        ({"positions": {"kind": "sinusoidal"}}, "model.positions.kind"),
        ({"head_dim": 5}, "model.head_dim"),
        ({"attention": {"pattern": ["full"], "full": {"shared_qk": True}}}, "model.attention.full.shared_qk"),
        ({"attention": {"pattern": ["yoso", "full"]}}, r"model.attention.pattern\[1\]"),
        ({"attention": {"pattern": ["yoso"], "yoso": {"evaluation_hashes": 7}}}, "model.attention.yoso.eval"),
    ],
)
def test_features_missing_in_huggingface_are_named(changes, key):
    config = build_config({"model": {**MODEL, **changes}, "data": {"sequence_length": 64}})
    to = "bert" if key.startswith("model.attention.full") else "yoso"
    with pytest.raises(HubError, match=rf"^{key}.*: .* is not supported by Hugging Face's {to}, only "):
        format_named(to).export(config, lambda name: pytest.fail("a weight was read"))
    with pytest.raises(HubError, match=r"^model.kind: 'decoder' is not .* bert, only 'encoder'"):
        format_named("bert").export(Config(), lambda name: pytest.fail("a weight was read"))


@together(
    ("changes", "problem"),
    [
        ({"model_type": "bert"}, "its model_type is 'bert'"),
        ({"hidden_act": "relu"}, "hidden_act is 'relu', but megasparse supports only 'gelu'"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type is 'relative_key', but megasparse"),
        ({"hash_code_len": 31}, "hash_code_len is 31, but megasparse supports only 30 or less"),
        ({"conv_window": 4}, "conv_window is 4, but megasparse supports only odd sizes"),
        ({"use_expectation": False, "lsh_backward": False}, "lsh_backward is False, but megasparse supports only true"),
        ({"num_attention_heads": 7}, "num_attention_heads is 7, .* only a divisor of hidden_size = 30"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0"),
        ({"hidden_size": "large"}, "is not a configuration of yoso .*hidden_size.*expected int"),
        ({"num_hidden_layers": 10**9}, "tensors, but its config.json specifies 1000000000 layers"),
        ({"num_hidden_layers": 2}, "contains a tensor yoso.encoder.layer.2.*, unknown to its architecture"),
        ({"num_hidden_layers": 4}, "contains no tensor yoso.encoder.layer.3"),
        ({"vocab_size": 302}, r"word_embeddings.weight has shape \[301, 30\], but \[302, 30\] by its config.json"),
        ({"type_vocab_size": 0}, "type_vocab_size is 0, but megasparse supports only 1 or more"),
    ],
)
def test_a_wrong_config_is_named(tmp_path, changes, problem):
    model, form = theirs("yoso")
    path = saved(model, tmp_path) / "config.json"
    values = json.loads(path.read_text()) | changes
    path.write_text(json.dumps(values))
    with pytest.raises((HubError, ConfigError), match=problem) as error:
        form.load(values, TensorFile.open(tmp_path))
    assert "\n" not in str(error.value)


def rewritten(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_copies_and_constants_that_older_versions_wrote_are_taken(tmp_path):
    model, form = theirs("yoso")
    expected = {name: read() for name, read in load(form, saved(model, tmp_path / "new")).tensors.items()}

    def older(tensors):
        tensors["cls.predictions.decoder.weight"] = tensors["yoso.embeddings.word_embeddings.weight"].clone()
        tensors["cls.predictions.decoder.bias"] = tensors["cls.predictions.bias"].clone()
        tensors["yoso.embeddings.position_ids"] = torch.arange(2, 43)[None]

    rewritten(saved(model, tmp_path / "old"), older)
    found = {name: read() for name, read in load(form, tmp_path / "old").tensors.items()}
    assert_same_bits(found, expected)
    rewritten(tmp_path / "old", lambda tensors: tensors["cls.predictions.decoder.bias"].add_(1.0))
    with pytest.raises(HubError, match=r"decoder.bias and .* differ"):
        load(form, tmp_path / "old")


def test_the_first_berts_come_in_without_their_pooler(tmp_path):
    """They have LayerNorm.gamma and .beta, a pooler and a next-sentence head."""
    torch.manual_seed(0)
    model = BertForPreTraining(BertConfig(**ODD)).eval()
    new = saved(model, tmp_path / "new")
    tensors = load_file(new / "model.safetensors")
    old = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): tensor
        for name, tensor in tensors.items()
    }
    assert len(old.keys() & {"bert.pooler.dense.weight", "cls.seq_relationship.bias"}) == 2
    save_file(old, new / "model.safetensors")
    mine, tokens = ours(load(format_named("bert"), new)), random_tokens(2, 41, vocabulary=301)
    with torch.no_grad():
        expected = model(tokens).prediction_logits
    torch.testing.assert_close(our_logits(mine, tokens, 0), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["bert", "roberta", "yoso"])
def test_tied_weights_may_be_stored_under_the_names_of_the_head_only(tmp_path, name):
    model, form = theirs(name)
    tensors = {key: x.contiguous() for key, x in model.state_dict().items()}
    kept = set(sorted(key for key in tensors if "decoder" in key))
    tied = {tensors[key].data_ptr() for key in kept}
    only = {key: x for key, x in tensors.items() if key in kept or x.data_ptr() not in tied}
    assert len(kept) == 2 and len(only) == len(tensors) - 2
    folder = saved(model, tmp_path / "model")
    save_file(only, folder / "model.safetensors", {"format": "pt"})
    assert torch.equal(load(form, folder).tensors["embedding.weight"](), model.get_input_embeddings().weight)
    assert torch.equal(load(form, folder).tensors["head.bias"](), tensors[min(kept)])
    whole = load_whole(type(model), folder).state_dict()
    assert all(torch.equal(whole[key], x) for key, x in tensors.items())
