"""A pretrained decoder's attention replaced: visible keys, cache, padding, packing, training, saving, errors."""

import copy
from functools import partial
from pathlib import Path
from unittest.mock import MagicMock

import peft
import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
    StaticCache,
)
from transformers.cache_utils import DynamicLayer

from megasparse import hub
from megasparse.attention.observation import calls
from megasparse.errors import ConfigError, HubError
from megasparse.hub import replace
from megasparse.hub.replace import ADAPTER, load_replaced, mechanisms, replace_attention, save_replaced
from megasparse.hub.replaced_layer import IndexedLayer, Mechanisms
from megasparse.planning.passes import as_on_a_gpu
from tests.helpers.cases import together
from tests.helpers.launches import Counts, LaunchCounter
from tests.hub import test_replace

SIZE = {"vocab_size": 60, "max_position_embeddings": 64, "bos_token_id": 0, "eos_token_id": None, "pad_token_id": 1}
WIDTHS = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
GROUPED = {**SIZE, **WIDTHS, "num_key_value_heads": 2}
CONFIGS = {
    "Llama": LlamaConfig(**GROUPED, head_dim=16),
    "Mistral": MistralConfig(**GROUPED, sliding_window=None),
    "Qwen2": Qwen2Config(**GROUPED),
    "Qwen3": Qwen3Config(**GROUPED, head_dim=16),
    "GPT2": GPT2Config(**SIZE, n_embd=32, n_layer=2, n_head=4, scale_attn_by_inverse_layer_idx=True),
}
SLIDING = {"num_hidden_layers": 4, "head_dim": 16, "sliding_window": 8}
EXPERTS = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
TURNS = ["sliding_attention", "full_attention"] * 2
FURTHER = {
    "Gemma": transformers.GemmaConfig(**GROUPED, head_dim=16),
    "Gemma2": transformers.Gemma2Config(**GROUPED | SLIDING, attn_logit_softcapping=None),
    "Gemma3": transformers.Gemma3TextConfig(**GROUPED | SLIDING, layer_types=TURNS),
    "Qwen2": Qwen2Config(**GROUPED | SLIDING, use_sliding_window=True, max_window_layers=2),
    "Qwen3Moe": transformers.Qwen3MoeConfig(**GROUPED, **EXPERTS, head_dim=16),
    "Mixtral": transformers.MixtralConfig(**GROUPED, num_local_experts=4),
    "Phi3": transformers.Phi3Config(**GROUPED),
    "Olmo2": transformers.Olmo2Config(**GROUPED),
    "SmolLM3": transformers.SmolLM3Config(**GROUPED),
    "GPTNeoX": transformers.GPTNeoXConfig(**SIZE, **WIDTHS),
    "GPTBigCode": transformers.GPTBigCodeConfig(**SIZE, n_embd=32, n_layer=2, n_head=4),
    "Granite": transformers.GraniteConfig(**GROUPED),
    "GptOss": transformers.GptOssConfig(**GROUPED | SLIDING, num_local_experts=4, layer_types=TURNS),
    "Cohere2": transformers.Cohere2Config(**GROUPED | SLIDING, layer_types=TURNS),
}
REFUSED = {
    "Nemotron": transformers.NemotronConfig(**GROUPED),
    "Bloom": transformers.BloomConfig(**SIZE, hidden_size=32, n_layer=2, n_head=4),
    "Qwen3Next": transformers.Qwen3NextConfig(**GROUPED, **EXPERTS),
    "Doge": transformers.DogeConfig(**GROUPED),
}
BAND = {"chunk": 6, "local": True, "sinks": 2}
LOCAL = {"kind": "local", "chunk": 6, "sinks": 2}
LSH = {"kind": "lsh", **BAND, "rounds": 1, "buckets": 4}
LHA = {"kind": "lha", **BAND}
BIRD = {"kind": "smart_bird", "keys": 7, "chunk": 4, "local": True, "sinks": 2, "sketch_dim": 3}
HEADS = {**BIRD, "sketch": "heads", "sketch_heads": 2, "objective": "attention"}
RANKED = {"kind": "ranked", **BAND, "keys": 7, "sketch_dim": 8, "sketch_heads": 2, "buckets": 8, "probes": 3}
SIGNS = {**RANKED, "sketch_dim": 16, "sketch_signs": True}
SEPARATE = {**LHA, "joint": False, "utility": "collisions"}
MIXED = {"pattern": [{"full": 2, "lsh": 2}, "full"], "lsh": {**BAND, "rounds": 2}}
SHARED = {"kind": "lsh", "chunk": 6, "shared_qk": True}
ROUTING, YOSO = {"kind": "routing", **BAND}, {"kind": "yoso", "hashes": 4}
SMALL = [LOCAL, LSH, LHA, BIRD, HEADS, RANKED, SIGNS, SEPARATE, SHARED, ROUTING, YOSO, MIXED]


