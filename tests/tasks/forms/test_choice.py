"""Questions with candidates of their own: QAngaroo's files, laid out by hand, scored, learned, and predicted."""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megasparse.config.finetuning import TaskConfig
from megasparse.data.tokenizers import build_tokenizer
from megasparse.errors import ConfigError
from megasparse.ops.random import RngContext
from megasparse.tasks.batches import EncodedExample, Padded, Segments
from megasparse.tasks.body import Backbone, HuggingFaceBody
from megasparse.tasks.catalog import build_task
from megasparse.tasks.form import ChoiceForm, ChoiceModel
from megasparse.tasks.task import Example, SourceLocation
from megasparse.training.checkpoints.checkpoint import Checkpoint
from tests.helpers.cases import together
from tests.helpers.commands import refusal
from tests.helpers.finetuning import ENCODER, assert_resumes, bert, bert_tokenizer, configured, our_body, plain
from tests.helpers.tokenizers import written

LENGTHS, CANDIDATES = (30, 12, 44, 9), (3, 1, 7, 2)


def choice(question: str, candidates: Sequence[str], texts: Sequence[str] = (), label: int | None = 0) -> Example:
    return Example((question, tuple(candidates), tuple(texts)), label, SourceLocation(Path("made.json"), 3), "made_3")


def form_with(tmp_path: Path, **sections: Any) -> ChoiceForm:
    sections = {**sections, "task": {"name": "wikihop", "max_length": 64, **sections.get("task", {})}}
    config = configured(tmp_path / "run", tmp_path, **{"model": {"kind": "encoder", "vocabulary": 264}, **sections})
    return ChoiceForm(build_task(config.task), config)


def encoder(tmp_path: Path, tokenizer: str = "bytes", vocabulary: int = 264, **task: Any) -> ChoiceForm:
    form = form_with(tmp_path, task=task)
    form.prepare(SimpleNamespace(vocabulary=vocabulary, separators=1), build_tokenizer(tokenizer))  # type: ignore[arg-type]
    return form


def one(coder: ChoiceForm, example: Example) -> EncodedExample:
    (made,) = coder.encode([example])
    return made


QUESTION = choice("who?", ["ann", "bo"], ["It is bo.", "a\nb"], 1)


def test_bytes_without_special_tokens_are_laid_out_in_lines(tmp_path):
    made = one(encoder(tmp_path, vocabulary=256), QUESTION)
    (sequence,) = made.sequences
    assert bytes(sequence.tokens.tolist()) == b"who?\nann\nbo\nIt is bo.\na\nb\n"
    assert made.marks.tolist() == [8, 11] and sequence.types.tolist() == [0] * 12 + [1] * 14
    assert (made.label, made.name, str(made.location)) == (1, "made_3", "made.json:3")
    assert made.candidates == ("ann", "bo") and made.length == 26


def test_wordpieces_of_a_bert(tmp_path):
    file = str(written(tmp_path, bert_tokenizer()))
    vocab = bert_tokenizer()["model"]["vocab"]
    made = one(encoder(tmp_path, file), choice("The models", ["attention", "a mask"], ["Of a model!"]))
    head = ["[CLS]", "the", "model", "##s", "[SEP]", "atten", "##tion", "[SEP]", "a", "mask", "[SEP]"]
    expected = [*head, "of", "a", "model", "!", "[SEP]"]
    tokens = made.sequences[0].tokens.tolist()
    assert tokens == [vocab[piece] for piece in expected]
    separators = [place for place, token in enumerate(tokens) if token == vocab["[SEP]"]]
    assert made.marks.tolist() == separators[1:3]
    assert made.sequences[0].types.tolist() == [0] * (separators[2] + 1) + [1] * (len(tokens) - separators[2] - 1)


