"""Import and export of HuggingFace decoders: identical weights, logits, tokenizers, rejected models."""

import json

import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from megasparse.cli.main import door
from megasparse.errors import ConfigError, HubError
from megasparse.evaluation.generate import BeamSettings, Sampling, end_tokens, generate, search
from megasparse.evaluation.texts import Request, texts
from megasparse.hub import from_pretrained
from megasparse.hub.architectures import format_named
from megasparse.hub.checker import load_model
from megasparse.hub.importing import HFModel
from megasparse.hub.replace import load_plain, load_replaced, replace_attention, save_replaced
from megasparse.hub.tensor_file import QUANTISED
from megasparse.hub.tokenizer_files import chat_files
from megasparse.ops.random import RngContext
from megasparse.runs.api import load_checkpoint
from megasparse.settings.load import build_config
from tests.helpers.cases import together
from tests.helpers.models import random_tokens
from tests.helpers.tokenizers import byte_level, written

SIZES = dict(vocab_size=270, bos_token_id=0, eos_token_id=2, pad_token_id=1)
LLAMA = SIZES | dict(
    hidden_size=32, intermediate_size=44, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
    max_position_embeddings=70, rms_norm_eps=1e-6,
)  # fmt: skip
GPT2 = SIZES | dict(n_embd=30, n_layer=2, n_head=5, n_positions=70)
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "original_max_position_embeddings": 20, "low_freq_factor": 1.0,
          "high_freq_factor": 4.0, "rope_theta": 500.0}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 3.5, "original_max_position_embeddings": 20, "rope_theta": 500.0,
        "beta_fast": 32.0, "beta_slow": 1.0}  # fmt: skip
KINDS = {
    "llama": LLAMA,
    "llama as SmolLM": {**LLAMA, "tie_word_embeddings": True, "rope_theta": 100000.0, "num_attention_heads": 8},
    "llama with biases, scaled": {**LLAMA, "attention_bias": True, "mlp_bias": True, "rope_parameters": LLAMA3},
    "llama of gelu": {**LLAMA, "hidden_act": "gelu_pytorch_tanh", "head_dim": 12, "num_key_value_heads": 4},
    "mistral": {**LLAMA, "head_dim": 10, "sliding_window": None},
    "qwen2": {**LLAMA, "bos_token_id": None, "rope_parameters": YARN},
    "qwen3": {**LLAMA, "head_dim": 16, "tie_word_embeddings": True},
    "gpt2": GPT2,
    "gpt2 untied": {**GPT2, "tie_word_embeddings": False, "n_inner": 50, "activation_function": "gelu"},
}
TEMPLATE = "{% for message in messages %}<s>{{ message['content'] }}</s>{% endfor %}"


