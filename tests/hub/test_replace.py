"""A pretrained encoder's attention replaced: equal where it is full, masked, trained, saved, longer, linear."""

import copy

import pytest
import torch
import transformers
from transformers import BertConfig, DistilBertConfig, RobertaConfig, XLMRobertaConfig

from megasparse.attention import lha
from megasparse.attention.contract import Attention
from megasparse.attention.observation import calls
from megasparse.config.attention import AttentionConfig
from megasparse.errors import ConfigError, HubError
from megasparse.hub.replace import (
    ENTRY,
    auxiliary_loss,
    extend_positions,
    load_replaced,
    mechanisms,
    positions,
    replace_attention,
    save_replaced,
)
from megasparse.hub.teaching import Teacher, full_attention

SIZE = {"vocab_size": 60, "max_position_embeddings": 66, "num_labels": 3}
WIDTHS = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
CONFIGS = {
    "Bert": BertConfig(**SIZE, **WIDTHS),
    "Roberta": RobertaConfig(**SIZE, **WIDTHS),
    "XLMRoberta": XLMRobertaConfig(**SIZE, **WIDTHS),
    "DistilBert": DistilBertConfig(**SIZE, dim=32, n_layers=2, n_heads=4, hidden_dim=48),
}
HEADS = ["Model", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering"]
SMALL = [
    {"kind": "local", "chunk": 8},
    {"kind": "lsh", "chunk": 8},
    {"kind": "lsh", "chunk": 8, "shared_qk": True},
    {"kind": "lha", "chunk": 8},
    {"kind": "lha", "chunk": 8, "window": "top_k"},
    {"kind": "yoso", "hashes": 4, "convolution": 3},
    {"kind": "smart_bird", "keys": 6},
    {"kind": "smyrf", "chunk": 8},
    {"kind": "routing", "chunk": 8},
    {"kind": "random", "chunk": 8},
    {"kind": "linformer", "projected": 8},
    {"pattern": [{"local": 2, "lha": 2}, "full"], "local": {"chunk": 8}, "lha": {"chunk": 8}},
]


QUICK = pytest.mark.parametrize(
    "attention",
    [case if n in (1, 2, 3, 5, 6, 11) else pytest.param(case, marks=pytest.mark.slow) for n, case in enumerate(SMALL)],
    ids=str,
)
"""Separate and shared queries and keys, auxiliary losses, weights, draws, and two mechanisms in a layer."""


def build(name, kind="Bert", **changes):
    torch.manual_seed(0)
    config = copy.deepcopy(CONFIGS[kind])
    if name == "ForQuestionAnswering":
        config.num_labels = 2
    for key, value in changes.items():
        setattr(config, key, value)
    model = getattr(transformers, f"{kind}{name}")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # freshly made models hardly attend
            parameter.mul_(2.0 if parameter.dim() > 1 else 1.0)
    return model


def inputs(batch=3, length=40, left=False):
    tokens = torch.randint(5, 60, (batch, length), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(tokens)
    for row in range(1, batch):
        mask[row, : 9 * row] = 0
    if not left:
        mask = mask.flip(1)
    return {"input_ids": torch.where(mask > 0, tokens, 1), "attention_mask": mask}


def values(model, given):
    with torch.no_grad():
        return model(**given)[0]


@pytest.mark.parametrize(
    "kind,name", [*(("Bert", name) for name in HEADS), *((kind, "ForMaskedLM") for kind in [*CONFIGS][1:])]
)
def test_full_attention_is_huggingfaces(kind, name):
    model = build(name, kind, _attn_implementation="eager")
    assert model.config._attn_implementation == "eager"
    # A classifier of sequences reads the first place, where nothing is if padding is on the left.
    sides = [inputs(left=left) for left in (False, True)][: 1 if name == "ForSequenceClassification" else 2]
    expected = [values(model, given) for given in sides]
    assert replace_attention(model, {"kind": "full"}) is model
    for given, theirs in zip(sides, expected, strict=True):
        real = given["attention_mask"].bool() if name != "ForSequenceClassification" else ...
        assert (theirs - values(model, given))[real].abs().max() < 1e-5
        assert theirs[real].std() > 0.01


def where(real):
    """Positions of the second sequence's tokens, (1, n)."""
    return real[1].nonzero().T


@QUICK
def test_padding_is_never_seen(attention):
    """A sequence has the same outputs in a batch with longer ones, padded on either side."""
    model = build("Model", "Bert")
    replace_attention(model, attention)
    for left in (False, True):
        given = inputs(batch=2, left=left)
        real = given["attention_mask"].bool()
        noise = given["input_ids"].masked_fill(~real, 7)
        first, second = values(model, given), values(model, {**given, "input_ids": noise})
        assert torch.allclose(first[real], second[real], atol=1e-6)
        alone = values(model, {"input_ids": given["input_ids"][1:][real[1:]].unsqueeze(0), "position_ids": where(real)})
        assert torch.allclose(first[1:][real[1:]], alone[0], atol=1e-5)


@QUICK
def test_evaluation_repeats_and_training_draws_new_hashes(attention):
    model, given = build("ForSequenceClassification"), inputs()
    for part in model.modules():
        if isinstance(part, torch.nn.Dropout):
            part.p = 0.0
    replace_attention(model, attention, seed=3)
    again = replace_attention(copy.deepcopy(model), attention, seed=3)
    assert torch.equal(values(model, given), values(model, given))
    assert torch.equal(values(model, given), values(again, given))
    model.train(), again.train()
    torch.manual_seed(5)
    first, second = values(model, given), values(model, given)
    torch.manual_seed(5)
    assert torch.equal(first, values(again, given)) and torch.equal(second, values(again, given))
    drawn = {"lsh", "yoso", "smart_bird", "smyrf", "random"}
    assert torch.equal(first, second) != (attention.get("kind") in drawn)


def labelled(given, name):
    tokens = given["input_ids"]
    if name == "ForSequenceClassification":
        return {**given, "labels": torch.arange(len(tokens)) % 3}
    if name == "ForQuestionAnswering":
        return {**given, "start_positions": torch.tensor([0, 1, 2]), "end_positions": torch.tensor([3, 4, 5])}
    labels = tokens.masked_fill(given["attention_mask"] == 0, -100)
    return {**given, "labels": labels % 3 if name == "ForTokenClassification" else labels}


@pytest.mark.parametrize("name", HEADS[1:])
def test_the_loss_contains_the_lha_term_only_in_training(name, monkeypatch):
    monkeypatch.setattr(lha, "WEIGHT", 0.25)
    model, given = build(name, hidden_dropout_prob=0.0, classifier_dropout=0.0), labelled(inputs(), name)
    replace_attention(model, {"kind": "lha", "chunk": 8})
    plain = model(**given)
    assert auxiliary_loss(model) == 0
    model.train()
    found = model(**given)
    assert auxiliary_loss(model) == 0  # it is in the loss
    unlabelled = {key: given[key] for key in ("input_ids", "attention_mask")}
    model(**unlabelled)
    auxiliary = auxiliary_loss(model)
    assert auxiliary > 0
    model.base_model(**unlabelled)
    assert auxiliary_loss(model) > 0
    copy.deepcopy(model)
    if name == "ForSequenceClassification":
        task = torch.nn.functional.cross_entropy(found.logits, given["labels"])
        assert torch.allclose(task, plain.loss, atol=1e-6)
        # The queries to learn from are drawn by step, so the two passes' auxiliary losses are near, not equal.
        assert torch.allclose(found.loss - 0.75 * task, auxiliary, rtol=0.05)
        loss, logits = model(**given, return_dict=False)[:2]
        assert torch.allclose(loss - 0.75 * task, auxiliary, rtol=0.05) and logits.shape == (3, 3)
    found.loss.backward()
    for mechanism in mechanisms(model):
        assert all(parameter.grad.abs().sum() > 0 for parameter in mechanism.parameters())


@pytest.mark.parametrize("name", HEADS[1:4])
def test_smart_birds_sketch_learns_from_the_labels(name):
    settings = {"objective": "pooled", "labels": 3} if name == "ForSequenceClassification" else {}
    model, given = build(name).train(), labelled(inputs(), name)
    replace_attention(model, {"kind": "smart_bird", "keys": 6, **settings})
    model(**given).loss.backward()
    for mechanism in mechanisms(model):
        assert all(parameter.grad.abs().sum() > 0 for parameter in mechanism.parameters())


@QUICK
@pytest.mark.parametrize("kind", ["Bert", pytest.param("DistilBert", marks=pytest.mark.slow)])
def test_gradient_checkpointing_changes_no_gradient(kind, attention):
    found = []
    for checkpointed in (False, True):
        model, given = build("ForMaskedLM", kind).train(), labelled(inputs(), "ForMaskedLM")
        replace_attention(model, attention)
        if checkpointed:
            model.gradient_checkpointing_enable()
        torch.manual_seed(5)  # dropout
        # Two passes before the backward: a recomputation must draw as its own pass did.
        loss = model(**given).loss + model(**given).loss
        loss.backward()
        found.append([None if p.grad is None else p.grad.clone() for p in model.parameters()] + [loss.detach()])
    assert any(p is not None for p in found[0])
    for plain, other in zip(*found, strict=True):
        assert (plain is None and other is None) or torch.equal(plain, other)


def test_labels_that_do_not_fit_and_reentrant_checkpointing_are_rejected():
    model = replace_attention(build("ForSequenceClassification").train(), {"kind": "smart_bird", "keys": 6})
    with pytest.raises(ConfigError, match=r'smart_bird.objective: "token" does not match .* Set it to "pooled"'):
        model(**labelled(inputs(), "ForSequenceClassification"))
    model = replace_attention(build("ForMaskedLM").train(), {"kind": "lha", "chunk": 8})
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    with pytest.raises(HubError, match="use_reentrant=True"):
        model(**labelled(inputs(), "ForMaskedLM"))


@pytest.mark.parametrize("kind", CONFIGS)
def test_positions_are_extended_by_repeating_them(kind):
    model = build("ForMaskedLM", kind)
    old, before = positions(model), values(model, inputs())
    assert old == (64 if "oberta" in kind or "Roberta" in kind else 66)
    table = model.base_model.embeddings.position_embeddings.weight.detach().clone()
    extend_positions(model, 180)
    longer = model.base_model.embeddings.position_embeddings.weight
    offset = len(table) - old
    assert torch.equal(longer[: len(table)], table)
    assert torch.equal(longer[offset + old : offset + 2 * old], table[offset:])
    assert torch.equal(longer[offset + 2 * old :], table[offset : offset + 180 - 2 * old])
    assert model.config.max_position_embeddings == len(longer) == 180 + offset
    assert positions(model) == 180
    assert torch.equal(values(model, inputs()), before)
    assert values(model, inputs(length=180)).shape[1] == 180
    with pytest.raises(HubError, match="more than the requested 179"):
        extend_positions(model, 179)


def test_a_longer_max_length_extends_and_decides_the_buckets():
    model = replace_attention(build("Model"), {"kind": "lha", "chunk": 8}, max_length=128)
    assert positions(model) == 128 and {mechanism.buckets for mechanism in mechanisms(model)} == {16}
    model = replace_attention(model, {"kind": "lha", "chunk": 8}, max_length=32)
    assert positions(model) == 128 and {mechanism.buckets for mechanism in mechanisms(model)} == {4}
    with pytest.raises(HubError, match="40 tokens are more than the max_length = 32"):
        model(**inputs())


@pytest.mark.parametrize("attention", [SMALL[3], SMALL[5], SMALL[6], SMALL[8], SMALL[-1]], ids=str)
@pytest.mark.parametrize(
    "kind", ["Bert", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("Roberta", "DistilBert"))]
)
def test_a_saved_model_is_loaded_replaced(tmp_path, kind, attention):
    model = build("ForSequenceClassification", kind)
    replace_attention(model, attention, max_length=100, seed=2)
    with torch.no_grad():
        for mechanism in mechanisms(model):
            for parameter in [*mechanism.parameters(), *mechanism.buffers()]:
                parameter.add_(0.1)
    save_replaced(model, tmp_path / "model")
    again, given = load_replaced(tmp_path / "model"), inputs()
    assert type(again) is type(model) and again.config.to_dict()[ENTRY] == model.config.to_dict()[ENTRY]
    assert again.state_dict().keys() == model.state_dict().keys()
    assert all(torch.equal(a, b) for a, b in zip(again.state_dict().values(), model.state_dict().values(), strict=True))
    assert torch.equal(values(again, given), values(model, given))
    base = load_replaced(tmp_path / "model", getattr(transformers, f"{kind}Model"))
    assert torch.equal(values(base, given), model.base_model(**given)[0])
    plain = type(model).from_pretrained(tmp_path / "model", attn_implementation="sdpa").eval()
    with full_attention(model):
        real = given["attention_mask"].bool()
        assert torch.allclose(values(plain, given), values(model, given), atol=1e-5) and real.any()
    with pytest.raises(HubError, match="exists already"):
        save_replaced(model, tmp_path / "model")


def test_a_damaged_folder_is_rejected(tmp_path):
    from safetensors.torch import load_file, save_file

    model = replace_attention(build("Model"), {"kind": "lha", "chunk": 8})
    folder = tmp_path / "model"
    save_replaced(model, folder)
    tensors = load_file(folder / "megasparse.safetensors")
    own = sorted(name for name in tensors if ".megasparse." in name)
    cases = {
        f"contains no tensor {own[0].replace('.', '[.]')}": {k: v for k, v in tensors.items() if k != own[0]},
        "contains a tensor encoder.x.megasparse.y": {**tensors, "encoder.x.megasparse.y": torch.ones(1)},
        "has shape": {**tensors, own[0]: torch.ones(2)},
    }
    for message, changed in cases.items():
        save_file(changed, folder / "megasparse.safetensors")
        with pytest.raises(HubError, match=message):
            load_replaced(folder)
    build("Model").save_pretrained(tmp_path / "plain")
    with pytest.raises(HubError, match="no valid entry megasparse_attention"):
        load_replaced(tmp_path / "plain")
    with pytest.raises(HubError, match="no such folder"):
        load_replaced(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("attention", "message"),
    [
        ({"kind": "lhaa"}, 'attention.kind: unknown mechanism "lhaa". Did you mean "lha"'),
        ({"kind": "lha", "chunks": 3}, 'model.attention.lha.chunks: unknown key .* Did you mean "chunk"'),
        ({"pattern": [{"lha": 3}]}, "has 3 heads, but model.heads = 4"),
    ],
)
def test_settings_that_do_not_fit_change_nothing(attention, message):
    model = build("Model")
    before = values(model, inputs())
    with pytest.raises(ConfigError, match=message):
        replace_attention(model, attention, max_length=500)
    assert torch.equal(values(model, inputs()), before) and positions(model) == 66


def test_unsupported_models_and_requests_are_rejected():
    with pytest.raises(HubError, match="Linear: is not a model of Hugging Face transformers"):
        replace_attention(torch.nn.Linear(2, 2), {"kind": "lha"})
    config = transformers.ElectraConfig(**SIZE, **WIDTHS)
    with pytest.raises(HubError, match='ElectraModel: is of type "electra", whose attention is not causal'):
        replace_attention(transformers.ElectraModel(config), {"kind": "lha"})
    with pytest.raises(HubError, match="is a decoder"):
        replace_attention(build("LMHeadModel", is_decoder=True), {"kind": "lha"})
    with pytest.raises(HubError, match="interface in 0 of its 0 layers"):
        replace_attention(build("Model", num_hidden_layers=0), {"kind": "lha"})
    model = build("Model")
    with pytest.raises(HubError, match="its attention is not replaced"):
        auxiliary_loss(model)
    replace_attention(model, {"kind": "full"})
    with pytest.raises(HubError, match="no matrix of attention weights"):
        model(**inputs(), output_attentions=True)
    with pytest.raises(HubError, match=r"attention_mask has shape \(3, 1, 40, 40\)"):
        model(inputs()["input_ids"], attention_mask=torch.ones(3, 1, 40, 40))
    with pytest.raises(HubError, match="its attention is not replaced"):
        transformers.BertModel(copy.deepcopy(model.config))(**inputs())
    with pytest.raises(HubError, match="no part of its attention can be taught"):
        Teacher(model)


def test_the_yoso_convolution_starts_at_zero():
    """The pretrained values are unchanged, and the convolution learns."""
    given, found = labelled(inputs(), "ForMaskedLM"), []
    for convolution in (None, 3):
        model = build("ForMaskedLM")
        replace_attention(model, {"kind": "yoso", "hashes": 4, "convolution": convolution})
        found.append(model(**given).loss)
    assert torch.equal(*found)
    found[1].backward()
    assert all(parameter.grad.abs().sum() > 0 for each in mechanisms(model) for parameter in each.parameters())


def test_a_megasparse_configuration_is_accepted_unchanged():
    attention = AttentionConfig.model_validate({"pattern": ["lsh", "full"], "lsh": {"chunk": 8, "rounds": 3}})
    first, second = mechanisms(replace_attention(build("Model"), attention))
    assert (first.config.rounds, first.shared_qk, type(second).__name__) == (3, True, "FullAttention")


def test_every_layer_sees_its_own_input_and_projections():
    model, given = build("Model"), inputs()
    theirs = model(**given, output_hidden_states=True).hidden_states
    replace_attention(model, {"kind": "full"})
    with torch.no_grad(), calls(model) as found:
        hidden = model(**given, output_hidden_states=True).hidden_states
    assert len(hidden) == len(theirs) == 3 and torch.equal(hidden[1], found[1].x)
    for number, (call, layer) in enumerate(zip(found, model.encoder.layer, strict=True)):
        assert torch.allclose(call.x, theirs[number], atol=1e-5) or number
        query = layer.attention.self.query(call.x).unflatten(-1, (4, 8)).transpose(1, 2)
        assert torch.equal(call.inputs.q, query) and torch.equal(call.inputs.key_mask, given["attention_mask"].bool())
        assert call.context.layer == number and not call.inputs.causal


def test_hashes_are_trained_on_full_attention_and_nothing_else_moves():
    model = build("ForMaskedLM").train()
    with torch.no_grad():
        for layer in model.bert.encoder.layer:
            layer.attention.self.query.weight.mul_(30.0)  # attention that has something to find
    replace_attention(model, {"pattern": [{"local": 2, "lha": 2}], "lha": {"chunk": 8}})
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    tokens, teacher = inputs(batch=2, length=64)["input_ids"], Teacher(model)
    history = [teacher.learn(tokens) for _ in range(10)]
    assert history[-1] < 0.7 * history[0]
    assert model.training and all(isinstance(m, Attention) for m in mechanisms(model))
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]) != (".lha.hash." in name), name
    assert all(p.grad is None for name, p in model.named_parameters() if ".lha." not in name)
