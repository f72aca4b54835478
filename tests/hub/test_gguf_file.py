import os
import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, Qwen2Config, Qwen3Config

from megasparse.errors import HubError
from megasparse.hub.formats import our_logits
from megasparse.hub.gguf_file import check_gguf, config_of
from megasparse.hub.importing import HFModel
from tests.helpers.cases import together
from tests.helpers.models import random_tokens


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def gguf(**changed: Any) -> bytes:
    """A file of two tensors by the format's definition."""
    given = {"layers": 1, "width": 4, "tensors": 2, "entries": 5, "count": 2, "dimensions": 2, "kind": 9, **changed}
    entries = [
        text(b"general.name") + struct.pack("<I", 8) + text(b"small"),
        text(b"llama.block_count") + struct.pack("<II", 4, given["layers"]),
        text(b"llama.embedding_length") + struct.pack("<II", 4, given["width"]),
        text(b"tokenizer.ggml.tokens") + struct.pack("<IIQ", given["kind"], 8, 2) + text(b"a") + text(b"b"),
        text(b"tokenizer.ggml.scores") + struct.pack("<IIQ", 9, 6, given["count"]) + struct.pack("<2f", 0.5, 1.5),
    ]
    infos = [
        text(name) + struct.pack("<I2QIQ", given["dimensions"], 4, 2, 0, 32 * number)
        for number, name in enumerate((b"token_embd.weight", b"output.weight"))
    ]
    head = b"GGUF" + struct.pack("<IQQ", 3, given["tensors"], given["entries"])
    body = head + b"".join(entries) + b"".join(infos)
    return body.ljust(-(-len(body) // 32) * 32, b"\0") + bytes(64)


def test_a_whole_file_passes_and_every_cut_header_does_not(tmp_path):
    whole, path = gguf(), tmp_path / "a.gguf"
    path.write_bytes(whole)
    check_gguf(path)
    header = whole.index(b"output.weight") + 13 + 4 + 16 + 4 + 8
    for size in range(0, header):
        path.write_bytes(whole[:size])
        with pytest.raises(HubError, match=r"a\.gguf: damaged GGUF file"):
            check_gguf(path)


@together(
    ("changed", "message"),
    [
        ({"layers": 10**9}, "it has 1,000,000,000 layers, more than its 2 tensors"),
        ({"width": 10**9}, "llama.embedding_length is 1,000,000,000, larger than any size of a tensor, at most 4"),
        ({"tensors": 2**62}, "cannot contain 4,611,686,018,427,387,904 tensors"),
        ({"entries": 2**63}, "cannot contain 2 tensors and"),
        ({"count": 2**60}, "an array of 1,152,921,504,606,846,976 values of type 6"),
        ({"dimensions": 2**32 - 1}, "a tensor has 4,294,967,295 dimensions"),
        ({"kind": 77}, "a value of type 77"),
    ],
)
def test_forged_sizes_are_rejected_before_an_allocation(tmp_path, monkeypatch, changed, message):
    path = tmp_path / "a.gguf"
    path.write_bytes(gguf(**changed))
    with pytest.raises(HubError, match=message) as caught:
        HFModel.open(path)
    assert "\n" not in str(caught.value)


@together("make", [Path.mkdir, os.mkfifo, lambda _: None])
def test_missing_and_irregular_files_are_rejected(tmp_path, make):
    make(tmp_path / "a.gguf")
    with pytest.raises(HubError, match=r"a\.gguf: "):
        check_gguf(tmp_path / "a.gguf")


ROPE = {"rope_theta": 10000.0, "rope_type": "default"}
LLAMA3 = {**ROPE, "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64}  # fmt: skip
YARN = {**ROPE, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LINEAR = {**ROPE, "rope_type": "linear", "factor": 4.0}
SCALINGS = {
    "none": (ROPE, {}),
    "linear": (LINEAR, {"type": "linear", "factor": 4.0}),
    "linear by factor": (LINEAR, {"factor": 4.0, "finetuned": True}),
    "yarn": (YARN, {"type": "yarn", "factor": 4.0, "original_context_length": 64, "yarn_ext_factor": 1.0}),
    # llama.cpp multiplies the logits' factor 1 + 0.1 ln(factor) by attn_factor
    "yarn, colder": (
        {**YARN, "attention_factor": 0.5 * (1 + 0.1 * np.log(4.0)), "beta_fast": 32.0},
        {"type": "yarn", "factor": 4.0, "original_context_length": 64, "attn_factor": 0.5, "yarn_beta_fast": 32.0},
    ),
    "llama3": (LLAMA3, None),
    "llama3, no frequency blended": ({**LLAMA3, "original_max_position_embeddings": 16, "rope_theta": 1e6}, None),
}
RENAMED = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output", "model.layers": "blk",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "transformer.wte": "token_embd",
    "transformer.wpe": "position_embd", "transformer.ln_f": "output_norm", "transformer.h": "blk", "ln_1": "attn_norm",
    "ln_2": "ffn_norm", "attn.c_attn": "attn_qkv", "attn.c_proj": "attn_output", "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
}  # fmt: skip
TOKENS = ["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "\u0120\u0120", "\u01201"]
MERGES = ["\u0120 \u0120", "\u0120 1"]


def packed(value: Any) -> bytes:
    if isinstance(value, list):
        return struct.pack("<IIQ", 9, 8 if isinstance(value[0], str) else 5, len(value)) + b"".join(
            text(x.encode()) if isinstance(x, str) else struct.pack("<i", x) for x in value
        )
    if isinstance(value, str):
        return struct.pack("<I", 8) + text(value.encode())
    kind, letter = {bool: (7, "?"), int: (4, "I"), float: (6, "f")}[type(value)]
    return struct.pack(f"<I{letter}", kind, value)


def write(path: Path, values: dict[str, Any], tensors: dict[str, np.ndarray]) -> Path:
    """A file by the format's definition."""
    body = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(values))
    body += b"".join(text(key.encode()) + packed(value) for key, value in values.items())
    data = b""
    for name, x in tensors.items():
        sizes = x.shape[::-1]
        body += text(name.encode()) + struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, 0, len(data))
        data += np.ascontiguousarray(x, np.float32).tobytes().ljust(-(-x.nbytes // 32) * 32, b"\0")
    path.write_bytes(body.ljust(-(-len(body) // 32) * 32, b"\0") + data)
    return path


def model_and_content(name="llama", scaling="none"):
    """Hugging Face's model, and the metadata and tensors that llama.cpp's converter writes of it."""
    rope, metadata = SCALINGS[scaling]
    common = {"vocab_size": len(TOKENS), "bos_token_id": 0, "eos_token_id": 1}
    sizes = {
        "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 256, "tie_word_embeddings": name != "llama",
        "rope_parameters": rope, "head_dim": 12 if name == "qwen3" else 8,
    }  # fmt: skip
    config = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}.get(name, GPT2Config)(
        **common, **(dict(n_embd=32, n_layer=2, n_head=4, n_positions=256, n_inner=40) if name == "gpt2" else sizes)
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.2 * torch.randn(weight.shape))
    tensors = {}
    for key, x in model.state_dict().items():
        if key == "lm_head.weight" and config.tie_word_embeddings:
            continue
        for theirs, short in RENAMED.items():
            key = key.replace(theirs, short)
        x = x.T if name == "gpt2" and x.dim() == 2 and key.startswith("blk") else x
        if name == "llama" and ("attn_q" in key or "attn_k" in key):
            x = x.view(-1, 2, 4, 32).transpose(1, 2).reshape(x.shape)
        tensors[key] = x.numpy()
    keys = {"context_length": 256, "embedding_length": 32, "block_count": 2, "feed_forward_length": 40,
            "attention.head_count": 4, "logit_scale": 1.0}  # fmt: skip
    if name == "gpt2":
        keys["attention.layer_norm_epsilon"] = config.layer_norm_epsilon
    else:
        keys |= {"attention.head_count_kv": 2, "attention.layer_norm_rms_epsilon": config.rms_norm_eps}
        keys |= {"rope.freq_base": rope["rope_theta"], "attention.key_length": config.head_dim}
        keys |= {f"rope.scaling.{key}": value for key, value in (metadata or {}).items()}
    if metadata is None:
        plain = 1 / rope["rope_theta"] ** (np.arange(0, config.head_dim, 2) / config.head_dim)
        tensors["rope_freqs.weight"] = plain / model.model.rotary_emb.inv_freq.numpy()
    values = {"general.architecture": name, **{f"{name}.{key}": value for key, value in keys.items()}}
    tokenizer = {"model": "gpt2", "pre": "default", "tokens": TOKENS, "merges": MERGES, "bos_token_id": 0}
    tokenizer |= {"token_type": [3, 3, *[1] * (len(TOKENS) - 2)], "eos_token_id": 1}
    return model, values | {f"tokenizer.ggml.{key}": value for key, value in tokenizer.items()}, tensors


@together("scaling", SCALINGS)
def test_the_scaling_of_rotary_positions_is_read(tmp_path, scaling):
    model, *content = model_and_content(scaling=scaling)
    path = write(tmp_path / "a.gguf", *content)
    read = LlamaConfig(**config_of(path, check_gguf(path)))
    assert read.rope_parameters == pytest.approx(model.config.rope_parameters)
    assert read.vocab_size == len(TOKENS) and not read.tie_word_embeddings and read.head_dim == 8


@together(
    ("changes", "message"),
    [
        ({"split.count": 3}, "a.gguf: is one part of a model in several files. Merge"),
        ({"general.architecture": "gemma2"}, "its architecture is 'gemma2'"),
        ({"llama.attention.layer_norm_rms_epsilon": None}, "llama.attention.layer_norm_rms_epsilon is missing"),
        ({"llama.block_count": 1}, "contains a tensor blk.1.* an import would lose"),
        ({"blk.1.ffn_up.weight": None}, "contains no tensor blk.1.ffn_up.weight"),
        ({"blk.0.attn_q.bias": np.zeros(32)}, "contains a tensor blk.0.attn_q.bias, which an import would lose"),
        ({"rope_factors_long.weight": np.ones(4)}, "a tensor rope_factors_long.weight, which an import would lose"),
        ({"rope_freqs.weight": np.array([1, 2, 3, 4])}, "contains other frequencies than Llama 3's scaling"),
        ({"rope_freqs.weight": np.ones(3)}, "rope_freqs.weight is not 4 numbers"),
        ({"rope_freqs.weight": np.ones(4), "llama.rope.scaling.factor": 2.0}, "two scalings"),
        ({"llama.rope.scaling.type": "longrope"}, "rope.scaling.type is longrope, which an import would lose"),
        ({"llama.rope.scaling.factor": -1.0}, "rope.scaling.factor is -1.0"),
        ({"llama.rope.scaling.attn_factor": 1.5}, "rope.scaling.attn_factor is 1.5"),
        ({"llama.rope.scaling.yarn_log_multiplier": 0.1}, "rope.scaling.yarn_log_multiplier is 0.1"),
        ({"llama.rope.scale_linear": 2.0}, "llama.rope.scale_linear is 2.0, which an import would lose"),
        ({"llama.rope.dimension_count": 4}, "rope.dimension_count is 4, but megasparse supports only .* head, 8"),
        ({"llama.attention.sliding_window": 64}, "sliding_window is 64, but megasparse supports no window below 256"),
        ({"llama.attention.causal": False}, "llama.attention.causal is False"),
        ({"llama.attention.scale": 0.3}, "llama.attention.scale is 0.3"),
        ({"llama.final_logit_softcapping": 30.0}, "llama.final_logit_softcapping is 30.0"),
        ({"llama.logit_scale": 0.5}, "llama.logit_scale is 0.5"),
        ({"llama.expert_count": 8}, "llama.expert_count is 8"),
        ({"llama.attention.head_count_kv": [2, 1]}, "llama.attention.head_count_kv is 2 values"),
        ({"tokenizer.ggml.pre": "deepseek-llm"}, "tokenizer.ggml.pre is deepseek-llm, a way to split texts"),
        ({"tokenizer.ggml.pre": "deepseek-coder"}, "tokenizer.ggml.pre is deepseek-coder, a way to split texts"),
        ({"tokenizer.ggml.model": "bert"}, "tokenizer.ggml.model is bert"),
    ],
)
def test_tensors_and_metadata_that_an_import_would_lose_are_rejected(tmp_path, changes, message):
    _, values, tensors = model_and_content()
    for key, value in changes.items():
        content = tensors if key.endswith((".weight", ".bias")) else values
        content[key] = value
        if value is None:
            del content[key]
    with pytest.raises(HubError, match=message) as caught:
        HFModel.open(write(tmp_path / "a.gguf", values, tensors))
    assert "\n" not in str(caught.value)


def test_a_part_of_a_model_is_rejected_by_its_name(tmp_path):
    _, *content = model_and_content()
    with pytest.raises(HubError, match=r"00003\.gguf: is one part of a model"):
        HFModel.open(write(tmp_path / "a-00001-of-00003.gguf", *content))


@pytest.mark.parametrize(
    ("name", "scaling"),
    [*(("llama", scaling) for scaling in SCALINGS), ("qwen2", "yarn"), ("qwen3", "none"), ("gpt2", "none")],
)
def test_a_file_has_the_logits_of_the_model_that_it_was_made_of(tmp_path, name, scaling):
    pytest.importorskip("gguf")
    model, *content = model_and_content(name, scaling)
    imported, tokens = HFModel.open(write(tmp_path / "a.gguf", *content)), random_tokens(1, 200, vocabulary=250)
    assert imported.compare() == 256
    with torch.no_grad():
        expected = model(torch.cat([torch.zeros(1, 1, dtype=torch.long), tokens[:, :-1]], dim=1)).logits
    torch.testing.assert_close(our_logits(imported.build(), tokens, 0), expected, rtol=0, atol=1e-4)


def test_a_tensor_of_another_shape_is_named(tmp_path):
    pytest.importorskip("gguf")
    _, values, tensors = model_and_content()
    tensors["blk.1.ffn_up.weight"] = np.zeros((39, 32))
    with pytest.raises(HubError, match=r"layers.1.mlp.up_proj.weight has shape \[39, 32\], but \[40, 32\] by its meta"):
        HFModel.open(write(tmp_path / "a.gguf", values, tensors))


def test_a_missing_package_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "gguf", None)
    _, *content = model_and_content()
    with pytest.raises(HubError, match=r"gguf: is not installed.*pip install gguf"):
        HFModel.open(write(tmp_path / "a.gguf", *content))
    assert "a.gguf: tokenizer.ggml.pre is default: texts are split as GPT-2's" in capsys.readouterr().err


def test_an_error_in_the_unpacked_folder_names_the_file(tmp_path):
    pytest.importorskip("gguf")
    _, values, tensors = model_and_content(scaling="yarn")
    values["llama.rope.scaling.yarn_beta_fast"] = 16.0
    with pytest.raises(HubError, match=r"a\.gguf: beta_fast is 16.0, but megasparse supports only 32.0") as caught:
        HFModel.open(write(tmp_path / "a.gguf", values, tensors))
    assert caught.value.path == str(tmp_path / "a.gguf")


@pytest.mark.parametrize(
    ("split", "parts"),
    [("default", []), ("smollm", [pre_tokenizers.Digits(individual_digits=True)]), ("llama-bpe", None)],
)
def test_texts_are_split_as_by_the_models_tokenizer(tmp_path, split, parts):
    pytest.importorskip("gguf")
    _, values, tensors = model_and_content()
    whole_word, start, user = "\u0120the", "<\uff5cstart\uff5c>", "<\uff5cuser\uff5c>"  # no merges give the first
    values["tokenizer.ggml.tokens"] = [start, user, *TOKENS[2:-3], whole_word, *TOKENS[-2:]]
    values["tokenizer.ggml.token_type"] = [3, 4, *[1] * (len(TOKENS) - 2)]
    values["tokenizer.ggml.pre"] = split
    imported = HFModel.open(write(tmp_path / "a.gguf", values, tensors))
    ours = Tokenizer.from_file(str(imported.folder / "tokenizer.json"))
    assert ours.get_vocab_size() == len(TOKENS)
    assert ours.encode(f"{start}{user}1").ids[:2] == [0, 1]
    if parts is None:
        assert ours.encode(" the").tokens == [whole_word]
    else:
        vocabulary = {token: number for number, token in enumerate(values["tokenizer.ggml.tokens"])}
        expected = Tokenizer(models.BPE(vocab=vocabulary, merges=[tuple(merge.split()) for merge in MERGES]))
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
        expected.pre_tokenizer = pre_tokenizers.Sequence([*parts, byte_level])
        for sample in ("  1 12", "a  b 1", "x  11", " the"):
            assert ours.encode(sample).tokens == expected.encode(sample).tokens
        assert (ours.encode("  1").tokens == ["\u0120\u0120", "1"]) == bool(parts)
