"""A small decoder replaced, taught and compared, by the commands themselves."""

import json

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from megasparse.benchmarks.passkey import Trial, retrieved
from megasparse.cli.main import door
from megasparse.hub.replace import load_replaced
from tests.helpers import commands

SKETCH = {"kind": "smart_bird", "keys": 6, "chunk": 8, "local": True, "sinks": 2, "sketch": "heads", "sketch_heads": 2}
WORDS = [f"w{number}" for number in range(40)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("decoder")
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(["[UNK]", *WORDS])}, "[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]").save_pretrained(folder / "plain")
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 32}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=41, max_position_embeddings=64, num_key_value_heads=2, **sizes))
    with torch.no_grad():
        model.model.layers[0].self_attn.q_proj.weight.mul_(100.0)
    model.save_pretrained(folder / "plain")
    draw = torch.Generator().manual_seed(1)
    (folder / "texts").mkdir()
    for number in range(2):
        words = [WORDS[i] for i in torch.randint(0, 40, (130,), generator=draw)]
        (folder / "texts" / f"{number}.txt").write_text(" ".join(words))
    attention = json.dumps(SKETCH | {"objective": "attention"})
    names = ["--model", folder / "plain", "--output", folder / "sketched", "--attention", attention]
    commands.run(door("replace-attention"), *names, "--seed", 3)
    return folder


def teach(folder, output, *arguments):
    names = ["--model", folder / "sketched", "--texts", folder / "texts", "--output", folder / output]
    commands.run(door("teach"), *names, "--length", 64, *arguments)


def test_a_taught_folder_is_the_same_model_that_chooses_better(folder, capsys):
    teach(folder, "taught", "--passes", 6)
    words = capsys.readouterr().out.split()
    assert words[:5] == ["loss", "on", "1", "held-out", "windows:"] and float(words[7]) < 0.9 * float(words[5])
    assert not (folder / "taught.teaching").exists()
    old, new = (load_replaced(folder / name).state_dict() for name in ("sketched", "taught"))
    assert all(torch.equal(new[name], old[name]) != (".megasparse." in name) for name in old)
    plain = AutoModelForCausalLM.from_pretrained(folder / "plain").state_dict()
    alone = AutoModelForCausalLM.from_pretrained(folder / "taught").state_dict()
    assert all(torch.equal(plain[name], alone[name]) for name in plain)


def test_arms_are_measured_into_a_file_once(folder, capsys, monkeypatch):
    arms = {
        "full": '{"kind": "full"}',
        "window": '{"kind": "local", "chunk": 8, "sinks": 2}',
        "lsh": '{"kind": "lsh", "rounds": 2, "buckets": 4, "chunk": 8, "local": true, "sinks": 2}',
        "sketch": str(folder / "sketched"),
        "oracle": '{"best": 10, "window": 8, "sinks": 2}',
        "all": '{"best": 64, "window": 1, "sinks": 0}',
    }
    given = [part for name, value in arms.items() for part in ("--arm", f"{name}={value}")]
    names = ["--model", folder / "plain", "--texts", folder / "texts", "--length", 64, "--json", folder / "arms.json"]
    commands.run(door("bench decoder"), *names, *given, "--seeds", 2)
    rows = json.loads((folder / "arms.json").read_text())["rows"]
    by_arm = {name: [row for row in rows if row["arm"] == name] for name in arms}
    assert {name: len(own) for name, own in by_arm.items()} == dict.fromkeys(arms, 2) | {"lsh": 4}
    assert {row["seed"] for row in by_arm["lsh"]} == {0, 1} and {row["seed"] for row in by_arm["sketch"]} == {3}
    full, window, oracle, everything = (by_arm[name][0] for name in ("full", "window", "oracle", "all"))
    assert full["captured"] == pytest.approx(1.0) == everything["captured"]
    assert everything["nats"] == pytest.approx(full["nats"], abs=1e-5) and full["keys"] > oracle["keys"] > 12
    assert window["captured"] < oracle["captured"] < 1.0
    assert "| lsh | " in capsys.readouterr().out
    monkeypatch.setattr("megasparse.benchmarks.decoder_table.measure", None)  # nothing is measured again
    commands.run(door("bench decoder"), *names, *given, "--seeds", 2)


def test_nats_are_those_of_transformers(folder):
    from megasparse.benchmarks.decoders import Arm, measure

    tokens = torch.arange(60)[None] % 41
    model = AutoModelForCausalLM.from_pretrained(folder / "plain")
    with torch.no_grad():
        expected = float(model(tokens, labels=tokens).loss)
    found = measure(Arm("full", {"kind": "full"}).model(folder / "plain", 60, 0), tokens, None)
    assert found["nats"] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    ("command", "arguments", "message"),
    [
        ("teach", ["--passes", 0], "--passes: 0 is too few"),
        ("teach", ["--length", 65], "--length: 65 is not in 8 … 64"),
        ("teach", ["--held-out", 9], "no more than --held-out 9"),
        ("bench decoder", ["--arm", "full"], "--arm: full names no attention"),
        ("bench decoder", ["--arm", 'x={"best": 3}'], "is no attention"),
        ("bench decoder", ["--arm", 'x={"kind": "full"}', "--length", 200], "has 130 tokens, fewer than --length 200"),
        ("bench decoder", ["--arm", 'x={"kind": "yoso"}'], "YOSOAttention shows no set of keys"),
    ],
)
def test_what_does_not_fit_is_one_line(folder, tmp_path, capsys, command, arguments, message):
    texts = ["--texts", folder / "texts"]
    own = ["--model", folder / "sketched", "--output", tmp_path / "x"]
    if command == "bench decoder":
        own = ["--model", folder / "plain", "--json", tmp_path / "x.json", "--length", 64]
    assert message in commands.refused(capsys, door(command), *own, *texts, *arguments)
    assert not list(tmp_path.iterdir())


class Copier(torch.nn.Module):
    """Predicts at each token the one that followed its latest earlier occurrence, a model that retrieves."""

    def forward(self, input_ids, use_cache):
        known = input_ids[0].tolist()
        after = [
            next((known[at + 1] for at in reversed(range(i)) if known[at] == known[i]), 0) for i in range(len(known))
        ]
        return type(
            "Output", (), {"last_hidden_state": torch.nn.functional.one_hot(torch.tensor([after]), 300).float()}
        )


def test_a_passkey_is_hidden_once_and_found_by_what_can_look_back():
    def tokenizer(text, add_special_tokens):
        return {"input_ids": [ord(letter) for letter in text]}

    trials = [Trial.draw(tokenizer, [1] * 400, 400, number) for number in range(8)]
    for trial in trials:
        text = "".join(map(chr, trial.tokens[0].tolist()))
        digits = text[-5:]
        assert (
            len(text) == 400 and trial.answer == 5 and text.endswith(f"What is the pass key? The pass key is {digits}")
        )
        assert text.count(digits) == 3 and digits.isdigit()
        assert abs(text.index("\nThe pass key is ") / (400 - 110) - trial.depth) < 0.1
    assert len({trial.depth for trial in trials}) == 8 and max(trial.depth for trial in trials) < 1
    model = type("Model", (), {"base_model": Copier(), "get_output_embeddings": lambda self: torch.nn.Identity()})()
    once = Trial(torch.tensor([[7, 8, 9, 10, 3, 7, 8, 9, 10]]), 3, 0.0)
    assert retrieved(model, once)
    assert not retrieved(model, Trial(torch.tensor([[7, 8, 9, 10, 3, 7, 8, 9, 11]]), 3, 0.0))
