"""A small decoder replaced and taught, by the commands themselves."""

import json

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--passes", 0], "--passes: 0 is too few"),
        (["--length", 65], "--length: 65 is not in 8 … 64"),
        (["--held-out", 9], "no more than --held-out 9"),
    ],
)
def test_what_does_not_fit_is_one_line(folder, tmp_path, capsys, arguments, message):
    folders = ["--model", folder / "sketched", "--output", tmp_path / "x", "--texts", folder / "texts"]
    assert message in commands.refused(capsys, door("teach"), *folders, *arguments)
    assert not list(tmp_path.iterdir())