def build(kind="Llama", name="ForCausalLM", dtype=torch.float64, **changes):
    torch.manual_seed(0)
    config = copy.deepcopy({**REFUSED, **FURTHER, **CONFIGS}[kind])
    for key, value in changes.items():
        setattr(config, key, value)
    name = "LMHeadModel" if kind == "GPT2" and name == "ForCausalLM" else name
    model = getattr(transformers, f"{kind}{name}")(config).eval().to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():  # freshly made models hardly attend
            parameter.mul_(8.0 if parameter.dim() > 1 else 1.0)
    return model


inputs = partial(test_replace.inputs, left=True)


@pytest.fixture
def streams(monkeypatch):
    """CUDA streams that do nothing, for offloaded caches."""
    stream = MagicMock()
    monkeypatch.setattr(torch, "Stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: stream)


def positions_of(mask):
    return (mask.cumsum(1) - 1).clamp_min(0)


@torch.no_grad()
def logits(model, **given):
    return model(**{"use_cache": False, **given}).logits


@pytest.mark.parametrize("kind", CONFIGS)
def test_full_attention_is_huggingfaces(kind):
    model, sides = build(kind), [inputs(left=left) for left in (False, True)]
    expected = [logits(model, **given) for given in sides]
    assert replace_attention(model, {"kind": "full"}) is model
    for given, theirs in zip(sides, expected, strict=True):
        real = given["attention_mask"].bool()
        assert torch.allclose(theirs[real], logits(model, **given)[real], atol=1e-10) and theirs.std() > 0.1


@pytest.mark.parametrize("kind", FURTHER)
def test_further_architectures_decode_as_in_one_pass(kind, tmp_path):
    """Layers with a sliding window of their own, among full ones, stay as they are."""
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForCausalLM")(copy.deepcopy(FURTHER[kind])).eval()
    given = inputs(batch=2)
    mask, real = given["attention_mask"], given["attention_mask"].bool()
    packed = {"input_ids": given["input_ids"][:1], "position_ids": torch.arange(40)[None] % 23}
    alone = [logits(model, input_ids=part) for part in packed["input_ids"].split(23, dim=1)]  # gpt-oss ignores packing
    expected = [logits(model, **given)[real], torch.cat(alone, dim=1)]
    replace_attention(model, {"kind": "full"})
    torch.testing.assert_close([logits(model, **given)[real], logits(model, **packed)], expected, atol=1e-5, rtol=1e-4)
    replace_attention(model, LSH)
    windows = (getattr(model.config, "layer_types", None) or []).count("sliding_attention")
    assert len(mechanisms(model)) == model.config.num_hidden_layers - windows
    whole, cache, parts = logits(model, **given, position_ids=positions_of(mask)), DynamicCache(config=model.config), []
    for first, end in ((0, 22), (22, 23), (23, 40)):
        own = {"attention_mask": mask[:, :end], "position_ids": positions_of(mask)[:, first:end]}
        tokens = given["input_ids"][:, first:end]
        parts.append(logits(model, input_ids=tokens, past_key_values=cache, use_cache=True, **own))
    torch.testing.assert_close(torch.cat(parts, 1)[real], whole[real], atol=1e-5, rtol=1e-4)
    save_replaced(model, tmp_path / "model")
    assert torch.equal(logits(load_replaced(tmp_path / "model"), **given), logits(model, **given))


@pytest.mark.parametrize("attention", [LOCAL, LSH, LHA, BIRD], ids=str)
def test_learned_sinks_stay_in_the_softmax(attention):
    """Those of gpt-oss, with every key chosen."""
    model, given = build("GptOss", dtype=torch.float32), inputs(batch=2)
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.self_attn.sinks, std=3.0)
    real, tokens = given["attention_mask"].bool(), given["input_ids"][:1]
    expected = [logits(model, **given)[real], logits(model, input_ids=tokens)]
    replace_attention(model, {**attention, "chunk": 64})
    cache = DynamicCache(config=model.config)
    parts = tokens.tensor_split((30, 31), 1)
    cached = [logits(model, input_ids=part, past_key_values=cache, use_cache=True) for part in parts]
    torch.testing.assert_close([logits(model, **given)[real], torch.cat(cached, 1)], expected, atol=1e-4, rtol=1e-4)
    with pytest.raises(HubError, match="which mechanisms add neither in training nor for packed documents"):
        logits(model.train(), input_ids=tokens)
    with pytest.raises(HubError, match="YOSOAttention: chooses no keys, so that the model's learned sinks"):
        logits(replace_attention(model.eval(), YOSO), input_ids=tokens)