def test_a_tokenizer_without_separators_marks_the_candidates_last_tokens(tmp_path):
    """A model that has no room for separators has none."""
    ours = encoder(tmp_path, str(written(tmp_path, bert_tokenizer())))
    ours.special = None
    made = one(ours, choice("a the", ["attention", "a mask"], ["of"]))
    names = {token: piece for piece, token in bert_tokenizer()["model"]["vocab"].items()}
    expected = ["a", "the", "atten", "##tion", "a", "mask", "of"]
    assert [names[token] for token in made.sequences[0].tokens.tolist()] == expected
    assert made.marks.tolist() == [3, 5] and made.sequences[0].types.tolist() == [0] * 6 + [1]


def test_the_end_of_the_texts_is_cut_and_counted(tmp_path):
    whole = one(encoder(tmp_path), QUESTION)
    for limit in (13, 14, 26):
        ours = encoder(tmp_path, max_length=limit)
        made = one(ours, QUESTION)
        assert np.array_equal(made.sequences[0].tokens, whole.sequences[0].tokens[:limit])
        assert np.array_equal(made.sequences[0].types, whole.sequences[0].types[:limit])
        assert np.array_equal(made.marks, whole.marks)
        assert (ours.counts.cut, ours.counts.longest, str(ours.counts.first_cut)) == (1, 27, "made.json:3")
        assert f"1 inputs of more than {limit} tokens are truncated to their start" in ours.lines("new")[1]
    ours = encoder(tmp_path, max_length=27)
    assert one(ours, QUESTION).length == 27 and ours.counts.cut == 0 and len(ours.lines("new")) == 1


def test_question_and_candidates_are_never_cut(tmp_path):
    said = r"question and 2 candidates of made_3 have 13 tokens, more than task\.max_length = 12\. Raise it"
    refusal(lambda: one(encoder(tmp_path, max_length=12), QUESTION), match=rf"^made\.json:3: {said}")


# The model.


def encoded(number: int, length: int, candidates: int, label: int | None) -> EncodedExample:
    generator = np.random.default_rng(number)
    ids = generator.integers(5, 60, length)
    marks = np.sort(generator.choice(length, candidates, replace=False))
    names = tuple(f"c{i}" for i in range(candidates))
    types = (np.arange(length) > marks[-1]).astype(np.int64)
    location = SourceLocation(Path("made"), number + 1)
    return EncodedExample((Segments(ids, types),), label, location, str(number), marks=marks, candidates=names)


def examples(labels: Sequence[int | None] = (2, 0, 6, 1)) -> list[EncodedExample]:
    return [encoded(i, *row) for i, row in enumerate(zip(LENGTHS, CANDIDATES, labels, strict=True))]


def model_of(body: Backbone, rate: float = 0.1) -> ChoiceModel:
    model = ChoiceModel(body, rate, seed=1)
    with torch.no_grad():
        model.output.weight += 0.3 * torch.randn(1, body.width, generator=torch.Generator().manual_seed(2))
    return model.eval()


def body_of(where: str, tmp_path: Path) -> Backbone:
    if where == "bert":
        from transformers import BertModel

        return HuggingFaceBody(BertModel.from_pretrained(bert(tmp_path / "bert")), False, 64)
    kind = {"kind": "decoder"} if where == "decoder" else {}
    own = {"pattern": [where], where: {"chunk": 8}} if where in ("lsh", "lha") else {"pattern": ["full"]}
    return our_body(dropout=0.0, attention=own, **kind)


