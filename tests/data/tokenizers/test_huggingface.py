import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer as Original
from transformers import BertTokenizerFast

from megasparse.data.tokenizers import build_tokenizer
from megasparse.data.tokenizers.contract import SpecialTokens
from megasparse.data.tokenizers.huggingface import HuggingFaceTokenizer
from megasparse.errors import ConfigError
from tests.helpers.refusals import refusal
from tests.helpers.tokenizers import ODD_TEXTS, PROSE, byte_level, random_texts, unigram, wordpiece, written

KINDS = {"wordpiece": wordpiece, "byte-level": byte_level, "unigram": unigram}
NAMES = " ".join(["[CLS] [SEP][PAD] [MASK] [UNK]a [MASK]", "<s> a</s> <pad><mask> <unk> <s> ", "the <mask> <s"])


def built(folder: Path, values: dict[str, Any]) -> HuggingFaceTokenizer:
    found = build_tokenizer(str(written(folder, values)))
    assert isinstance(found, HuggingFaceTokenizer)
    return found


def plain(values: dict[str, Any]) -> Original:
    """The `tokenizers` package's own, without what tokenizer.json adds to a text and cuts off."""
    own = Original.from_str(json.dumps(values))
    own.no_padding()
    own.no_truncation()
    return own


@pytest.mark.parametrize("kind", KINDS)
def test_ordinary_text_is_encoded_as_the_package_does(tmp_path, kind):
    values = KINDS[kind]()
    mine, own = built(tmp_path, values), plain(values)
    for text in (PROSE, "", "the models of attentions, unable", *PROSE.split("\n")[:50]):
        tokens = mine.encode(text)
        assert tokens.dtype == torch.int64 and tokens.tolist() == own.encode(text, add_special_tokens=False).ids
        assert mine.decode(tokens).decode() == own.decode(tokens.tolist())
        assert "".join(mine.text(tokens.tolist())) == own.decode(tokens.tolist())


def test_bert_is_as_in_transformers(tmp_path):
    values = wordpiece()
    theirs = BertTokenizerFast(vocab=values["model"]["vocab"], do_lower_case=True)
    mine = built(tmp_path, values)
    for text in ("The ATTENTION, of unable modéls!", PROSE):
        assert mine.encode(text).tolist() == theirs(text, add_special_tokens=False)["input_ids"]
    assert mine.special == SpecialTokens(
        theirs.cls_token_id, theirs.sep_token_id, theirs.pad_token_id, theirs.mask_token_id
    )


@pytest.mark.parametrize("kind", KINDS)
def test_no_text_becomes_a_special_token(tmp_path, kind):
    values = KINDS[kind]()
    mine = built(tmp_path, values)
    assert mine.special is not None and mine.separator == mine.special.separator
    hidden = "  ".join(f" {name} " for name in ("[MASK]", "<mask>", "<s>"))
    found = set(mine.encode(NAMES).tolist()) | set(mine.encode(hidden).tolist())
    assert found and not found & set(mine.special)
    expected = [values["model"]["unk_token"] is None or 1] if kind == "wordpiece" else []
    assert mine.decode(torch.tensor([*mine.special, *expected])) == b""
    read = plain(values).encode(NAMES, add_special_tokens=False).ids
    assert set(read) & set(mine.special)  # the package's own reading of it is another


def test_special_tokens_are_hidden_though_the_file_does_not_call_them_special(tmp_path):
    values = wordpiece()
    values["added_tokens"] = [{**values["added_tokens"][4], "special": False}]
    mine = built(tmp_path, values)
    assert mine.special == SpecialTokens(2, 3, 0, 4)
    assert not set(mine.encode("a [MASK] [CLS] b").tolist()) & {0, 2, 3, 4}
    values["pre_tokenizer"] = {"type": "WhitespaceSplit"}
    assert not set(built(tmp_path, values).encode("a [MASK] [CLS] b").tolist()) & {0, 2, 3, 4}


def test_a_tokenizer_whose_special_tokens_text_can_have_is_refused(tmp_path):
    values = wordpiece()
    values |= {"pre_tokenizer": None, "normalizer": None}
    with pytest.raises(ConfigError, match="a text can become its special token"):
        built(tmp_path, values)


@pytest.mark.parametrize("name", ODD_TEXTS)
def test_byte_level_ones_give_back_any_bytes(tmp_path, name):
    mine, raw = built(tmp_path, byte_level()), ODD_TEXTS[name]
    tokens = mine.encode(raw)
    assert mine.lossless and mine.decode(tokens) == raw
    assert "".join(mine.text(tokens.tolist())) == raw.decode("utf-8", "replace")


def test_byte_level_ones_give_back_random_bytes_long_lines_and_every_code_point(tmp_path):
    mine = built(tmp_path, byte_level())
    points = "".join(map(chr, [*range(0x11000), *range(0x1F000, 0x1FB00), 0x10FFFF])).encode("utf-8", "surrogatepass")
    for raw in (*random_texts(400), b"the " * 250_000, points):
        assert mine.decode(mine.encode(raw)) == raw


