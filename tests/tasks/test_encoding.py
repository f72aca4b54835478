"""Examples to token ids: against transformers' tokenizer, truncation, empty texts, counts and errors."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from transformers import AutoTokenizer

from megasparse.config.finetuning import FinetuneConfig, TaskConfig
from megasparse.data.tokenizers import build_tokenizer
from megasparse.errors import ConfigError, DataError
from megasparse.tasks.batches import EncodedExample, Segments
from megasparse.tasks.form import LabelForm
from megasparse.tasks.task import Example, SourceLocation, Task
from tests.helpers.finetuning import bert_tokenizer, write_tokenizer
from tests.helpers.tokenizers import byte_level, written

TEXTS = ["The attention of a model", "Unable!", "we go to it [MASK] [SEP]", "it's" + " the models" * 12]


class Made(Task):
    name = "made"
    metrics = ("accuracy",)
    classes = ("no", "yes")

    def files(self, folder: Path) -> dict[str, list[Path]]:
        return {}

    def read(self, file: Path) -> Iterator[Example]:
        raise NotImplementedError


class Towers(Made):
    towers = True


def encoder(tokenizer: str | None, kind: type[Task] = Made, vocabulary: int = 1000, separators: int = 1,
            **settings: object) -> LabelForm:  # fmt: skip
    task = kind(TaskConfig.model_validate({"max_length": 40, **settings}))
    task.vocabulary = vocabulary if tokenizer is None else None
    form, body = LabelForm(task, FinetuneConfig()), SimpleNamespace(vocabulary=vocabulary, separators=separators)
    form.prepare(body, build_tokenizer(tokenizer or "bytes"))  # type: ignore[arg-type]
    return form


def examples(*inputs: tuple[object, ...]) -> list[Example]:
    return [Example(given, i % 2, SourceLocation(Path("made.tsv"), i + 5), str(i)) for i, given in enumerate(inputs)]  # type: ignore[arg-type]


def only(examples: Iterator[EncodedExample]) -> Segments:
    (each,) = examples
    (sequence,) = each.sequences
    return sequence


@pytest.fixture
def folder(tmp_path):
    write_tokenizer(tmp_path, bert_tokenizer())
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    return tmp_path


@pytest.mark.parametrize("limit", [*range(5, 16), 40, 100])
def test_encoded_texts_and_pairs_equal_transformers(folder, limit):
    theirs = AutoTokenizer.from_pretrained(folder)
    ours = encoder(str(folder / "tokenizer.json"), max_length=limit)
    texts = [text for text in TEXTS if "[" not in text]  # there a text can name a special token
    for given in [*((text,) for text in texts), *itertools.product(texts, texts)]:
        expected = theirs(*given, truncation=True, max_length=limit, return_token_type_ids=True)
        result = only(ours.encode(examples(given)))
        assert result.tokens.tolist() == expected["input_ids"], given
        assert result.types.tolist() == expected["token_type_ids"]
        assert result.tokens.dtype == result.types.dtype == np.int64


def test_robertas_pairs_have_two_separators(tmp_path):
    values = byte_level()
    special = {"pad_token": "<pad>", "unk_token": "<unk>", "cls_token": "<s>", "sep_token": "</s>"}
    written(tmp_path, values)
    written(tmp_path, {"tokenizer_class": "PreTrainedTokenizerFast", **special}, "tokenizer_config.json")
    (tmp_path / "config.json").write_text('{"model_type": "roberta"}')
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    ours = encoder(str(tmp_path / "tokenizer.json"), separators=2)
    for given in (("the other",), ("the other", "then, one"), ("the" * 30, "a b c d e f g")):
        expected = theirs(*given, truncation=True, max_length=40)["input_ids"]
        assert only(ours.encode(examples(given))).tokens.tolist() == expected
    assert expected.count(2) == 3


def test_bytes_with_room_for_special_tokens():
    special = build_tokenizer("bytes").special
    assert special is not None
    result = only(encoder("bytes", vocabulary=264).encode(examples(("ab", "c"))))
    assert result.tokens.tolist() == [special.begin, 97, 98, special.separator, 99, special.separator]
    assert result.types.tolist() == [0, 0, 0, 0, 1, 1]


def test_ids_get_no_special_tokens():
    ids = np.array([3, 1, 4, 1], dtype=np.int64)
    assert only(encoder(None).encode(examples((ids,)))).tokens.tolist() == [3, 1, 4, 1]
    (result,) = encoder(None, Towers).encode(examples((ids, ids[:2])))
    assert [each.tokens.tolist() for each in result.sequences] == [[3, 1, 4, 1], [3, 1]]
    assert all(not each.types.any() for each in result.sequences)


@pytest.mark.parametrize("kind", [Made, Towers])
@pytest.mark.parametrize("given", [("", "b"), ("a", "")])
def test_an_empty_input_is_rejected_where_it_stands(kind, given):
    with pytest.raises(DataError, match=r"^made\.tsv:6: empty.*task\.empty=\"keep\"$"):
        list(encoder("bytes", kind).encode(examples(("a", "b"), given)))


def test_empty_inputs_are_kept_and_counted():
    ours = encoder("bytes", empty="keep", vocabulary=264)
    result = list(ours.encode(examples(("a",), ("",), ("",))))
    assert [len(each.sequences[0].tokens) for each in result] == [3, 2, 2]
    assert ours.counts.empty == 2 and str(ours.counts.first_empty) == "made.tsv:6"
    assert ours.lines("training")[-1] == "training: 2 inputs are empty, the first in made.tsv:6"


def test_too_long_an_input_is_rejected_where_it_stands():
    ours = encoder("bytes", too_long="refuse", vocabulary=264, max_length=6)
    with pytest.raises(DataError, match=r"^made\.tsv:6: 7 tokens are more than task\.max_length = 6\. .*too_long"):
        list(ours.encode(examples(("abcd",), ("abcde",))))


def test_truncated_texts_are_counted_and_printed():
    ours = encoder("bytes", vocabulary=264, max_length=6)
    result = list(ours.encode(examples(("abcd",), ("abcdefgh",), ("ab", "cdef"), ("x",))))
    assert [len(each.sequences[0].tokens) for each in result] == [6, 6, 6, 3]
    assert (ours.counts.examples, ours.counts.cut, ours.counts.longest) == (4, 2, 10)
    said = ours.lines("training")
    assert said[0] == "training: 4 examples, the longest of 10 tokens; no 2, yes 2"
    assert said[1].startswith("training: 2 inputs of more than 6 tokens are truncated to their start")
    assert "made.tsv:6" in said[1] and "task.max_length" in said[1] and len(said) == 2


def test_a_limit_without_room_for_any_text_is_rejected():
    for limit in (1, 3, 4):
        with pytest.raises(ConfigError, match=rf"^task\.max_length: {limit} leaves no space for text next to 3 spe"):
            list(encoder("bytes", vocabulary=264, max_length=limit).encode(examples(("ab", "cd"))))
