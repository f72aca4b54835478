"""HuggingFace's Reformer and our decoder: the same weights, the same outputs, both ways."""

import json
import math

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoTokenizer, ReformerConfig, ReformerModelWithLMHead
from transformers.models.reformer.modeling_reformer import LSHSelfAttention

from megasparse.errors import HubError, UserError
from megasparse.evaluation.generate import generate
from megasparse.hub.formats import difference, our_logits
from megasparse.hub.reformer import FORMAT, NEVER, buckets
from megasparse.hub.tensor_file import TensorFile
from megasparse.model.build import build_model
from megasparse.settings.load import build_config
from tests.helpers.cases import together
from tests.helpers.hub import assert_same_bits, load
from tests.helpers.models import random_tokens

CRIME_AND_PUNISHMENT = {
    # google/reformer-crime-and-punishment, widths by 8
    "attn_layers": ["local", "lsh", "local", "lsh", "local", "lsh"],
    "attention_head_size": 8, "num_attention_heads": 2, "hidden_size": 32, "feed_forward_size": 64,
    "axial_pos_shape": [512, 1024], "axial_pos_embds_dim": [8, 24], "max_position_embeddings": 524288,
    "local_attn_chunk_length": 64, "lsh_attn_chunk_length": 64, "num_buckets": [64, 128], "num_hashes": 1,
    "num_chunks_before": 1, "num_chunks_after": 0, "vocab_size": 320,
}  # fmt: skip
SMALL = {
    "attn_layers": ["local", "lsh"], "hidden_size": 32, "num_attention_heads": 2, "attention_head_size": 24,
    "axial_pos_shape": [8, 16], "axial_pos_embds_dim": [12, 20], "max_position_embeddings": 128, "vocab_size": 260,
    "local_attn_chunk_length": 8, "lsh_attn_chunk_length": 8, "num_buckets": 8, "num_hashes": 2,
    "feed_forward_size": 48,
}  # fmt: skip
SHAPES = {
    "local": {"attn_layers": ["local", "local"]},
    "lsh": {"attn_layers": ["lsh", "lsh"], "num_hashes": 1},
    "mixed": {"attn_layers": ["lsh", "local", "local", "lsh", "lsh"], "num_buckets": [4, 6], "num_hashes": 4},
    "many buckets": {"num_buckets": 130, "layer_norm_eps": 1e-3},
    "no number of buckets": {"num_buckets": None, "lsh_attn_chunk_length": 4, "tie_word_embeddings": True},
    "chunks of two sizes": {"lsh_attn_chunk_length": 12, "bos_token_id": 3, "hash_seed": 7},
    "learned positions": {"axial_pos_embds": False, "max_position_embeddings": 100, "pad_token_id": 5},
}


def theirs(seed=0, **settings):
    """A Reformer with weights at random everywhere, so that a wrong one is seen."""
    torch.manual_seed(seed)
    model = ReformerModelWithLMHead(ReformerConfig(is_decoder=True, **{**SMALL, **settings})).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(0, 1.0 if "embedding" in name else 0.2)
            if name.endswith("layer_norm.weight"):
                parameter.add_(1)
        if model.lm_head.decoder.bias is not None:
            model.lm_head.bias.copy_(model.lm_head.decoder.bias)  # nothing reads the first one
    return model


def imported(model, folder):
    """Our configuration and model of HuggingFace's, through files."""
    model.save_pretrained(folder)
    found = load(FORMAT, folder)
    config = build_config(found.config)
    return config, filled(config, {name: read() for name, read in found.tensors.items()})


def filled(config, weights):
    model = build_model(config.model, seed=9).eval()
    model.load_state_dict(weights)
    return model


def exported(config, model, folder):
    """HuggingFace's model of a megasparse model, through files."""
    out = FORMAT.export(config, model.state_dict().__getitem__)
    architecture = ReformerModelWithLMHead(ReformerConfig.from_dict(out.config))
    missing, unexpected = architecture.load_state_dict(dict(out.tensors()), strict=False)
    assert not missing and set(unexpected) <= FORMAT.unread
    architecture.save_pretrained(folder)
    for name, text in out.files.items():
        (folder / name).write_text(text)
    return out.config, ReformerModelWithLMHead.from_pretrained(folder).eval()