@pytest.mark.parametrize("kind", ["Llama", "Qwen3", "GPT2"])
def test_mechanisms_get_the_models_own_queries_and_keys(kind):
    """Rotated as the model rotates them, keys of a group for each of its heads, and with its scale."""
    model, given = build(kind, _attn_implementation="eager"), inputs(batch=1)["input_ids"]
    with torch.no_grad():
        weights = model(given, output_attentions=True, use_cache=False).attentions
    replace_attention(model, {"kind": "full"})
    with torch.no_grad(), calls(model) as found:
        model(given, use_cache=False)
    hidden = torch.ones(40, 40, dtype=torch.bool).triu(1)
    for call, theirs in zip(found, weights, strict=True):
        score = call.inputs.q @ call.inputs.k.transpose(-1, -2) * call.scale
        assert torch.allclose(torch.softmax(score.masked_fill(hidden, -torch.inf), -1), theirs, atol=1e-10)


@pytest.mark.parametrize("beams", [pytest.param(1, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize("attention", SMALL, ids=str)
def test_generation_from_a_cache_equals_whole_sequences(attention, beams, streams):
    model, given = replace_attention(build(), attention, seed=4), inputs(batch=2, length=12)
    options = {"max_new_tokens": 14, "do_sample": False, "num_beams": beams}
    expected = model.generate(**given, **options, use_cache=False)
    for kind in ("dynamic", "static", "offloaded", "offloaded_static"):
        assert torch.equal(model.generate(**given, **options, cache_implementation=kind), expected)
    assert len(expected[0].unique()) > 5


@pytest.mark.parametrize("kind", CONFIGS)
def test_tokens_that_join_a_cache_are_as_in_one_pass(kind):
    """One token, then several, in a layer that hashes and in one that stays full."""
    model, given = replace_attention(build(kind), MIXED), inputs(batch=3, length=30)
    mask, positions = given["attention_mask"], positions_of(given["attention_mask"])
    whole = logits(model, **given, position_ids=positions)
    cache, parts = DynamicCache(), []
    for first, end in ((0, 22), (22, 23), (23, 30)):
        tokens = given["input_ids"][:, first:end]
        own = {"attention_mask": mask[:, :end], "position_ids": positions[:, first:end]}
        parts.append(logits(model, input_ids=tokens, past_key_values=cache, use_cache=True, **own))
    assert torch.allclose(torch.cat(parts, 1)[mask.bool()], whole[mask.bool()], atol=1e-10)
    assert [type(layer) for layer in cache.layers] == [IndexedLayer, IndexedLayer]
    assert cache.get_seq_length() == 30


@pytest.mark.parametrize("attention", [LOCAL, LSH, {**LSH, "rounds": 2}, LHA, BIRD, HEADS], ids=str)
def test_launches_do_not_depend_on_the_number_of_new_tokens(attention):
    """On a GPU. 512 new tokens launched 300 to 600 operations per layer when they were processed in blocks."""
    model, counts = replace_attention(build(dtype=torch.float32, max_position_embeddings=4096), attention), []
    torch.nn.Module.to(model, "meta")
    for count in (64, 512):
        cache, tokens = DynamicCache(), torch.zeros(1, 1500, dtype=torch.int64, device="meta")
        with as_on_a_gpu(), LaunchCounter() as counter:
            logits(model, input_ids=tokens, past_key_values=cache, use_cache=True)
            counter.counts = Counts()
            logits(model, input_ids=tokens[:, :count], past_key_values=cache, use_cache=True)
        counts.append(counter.counts)
    assert counts[0].torch == counts[1].torch < 2 * 130 and counts[0].kernels == counts[1].kernels > 0


@pytest.mark.parametrize("attention", [HEADS, {**RANKED, "buckets": 600, "probes": 200}, SIGNS], ids=str)
def test_a_bf16_cache_chooses_the_keys_of_a_whole_pass(attention, monkeypatch):
    model, chosen = replace_attention(build(dtype=torch.bfloat16), attention), []
    kind = type(mechanisms(model)[0])
    choose = kind._choose
    monkeypatch.setattr(kind, "_choose", lambda *args: chosen.append(choose(*args)) or chosen[-1])
    tokens = inputs(batch=1, length=64)["input_ids"]
    logits(model, input_ids=tokens)
    cache = model(tokens[:, :40]).past_key_values
    model(tokens[:, 40:], past_key_values=cache)
    assert torch.equal(chosen[0][:, :, 40:], chosen[-2])  # of the first of two layers


@pytest.mark.parametrize("attention", [LOCAL, LSH, LHA, HEADS, RANKED], ids=str)
def test_a_bf16_cache_rounds_the_window_and_the_sinks_as_a_whole_pass(attention):
    model = replace_attention(build(dtype=torch.bfloat16, num_hidden_layers=1), attention)
    tokens, cache = inputs(batch=1, length=64)["input_ids"], DynamicCache()
    cached = [logits(model, input_ids=x, past_key_values=cache, use_cache=True) for x in tokens.split([40, 23, 1], 1)]
    same = logits(model, input_ids=tokens) == torch.cat(cached, 1)
    assert same.float().mean() > 0.98  # a sum of another order may cross a rounding of bf16


@pytest.mark.parametrize("attention", SMALL, ids=str)
def test_a_cache_is_cropped_and_takes_drafts(attention):
    model, given = replace_attention(build(), attention, seed=4), inputs(batch=1, length=14)
    tokens = torch.cat([given["input_ids"], given["input_ids"]], 1)
    options = {"max_new_tokens": 12, "do_sample": False}
    for cache in (DynamicCache(), StaticCache(model.config, 28)):
        logits(model, input_ids=tokens[:, :20], past_key_values=cache, use_cache=True)
        for length in (11, 23):
            cache.crop(length - cache.get_seq_length())
            again = logits(model, input_ids=tokens[:, length:], past_key_values=cache, use_cache=True)
            assert torch.allclose(again, logits(model, input_ids=tokens)[:, length:], atol=1e-10)
    greedy = model.generate(tokens, **options)
    assert torch.equal(model.generate(tokens, **options, prompt_lookup_num_tokens=3), greedy)
    assert torch.equal(model.generate(tokens, **options, assistant_model=build(num_hidden_layers=1)), greedy)


@pytest.mark.parametrize("attention", [LSH, LHA, {**HEADS, "sketch_dim": 4}, MIXED], ids=str)
def test_a_cache_holds_key_heads_and_a_small_index(attention):
    plain = build(dtype=torch.float32, head_dim=64, max_position_embeddings=4096)
    model, tokens = replace_attention(plain, attention), inputs(1, 1500)["input_ids"]
    cache = DynamicCache()
    logits(model, input_ids=tokens[:, :1490], past_key_values=cache, use_cache=True)
    first, layer = cache.layers[0].keys.data_ptr(), cache.layers[0]
    for token in tokens[:, 1490:].split(1, dim=1):
        logits(model, input_ids=token, past_key_values=cache, use_cache=True)
    assert layer.keys.shape == (1, 2, 1500, 64) and layer.keys.data_ptr() == first  # nothing was copied
    held = sum(x.untyped_storage().nbytes() for x in (layer.keys, layer.values, layer.index))
    assert held <= 1.2 * 2 * layer.keys.nbytes


def test_attention_can_be_switched_and_unsupported_switches_are_one_line():
    model, given = build(), inputs(batch=2, length=12)
    options = {"max_new_tokens": 10, "do_sample": False}
    plain = model.generate(**given, **options)
    hashed = replace_attention(model, MIXED).generate(**given, **options)
    cache = DynamicCache()
    logits(model, **given, past_key_values=cache, use_cache=True)
    model.set_attn_implementation("sdpa")
    assert torch.equal(model.generate(**given, **options), plain) and not torch.equal(plain, hashed)
    tokens, mask = F.pad(given["input_ids"], (0, 1), value=9), F.pad(given["attention_mask"], (0, 1), value=1)
    step = {"past_key_values": cache, "use_cache": True}
    dense = DynamicCache()
    logits(model, **given, past_key_values=dense, use_cache=True)
    logits(model, input_ids=tokens[:, 12:], attention_mask=mask, **step)  # sees all keys: nothing is lost
    model.set_attn_implementation("megasparse")
    assert torch.equal(model.generate(**given, **options), hashed)
    with pytest.raises(HubError, match="index of 12 of its 13 tokens: another attn_implementation"):
        logits(model, input_ids=tokens[:, 12:], attention_mask=F.pad(mask, (0, 1), value=1), **step)
    with pytest.raises(HubError, match="layer 0 of past_key_values is a DynamicLayer without an index of its tokens"):
        logits(model, input_ids=tokens[:, 12:], attention_mask=mask, past_key_values=dense, use_cache=True)


@pytest.mark.parametrize("cached", [False, True])
def test_packed_documents_equal_separate_ones(cached):
    model, tokens = replace_attention(build(), MIXED), inputs(batch=1)["input_ids"]
    cache = DynamicCache() if cached else None
    given = {"position_ids": torch.arange(40)[None] % 23, "use_cache": cached, "past_key_values": cache}
    packed = logits(model, input_ids=tokens, **given)
    alone = [logits(model, input_ids=part) for part in tokens.split(23, dim=1)]
    assert torch.allclose(packed, torch.cat(alone, dim=1), atol=1e-10)
    if cached:
        with pytest.raises(HubError, match="past_key_values: contains several packed documents"):
            logits(model, input_ids=tokens[:, :1], past_key_values=cache, use_cache=True)


@pytest.mark.parametrize("attention", [LHA, SEPARATE, BIRD, HEADS, MIXED], ids=str)
def test_gradients_reach_the_weights_with_and_without_checkpointing(attention):
    given, found = inputs(), []
    labels = given["input_ids"].masked_fill(given["attention_mask"] == 0, -100)
    for checkpointed in (False, True):
        model = replace_attention(build(), attention).train()
        if checkpointed:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model(**given, labels=labels).loss.backward()
        assert all(parameter.grad.abs().sum() > 0 for parameter in model.parameters())
        found.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


def test_a_sketch_learns_the_next_token():
    model, given = replace_attention(build(), BIRD).train(), inputs(batch=1)["input_ids"]
    with calls(model) as found:
        model(given, labels=given, use_cache=False)
    targets = found[0].context.targets
    assert torch.equal(targets.values[:, :-1], given[:, 1:]) and targets.counted[0].tolist() == [True] * 39 + [False]


def test_a_cache_under_an_unknown_name_is_an_error_before_the_model_is_used(monkeypatch):
    """As if a version of transformers passed its cache to attention in a way that megasparse does not know."""
    monkeypatch.setattr(replace, "_cache_among", lambda args, kwargs: None)
    replace_attention(build(), {"pattern": ["full"]})  # needs no index of the cache
    message = f"no cache that megasparse can read from transformers {transformers.__version__}"
    with pytest.raises(HubError, match=message):
        replace_attention(build(), {"pattern": ["full", "local"], "local": {"chunk": 6}})


@pytest.mark.parametrize(("length", "as_dictionary"), [(1, True), (64, False)])
def test_the_cached_step_is_checked_for_any_length_and_form_of_outputs(length, as_dictionary):
    model = build()
    model.config.return_dict = as_dictionary
    replace_attention(model, {"pattern": ["full"]}, max_length=length)
    assert model.config.return_dict is as_dictionary


def test_a_step_unlike_the_whole_pass_is_an_error_before_the_model_is_used(monkeypatch):
    monkeypatch.setattr(Mechanisms, "attend_cached", lambda self, parts, *rest: 0 * parts[0].newest.inputs.q)
    with pytest.raises(HubError, match="decodes from a cache unlike its whole pass"):
        replace_attention(build(dtype=torch.float32), LOCAL)


@together(
    ("kind", "changes", "old", "message"),
    [
        ("Llama", {}, "scaling", "missing 1 required keyword-only argument: 'scaling'"),
        ("Llama", {}, "attention_mask", "missing 1 required keyword-only argument: 'attention_mask'"),
        ("Llama", {}, "position_ids", "takes no position_ids with transformers"),
        ("Gemma3", {}, "sliding_window", "its attention has renamed next to queries, keys and values"),
        ("Gemma2", {"attn_logit_softcapping": 30.0}, "softcap", "its attention has renamed next to"),
    ],
)
def test_a_renamed_argument_of_transformers_is_an_error(kind, changes, old, message, monkeypatch):
    def renamed(function, *given, **named):
        return function(*given, **{"renamed" if name == old else name: value for name, value in named.items()})

    model = build(kind, **changes)
    for functions in (transformers.AttentionInterface, transformers.AttentionMaskInterface):
        known = functions._global_mapping
        monkeypatch.setitem(known, "megasparse", partial(renamed, known["megasparse"]))
    if old == "position_ids":
        kind, forward = type(model.model), type(model.model).forward
        monkeypatch.setattr(kind, "forward", lambda self, input_ids=None, **named: forward(self, input_ids, **named))
    with pytest.raises(HubError, match=message):
        replace_attention(model, LOCAL)


def test_an_untested_version_prints_one_line_once(monkeypatch, capsys):
    monkeypatch.setattr(transformers, "__version__", "9.1.0")
    hub.require_transformers()
    hub.require_transformers()
    assert capsys.readouterr().err.count("transformers: 9.1.0 is not tested with megasparse") == 1
    monkeypatch.setattr(transformers, "__version__", "4.57.6")
    with pytest.raises(HubError, match=r"4\.57\.6 is too old. Install it: pip install .transformers>="):
        hub.require_transformers()


@pytest.mark.parametrize("attention", [{"pattern": ["full"]}, MIXED, LSH, RANKED], ids=str)
def test_generation_under_autocast(attention):
    """Rotated queries and keys are in fp32 there, values in bf16."""
    model = replace_attention(build(dtype=torch.float32), attention)
    options = {"max_new_tokens": 4, "do_sample": False, **inputs(batch=1)}
    with torch.autocast("cpu", torch.bfloat16):
        found = [model.generate(**options, use_cache=use) for use in (True, False)]
    assert torch.equal(*found)


@pytest.mark.parametrize("part", ["model.embed_tokens", "model.layers.1"])
@pytest.mark.parametrize("attention", [LOCAL, HEADS, RANKED], ids=["local", "sketch", "ranked"])
def test_parts_offloaded_to_disk_generate_the_same_text(attention, part, tmp_path):
    model = replace_attention(build(), attention)
    model.save_pretrained(tmp_path / "model")
    parts = ("model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm", "model.rotary_emb", "lm_head")
    places = {**dict.fromkeys(parts, "cpu"), part: "disk"}
    options = {"device_map": places, "offload_folder": tmp_path / "weights"}
    offloaded = load_replaced(tmp_path / "model", **options)
    assert any(weight.is_meta for weight in offloaded.parameters())
    found = [part.generate(**inputs(batch=1), max_new_tokens=5, do_sample=False) for part in (model, offloaded)]
    assert torch.equal(*found)


def test_an_adapter_trains_a_replaced_decoder_and_generates():
    given = inputs(batch=2, length=24)
    model = replace_attention(build(), LHA)
    wrapped = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    optimizer = torch.optim.Adam([p for p in wrapped.parameters() if p.requires_grad], lr=0.02)
    losses = []
    for _ in range(5):
        losses.append(wrapped(**given, labels=given["input_ids"]).loss)
        losses[-1].backward()
        optimizer.step(), optimizer.zero_grad()
    assert losses[-1] < losses[0] - 0.1
    assert all("lora" in name for name, p in wrapped.named_parameters() if p.requires_grad)
    found = [wrapped.generate(**given, max_new_tokens=5, do_sample=False, use_cache=use) for use in (True, False)]
    assert torch.equal(*found)


def test_the_auxiliary_loss_is_divided_among_accumulated_batches():
    model, tokens = replace_attention(build(), LHA).train(), inputs()["input_ids"]
    losses = [
        copy.deepcopy(model)(tokens, labels=tokens, num_items_in_batch=times * tokens.numel()).loss for times in (1, 2)
    ]
    torch.testing.assert_close(losses[0], 2 * losses[1])


@pytest.mark.slow
def test_the_trainer_trains_and_evaluates_a_replaced_decoder(tmp_path):
    model = replace_attention(build(dtype=torch.float32), LHA)
    data = [{"input_ids": row, "labels": row} for row in inputs(batch=4)["input_ids"]]
    settings = transformers.TrainingArguments(
        str(tmp_path), max_steps=2, per_device_train_batch_size=2, report_to=[], use_cpu=True, save_strategy="no"
    )
    before = copy.deepcopy(model.state_dict())
    trainer = transformers.Trainer(model, settings, train_dataset=data, eval_dataset=data)
    trainer.train()
    assert trainer.evaluate()["eval_loss"] > 0
    moved = {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])}
    assert {name for name in before if ".megasparse." in name and "bias" not in name} <= moved


@pytest.mark.parametrize("kind", ["Llama", "GPT2"])
def test_a_saved_decoder_is_loaded_with_either_attention(tmp_path, kind, monkeypatch):
    model, given = replace_attention(build(kind, dtype=torch.float32), LHA, max_length=48, seed=2), inputs()
    with torch.no_grad():
        for mechanism in mechanisms(model):
            for parameter in mechanism.parameters():
                parameter.normal_()
    save_replaced(model, tmp_path / "model")
    model.save_pretrained(tmp_path / "one_file")  # as transformers' Trainer saves, and as older folders are
    replaced, plain = logits(model, **given), logits(build(kind, dtype=torch.float32), **given)
    names = [*load_file(tmp_path / "model" / "model.safetensors"), *load_file(tmp_path / "model" / ADAPTER)]
    assert sorted(names, key=names.index) == names
    assert not any(".megasparse." in name for name in names[: len(names) // 2])
    for folder in (tmp_path / "model", tmp_path / "one_file"):
        for settings in ({}, {"attn_implementation": "megasparse"}, {"attn_implementation": "sdpa"}):
            loaded = load_replaced(folder, **settings)
            expected = plain if "sdpa" in settings.values() else replaced
            torch.testing.assert_close(logits(loaded, **given), expected, atol=1e-5, rtol=1e-5)
        loaded.set_attn_implementation("megasparse")
        assert type(loaded) is type(model) and torch.equal(logits(loaded, **given), replaced)
        alone = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa", dtype=torch.float32)
        torch.testing.assert_close(logits(alone, **given), plain, atol=1e-5, rtol=1e-5)
    assert "attention by megasparse: lha" in (tmp_path / "model" / "README.md").read_text()
    model.save_pretrained(tmp_path / "model")
    with pytest.raises(HubError, match=r"Delete megasparse\.safetensors to use the newer tensors"):
        load_replaced(tmp_path / "model")
    with pytest.raises(HubError, match=r"its attention is not replaced\. Load its folder by"):
        logits(AutoModelForCausalLM.from_pretrained(tmp_path / "one_file"), **given)
    monkeypatch.delitem(transformers.AttentionInterface._global_mapping, "megasparse")  # transformers alone
    with pytest.raises(ValueError, match='attn_implementation="megasparse"` is not supported'):
        AutoModelForCausalLM.from_pretrained(tmp_path / "model")


def test_fp64_is_loaded_as_it_was_saved(tmp_path):
    model = replace_attention(build(), RANKED)
    with torch.no_grad():
        for mechanism in mechanisms(model):
            for parameter in mechanism.parameters():
                parameter.normal_()
    save_replaced(model, tmp_path / "model")
    saved, loaded = model.state_dict(), load_replaced(tmp_path / "model").state_dict()
    assert all(torch.equal(saved[name], loaded[name]) for name in saved)


def test_importing_megasparse_changes_no_method_of_transformers():
    methods = [getattr(x, "__func__", x) for x in vars(transformers.PreTrainedModel).values()]
    files = {Path(x.__code__.co_filename) for x in methods if hasattr(x, "__code__")}
    assert not [file for file in files if Path(load_replaced.__code__.co_filename).parents[1] in file.parents]


def test_a_model_that_was_not_replaced_is_not_loaded_as_one(tmp_path):
    build().save_pretrained(tmp_path)
    with pytest.raises(HubError, match="no valid entry megasparse_attention"):
        load_replaced(tmp_path)
    model = build()
    model.set_attn_implementation("megasparse")
    with pytest.raises(HubError, match=r"LlamaAttention: its attention is not replaced\. Load its folder"):
        logits(model, **inputs())


@together(
    ("kind", "changes", "attention", "length", "message"),
    [
        ("Llama", {}, {"kind": "lha", "window": "top_k"}, None, "attention.lha: a decoder would attend to later"),
        ("Llama", {}, {"kind": "smyrf"}, None, "smyrf"),
        ("Llama", {}, {"kind": "ngram"}, None, "attention.ngram: it reads token ids"),
        ("Llama", {}, {**LHA, "normalize": True}, None, "attention.lha: it adds positions to keys or normalises"),
        ("Llama", {}, {"kind": "full", "sinusoidal_positions": True}, None, "attention.full: it adds positions"),
        ("Llama", {}, {**RANKED, "buckets": 65537}, None, "ranked.buckets: 65537 does not fit"),
        ("Llama", {}, {**SIGNS, "sketch_dim": 12}, None, "ranked.sketch_dim: 12 is not a multiple of 8"),
        ("Llama", {"is_causal": False}, LHA, None, "attends in both directions .config.is_causal"),
        ("Llama", {}, {"kind": "lsh", "shared_qk": True, "shifted_keys": True}, None, "without rotary positions"),
        ("Llama", {}, LHA, 65, "has 64 positions, fewer than max_length = 65. Set .* rope_parameters"),
        ("GPT2", {}, LHA, 65, "has 64 positions, fewer than max_length = 65. Use a smaller one"),
        ("GPT2", {"add_cross_attention": True}, LHA, None, "has cross-attention"),
        ("Nemotron", {}, LHA, None, "does not pass keyword arguments to its attention"),
        ("Bloom", {"max_position_embeddings": 64}, LHA, None, "uses transformers' interface in 0 of its 2 layers"),
        ("Qwen3Next", {}, LHA, None, "has layers of another attention .config.layer_types: linear_attention"),
        ("Doge", {}, LHA, None, "adds its own mask or bias to its scores"),
        ("Gemma2", {"attn_logit_softcapping": 50.0}, LHA, None, "caps its scores .attn_logit_softcapping = 50.0"),
        ("Gemma3", {"use_bidirectional_attention": True}, LHA, None, "attends in both directions"),
        ("Mistral", {"sliding_window": 32}, LHA, None, "sliding_window of 32 tokens is below max_length = 64"),
    ],
)
def test_attention_unsuitable_for_decoders_is_rejected(kind, changes, attention, length, message):
    model = build(kind, dtype=torch.float32, **changes)
    with pytest.raises((HubError, ConfigError), match=message):
        replace_attention(model, attention, max_length=length)
    assert not any(".megasparse." in name for name in model.state_dict())


def test_unsupported_calls_are_rejected():
    model, given = replace_attention(build(), LHA, max_length=32), inputs(length=24)
    with pytest.raises(HubError, match="40 tokens are more than the max_length = 32"):
        logits(model, **inputs())
    with pytest.raises(HubError, match="more than the max_length = 32"):
        model.generate(**given, max_new_tokens=12)


def test_static_caches_are_allocated_once_and_not_compiled():
    model, given = replace_attention(build("Gemma3"), LHA), inputs(batch=2, length=24)
    options = {**given, "max_new_tokens": 4, "do_sample": False}
    compiled = transformers.CompileConfig()
    compiled._compile_all_devices = True  # as on a GPU
    cached = model.generate(**options, compile_config=compiled, cache_implementation="static")
    assert torch.equal(model.generate(**options), cached) and not hasattr(model, "_compiled_call")
    cache = StaticCache(model.config, 24)
    logits(model, **given, past_key_values=cache, use_cache=True)
    held = [layer.keys.untyped_storage().nbytes() for layer in cache.layers if isinstance(layer, IndexedLayer)]
    assert held == 2 * [2 * 2 * 24 * 16 * 8]
    with pytest.raises(HubError, match="past_key_values: is static, with room for 24 tokens, not 25"):
        logits(model, input_ids=given["input_ids"][:, :1], past_key_values=cache, use_cache=True)


def test_offloaded_layers_keep_only_their_index(streams):
    model, given = replace_attention(build(), LHA), inputs(batch=1)["input_ids"]
    cache = DynamicCache(offloading=True)
    parts = [logits(model, input_ids=part, past_key_values=cache, use_cache=True) for part in given.split(39, 1)]
    assert [layer.stores.keys() for layer in cache.layers] == 2 * [{"index"}]
    assert torch.allclose(torch.cat(parts, 1), logits(model, input_ids=given), atol=1e-10)


def test_other_caches_are_one_line():
    model, given, quantized = replace_attention(build(), LHA), inputs(batch=1, length=24), DynamicCache()
    quantized.layers.append(type("QuantizedLayer", (DynamicLayer,), {})())  # transformers' own asks for a library
    with pytest.raises(HubError, match="of past_key_values is a QuantizedLayer without an index"):
        logits(model, **given, past_key_values=quantized, use_cache=True)


def test_a_model_in_training_takes_no_filled_cache():
    for attention in (LHA, YOSO):  # with and without an index
        model, tokens, cache = replace_attention(build(), attention), inputs(batch=1)["input_ids"], DynamicCache()
        logits(model, input_ids=tokens[:, :30], past_key_values=cache, use_cache=True)
        with pytest.raises(HubError, match="past_key_values: contains 30 tokens, but a model in training"):
            logits(model.train(), input_ids=tokens[:, 30:], past_key_values=cache, use_cache=True)
