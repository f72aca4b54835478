"""Initial models of fine-tuning, restoring without them, and rejected ones."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import AutoTokenizer, BertForMaskedLM, BertForSequenceClassification, BertModel, GPT2Config, GPT2Model

from megasparse.attention.heads import Padding
from megasparse.config.finetuning import FinetuneConfig
from megasparse.config.schema import SentenceOrderConfig
from megasparse.errors import CheckpointError, ConfigError, HubError, UserError
from megasparse.hub.export import to_hf
from megasparse.hub.replace import mechanisms, replace_attention, save_replaced
from megasparse.ops.random import EVALUATION_STEP, RngContext
from megasparse.tasks.batches import Inputs, Padded, collate
from megasparse.tasks.body import Backbone, HuggingFaceBody, MegasparseBody
from megasparse.tasks.run import answers, encode_all, predicted, restore_task
from megasparse.tasks.start import Start, rebuild
from megasparse.training.checkpoints.checkpoint import Checkpoint, Fragment, load_weights, persistent_buffers
from megasparse.training.checkpoints.manifest import RunIdentity
from megasparse.training.checkpoints.saving import Saver
from megasparse.training.ranks import Ranks
from tests.helpers import finetuning
from tests.helpers.cases import together
from tests.helpers.finetuning import ENCODER, bert, config_of, open_start, reviews
from tests.helpers.hub import checkpoint, decoder, encoder
from tests.helpers.models import attention, small_pair

KINDS: dict[str, dict[str, Any]] = {
    "lha": {"chunk": 8}, "lsh": {"chunk": 8}, "yoso": {"hashes": 4, "convolution": 3}, "smart_bird": {"keys": 6},
}  # fmt: skip


def read_of(vocabulary: int = 40) -> Padded:
    """Two sequences, one of them padded, of which the second half is a second segment."""
    tokens = torch.randint(5, vocabulary, (2, 24), generator=torch.Generator().manual_seed(0))
    tokens[1, 15:] = 0
    return Padded(tokens, (torch.arange(24) > 10).long().expand(2, -1) * (tokens > 0), torch.tensor([24, 15]))


def states(body: Backbone, step: int = EVALUATION_STEP) -> Tensor:
    training = step != EVALUATION_STEP
    body.train(training)
    read = read_of()
    with torch.no_grad():
        result = body(read, RngContext(0, step, torch.arange(2), training=training), torch.tensor([1, 0]))[0]
    return torch.cat([result[0], result[1, :15]])


def assert_built_again(start: Start, config: FinetuneConfig, origin: Path | None) -> None:
    """From RUN/start and a checkpoint in which every weight has moved, its outputs are the same bits, in evaluation and
    in training, though the origin is gone."""
    run, generator = Path(config.run.directory), torch.Generator().manual_seed(8)
    with torch.no_grad():
        for parameter in start.body.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    start.write(run)
    tokenizer = {"name": start.tokenizer.name, "sha256": start.tokenizer.sha256}
    saver = Saver(RunIdentity(config, "0" * 64, tokenizer), Ranks())
    module = torch.nn.ModuleDict({"body": start.body})  # as a part of something, as a run's model has it
    weights = {**dict(module.named_parameters()), **persistent_buffers(module)}
    fragments = [Fragment("weight", name, tuple(w.shape), 0, w.detach().reshape(-1)) for name, w in weights.items()]
    engine: Any = SimpleNamespace(steps_done=lambda: 0, fragments=lambda: fragments)
    saver.save(engine, 1, 8, {})
    path = saver.finish() or run / "checkpoints" / "00000001"
    if origin is not None:
        shutil.move(origin, origin.with_name("moved"))
    checkpoint = Checkpoint.open(path)
    body, tokenizer = rebuild(run, finetuning.form_for(config), checkpoint)
    load_weights(torch.nn.ModuleDict({"body": body}), checkpoint)
    assert tokenizer.sha256 == start.tokenizer.sha256
    assert (body.causal, body.width, body.longest, body.vocabulary, body.task_weight) == (
        start.body.causal, start.body.width, start.body.longest, start.body.vocabulary, start.body.task_weight,
    )  # fmt: skip
    for step in (EVALUATION_STEP, 3):
        assert torch.equal(states(body, step), states(start.body, step))


OURS = {
    "encoder": encoder("lha", activations="stored", blocks="ordinary"),
    "decoder": decoder("full", blocks="ordinary", activations="checkpoint"),
    "reversible": decoder("lsh"),
    "mixed encoder": encoder("full", attention=attention({"local": 1, "yoso": 1}, "smart_bird")),
    "bert": encoder("full", style="bert", blocks="ordinary", activations="stored", positions={"kind": "learned"}),
}


@pytest.mark.parametrize("name", OURS)
def test_start_from_a_megasparse_checkpoint(name, tmp_path):
    config = OURS[name]
    model, path = checkpoint(config, tmp_path / "pretrained")
    settings = config_of(tmp_path, {"checkpoint": str(path)})
    start = open_start(settings, labels=3)
    body = start.body
    assert isinstance(body, MegasparseBody) and start.tokenizer.name == "bytes"
    assert (body.causal, body.longest) == (config.kind == "decoder", 128)
    assert body.width == (64 if config.blocks == "reversible" else 32)
    state = dict(model.named_parameters())
    for parameter_name, parameter in body.stack.named_parameters():
        if ".objective." not in parameter_name:
            assert torch.equal(parameter, state[parameter_name]), parameter_name
    for mechanism in [m for _, m in body.stack.mechanisms() if hasattr(m, "objective")]:
        assert list(mechanism.objective.parameters())[-1].shape[0] == 3  # type: ignore[union-attr]
    newest = open_start(config_of(tmp_path, {"checkpoint": str(tmp_path / "pretrained")}), 3)
    assert newest.sha256 == start.sha256 and start.sha256 is not None
    assert_built_again(start, settings, tmp_path / "pretrained")


def test_a_checkpoints_final_states_are_the_models(tmp_path):
    model, path = checkpoint(OURS["encoder"], tmp_path / "pretrained")
    body = open_start(config_of(tmp_path, {"checkpoint": str(path)}), 2).body
    assert isinstance(body, MegasparseBody)
    read = read_of(250)
    whole: Any = model
    rng = RngContext.evaluation(0, 2)
    with torch.no_grad():
        (stream,), _, _ = whole.streams(read.tokens, rng, Padding(read.mask), None)
        expected = torch.nn.functional.layer_norm(stream, (32,), eps=body.norm.eps)
        result = body.eval()(read, rng, None)[0]
    assert (result[0] - expected[0]).abs().max() < 1e-5 and (result[1, :15] - expected[1, :15]).abs().max() < 1e-5


def test_a_megasparse_checkpoint_gets_another_attention(tmp_path):
    model, path = checkpoint(OURS["bert"], tmp_path / "pretrained")
    settings = config_of(
        tmp_path, {"checkpoint": str(path), "attention": {"pattern": ["local"], "local": {"chunk": 8}}}
    )
    start = open_start(settings, 2)
    assert isinstance(start.body, MegasparseBody)
    assert [type(each).__name__ for _, each in start.body.stack.mechanisms()] == ["LocalAttention"] * 2
    state = dict(model.named_parameters())
    assert all(torch.equal(weight, state[name]) for name, weight in start.body.stack.named_parameters())
    plain = open_start(config_of(tmp_path, {"checkpoint": str(path)}), 2).body
    assert not torch.allclose(states(plain), states(start.body), atol=1e-3)
    assert_built_again(start, settings, tmp_path / "pretrained")


def test_initial_weights(tmp_path):
    settings = config_of(tmp_path, {}, model=ENCODER, run={"seed": 4})
    start, same = open_start(settings, 2), open_start(settings, 2)
    assert start.sha256 is None and start.tokenizer.name == "bytes"
    assert torch.equal(states(start.body), states(same.body))
    other = open_start(config_of(tmp_path, {}, model=ENCODER, run={"seed": 5}), 2)
    assert not torch.equal(states(start.body), states(other.body))
    assert_built_again(start, settings, None)


def test_an_imported_bert_keeps_its_logits(tmp_path):
    folder = bert(tmp_path / "bert")
    settings = config_of(tmp_path, {"huggingface": str(folder)})
    start = open_start(settings, 2)
    theirs, read = BertModel.from_pretrained(folder).eval(), read_of()
    assert isinstance(start.body, HuggingFaceBody) and not start.body.causal and start.body.longest == 64
    with torch.no_grad():
        expected = theirs(read.tokens, attention_mask=read.mask, token_type_ids=read.types).last_hidden_state
    result = states(start.body)
    assert (result[:24] - expected[0]).abs().max() < 1e-5 and (result[24:] - expected[1, :15]).abs().max() < 1e-5
    text = "the attention of models"
    assert start.tokenizer.encode(text).tolist() == AutoTokenizer.from_pretrained(folder)(text)["input_ids"][1:-1]
    assert_built_again(start, settings, folder)


@pytest.mark.parametrize("kind", KINDS)
def test_a_berts_attention_is_replaced(kind, tmp_path):
    folder = bert(tmp_path / "bert")
    given = {"pattern": [kind], kind: KINDS[kind]}
    settings = config_of(tmp_path, {"huggingface": str(folder), "attention": given}, run={"seed": 4})
    start = open_start(settings, labels=3)
    assert isinstance(start.body, HuggingFaceBody) and start.body.replaced and start.body.longest == 64
    made = mechanisms(start.body)
    names = {type(each).__name__.lower().removesuffix("attention") for each in made}
    assert len(made) == 2 and names == {kind.replace("_", "")}
    if kind == "smart_bird":  # its sketch learns the task's classes
        assert list(made[0].objective.parameters())[-1].shape[0] == 3
        given = {**given, kind: {**KINDS[kind], "objective": "pooled", "labels": 3}}
    theirs = replace_attention(BertModel.from_pretrained(folder), given, max_length=48, seed=4)
    theirs.pooler = None
    assert torch.equal(states(start.body), states(HuggingFaceBody(theirs, False, 64)))
    assert_built_again(start, settings, folder)


def test_a_folder_of_a_replaced_model(tmp_path):
    model = BertForMaskedLM.from_pretrained(bert(tmp_path / "bert"))
    replace_attention(model, {"kind": "lha", "chunk": 8}, max_length=64, seed=9)
    with torch.no_grad():
        for mechanism in mechanisms(model):
            for parameter in mechanism.parameters():
                parameter += 0.2
    save_replaced(model, tmp_path / "replaced")
    finetuning.write_tokenizer(tmp_path / "replaced", finetuning.bert_tokenizer())
    settings = config_of(tmp_path, {"huggingface": str(tmp_path / "replaced")})
    start = open_start(settings, 2)
    assert torch.equal(states(start.body), states(HuggingFaceBody(model.bert.eval(), False, 64)))
    assert_built_again(start, settings, tmp_path / "replaced")


def test_start_from_a_megasparse_folder(tmp_path):
    lsh = {"window": "chunk", "same_bucket": False, "count_rounds": False}
    _, path = checkpoint(decoder("full", attention=attention("local", "lsh", lsh=lsh)), tmp_path / "pretrained")
    folder = to_hf(path, tmp_path / "exported", to="reformer")
    settings = config_of(tmp_path, {"huggingface": str(folder)})
    start, other = open_start(settings, 3), open_start(config_of(tmp_path, {"checkpoint": str(path)}), 3)
    assert isinstance(start.body, MegasparseBody) and start.body.causal and start.sha256 != other.sha256
    names = dict(other.body.named_parameters())
    assert names.keys() == dict(start.body.named_parameters()).keys()
    for name, parameter in start.body.named_parameters():
        assert torch.equal(parameter, names[name]), name
    assert_built_again(start, settings, folder)


def test_a_decoder_of_transformers(tmp_path):
    folder = tmp_path / "gpt"
    size = len(finetuning.bert_tokenizer()["model"]["vocab"])
    GPT2Model(GPT2Config(vocab_size=size, n_positions=64, n_embd=32, n_layer=1, n_head=4)).save_pretrained(folder)
    finetuning.write_tokenizer(folder, finetuning.bert_tokenizer())
    settings = config_of(tmp_path, {"huggingface": str(folder), "attention": {"pattern": ["lsh"], "lsh": {"chunk": 8}}})
    start = open_start(settings, 2)
    assert isinstance(start.body, HuggingFaceBody) and start.body.replaced
    assert start.body.causal and start.body.longest == 64
    assert_built_again(start, settings, folder)


def test_a_pooler_makes_the_head_that_transformers_has(tmp_path):
    folder, table = bert(tmp_path / "with_pooler"), reviews(tmp_path / "reviews.csv", 24)
    run = finetuning.opened(tmp_path / "run", table, start={"huggingface": str(folder)})
    assert run.config.head.pooling == "pooler"
    theirs = BertForSequenceClassification.from_pretrained(folder, num_labels=2).eval()
    with torch.no_grad():
        theirs.classifier.weight.copy_(run.model.head.output.weight)
        theirs.classifier.bias.copy_(run.model.head.output.bias)
        inputs = collate(run.train[:4], 64)
        read = inputs.sequences[0]
        mask = torch.arange(read.tokens.shape[1]) < read.lengths.unsqueeze(1)
        expected = theirs(read.tokens, attention_mask=mask.long(), token_type_ids=read.types).logits
        predicted, _ = run.model.eval().predicted(inputs, RngContext.evaluation(0, 4))
    assert torch.allclose(predicted, expected, atol=1e-5)


def test_the_pooler_of_sentence_order_makes_the_head_of_our_own(tmp_path):
    """It reads the post-norm state of the first token itself, as in pretraining."""
    order = {"sentence_order": SentenceOrderConfig(separator=3), "padding_token": 0}
    model, path = checkpoint(OURS["bert"].model_copy(update=order), tmp_path / "pretrained")
    settings = config_of(tmp_path, {"checkpoint": str(path)})
    start = open_start(settings, 2)
    pooler = {name: parameter for name, parameter in model.sentence_order.named_parameters()}
    form = finetuning.form_for(settings)
    task_model: Any = form.model(start.body)
    assert task_model.pooling == "pooler" and torch.equal(task_model.head.dense.weight, pooler["dense"])
    read, rng = read_of(250), RngContext.evaluation(0, 2)
    whole: Any = model
    with torch.no_grad():
        (stream,), _, _ = whole.streams(read.tokens, rng, Padding(read.mask), None)
        expected = task_model.head.output(torch.tanh(stream[:, 0] @ pooler["dense"].T + pooler["dense_bias"]))
        result, _ = task_model.eval().predicted(Inputs((read,), None), rng)
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-6)
    assert_built_again(start, settings, tmp_path / "pretrained")


def refusal(config: FinetuneConfig) -> str:
    with pytest.raises(UserError) as caught:
        open_start(config, 2)
    assert "\n" not in str(caught.value) and isinstance(caught.value, ConfigError | CheckpointError | HubError)
    return str(caught.value)


def test_other_weights_are_rejected(tmp_path):
    folder = bert(tmp_path / "bert")
    result = open_start(config_of(tmp_path, {"huggingface": str(folder)}), 2).sha256
    open_start(config_of(tmp_path, {"huggingface": str(folder), "sha256": result}), 2)
    wrong = config_of(tmp_path, {"huggingface": str(folder), "sha256": "0" * 64})
    assert refusal(wrong).startswith(f'start.sha256: "{"0" * 64}", but the weights have "{result}"')
    model = BertModel.from_pretrained(folder)
    with torch.no_grad():
        model.embeddings.word_embeddings.weight[0, 0] += 1.0
    model.save_pretrained(folder)
    assert "but the weights have" in refusal(config_of(tmp_path, {"huggingface": str(folder), "sha256": result}))


def test_encoder_decoders_are_rejected(tmp_path):
    _, path = checkpoint(small_pair(), tmp_path / "pretrained")
    problem = 'start: "encoder_decoder" is not supported by table. Use a model of kind "encoder" or "decoder"'
    assert refusal(config_of(tmp_path, {"checkpoint": str(path)})) == problem
    folder = to_hf(path, tmp_path / "exported")
    assert refusal(config_of(tmp_path, {"huggingface": str(folder)})) == problem
    layers = {"encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    bart = transformers.BartConfig(vocab_size=60, d_model=16, max_position_embeddings=64, **layers, **heads)
    transformers.BartModel(bart).save_pretrained(tmp_path / "bart")
    finetuning.write_tokenizer(tmp_path / "bart", finetuning.bert_tokenizer())
    assert "encoder-decoder" in refusal(config_of(tmp_path, {"huggingface": str(tmp_path / "bart")}))


def test_other_mistakes_are_rejected(tmp_path):
    folder = bert(tmp_path / "bert")
    of_bert = {"huggingface": str(folder)}
    assert "not a folder" in refusal(config_of(tmp_path, {"huggingface": str(tmp_path / "nowhere")}))
    refused = refusal(config_of(tmp_path, {"checkpoint": str(tmp_path / "nowhere")}))
    assert "contains no checkpoint" in refused and "megasparse quickstart" in refused
    _, path = checkpoint(decoder("lsh"), tmp_path / "pretrained")
    result = refusal(config_of(tmp_path, {"checkpoint": str(path)}, task={"max_length": 129}))
    assert result.startswith("task.max_length: 129 tokens are more than the model's maximum of 128. Lower it")
    result = refusal(config_of(tmp_path, {"checkpoint": str(path), "activations": "checkpoint"}))
    assert result.startswith("start.activations:")
    result = refusal(config_of(tmp_path, {"checkpoint": str(path), "attention": {"pattern": ["lha"]}}))
    assert "contains no weight" in result and ".lha." in result
    (folder / "tokenizer.json").rename(folder / "hidden.json")
    assert "tokenizer.json: is missing" in refusal(config_of(tmp_path, of_bert))
    (folder / "hidden.json").rename(folder / "tokenizer.json")
    weights = folder / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[: len(content) // 2])
    assert "model.safetensors" in refusal(config_of(tmp_path, of_bert))
    weights.unlink()
    assert str(folder) in refusal(config_of(tmp_path, of_bert))


@together("content", [None, b"{", b"[]", b'{"kind": "megasparse"}', b"null"])
def test_a_damaged_record_is_rejected(content, tmp_path):
    config = config_of(tmp_path, {}, model=ENCODER)
    open_start(config, 2).write(tmp_path)
    record = tmp_path / "start" / "body.json"
    if content is None:
        record.unlink()
    else:
        record.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"body\.json: cannot be read .*Copy the whole run folder again"):
        rebuild(tmp_path, finetuning.form_for(config), Checkpoint(tmp_path, {"tensors": {}}))


def test_more_layers_than_weights_are_rejected_before_one_is_built(tmp_path):
    folder = bert(tmp_path / "bert")
    settings = config_of(tmp_path, {"huggingface": str(folder)})
    start = open_start(settings, 2)
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**values, "num_hidden_layers": 10**9}))
    assert "tensors, but its config.json specifies 1000000000 layers" in refusal(settings)
    start.record["config"]["num_hidden_layers"] = 10**9
    start.write(tmp_path / "run")
    small = Checkpoint(tmp_path, {"tensors": {"weight": {"body.x": {}}}})
    with pytest.raises(CheckpointError, match="contains 1 weights, the record 1000000000 layers"):
        rebuild(tmp_path / "run", finetuning.form_for(settings), small)
    _, path = checkpoint(decoder("full"), tmp_path / "pretrained")
    folder = to_hf(path, tmp_path / "exported")
    values = json.loads((folder / "config.json").read_text())
    values["model"]["layers"] = 10**9
    (folder / "config.json").write_text(json.dumps(values))
    assert "its config.json specifies 1000000000 layers" in refusal(config_of(tmp_path, {"huggingface": str(folder)}))


def scores(run, file):
    result = restore_task(run)
    examples = encode_all(result.form, "new", result.form.task.read(file), lambda line: None)
    return result, result.form.measures(examples, answers(result.form, examples, predicted(result, examples)))


def files(folder):
    return reviews(folder / "train.csv", 24), reviews(folder / "validation.csv", 13, seed=1)


def best(run):
    return json.loads((run / "best.json").read_text())


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("restore")
    train, validation = files(folder)
    attention = {"pattern": ["lsh"], "lsh": {"chunk": 8}}
    task = {"validation": str(validation)}
    finetuning.launch(folder / "run", train, model={**ENCODER, "attention": attention}, task=task)
    return folder


@pytest.mark.parametrize("name", ["ours", "replaced", "bf16"])
def test_a_restored_model_predicts_as_in_training(tmp_path, trained, name):
    folder, start = (trained if name == "ours" else tmp_path), {}
    if name != "ours":
        train, validation = files(tmp_path)
        start = {"huggingface": str(bert(tmp_path / "bert"))}
        start |= {"attention": {"pattern": ["yoso"], "yoso": {"hashes": 4}}} if name == "replaced" else {}
        training = {"precision": "bf16" if name == "bf16" else "fp32"}
        finetuning.launch(tmp_path / "run", train, start=start, task={"validation": str(validation)}, training=training)
    result, values = scores(folder / "run", folder / "validation.csv")
    known, attention = best(folder / "run"), result.model.body.attention() or {}
    assert {metric: known["scalars"][f"evaluation/{metric}"] for metric in values} == values
    assert result.checkpoint.step == known["step"] and not result.model.training
    assert result.model.head.dense.weight.dtype == (torch.bfloat16 if name == "bf16" else torch.float32)
    if name == "ours":
        assert (attention["pattern"], attention["lsh"]["chunk"], "yoso" in attention) == (["lsh"], 8, False)
        assert attention["evaluation_rounds"] == {"lsh": attention["lsh"]["rounds"]}
        return
    assert attention.get("pattern") == start.get("attention", {}).get("pattern")
    with (tmp_path / "run" / "start" / "tokenizer.json").open("ab") as file:
        file.write(b"\n")
    with pytest.raises(CheckpointError, match="its tokenizer is not the one"):
        restore_task(tmp_path / "run")


def test_a_model_without_fine_tuning_is_rejected(tmp_path, trained):
    checkpoint(encoder("full"), tmp_path / "pretrained")
    with pytest.raises(CheckpointError, match=r"belongs to a pretrained model.*or use --data"):
        restore_task(tmp_path / "pretrained")
    with pytest.raises(CheckpointError, match="contains no checkpoint"):
        restore_task(tmp_path)


def test_another_task_takes_its_place_only_with_the_same_classes(trained):
    assert restore_task(trained / "run", task="table").form.task.classes == ("bad", "good")
    other = r'--task: "rte" has other classes or inputs\. Use --task'
    with pytest.raises(ConfigError, match=other):
        restore_task(trained / "run", task="rte")
    with pytest.raises(ConfigError, match="--task"):
        restore_task(trained / "run", task="listops")
    with pytest.raises(ConfigError, match='unknown task "tabel"'):
        restore_task(trained / "run", task="tabel")


def test_overrides_are_checked(trained):
    assert restore_task(trained / "run", ["task.max_length=16"]).config.task.max_length == 16
    with pytest.raises(ConfigError, match=r"task.max_length: 129 tokens are more than"):
        restore_task(trained / "run", ["task.max_length=129"])
    with pytest.raises(ConfigError, match="max_lenght"):
        restore_task(trained / "run", ["task.max_lenght=1"])
    with pytest.raises(ConfigError, match="model: cannot be changed in a fine-tuned model"):
        restore_task(trained / "run", ["model.attention.lsh.chunk=4"])
    with pytest.raises(CheckpointError, match="shape"):
        restore_task(trained / "run", ["head.hidden=5"])