@torch.no_grad()
@pytest.mark.parametrize("where", ["full", "decoder", "lsh", "lha", "bert"])
def test_scores_costs_and_answers_against_one_example_at_a_time(where, tmp_path):
    model, form = model_of(body_of(where, tmp_path)), form_with(tmp_path)
    given = examples()
    objective, result = model(form.collate(given), RngContext.evaluation(3, 4))
    expected = []
    for row, each in enumerate(given):
        ids, types = (torch.from_numpy(values).unsqueeze(0) for values in each.sequences[0])
        read = Padded(ids, types, torch.tensor([ids.shape[1]]))
        states = model.body(read, RngContext.evaluation(3, 1), None)[0][0]
        scores = np.array([float(states[mark] @ model.output.weight[0]) for mark in each.marks.tolist()])
        p = np.exp(scores) / np.exp(scores).sum()
        expected.append(-np.log(p[each.label]))
        own = result["predicted"][row]
        assert np.allclose(own.numpy(), scores, atol=1e-5) and own.dtype == torch.float32
        assert form.answer(each, own.double().numpy()) == scores.argmax()
    assert np.allclose(result["costs"].numpy(), expected, atol=1e-5) and result["weights"].tolist() == [1.0] * 4
    assert result["nats"].item() == pytest.approx(sum(expected), rel=1e-5) and result["tokens"] == 4
    if where != "lha":  # it adds a loss of its own
        assert objective.item() == pytest.approx(sum(expected) / 4, rel=1e-5)
    right = [int(predicted.argmax()) == each.label for predicted, each in zip(result["predicted"], given, strict=True)]
    assert result["accuracy"].item() == pytest.approx(np.mean(right))


def test_gradients_reach_only_the_candidates_of_the_example(tmp_path):
    """Where others have more, nothing is learned from, or affected by, the padding that this leaves."""
    model, form, given = model_of(body_of("full", tmp_path), rate=0.0), form_with(tmp_path), examples()

    def gradient(chosen: list[int]) -> torch.Tensor:
        model.zero_grad()
        rng = RngContext(3, 1, torch.tensor(chosen), training=True)
        objective, result = model(form.collate([given[i] for i in chosen]), rng)
        assert "predicted" not in result
        objective.backward()
        assert model.output.weight.grad is not None
        return model.output.weight.grad.clone()

    together, alone = gradient([0, 2]), [gradient([i]) for i in (0, 2)]
    assert torch.allclose(together, sum(alone, torch.zeros(())) / 2, atol=1e-6) and gradient([1]).abs().max() < 1e-9


def test_rows_of_predictions(tmp_path):
    ours = encoder(tmp_path)
    form, made = form_with(tmp_path), one(ours, choice("who?", ["ann", "bo", "cy"], label=2))
    predicted = np.array([0.5, 1.5, -1.0])
    row = {"label": "cy", "predicted": "bo", "scores": {"ann": 0.5, "bo": 1.5, "cy": -1.0}}
    assert form.row(made, predicted) == row
    assert form.row(one(ours, choice("who?", ["ann", "bo", "cy"], label=None)), predicted) == {**row, "label": None}
    assert form.measures([made, made], [2, 0]) == {"accuracy": 0.5}


def test_unsuitable_settings_and_inputs_are_rejected(tmp_path):
    body = our_body()
    for key, value in (("pooling", "mean"), ("hidden", 8)):
        with pytest.raises(ConfigError, match=rf"^head\.{key}: .*{value}.*wikihop.* Remove it"):
            form_with(tmp_path, head={key: value}).check(body)
    form_with(tmp_path, head={"dropout": 0.3}).check(body)
    with pytest.raises(ConfigError, match=r'^--text: "wikihop" does not read texts. Use --source FILE'):
        form_with(tmp_path).example(["who?"])


ROWS: list[dict[str, Any]] = [
    {
        "id": "WH_dev_0", "query": "country of tallinn", "answer": "estonia",
        "candidates": ["latvia", "estonia"],
        "supports": ["Tallinn is a city.", "It is in Estonia ."], "annotations": [],
    },
    {"id": "WH_dev_1", "query": "genre jaws", "candidates": ["thriller", "a", "b"], "supports": []},
]  # fmt: skip


def written_rows(file: Path, rows: Any) -> Path:
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(rows))
    return file


def read(file: Path) -> list[Any]:
    return list(build_task(TaskConfig(name="wikihop")).read(file))


