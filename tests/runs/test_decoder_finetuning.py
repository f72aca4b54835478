"""Fine-tune a pretrained decoder on texts, all weights or adapters, and export it as a transformers model."""

import json
import subprocess
import sys
from functools import partial
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from megasparse.attention.heads import Padding
from megasparse.cli.main import door
from megasparse.data.index import Index
from megasparse.data.reader import EvaluationStream
from megasparse.evaluation.generate import generate
from megasparse.evaluation.results import restore
from megasparse.hub.formats import our_logits
from megasparse.hub.importing import HFModel, adapted
from megasparse.hub.replace import load_plain, load_replaced, mechanisms, replace_attention, save_replaced
from megasparse.hub.tensor_file import TensorFile
from megasparse.model.stack import padding_of
from megasparse.ops.quantised import Quantised
from megasparse.ops.random import RngContext
from megasparse.training.checkpoints.checkpoint import Checkpoint
from tests.data.corpora.test_chats import CHATML, conversation, lines_in
from tests.helpers.commands import refused, run
from tests.helpers.run_ranks import ROOT
from tests.helpers.tiny import read_metrics
from tests.hub.test_decoders import logits_of, saved
from tests.hub.test_replace_decoders import BAND, HEADS, LSH, SEPARATE

LENGTH = 64
QUICK = {
    "run.engine": "torch", "run.device": "cpu", "model.max_length": LENGTH, "data.sequence_length": LENGTH,
    "model.activations": "checkpoint", "model.loss_tiles": 2, "model.feed_forward_tiles": 4, "training.steps": 4,
    "training.precision": "fp32",
    "training.global_batch": 2, "optimizer.learning_rate": 0.01, "optimizer.warmup_steps": 0,
    "evaluation.sequences": 1, "evaluation.every": 4,
}  # fmt: skip
TEXTS = [f"Chapter {number}. " + "the sea was calm and the wind was low. " * 8 for number in range(30)]


@pytest.fixture
def decoder(tmp_path):
    torch.manual_seed(0)
    saved("llama as SmolLM", tmp_path / "llama")
    return tmp_path / "llama"


def books(folder, texts=TEXTS):
    folder.mkdir()
    for number, text in enumerate(texts):
        (folder / f"{number:02}.txt").write_text(text)
    return folder


def words_of(directory, start, texts, changes):
    settings = {**QUICK, "run.directory": directory, **changes}
    sets = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    return ["decoder_64k", "--start", start, "--data", texts, *sets]


def go_on(directory, start, texts, *words, **changes):
    run(door("pretrain"), *words_of(directory, start, texts, changes), *words)
    return json.loads((directory / "config.json").read_text())


QUERY = "blocks.1.attention.attention.query"


def product(checkpoint):
    """The product of the adapter of QUERY, which is added to its weight."""
    a, b = (checkpoint.tensor("weight", f"{QUERY}.lora_{each}.default.weight") for each in "AB")
    return 32 / (4 if checkpoint.settings.lora.rslora else 16) * b @ a


def at_start(run):
    """The weight that the adapter of QUERY belongs to."""
    return Checkpoint.open(run / "start" / "checkpoints" / "00000000").tensor("weight", f"{QUERY}.weight")


def test_all_weights_learn_ones_own_books(decoder, tmp_path, capsys):
    config = go_on(tmp_path / "run", decoder, books(tmp_path / "books"), lora="null")
    assert (config["model"]["layers"], config["model"]["key_heads"], config["model"]["d_ff"]) == (3, 2, 44)
    assert config["model"]["document_separator"] == 2  # </s> ends every book
    assert "new weights: none" in capsys.readouterr().err
    losses = [line["train/loss"] for line in read_metrics(tmp_path / "run") if "train/loss" in line]
    assert len(losses) == 4 and losses[-1] < losses[0] - 1
    index = json.loads((tmp_path / "run" / "data" / "index.json").read_text())
    assert index["splits"].keys() == {"train", "validation"} and index["settings"]["documents"]


def stored_by_bitsandbytes(weight, kind):
    """The values that transformers' quantised linear layers compute with."""
    functional = pytest.importorskip("bitsandbytes.functional")
    if kind == "int8":
        codes, scales, _ = functional.int8_vectorwise_quant(weight.half())
        return codes * scales[:, None] / 127
    codes, state = functional.quantize_4bit(weight, blocksize=64, compress_statistics=True, quant_type=kind)
    return functional.dequantize_4bit(codes, state)


ADAPTERS: list[dict[str, Any]] = [{}, {"quantized": "nf4", "dora": True}]


