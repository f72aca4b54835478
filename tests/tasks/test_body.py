"""Adapters of a frozen body, and checkpointed layers of transformers' models."""

import pytest
import torch
from transformers import BertConfig, BertModel, DistilBertConfig, DistilBertModel, GPT2Config, GPT2Model

from megasparse.config.attention import AttentionConfig
from megasparse.config.finetuning import HeadConfig
from megasparse.config.schema import LoRAConfig, ModelConfig
from megasparse.errors import CheckpointError, ConfigError
from megasparse.hub.replace import replace_attention
from megasparse.model.build import initialise
from megasparse.ops.random import RngContext
from megasparse.tasks.batches import Inputs, Padded
from megasparse.tasks.body import HuggingFaceBody, MegasparseBody, add_adapters
from megasparse.tasks.form import TaskModel
from megasparse.tasks.run import answers, predict_examples, restore_task
from megasparse.training.checkpoints.checkpoint import Checkpoint
from megasparse.training.checkpoints.manifest import find_checkpoint
from tests.helpers import finetuning
from tests.helpers.peak_memory import PeakMemory

WIDTHS = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}


def bert(attention=None):
    torch.manual_seed(0)
    model = BertModel(BertConfig(vocab_size=60, max_position_embeddings=64, **WIDTHS), add_pooling_layer=False)
    if attention is not None:
        replace_attention(model, attention, max_length=64, seed=1)
    return HuggingFaceBody(model, False, 64)


def gpt2():
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=60, n_positions=64, n_embd=32, n_layer=2, n_head=4)
    return HuggingFaceBody(GPT2Model(config), True, 64)


def ours(blocks="ordinary", kind="lha"):
    attention = AttentionConfig.model_validate({"pattern": [kind], "lha": {"chunk": 8}, "lsh": {"chunk": 8}})
    activations = "stored" if blocks == "ordinary" else "reversible"
    config = ModelConfig(
        vocabulary=60, max_length=64, layers=2, d_model=32, d_ff=48, heads=4, blocks=blocks, activations=activations,
        attention=attention,
    )  # fmt: skip
    body = MegasparseBody(config)
    initialise(body.stack, config, 0)
    return body


def whole(body, config=None, seed=3):
    if config is not None:
        add_adapters(body, config, seed)
    return TaskModel(body, 3, HeadConfig(dropout=0.0), False, 0)


def inputs():
    tokens = torch.randint(5, 60, (3, 40), generator=torch.Generator().manual_seed(1))
    return Inputs((Padded(tokens, torch.zeros_like(tokens), torch.tensor([40, 29, 17])),), torch.tensor([0, 2, 1]))


def predicted(model):
    model.eval()
    with torch.no_grad():
        return model(inputs(), RngContext(3, 0, torch.arange(3), training=False))[1]["predicted"]


def trained(model):
    return {name for name, weight in model.named_parameters() if weight.requires_grad}


ATTENTION = {
    "lha": {"kind": "lha", "chunk": 8},
    "smart_bird": {"kind": "smart_bird", "keys": 6, "objective": "pooled", "labels": 3},
    "routing": {"kind": "routing", "chunk": 8},
}
BODIES = {"bert": bert, "replaced bert": lambda: bert(ATTENTION["lha"]), "ours": ours}
BODIES["reversible"] = lambda: ours("reversible", "lsh")


@pytest.mark.parametrize("name", BODIES)
def test_only_adapters_head_and_new_weights_learn_and_outputs_start_as_they_were(name):
    before, model = whole(BODIES[name]()), whole(BODIES[name](), LoRAConfig(rank=2))
    assert torch.equal(predicted(before), predicted(model))
    names = trained(model.train())
    adapters = {each for each in names if ".lora_" in each}
    assert len(adapters) == 2 * 2 * 2  # A and B of query and value in two layers
    other = {each for each in trained(before) if each.startswith("head.")}
    other |= {each for each in trained(before) if ".megasparse." in each or ".mechanisms." in each}
    other |= {each for each in trained(before) if each.startswith("body.norm")}
    assert names - adapters == other
    rng = RngContext(3, 0, torch.arange(3), training=True)
    with torch.no_grad():
        for each, weight in model.named_parameters():
            if ".lora_B." in each:
                weight.fill_(0.01)
    model(inputs(), rng)[0].backward()
    assert {each for each, weight in model.named_parameters() if weight.grad is not None} == names


def test_the_output_equals_the_definition():
    body = bert()
    add_adapters(body, LoRAConfig(rank=2, alpha=5.0), 0)
    layer = body.model.encoder.layer[0].attention.self.query
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    torch.nn.init.normal_(b)
    x = torch.randn(4, 32)
    torch.testing.assert_close(layer(x), layer.base_layer(x) + 5.0 / 2 * x @ a.T @ b.T)


def test_transposed_layers_have_adapters(recwarn):
    model = whole(gpt2(), LoRAConfig(targets=["c_attn"]))
    assert len([name for name in trained(model) if ".lora_" in name]) == 4
    assert torch.equal(predicted(model), predicted(whole(gpt2())))
    assert not [each for each in recwarn if "fan_in_fan_out" in str(each.message)]