def ours(seed=0, **changes):
    """A megasparse decoder in HuggingFace's form; its learned start vector is not a token's embedding."""
    lsh = {"rounds": 2, "chunk": 8, "buckets": [4, 6], "window": "chunk", "same_bucket": False, "count_rounds": False}
    model = {
        "max_length": 128, "layers": 3, "d_model": 32, "d_ff": 64, "heads": 2,
        "positions": {"kind": "axial", "axial_shape": [8, 16], "axial_dims": [12, 20]},
        "attention": {"pattern": ["local", "lsh", "local"], "local": {"chunk": 8}, "lsh": lsh},
    }  # fmt: skip
    config = build_config({"model": {**model, **changes}, "data": {"sequence_length": 64}})
    return config, build_model(config.model, seed).eval()


@pytest.mark.parametrize("name", SHAPES)
def test_import_then_export_is_bit_identical(name, tmp_path):
    model = theirs(**SHAPES[name])
    config, mine = imported(model, tmp_path / "there")
    hf_config, back = exported(config, mine, tmp_path / "back")
    assert_same_bits(model.state_dict(), back.state_dict())
    for key in ("attn_layers", "layer_norm_eps", "vocab_size", "max_position_embeddings", "attention_head_size"):
        assert getattr(back.config, key) == getattr(model.config, key), key
    if model.config.num_buckets is not None:
        assert hf_config.get("num_buckets", model.config.num_buckets) == model.config.num_buckets
    start = model.config.bos_token_id or model.config.pad_token_id
    assert hf_config["bos_token_id"] == start
    assert torch.equal(mine.embedding.start[0], model.reformer.embeddings.word_embeddings.weight[start])


@pytest.mark.parametrize("name", SHAPES)
def test_logits_are_huggingfaces(name, tmp_path):
    """Also where the last chunk of a sequence is not full, and where one chunk holds all of it."""
    model = theirs(**SHAPES[name])
    config, mine = imported(model, tmp_path / "there")
    for length in (config.model.max_length, 61, 7):
        tokens = random_tokens(2, length, config.model.vocabulary, seed=length)
        logits = our_logits(mine, tokens, 5)
        assert logits.shape == (2, length, config.model.vocabulary) and logits.abs().max() > 1
        assert difference(logits, FORMAT.logits(model, tokens, 5)) < 2e-5


def test_with_local_layers_huggingfaces_own_forward_gives_our_logits(tmp_path):
    """Nothing of it is patched: [BOS, token 0, token 1, ...] in, the logits of token 0, 1, 2, ... out."""
    config, mine = ours(attention={"pattern": ["local"], "local": {"chunk": 8}}, output_bias=False)
    hf_config, model = exported(config, mine, tmp_path / "out")
    assert hf_config["bos_token_id"] == 256 and hf_config["vocab_size"] == 257
    tokens = random_tokens(2, 128)
    with torch.no_grad():
        logits = model(torch.cat([torch.full((2, 1), 256), tokens[:, :-1]], dim=1)).logits
    torch.testing.assert_close(logits[..., :256], our_logits(mine, tokens, 0), rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"output_bias": True, "dropout": 0.1},
        {"positions": {"kind": "sinusoidal"}},
        {"positions": {"kind": "none"}, "vocabulary": 300},
        {"positions": {"kind": "learned"}, "max_length": 70, "heads": 3, "head_dim": 5, "norm_eps": 1e-3},
    ],
)
def test_export_then_import_is_bit_identical(changes, tmp_path):
    config, mine = ours(**changes)
    if config.model.output_bias:
        mine.head.bias.data.normal_()
    _, model = exported(config, mine, tmp_path / "out")
    tokens = random_tokens(2, config.model.max_length, config.model.vocabulary)
    assert difference(our_logits(mine, tokens, 5), FORMAT.logits(model, tokens, 5)) < 2e-5
    again, back = imported(model, tmp_path / "again")
    assert_same_bits(mine.state_dict(), back.state_dict())
    assert again.model.positions == config.model.positions and again.model.vocabulary == config.model.vocabulary
    assert again.model.attention.local.chunk == 8 and again.model.attention.lsh == config.model.attention.lsh
    assert (again.model.norm_eps, again.model.dropout) == (config.model.norm_eps, config.model.dropout)