@pytest.mark.parametrize(
    "changes",
    [
        *ADAPTERS,
        *(
            pytest.param(one, marks=pytest.mark.slow)
            for one in ({"dora": True}, {"rslora": True}, {"quantized": "int8"})
        ),
    ],
    ids=str,
)
def test_adapters_learn_and_are_merged(decoder, tmp_path, changes):
    if kind := changes.get("quantized"):
        pytest.importorskip("bitsandbytes")
    sets = {f"lora.{key}": json.dumps(value) for key, value in changes.items()} | {"model.residual_dtype": "fp32"}
    texts = books(tmp_path / "books")
    config = go_on(tmp_path / "run", decoder, texts, **sets)
    stopped = Checkpoint.open(tmp_path / "run" / "checkpoints" / "00000004")
    names, dora = stopped.manifest["tensors"]["weight"], "dora" in changes
    assert len(names) == 3 * 4 * (2 + dora) and all(".lora_" in name for name in names)
    if kind:  # quantised again
        go_on(tmp_path / "halves", decoder, texts, "--stop-at", "2", **sets)
        go_on(tmp_path / "halves", decoder, texts, **sets)
        halves = Checkpoint.open(tmp_path / "halves" / "checkpoints" / "00000004")
        assert all(torch.equal(stopped.tensor("weight", name), halves.tensor("weight", name)) for name in names)
    merged, settings, _, _ = restore(tmp_path / "run")
    assert settings.lora is None and config["lora"]["rank"] == 16
    with_adapters = adapted(stopped.config, torch.device("cpu"))
    assert (type(dict(with_adapters.named_parameters())["blocks.0.feed_forward.feed_forward.up"]) is Quantised) == bool(
        kind
    )
    with torch.no_grad():
        for name, weight in with_adapters.named_parameters():
            if name in names:
                weight.copy_(stopped.tensor("weight", name))
    tokens = torch.randint(3, 258, (2, LENGTH), generator=torch.Generator().manual_seed(0))
    rng, padding = RngContext.evaluation(0, 2), padding_of(tokens, settings.model)
    logits = [
        model.eval().logits(model.streams(tokens[:, :-1], rng, Padding())[0]) for model in (merged, with_adapters)
    ]
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-4)  # W + B·A is rounded once more
    frozen = at_start(tmp_path / "run")
    expected = (stored_by_bitsandbytes(frozen, kind) if kind else frozen) + product(stopped)
    if dora:
        norms = stopped.tensor("weight", f"{QUERY}.lora_magnitude_vector.default.weight")
        expected = norms[:, None] * expected / expected.norm(dim=1, keepdim=True)
        assert not torch.equal(norms, frozen.norm(dim=1))
    torch.testing.assert_close(dict(merged.named_parameters())[f"{QUERY}.weight"], expected)
    assert product(stopped).abs().max() > 2e-3 and padding.segments is not None
    exported = tmp_path / "adapter"
    run(
        door("convert to-hf"), "--checkpoint", tmp_path / "run", "--to", "peft", "--base", decoder, "--output", exported
    )
    theirs = AutoModelForCausalLM.from_pretrained(decoder)
    with torch.no_grad():
        for name, weight in theirs.named_parameters():
            if kind and name.endswith("proj.weight"):
                weight.copy_(stored_by_bitsandbytes(weight, kind))
    inputs = torch.cat([torch.full((2, 1), settings.model.start_token), tokens[:, :-1]], dim=1)
    peft = PeftModel.from_pretrained(theirs, exported).eval()
    with torch.no_grad(), peft.disable_adapter():
        assert not torch.allclose(logits[0], peft(inputs).logits, rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        torch.testing.assert_close(logits[0], peft(inputs).logits, rtol=1e-4, atol=1e-4)


def test_adapters_want_weights_that_they_belong_to(decoder, tmp_path, capsys):
    texts = books(tmp_path / "books")
    sets = [word for key, value in QUICK.items() for word in ("--set", f"{key}={value}")]
    folder = f"run.directory={tmp_path / 'run'}"
    message = refused(capsys, door("pretrain"), "decoder_64k", "--data", texts, "--set", folder, *sets)
    assert "contains no base weights" in message and "--start" in message and not (tmp_path / "run").exists()
    go_on(tmp_path / "run", decoder, texts)
    (tmp_path / "run" / "start").rename(tmp_path / "elsewhere")
    result = refused(capsys, door("generate"), "--checkpoint", tmp_path / "run")
    assert "contains only adapters" in result and "Copy the whole run folder again" in result
    other = saved("llama as SmolLM", tmp_path / "other")
    torch.nn.init.normal_(other.model.norm.weight)
    other.save_pretrained(tmp_path / "other")  # the same sizes, other weights
    go_on(tmp_path / "again", tmp_path / "other", texts, "--stop-at", "1")
    message = refused(capsys, door("pretrain"), *words_of(tmp_path / "again", decoder, texts, {}))
    assert f"error: {decoder}: {tmp_path / 'again' / 'start'} was written from other weights" in message
    assert "Omit --start" in message
    (tmp_path / "again" / "start").rename(tmp_path / "run" / "start")
    assert "its adapters belong to weights" in refused(capsys, door("generate"), "--checkpoint", tmp_path / "run")
    resumed = ["decoder_64k", "--start", decoder, "--data", texts, "--set", folder, *sets]
    assert "its adapters belong to weights" in refused(capsys, door("pretrain"), *resumed)
    export = ["--checkpoint", tmp_path / "again", "--to", "peft", "--output", tmp_path / "adapter"]
    (tmp_path / "run" / "start").rename(tmp_path / "again" / "start")
    message = refused(capsys, door("convert to-hf"), *export, "--base", decoder)
    assert "is not the weight that the adapters of" in message and not (tmp_path / "adapter").exists()
    assert "--base: does not fit --to peft" in refused(capsys, door("convert to-hf"), *export)
    adapters = tmp_path / "peft"
    adapters.mkdir()
    for content, base in {'{"base_model_name_or_path": "org/base"}': "'org/base'", "[]": "a base model that"}.items():
        (adapters / "adapter_config.json").write_text(content)
        for command, *words in (
            ("pretrain", *words_of(tmp_path / "new", adapters, texts, {})),
            ("plan", "decoder_64k", "--start", adapters, "--gpus", 1),
            ("generate", "--checkpoint", adapters),
            ("evaluate", "--checkpoint", adapters, "--data", texts),
            ("convert from-hf", "--model", adapters, "--output", tmp_path / "new"),
            ("convert to-hf", "--checkpoint", adapters, "--output", tmp_path / "new"),
            ("convert to-hf", *export, "--base", adapters),
            ("check-model", "--model", adapters),
        ):
            message = refused(capsys, door(command), *words)
            assert f"error: {adapters}: contains adapters of PEFT for {base}" in message and "merge_and" in message


RANKED = {"kind": "ranked", **BAND, "keys": 5, "sketch_heads": 4, "sketch_dim": 4, "buckets": 6, "probes": 2}
TAUGHT = {"ranked": RANKED, "lsh": LSH, "lha": SEPARATE, "smart_bird": HEADS, "full": {"kind": "full"}}


@pytest.mark.parametrize("kind", ["ranked", *(pytest.param(kind, marks=pytest.mark.slow) for kind in [*TAUGHT][1:])])
@pytest.mark.parametrize(
    "lora",
    [
        pytest.param("null", id="weights", marks=pytest.mark.slow),
        pytest.param('{"rank": 4, "targets": ["query", "value"]}', id="adapters"),
    ],
)
def test_a_taught_decoder_trains_on_with_its_maps(decoder, tmp_path, kind, lora, capsys):
    """Imported, trained, resumed bit-identically, exported and decoded with the same choice of keys."""
    model, taught = replace_attention(load_plain(decoder), TAUGHT[kind], max_length=LENGTH), tmp_path / "taught"
    with torch.no_grad():
        for weight in (weight for mechanism in mechanisms(model) for weight in mechanism.parameters()):
            weight.add_(torch.randn_like(weight))
    save_replaced(model, taught, AutoTokenizer.from_pretrained(decoder))
    tokens = torch.randint(3, 258, (2, LENGTH), generator=torch.Generator().manual_seed(0))
    tokens[:, 0] = 0
    expected, imported = logits_of(model.eval(), tokens), HFModel.open(taught)
    assert imported.compare() == LENGTH == imported.config.model.max_length
    torch.testing.assert_close(our_logits(imported.build(), tokens[:, 1:], 0), expected[:, :-1], rtol=1e-4, atol=1e-4)
    texts, settings = books(tmp_path / "books"), {"lora": lora, "training.steps": 5, "model.residual_dtype": '"fp32"'}
    if kind == "lsh":  # of which the configuration has settings of its own
        settings["model.attention.lsh"] = json.dumps({**BAND, "rounds": 1, "buckets": 4, "shared_qk": False})
    go_on(tmp_path / "straight", taught, texts, **settings)
    assert "new weights: none; unused: none\n" in capsys.readouterr().err
    go_on(tmp_path / "run", taught, texts, "--stop-at", "2", **settings)
    go_on(tmp_path / "run", taught, texts, **settings)
    straight, stopped = (Checkpoint.open(tmp_path / name / "checkpoints" / "00000005") for name in ("straight", "run"))
    for name in stopped.manifest["tensors"]["weight"]:
        assert torch.equal(straight.tensor("weight", name), stopped.tensor("weight", name)), name
    maps = [name for name in imported.tensors if ".mechanisms." in name]
    assert bool(maps) == (kind in ("ranked", "lha", "smart_bird"))
    assert all(not torch.equal(stopped.tensor("weight", name), imported.tensors[name]()) for name in maps)
    trained = restore(tmp_path / "run")[0].eval()
    expected = our_logits(trained, tokens[:, 1:], 0)
    text = list(generate(trained, tokens[0, 1:30], 20, hash_seed=0, temperature=0.0))
    for to, first in (("llama", 0), ("megasparse", 1)):  # its decoders add their start token themselves
        run(door("convert to-hf"), "--checkpoint", tmp_path / "run", "--output", tmp_path / f"as {to}", "--to", to)
        plain = partial(AutoModelForCausalLM.from_pretrained, trust_remote_code=bool(first))
        load = plain if first or kind == "full" else load_replaced
        theirs = load(tmp_path / f"as {to}").eval()
        torch.testing.assert_close(
            logits_of(theirs, tokens[:, first:])[:, :-1], expected[:, first:], rtol=1e-4, atol=1e-4
        )
        options = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": None}
        assert theirs.generate(tokens[:1, first:30], **options)[0, -20:].tolist() == text
    files = [folder / "megasparse.safetensors" for folder in (taught, tmp_path / "as llama") if maps]
    assert len({tuple(TensorFile.one(file).names()) for file in files}) == bool(maps)


@pytest.mark.slow
def test_lines_of_json_and_single_books_are_texts_too(decoder, tmp_path):
    lines = tmp_path / "texts.jsonl"
    lines.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    config = go_on(tmp_path / "lines", decoder, lines)
    assert config["model"]["document_separator"] == 2
    again = go_on(tmp_path / "again", decoder, tmp_path / "lines" / "data", "--stop-at", "1")
    assert again["data"]["path"] == config["data"]["path"] == str(tmp_path / "lines" / "data")
    config = go_on(tmp_path / "one", decoder, books(tmp_path / "book", ["\n".join(TEXTS)]))
    assert config["model"]["document_separator"] is None


TOPICS = ["the sea", "a calm wind", "low clouds"]
CHATS = [
    conversation(f"Tell me of {TOPICS[i % 3]}.", f"{TOPICS[i % 3]} {i}", "And?", "more"[: 1 + i % 4]) for i in range(40)
]


@pytest.fixture
def chatting(decoder):
    return with_template(decoder)


def with_template(folder):
    """Add a template that writes the separator </s> inside conversations, and the start <s> before them."""
    template = "<s>" + CHATML.replace("<|im_start|>", "</s>").replace("<|im_end|>", "</s>")
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": template, "pad_token": "<pad>"}))
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    return folder


def test_packed_conversations_are_learned_as_transformers_reads_each_alone(chatting, tmp_path):
    """The scored tokens are the answers, and their losses those of each conversation by itself."""
    length, chats = 192, lines_in(tmp_path / "chats.jsonl", CHATS)
    sizes = {"model.max_length": length, "data.sequence_length": length}
    settings = {**sizes, "lora": "null", "model.residual_dtype": "fp32"}
    go_on(tmp_path / "run", chatting, chats, "--stop-at", "1", **{**settings, "optimizer.learning_rate": 1e-9})
    config = restore(tmp_path / "run")[1]
    model, theirs = HFModel.open(chatting).build(config), AutoModelForCausalLM.from_pretrained(chatting).eval()
    tokenizer = AutoTokenizer.from_pretrained(chatting)
    expected = {}
    for chat in CHATS:
        ids = torch.tensor(tokenizer.apply_chat_template(chat["messages"])["input_ids"])[None]
        with torch.no_grad():
            nats = -torch.log_softmax(theirs(ids).logits[0, :-1].float(), -1).gather(1, ids[0, 1:, None])[:, 0]
        expected[tuple(ids[0, 1:].tolist())] = nats
    stream = EvaluationStream(Index.load(tmp_path / "run" / "data"), "train")
    answers = []
    for row in stream.read(0, stream.tokens).view(-1, length):
        scores = model.token_scores(row[None], RngContext.evaluation(0, 1))
        assert int(model.count_scored(row[None])) == int(scores.scored.sum())
        first = 0
        for end in (row >= 2 << 24).nonzero()[:, 0].tolist():
            nats = expected.pop(tuple((row[first:end] % (1 << 24)).tolist()))
            torch.testing.assert_close(scores.nats[0, first:end], nats, rtol=0, atol=1e-4)
            scored = scores.scored[0, first:end]
            answers.append(tokenizer.decode(row[first:end][scored]))
            first = end + 1
        assert not scores.scored[0, first:].any()
    texts = ["".join(f"{message['content']}</s>\n" for message in chat["messages"][1::2]) for chat in CHATS]
    assert sorted(answers) == sorted(texts[: len(answers)]) and 36 <= len(answers) <= 38
    assert len(expected) == len(CHATS) - len(answers)  # those held out


@pytest.mark.slow
def test_two_ranks_that_share_packed_conversations_train_adapters_as_one(chatting, tmp_path):
    chats = lines_in(tmp_path / "chats.jsonl", CHATS)
    settings = {
        "model.max_length": 192, "data.sequence_length": 192, "model.feed_forward_tiles": 3,
        "model.attention.pattern": '["local", "full"]', "model.attention.local": '{"chunk": 16, "sinks": 4}',
        "model.residual_dtype": "fp32",
    }  # fmt: skip
    go_on(tmp_path / "one", chatting, chats, **settings)
    shared = {"run.engine": "deepspeed", "parallel.sequence": 2, "deepspeed.zero_optimization.stage": 3}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "--"]
    words = words_of(tmp_path / "two", chatting, chats, settings | shared)
    subprocess.run([*torchrun, "megasparse", "pretrain", *map(str, words)], check=True, cwd=ROOT)
    names = "train/loss", "optimizer/gradient_norm", "evaluation/loss"
    one, two = (
        [line[name] for line in read_metrics(tmp_path / run) for name in names if name in line]
        for run in ("one", "two")
    )
    assert len(one) == 9 and two == pytest.approx(one, rel=1e-5)