def test_added_words_and_lossy_parts_do_not_cost_bytes(tmp_path):
    """A token that eats the white space around it: its line is encoded in bytes, the others as before."""
    values = byte_level()
    number = len(values["model"]["vocab"])
    added = {**values["added_tokens"][-1], "id": number, "content": "W\u00d6RD", "special": False, "rstrip": True}
    values["added_tokens"].append(added)
    mine = built(tmp_path, values)
    raw = "the W\u00d6RD  x\nthe end\n".encode()
    tokens = mine.encode(raw)
    assert torch.equal(tokens[len("the W\u00d6RD  x\n".encode()) :], mine.encode("the end\n"))
    assert len(tokens) < len(raw)
    assert mine.decode(tokens) == raw and mine.vocabulary == number + 1
    assert number in mine.encode("W\u00d6RDx").tolist() and mine.decode(torch.tensor([number])) == "W\u00d6RD".encode()


def test_others_say_that_they_lose_something(tmp_path):
    spaced = byte_level()
    spaced["pre_tokenizer"] = {**spaced["pre_tokenizer"], "add_prefix_space": True}
    for values in (wordpiece(), unigram(), spaced, {**byte_level(), "normalizer": {"type": "NFC"}}):
        assert not built(tmp_path, values).lossless
    mine = built(tmp_path, wordpiece())
    assert mine.decode(mine.encode(b"The \xff Models")).decode() == plain(wordpiece()).decode(
        mine.encode("the \ufffd models").tolist()
    )


def test_where_words_begin(tmp_path):
    for values, text, words in (
        (wordpiece(), "the attention models unable", ["the", "attention", "models", "unable"]),
        (byte_level(), "the thing\n\tthe end", ["the", " thing", "\n", "\t", "the", " end"][:3]),
        (unigram(), "the thing going", ["▁the", "▁thing", "▁going"]),
    ):
        mine = built(tmp_path, values)
        tokens = mine.encode(text)
        starts, names = mine.word_starts(), {token: piece for piece, token in plain(values).get_vocab().items()}
        assert starts.shape == (mine.vocabulary,)
        found = list[str]()
        for token in tokens.tolist():
            piece = names[token].removeprefix("##").translate(str.maketrans("\u0120\u010a\u0109", " \n\t"))
            found[-1:] = [*found[-1:], piece] if starts[token] or not found else [found[-1] + piece]
        assert found[: len(words)] == words
    level = {"type": "WordLevel", "vocab": {"[UNK]": 0, "a": 1}, "unk_token": "[UNK]"}
    values = {**wordpiece(), "model": level, "decoder": None, "added_tokens": []}
    assert built(tmp_path, values).word_starts().tolist() == [True, True]


def test_numbers_that_are_no_tokens_are_refused(tmp_path):
    for kind in KINDS.values():
        mine = built(tmp_path, kind())
        for token in (-1, mine.vocabulary):
            with pytest.raises(ValueError, match="is no token of"):
                mine.decode(torch.tensor([token]))


def test_a_separator_without_the_others(tmp_path):
    values = byte_level()
    values["added_tokens"] = [{**values["added_tokens"][0], "content": "<|endoftext|>"}]
    values["model"]["vocab"] = {
        {"<s>": "<|endoftext|>", "<pad>": "x1", "</s>": "x2", "<mask>": "x3"}.get(piece, piece): token
        for piece, token in values["model"]["vocab"].items()
    }
    mine = built(tmp_path, values)
    assert mine.special is None and mine.separator == 0


def damages(values: dict[str, Any]) -> dict[str, Any]:
    model, first = values["model"], values["added_tokens"][0]

    def with_model(**changed: Any) -> str:
        return json.dumps({**values, "model": {**model, **changed}, "added_tokens": []})

    return {
        "cut": json.dumps(values)[:-100],
        "no UTF-8": b"\xff" + json.dumps(values).encode(),
        "empty": "",
        "a list": "[]",
        "a number": "7",
        "deep": "[" * 100_000,
        "no model": json.dumps({key: value for key, value in values.items() if key != "model"}),
        "no tokens": with_model(vocab={}, merges=[]),
        "vocabulary of text": with_model(vocab="abc"),
        "ids of text": with_model(vocab={"a": "b"}),
        "negative ids": with_model(vocab={"a": -1}),
        "huge ids": with_model(vocab={"[UNK]": 0, "a": 1 << 25}),
        "names of numbers": json.dumps({**values, "added_tokens": [{**first, "content": None}]}),
        "kind": with_model(type="Neural"),
        "pre-tokenizer": json.dumps({**values, "pre_tokenizer": {"type": "Split", "pattern": {"Regex": "("}}}),
        "merges": json.dumps({**byte_level(), "model": {**byte_level()["model"], "merges": ["x y z", "q"]}}),
    }


@pytest.mark.parametrize("damage", damages(wordpiece()))
def test_a_damaged_file_is_one_line(tmp_path, damage):
    content = damages(wordpiece())[damage]
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    refusal(lambda: build_tokenizer(str(path)), ConfigError, r"^data\.tokenizer: .*tokenizer\.json")