def test_a_published_configuration_goes_both_ways(tmp_path):
    settings = CRIME_AND_PUNISHMENT
    model = theirs(**settings)
    config, mine = imported(model, tmp_path / "there")
    assert math.prod(config.model.positions.axial_shape) == config.model.max_length
    assert config.model.norm_eps == 1e-12 and config.model.output_bias
    tokens = random_tokens(1, 2 * settings["lsh_attn_chunk_length"], settings["vocab_size"])
    assert difference(our_logits(mine, tokens, 0), FORMAT.logits(model, tokens, 0)) < 1e-4
    hf_config, back = exported(config, mine, tmp_path / "back")
    assert_same_bits(model.state_dict(), back.state_dict())
    for key, value in settings.items():
        if key in hf_config and "attention_probs" not in key:
            assert hf_config[key] == value, key


@together(("length", "chunk"), [(128, 8), (128, 4), (4096, 16), (100, 7), (65536, 64), (16384, 2), (8, 8), (8, 64)])
def test_the_default_number_of_buckets_is_huggingfaces(length, chunk):
    settings = {"attn_layers": ["lsh"], "axial_pos_embds": False, "hidden_size": 4, "max_position_embeddings": length}
    config = ReformerConfig(**{**SMALL, **settings, "lsh_attn_chunk_length": chunk, "num_buckets": None})
    found = buckets(config)
    LSHSelfAttention(config)._set_num_buckets(max(length, chunk))
    assert config.num_buckets == (found[0] if len(found) == 1 else found)


def test_published_files_with_a_duplicate_bias_and_constants_are_read(tmp_path):
    model = theirs()
    model.save_pretrained(tmp_path)
    tensors = TensorFile.open(tmp_path)
    weights = {name: tensors.read(name) for name in tensors.names()}
    weights["lm_head.decoder.bias"] = torch.arange(260.0)
    weights["lm_head.bias"] = torch.ones(260)  # no version of transformers adds it if there is the other one
    layer = "reformer.encoder.layers.1.attention.self_attention"
    weights[f"{layer}.mask_value_float32"] = torch.tensor(-1e9)
    weights[f"{layer}.self_mask_value_float16"] = torch.tensor(-1e3)
    write(tmp_path, weights)
    assert torch.equal(load(FORMAT, tmp_path).tensors["head.bias"](), torch.arange(260.0))


def write(folder, weights):
    save_file({name: weight.contiguous().clone() for name, weight in weights.items()}, folder / "model.safetensors")


def test_an_added_bos_is_recognised(tmp_path):
    """It is known by its row and bias in the LM head; trained further, it is a token like any other."""
    config, mine = ours()
    _, model = exported(config, mine, tmp_path / "out")
    assert model.lm_head.bias[256] == NEVER and not model.lm_head.decoder.weight[256].any()
    assert imported(model, tmp_path / "again")[0].model.vocabulary == 256
    model.lm_head.decoder.weight.data[256, 0] = 1.0
    assert imported(model, tmp_path / "trained")[0].model.vocabulary == 257


