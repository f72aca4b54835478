"""A pretrained encoder's attention replaced, and its hashes taught, by the commands themselves."""

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoTokenizer, BertConfig, BertForMaskedLM, PreTrainedTokenizerFast

from megasparse.cli.main import door
from megasparse.hub.replace import load_replaced
from megasparse.hub.teaching import read_windows
from tests.helpers import commands
from tests.helpers.cases import together

replace_attention, teach = door("replace-attention"), door("teach")
WORDS = [f"w{number}" for number in range(40)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A BERT of 64 positions, whose queries look for something, and texts of 1,600 words."""
    folder = tmp_path_factory.mktemp("pretrained")
    vocabulary = {word: number for number, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    frame = [("[CLS]", 2), ("[SEP]", 3)]
    tokenizer.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=frame)
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=64, **names).save_pretrained(folder / "bert")
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32}
    torch.manual_seed(0)
    model = BertForMaskedLM(BertConfig(vocab_size=len(vocabulary), max_position_embeddings=64, **sizes))
    with torch.no_grad():
        for layer in model.bert.encoder.layer:
            layer.attention.self.query.weight.mul_(150.0)
    model.save_pretrained(folder / "bert")
    draw = torch.Generator().manual_seed(1)
    (folder / "texts").mkdir()
    for number in range(4):
        words = [WORDS[i] for i in torch.randint(0, 40, (400,), generator=draw)]
        (folder / "texts" / f"{number}.txt").write_text(" ".join(words))
    run(replace_attention, folder, "bert", "lha", "--attention", '{"kind": "lha", "chunk": 8}')
    return folder


def run(tool, folder, model, output, *arguments):
    commands.run(tool, "--model", folder / model, "--output", folder / output, *arguments)


def test_taught_hashes_lose_less_and_nothing_else_has_moved(folder, capsys):
    run(teach, folder, "lha", "taught", "--texts", folder / "texts", "--held-out", 4, "--passes", 20)
    printed = capsys.readouterr().out.splitlines()
    words = printed[0].split()
    assert words[:4] == ["held-out", "loss", "(4", "windows):"]
    assert float(words[6]) < 0.9 * float(words[4]) and printed[1] == str(folder / "taught")
    old, new = (load_replaced(folder / name).state_dict() for name in ("lha", "taught"))
    assert old.keys() == new.keys()
    for name, tensor in new.items():
        assert torch.equal(tensor, old[name]) != (".lha.hash." in name), name


def test_a_text_is_cut_into_windows_that_hold_all_of_it(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder / "bert")
    found = read_windows(tokenizer, [folder / "texts" / "0.txt"], 64)
    assert [len(tokens) for tokens in found] == [64] * 6 + [30]
    words = [word for tokens in found for word in tokenizer.convert_ids_to_tokens(tokens) if word[0] != "["]
    assert " ".join(words) == (folder / "texts" / "0.txt").read_text()


@together(
    ("tool", "arguments", "message"),
    [
        (teach, ["--passes", 0], "error: --passes: 0 is too few"),
        (teach, ["--held-out", 24], "24 windows of 64 tokens are too few"),
        (teach, ["--texts", "/dev/null"], "/dev/null: cannot be read as UTF-8 text"),
        (replace_attention, ["--attention", "[]"], "error: --attention: is not a JSON object"),
        (replace_attention, ["--attention", '{"kind": "lhaa"}'], 'Did you mean "lha"?'),
        (replace_attention, ["--attention", '{"kind": ["lsh"]}'], 'attention.kind: unknown mechanism ["lsh"]'),
        (replace_attention, ["--attention", '{"lha": {}}'], "error: attention: contains neither kind nor pattern"),
        (replace_attention, ["--attention", '{"pattern": "lsh"}'], '"lsh" does not fit. It must be a valid list'),
        (replace_attention, ["--attention", '{"kind": "lha"}', "--max-length", 0], "model.max_length: 0 does not fit"),
    ],
)
def test_mistakes_are_told_in_a_line(folder, capsys, tool, arguments, message):
    basics = ["--model", folder / "lha", "--output", folder / "never"]
    if tool is teach:
        basics += ["--texts", folder / "texts"]
    assert message in commands.refused(capsys, tool, *basics, *arguments)
    assert not (folder / "never").exists()


def test_a_model_that_was_not_replaced_cannot_be_taught(folder, capsys):
    given = ["--model", folder / "bert", "--output", folder / "never", "--texts", folder / "texts"]
    assert "contains no valid entry megasparse_attention" in commands.refused(capsys, teach, *given)