def test_examples_of_a_file(tmp_path):
    file = written_rows(tmp_path / "dev.json", ROWS)
    first, second = read(file)
    assert first.inputs == ("country of tallinn", ("latvia", "estonia"), ("Tallinn is a city.", "It is in Estonia ."))
    assert (first.label, first.name, str(first.location)) == (1, "WH_dev_0", f"{file}:1")
    assert second.inputs == ("genre jaws", ("thriller", "a", "b"), ())
    assert (second.label, second.name, second.location.line) == (None, "WH_dev_1", 2)


@together(
    ("changes", "said"),
    [
        ({"query": None}, ": query: Input should be a valid string (null)"),
        ({"query": " "}, ": query: String should match pattern"),
        ({"id": 7}, ": id: Input should be a valid string (7)"),
        ({"candidates": "ann"}, ': candidates: Input should be a valid list ("ann")'),
        ({"candidates": []}, ": candidates: List should have at least 1 item"),
        ({"candidates": ["a", 3]}, ": candidates.1: Input should be a valid string (3)"),
        ({"candidates": ["a", " "]}, ": candidates.1: String should match pattern"),
        ({"candidates": ["estonia", "b", "estonia"]}, ' ("WH_dev_0"): "estonia" occurs twice among the candidates.'),
        ({"supports": ["a", None]}, ": supports.1: Input should be a valid string (null)"),
        ({"answer": "Estonia"}, ' ("WH_dev_0"): the answer "Estonia" is not among the candidates. Use one of them'),
        ({"answer": 1}, ": answer: Input should be a valid string (1)"),
    ],
)
def test_a_malformed_example_is_named_by_file_number_and_key(changes, said, tmp_path):
    file = written_rows(tmp_path / "dev.json", [ROWS[1], {**ROWS[0], **changes}])
    assert refusal(lambda: read(file)).startswith(f"{file}:2: example 2{said}")


@together(
    ("data", "said"),
    [
        (b'[{"id": "a",\n "query": "b', ": not JSON (Unterminated string starting at: line 2 column 11 (char 23)"),
        (b"", ": not JSON"),
        (b"[" * 200_000, ": not JSON (maximum recursion depth exceeded"),
        (b'["\xff"]', ": not UTF-8 (byte 0xff in column 3)"),
        (b'{"id": "a"}', ": not a JSON array of examples"),
        (b'["a"]', ":1: example 1: it: Input should be a valid dictionary"),
        (json.dumps([ROWS[0], ROWS[0]]).encode(), ':2: example 2 ("WH_dev_0"): the id occurs twice'),
    ],
)
def test_a_malformed_file_is_rejected(data, said, tmp_path):
    file = tmp_path / "train.json"
    file.write_bytes(data)
    assert refusal(lambda: read(file)).startswith(f"{file}{said}")


def test_a_stopped_run_resumes_bit_identically(tmp_path):
    drawn = random.Random(0)
    for name, number in (("train", 60), ("dev", 20)):
        rows = []
        for i in range(number):
            candidates = drawn.sample("klmnop", drawn.randint(3, 4))
            answer = drawn.choice(candidates)
            row = {"id": f"q{i}", "query": "b", "answer": answer, "candidates": candidates, "supports": [f"b {answer}"]}
            rows.append(row)
        written_rows(tmp_path / "data" / f"{name}.json", rows)
    attention = {"pattern": ["lsh"], "lsh": {"chunk": 4}}
    settings = {
        "task": {"name": "wikihop", "max_length": 24, "tokenizer": str(written(tmp_path, bert_tokenizer()))},
        "model": {**ENCODER, "max_length": 24, "attention": attention}, "head": {"dropout": 0.2},
    }  # fmt: skip
    assert len(plain(assert_resumes(tmp_path, tmp_path / "data", 4, **settings))) == 6
    weights = Checkpoint.open(tmp_path / "straight" / "checkpoints" / "00000006").manifest["tensors"]["weight"]
    assert "output.weight" in weights