def test_huggingface_generates_the_same_text_without_an_added_bos(tmp_path):
    """Generation from a text by its own tokenizer, cached, with local layers."""
    config, mine = ours(attention={"pattern": ["local"], "local": {"chunk": 8}})
    _, model = exported(config, mine, tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    text = "Größe [BOS]"
    read = tokenizer(text, return_tensors="pt").input_ids
    assert read.tolist() == [[256, *text.encode()]] and tokenizer.decode(read[0], skip_special_tokens=True) == text
    found = model.generate(read, max_new_tokens=20, do_sample=False)[0, read.shape[1] :].tolist()
    prompt = torch.tensor(list(text.encode()))
    assert found == list(generate(mine, prompt, 20, hash_seed=0, temperature=0.0))
    mine.head.weight.data.mul_(0.01)  # logits near 0, that of BOS is 0
    mine.head.norm_bias.data.zero_()
    _, model = exported(config, mine, tmp_path / "out")
    assert model.generation_config.suppress_tokens == [256] and model.generation_config.eos_token_id is None
    torch.manual_seed(0)
    found = model.generate(torch.full((8, 1), 256), max_new_tokens=100, do_sample=True)
    assert (found[:, 1:] < 256).all()


COUNTED = {"window": "chunk", "same_bucket": False}
AS_HUGGINGFACE = {**COUNTED, "count_rounds": False}
THREE_AXES = {"kind": "axial", "axial_shape": [4, 4, 8], "axial_dims": [8, 8, 16]}
SPLIT = {"local": 1, "lsh": 1}
OTHERS = [
    ({"tied_embeddings": True}, "model.tied_embeddings: True"),
    ({"adaptive_cutoffs": [100]}, "model.adaptive_cutoffs: [100]"),
    ({"blocks": "ordinary", "activations": "stored"}, "model.blocks: 'ordinary'"),
    ({"positions": {"kind": "rotary"}}, "model.positions.kind: 'rotary'"),
    ({"positions": THREE_AXES}, "model.positions.axial_shape: [4, 4, 8]"),
    ({"attention": {"pattern": ["local", "full"], "local": {"chunk": 8}}}, "model.attention.pattern[1]: 'full'"),
    ({"attention": {"pattern": ["lsh", SPLIT], "lsh": AS_HUGGINGFACE}}, f"model.attention.pattern[1]: {SPLIT}"),
    ({"attention": {"pattern": ["local"], "local": {"relative": True}}}, "model.attention.local.relative: True"),
    ({"attention": {"pattern": ["local"], "local": {"sinks": 2}}}, "model.attention.local.sinks: 2"),
    ({"attention": {"pattern": ["lsh"]}}, "model.attention.lsh.window: 'band'"),
    ({"attention": {"pattern": ["lsh"], "lsh": {"window": "chunk"}}}, "model.attention.lsh.same_bucket: True"),
    ({"attention": {"pattern": ["lsh"], "lsh": COUNTED}}, "model.attention.lsh.count_rounds: True"),
    ({"attention": {"pattern": ["lsh"], "lsh": {"shared_qk": False}}}, "model.attention.lsh.shared_qk: False"),
    ({"kind": "encoder", "vocabulary": 257}, "model.kind: 'encoder'"),
]


@together(("changes", "message"), OTHERS)
def test_features_that_huggingface_lacks_are_rejected_by_key(changes, message):
    config, mine = ours(**changes)
    with pytest.raises(HubError) as error:
        FORMAT.export(config, mine.state_dict().__getitem__)
    assert str(error.value).startswith(message) and "\n" not in str(error.value)


@together(
    ("changes", "message"),
    [
        ({"is_decoder": False}, "is_decoder is False"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"local_num_chunks_before": 2}, "local_num_chunks_before is 2"),
        ({"attn_layers": ["local", "full"]}, "attn_layers is 'full'"),
        ({"attn_layers": []}, "attn_layers is []"),
        ({"axial_pos_shape": [2, 4, 16]}, "axial_pos_shape is (2, 4, 16)"),
        ({"num_buckets": [2, 2, 2]}, "num_buckets is [2, 2, 2]"),
        ({"num_buckets": 7}, "model.attention.lsh.buckets"),
        ({"hidden_size": "wide"}, "is not a configuration of reformer"),
        ({"lsh_attn_chunk_length": None}, "lsh_attn_chunk_length is None"),
        ({"bos_token_id": 260}, "bos_token_id or pad_token_id is 260, but vocab_size is 260"),
        ({"feed_forward_size": 64}, "dense.dense.weight has shape [48, 32], but [64, 32] by its config.json"),
        ({"attn_layers": ["local", "lsh", "lsh"]}, "contains no tensor reformer.encoder.layers.2."),
    ],
)
def test_unsupported_or_incomplete_models_are_rejected(changes, message, tmp_path):
    theirs().save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(UserError) as error:
        load(FORMAT, tmp_path)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_logits_that_are_not_finite_differ():
    logits = torch.randn(2, 64, 7, generator=torch.Generator().manual_seed(0))
    assert difference(logits, logits) == 0.0 and difference(logits, logits * torch.nan) == torch.inf