def test_conversations_resume_bit_identically_and_are_checked_as_trained(chatting, tmp_path, capsys):
    chats, losses = lines_in(tmp_path / "chats.jsonl", [*CHATS, {"text": "A plain text."}] * 3), []
    settings = {"model.max_length": 192, "data.sequence_length": 192, "evaluation.every": 2}
    go_on(tmp_path / "straight", chatting, chats, **settings)
    go_on(tmp_path / "run", chatting, chats, "--stop-at", "2", **settings)
    config = go_on(tmp_path / "run", chatting, chats, **settings)
    for name in ("straight", "run"):
        lines = [line for line in read_metrics(tmp_path / name) if "train/loss" in line]
        losses.append([(line["train/loss"], line.get("evaluation/loss")) for line in lines])
    assert capsys.readouterr().err.count("123 conversations, of which 0 are cut to 192 tokens") == 2  # rendered once
    assert losses[0] == losses[1] and len(losses[0]) == 4 and losses[0][-1][1] is not None
    assert config["model"]["document_separator"] == 2 << 24
    run(door("check-model"), "--checkpoint", tmp_path / "run")
    said = capsys.readouterr().out
    assert "later tokens            PASS" in said and "packed documents        PASS" in said
    run(door("convert to-hf"), "--checkpoint", tmp_path / "run", "--output", tmp_path / "out", "--to", "llama")
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template is not None
    assert json.loads((tmp_path / "out" / "config.json").read_text())["eos_token_id"] == 2
    run(
        door("evaluate"), "--checkpoint", tmp_path / "run", "--data", tmp_path / "run" / "data", "--split", "validation"
    )
    again = go_on(tmp_path / "again", chatting, tmp_path / "run" / "data", "--stop-at", "1", **settings)
    assert again["model"]["document_separator"] == 2 << 24
    message = refused(
        capsys, door("pretrain"), "decoder_64k", "--start", chatting,
        *[w for k, v in {**QUICK, **settings}.items() for w in ("--set", f"{k}={v}")],
        "--set", f"data.path={tmp_path / 'run' / 'data'}", "--set", f"run.directory={tmp_path / 'other'}",
    )  # fmt: skip
    assert "model.document_separator: null, but conversations in" in message and "Set it to 33554432" in message