def theirs(name):
    """HuggingFace's model, every weight random."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name.split()[0], **KINDS[name])).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape))
    return model


def saved(name, folder):
    """The folder of a model with its tokenizer, and the model."""
    model = theirs(name)
    model.save_pretrained(folder)
    written(folder, byte_level())
    AutoTokenizer.from_pretrained(folder, chat_template=TEMPLATE).save_pretrained(folder)
    written(folder, byte_level())
    return model


def logits_of(model, tokens):
    """Logits of the token after each."""
    with torch.no_grad():
        return model(tokens).logits


def replaced_by(kind, length):
    return {"megasparse_attention": {"attention": {"pattern": [kind]}, "max_length": length, "seed": 0}}


@pytest.mark.parametrize("name", KINDS)
def test_in_and_out_again_is_the_same_model(tmp_path, name, capsys):
    original, kind = saved(name, tmp_path / "theirs"), name.split()[0]
    door("convert from-hf")(["--model", str(tmp_path / "theirs"), "--output", str(tmp_path / "run")])
    assert "logits agree with the converted model's on 70 tokens" in capsys.readouterr().err

    start = original.config.bos_token_id if original.config.bos_token_id is not None else 2
    tokens = torch.cat([torch.full((2, 1), start), random_tokens(2, 69)], 1)
    expected, ours = logits_of(original, tokens), from_pretrained(tmp_path / "theirs")
    cache = ours.new_cache(2, seed=0)
    found = [ours.prefill(tokens[:, 1:40], cache), *(ours.decode(token, cache) for token in tokens[:, 40:].unbind(1))]
    torch.testing.assert_close(torch.stack(found, 1), expected[:, 39:], rtol=0, atol=1e-4)
    nats = ours.token_scores(tokens[:, 1:], RngContext.evaluation(0, 2)).nats
    exact = -torch.log_softmax(expected[:, :-1], -1).gather(-1, tokens[:, 1:, None]).squeeze(-1)
    torch.testing.assert_close(nats, exact, rtol=0, atol=1e-4)

    door("convert to-hf")(["--checkpoint", f"{tmp_path}/run", "--output", f"{tmp_path}/out", "--to", kind])
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert torch.equal(logits_of(again, tokens), expected)
    before, after = (load_file(tmp_path / part / "model.safetensors") for part in ("theirs", "out"))
    assert before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)
    given, written_config = original.config.to_dict(), again.config.to_dict()
    left_out = {"_name_or_path", "bos_token_id", "architectures", "attention_dropout", "embd_pdrop", "n_inner"}
    left_out |= {"layer_types"}
    for key in given.keys() - left_out:
        assert written_config[key] == given[key], key
    chat, prompts = [{"role": "user", "content": "the end"}], []
    for part in ("theirs", "out"):
        tokenizer = AutoTokenizer.from_pretrained(tmp_path / part)
        prompts.append((tokenizer.apply_chat_template(chat, tokenize=False), tokenizer("Is it?").input_ids))
    assert prompts[0] == prompts[1] and prompts[0][0] == "<s>the end</s>"


@pytest.mark.parametrize("ends", [5, [9, 5]])
def test_the_models_own_end_ends_texts_and_is_exported(tmp_path, ends):
    model = saved("llama", tmp_path / "theirs")
    with torch.no_grad():
        model.lm_head.weight[5] += 0.2 * model.lm_head.weight.norm(dim=1).max()
    model.config.eos_token_id = model.generation_config.eos_token_id = ends
    model.save_pretrained(tmp_path / "theirs")
    door("convert from-hf")(["--model", str(tmp_path / "theirs"), "--output", str(tmp_path / "run")])
    loaded = load_checkpoint(tmp_path / "run")
    settings = {"hash_seed": 0, "temperature": 0.0, "ends": end_tokens(loaded.config, loaded.tokenizer)}
    options, lengths = {"do_sample": False, "max_new_tokens": 20, "pad_token_id": 1}, set()
    for seed in range(8):
        tokens = random_tokens(1, 6, seed=seed)
        text = model.generate(F.pad(tokens, (1, 0)), **options)[0, 7:].tolist()
        ended = text[-1] in settings["ends"]
        assert list(generate(loaded.model, tokens[0], 20, **settings)) == text[: len(text) - ended]
        ((best, *_),) = search(loaded.model, tokens, 0, BeamSettings(1, 20, settings["ends"]))
        assert (best.tokens, best.ended) == (text[: len(text) - ended], ended)
        lengths.add(len(text))
    assert len(lengths) > 2
    chat = Request("".join(loaded.tokenizer.text([7, 5, 8])).encode(), 3, Sampling(0.0), None, 0.0)
    assert 5 in loaded.tokenizer.encode(chat.prompt)
    (text,) = texts(loaded.model, loaded.config, loaded.tokenizer, chat, [], torch.device("cpu"))
    assert "".join(text).encode().startswith(chat.prompt)
    for to in ("llama", "megasparse"):
        door("convert to-hf")(["--checkpoint", f"{tmp_path}/run", "--output", f"{tmp_path}/{to}", "--to", to])
        assert transformers.GenerationConfig.from_pretrained(tmp_path / to).eos_token_id == ends
    for text, problem in (('{"eos_token_id": "</s>"}', 'eos_token_id = "</s>" is not an id'), ("[", "cannot be read")):
        (loaded.tokenizer.file.parent / "generation_config.json").write_text(text)
        with pytest.raises(ConfigError, match=f"generation_config.json: {problem}"):
            end_tokens(loaded.config, loaded.tokenizer)
    with pytest.raises(HubError, match="cannot be read as a JSON object"):
        chat_files(loaded.config, 20)


@pytest.mark.parametrize("buffer", [False, True])
def test_old_files_of_gpt2_are_read(tmp_path, buffer):
    """Without the prefix of their names, with the masks as buffers."""
    model, file = saved("gpt2", tmp_path), tmp_path / "model.safetensors"
    tensors = {name.removeprefix("transformer."): tensor for name, tensor in load_file(file).items()}
    if buffer:
        tensors |= {f"h.{i}.attn.bias": torch.ones(1, 1, 70, 70) for i in range(2)}
    save_file(tensors, file, metadata={"format": "pt"})
    weights = dict(from_pretrained(tmp_path).named_parameters())
    assert torch.equal(weights["embedding.weight"], model.transformer.wte.weight)


@together(
    ("name", "change", "problem"),
    [
        ("llama", {"hidden_act": "relu"}, "hidden_act is 'relu'"),
        ("llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type is 'dynamic'"),
        ("llama", {"rope_scaling": {**YARN, "beta_fast": 20.0}}, "beta_fast is 20.0"),
        ("llama", {"bos_token_id": None, "eos_token_id": None}, "neither bos_token_id nor eos_token_id"),
        ("llama", {"num_key_value_heads": 3}, "3 does not divide model.heads = 4"),
        ("mistral", {"sliding_window": 40}, 'sliding_window is 40.*Set "max_position_embeddings" to 40'),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx is True"),
        ("gpt2", {"model_type": "smollm3"}, "model_type is 'smollm3', which cannot be imported"),
        ("mistral", {"model_type": "mixtral"}, "model_type is 'mixtral', which cannot be imported. Supported: bert"),
        ("llama", {"megasparse_attention": {}}, "no valid entry megasparse_attention"),
        ("gpt2", replaced_by("full", 60), "max_length of its replaced attention is not the model's 70"),
        ("llama", replaced_by("routing", 70), "its replaced attention has shared queries and keys"),
    ],
)
def test_features_that_megasparse_lacks_are_one_line(tmp_path, name, change, problem):
    saved(name, tmp_path)
    path = tmp_path / "config.json"
    values = json.loads(path.read_text())
    if "rope_scaling" in change:
        values.pop("rope_parameters")
    path.write_text(json.dumps(values | change))
    with pytest.raises(Exception, match=problem) as error:
        HFModel.open(tmp_path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["llama as SmolLM", "qwen3", "gpt2"])
def test_a_tied_weight_may_be_stored_under_the_name_of_the_head_only(tmp_path, name):
    model, path = saved(name, tmp_path), tmp_path / "model.safetensors"
    tensors = load_file(path)
    embedding = next(key for key in tensors if key.endswith(("embed_tokens.weight", "wte.weight")))
    save_file(tensors | {"lm_head.weight": tensors.pop(embedding)}, path, {"format": "pt"})
    imported = HFModel.open(tmp_path)
    assert imported.compare() and torch.equal(imported.tensors["embedding.weight"](), model.lm_head.weight)
    tensors.pop("lm_head.weight", None)
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(HubError, match=f"contains no tensor {embedding}"):
        HFModel.open(tmp_path)
    head = model.lm_head.weight.detach()
    save_file(tensors | {embedding: head.clone(), "lm_head.weight": 2 * head}, path, {"format": "pt"})
    for load in (HFModel.open, load_plain):
        with pytest.raises(HubError, match=f"lm_head.weight and {embedding} differ, but are tied"):
            load(tmp_path)


UP = "model.layers.{}.mlp.up_proj.weight"
DAMAGES = {
    f"contains no tensor {UP.format(1)}": lambda x: x.pop(UP.format(1)),
    "contains no tensor lm_head.weight": lambda x: x.pop("lm_head.weight"),
    f"{UP.format(1)} has shape": lambda x: x.update({UP.format(1): torch.ones(44, 31)}),
    f"contains a tensor {UP.format(3)}, unknown": lambda x: x.update({UP.format(3): x[UP.format(1)].clone()}),
    "contains a tensor model.layers.0.self_attn.sinks, unknown": lambda x: x.update(
        {"model.layers.0.self_attn.sinks": torch.ones(4)}
    ),
    f"quantised .{UP.format(2)} is of type I8": lambda x: x.update({UP.format(2): torch.ones(44, 32).char()}),
}


@together("damage", [*DAMAGES, *QUANTISED])
def test_all_ways_in_reject_incomplete_unread_and_quantised_weights(tmp_path, damage):
    model, plain, replaced = saved("llama", tmp_path / "plain"), tmp_path / "plain", tmp_path / "replaced"
    save_replaced(
        replace_attention(model, {"kind": "local", "chunk": 8}), replaced, AutoTokenizer.from_pretrained(plain)
    )
    written(replaced, byte_level())
    for folder, ways in ((plain, (HFModel.open, load_plain, load_model)), (replaced, (HFModel.open, load_replaced))):
        for load in ways:
            load(folder)
        if damage in DAMAGES:
            tensors = load_file(folder / "model.safetensors")
            DAMAGES[damage](tensors)
            save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        else:
            values = json.loads((folder / "config.json").read_text())
            (folder / "config.json").write_text(json.dumps(values | {damage: {"quant_method": "gptq", "bits": 4}}))
        for load in ways:
            with pytest.raises(HubError, match=damage if damage in DAMAGES else r"quantised \(gptq\)") as caught:
                load(folder)
            assert str(folder) in str(caught.value) and "\n" not in str(caught.value)


def test_a_folder_without_its_tokenizer_is_rejected(tmp_path):
    saved("llama", tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(HubError, match=r"tokenizer\.json: is missing"):
        HFModel.open(tmp_path)


@together(
    ("to", "changes", "key"),
    [
        ("llama", {}, "model.blocks"),
        ("llama", {"attention": {"pattern": ["lsh"]}}, "model.attention.pattern"),
        ("llama", {"start_token": None}, "model.start_token"),
        ("mistral", {"feed_forward_biases": True}, "model.feed_forward_biases"),
        ("qwen2", {}, "model.attention_biases"),
        ("qwen3", {}, "model.query_key_norm"),
        ("gpt2", {}, "model.norm"),
        ("reformer", {}, "model.key_heads"),
    ],
)
def test_features_that_transformers_lacks_are_one_line(to, changes, key):
    ordinary = {"blocks": "ordinary", "activations": "stored"}
    parts = {"norm": "rms", "feed_forward": "swiglu", "feed_forward_biases": False, "logit_scale": 1.0}
    settings = {"layers": 1, "key_heads": 4, "start_token": 0, "positions": {"kind": "rotary"}, **parts, **changes}
    if key not in ("model.blocks", "model.key_heads"):
        settings |= ordinary
    model = {"max_length": 64, "d_model": 32, "attention": {"pattern": ["full"]}, **settings}
    if to == "reformer":
        model |= {"positions": {"kind": "sinusoidal"}, "attention": {"pattern": ["local"]}}
    config = build_config({"model": model, "data": {"sequence_length": 64}})
    with pytest.raises(HubError) as error:
        format_named(to).export(config, lambda name: torch.zeros(1))
    assert error.value.path == key