def test_wrong_targets_are_rejected():
    with pytest.raises(ConfigError, match=r'lora\.targets: .*"qery".*Did you mean "query"\?'):
        add_adapters(bert(), LoRAConfig(targets=["value", "qery"]), 0)
    with pytest.raises(ConfigError, match=r'Did you mean "output\.dense"\?'):  # a module of BERT's that is not linear
        add_adapters(bert(), LoRAConfig(targets=["output"]), 0)
    with pytest.raises(ConfigError, match=r"lora\.dropout.*Set it to 0"):
        add_adapters(ours(), LoRAConfig(dropout=0.1), 0)


def test_a_run_is_restored_from_its_adapters_and_the_pretrained_weights(tmp_path):
    source = finetuning.reviews(tmp_path / "reviews.csv", 24)
    pretrained, run = finetuning.bert(tmp_path / "bert"), tmp_path / "run"
    start = {"huggingface": str(pretrained), "attention": {"pattern": ["lha"], "lha": {"chunk": 8}}}
    sections = {"start": start, "lora": {"rank": 2}, "evaluation": {"every": 3}}
    scalars = finetuning.launch(run, source, **sections)
    checkpoint = Checkpoint.open(find_checkpoint(run))
    names = checkpoint.manifest["tensors"]["weight"]
    assert any(".lora_B." in name for name in names) and not any("base_layer" in name for name in names)
    assert not any("embedding" in name for name in names)
    result = restore_task(checkpoint.path)
    examples = finetuning.opened(tmp_path / "other", source, **sections).validation
    predicted = predict_examples(result.model, result.form, examples, result.config, result.ranks)
    metric = f"evaluation/{result.form.task.metrics[0]}"
    last = [line[metric] for line in scalars if metric in line][-1]
    measured = result.form.measures(examples, answers(result.form, examples, predicted))
    assert measured[result.form.task.metrics[0]] == last

    moved = pretrained.rename(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match=r"its pretrained weights cannot be read.*Set start\.huggingface"):
        restore_task(checkpoint.path)
    again = restore_task(checkpoint.path, [f"start.huggingface={moved}"])
    same = predict_examples(again.model, again.form, examples, again.config, again.ranks)
    assert all((one.values == other.values).all() for one, other in zip(same, predicted, strict=True))
    with pytest.raises(CheckpointError, match=r"start\.sha256"):
        restore_task(checkpoint.path, [f"start.huggingface={finetuning.bert(tmp_path / 'wide', vocab_size=50)}"])


def distilbert():
    torch.manual_seed(0)
    config = DistilBertConfig(vocab_size=60, max_position_embeddings=64, dim=32, n_layers=2, n_heads=4, hidden_dim=48)
    return HuggingFaceBody(DistilBertModel(config), False, 64)


MODELS = {"bert": bert, "distilbert": distilbert, "gpt2": gpt2}
CASES = [(name, None) for name in MODELS] + [("bert", kind) for kind in ATTENTION] + [("bert", "frozen")]


def built(name, kind=None):
    body = MODELS[name]() if kind in (None, "frozen") else bert(ATTENTION[kind])
    if kind == "frozen":
        body.requires_grad_(False)
        body.model.encoder.layer[1].output.dense.requires_grad_(True)
    with torch.no_grad():
        for weight in body.model.parameters():  # freshly made models hardly attend
            weight.mul_(3.0 if weight.dim() > 1 else 1.0)
    return TaskModel(body, 3, HeadConfig(), False, 0).train()


def one_pass(model, passes=1):
    for number in range(passes):
        objective = model(inputs(), RngContext(3, number, torch.arange(3), training=True))[0]
        objective.backward()
    return objective.detach(), {name: w.grad for name, w in model.named_parameters() if w.grad is not None}


@pytest.mark.parametrize(("name", "kind"), CASES)
@pytest.mark.parametrize("offload", [False, True])
def test_gradients_equal_stored_activations(name, kind, offload):
    stored, again = built(name, kind), built(name, kind)
    again.body.checkpoint_layers(offload)
    assert stored.state_dict().keys() == again.state_dict().keys()
    (loss, expected), (own_loss, own) = one_pass(stored, passes=2), one_pass(again, passes=2)
    torch.testing.assert_close(own_loss, loss, rtol=1e-6, atol=1e-6)
    assert own.keys() == expected.keys()
    for key, gradient in expected.items():
        torch.testing.assert_close(own[key], gradient, rtol=1e-6, atol=1e-6 * gradient.abs().max().item())


@pytest.mark.parametrize("kind", ["lha", "smart_bird"])
def test_auxiliary_losses_are_counted_once(kind):
    model = built("bert", kind)
    model.body.checkpoint_layers(False)
    rng = RngContext(3, 0, torch.arange(3), training=True)
    auxiliary = [model.predicted(inputs(), rng, inputs().labels)[1] for _ in range(2)]
    assert auxiliary[0].requires_grad and auxiliary[0] == auxiliary[1] > 0
    names = {name for name in one_pass(model)[1] if "megasparse" in name}
    assert names and names == {name for name, _ in model.named_parameters() if "megasparse" in name}


def test_only_inputs_of_layers_are_kept():
    model, live = built("bert"), []
    for checkpointed in (False, True):
        if checkpointed:
            model.body.checkpoint_layers(False)
        with PeakMemory() as memory:
            objective = model(inputs(), RngContext(3, 0, torch.arange(3), training=True))[0]
            live.append(memory.live)
            objective.backward()
        model.zero_grad()
    assert live[1] < 0.35 * live[0]
