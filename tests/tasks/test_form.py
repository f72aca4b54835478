"""The common part of forms: columns that metrics read, answers of texts, and the form that a task names."""

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megasparse.errors import ConfigError
from megasparse.tasks import build_task
from megasparse.tasks.batches import Encoded, Segments
from megasparse.tasks.form import FORM_CLASSES, Form, column, form_of
from megasparse.tasks.forms.labels import LabelForm
from megasparse.tasks.task import Example, SourceLocation
from tests.helpers.finetuning import ENCODER, configured, form_for


def test_a_column_of_numbers_is_of_numbers():
    classes, numbers = column([2, 0, np.int64(1)]), column([1, 2.5, np.float64(-1.0)])
    assert classes.dtype == np.int64 and classes.tolist() == [2, 0, 1]
    assert numbers.dtype == np.float64 and numbers.tolist() == [1.0, 2.5, -1.0]
    assert column([]).shape == (0,)


@pytest.mark.parametrize(
    "values",
    [
        ["a", "", "a long one"],
        ["one"],
        [[1, 2], [3, 4]],
        [[1, 2], [3]],
        [[1]],
        [[1, 2]],
        [[], []],
        [("a", "b"), ("c", "d")],
        [{"a": 1}, {"b": 2}],
        [1, "b", None],
        [None],
        [[[1, 2], [3, 4]], [[5, 6], [7, 8]]],
    ],
    ids=repr,
)
def test_a_column_of_anything_else_has_an_object_a_row(values):
    found = column(values)
    assert found.dtype == object and found.shape == (len(values),) and list(found) == values
    assert all(type(one) is type(other) for one, other in zip(found, values, strict=True))
    drawn = found[np.array([len(values) - 1, 0, 0])]  # as a bootstrap does
    assert list(drawn) == [values[-1], values[0], values[0]]


@pytest.mark.parametrize("shape", [(3,), (2, 2), (1,), (0,), ()])
@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_column_of_arrays_has_an_array_a_row(shape, number):
    values = [np.full(shape, i) for i in range(number)]
    found = column(values)
    assert found.dtype == object and found.shape == (number,)
    for one, other in zip(found, values, strict=True):
        assert isinstance(one, np.ndarray) and one.shape == shape and np.array_equal(one, other)


def form(**task: Any) -> Form:
    return form_for(configured(Path("run"), Path("none.csv"), model=ENCODER, task={"labels": ["no", "yes"], **task}))


def encoded(label: Any) -> Encoded:
    ids = np.array([1, 2, 3])
    return Encoded((Segments(ids, ids * 0),), label, SourceLocation(Path("made"), 1), "0")


def test_a_task_names_its_form():
    config = configured(Path("run"), Path("none.csv"), model=ENCODER, task={"labels": ["no", "yes"]})
    task = build_task(config.task)
    found = form_of(task, config)
    assert type(found) is LabelForm and found.task is task and found.config is config


@pytest.mark.parametrize("name", FORM_CLASSES)
def test_every_form_is_where_it_is_said_to_be(name):
    kind = getattr(importlib.import_module(f"megasparse.tasks.forms.{name}"), FORM_CLASSES[name])
    assert issubclass(kind, Form) and not kind.__abstractmethods__


def test_metrics_are_of_labels_and_answers_in_their_order():
    made, examples = form(), [encoded(label) for label in (0, 1, 1, 1)]
    assert made.measures(examples, [0, 1, 0, 1])["accuracy"] == 0.75


def test_a_sketch_learns_the_tasks_classes_or_as_many_as_its_numbers_are_high():
    place = SourceLocation(Path("made"), 1)
    train = [Example(("a",), label, place, "0") for label in (0.4, 3.6, None)]
    assert form(labels=["a", "b", "c"]).sketch_labels(train) == 3
    assert form(labels=[]).sketch_labels(train) == 5
    assert form(labels=[]).sketch_labels(train[:1]) == 2


def test_an_example_of_texts():
    found = form().example(["the model"])
    assert (found.inputs, found.label, found.name) == (("the model",), None, "0")
    with pytest.raises(ConfigError, match=r"--text: 2 given, and an example of .table. has 1\. Give it once"):
        form().example(["a", "b"])
    with pytest.raises(ConfigError, match=r"--text: 1 given, and an example of .table. has 2\. Give it twice"):
        form(text=["a", "b"]).example(["a"])
    config = configured(Path("run"), Path("none"), model=ENCODER, task={"name": "listops", "labels": None})
    with pytest.raises(ConfigError, match=r'--text: "listops" reads no texts'):
        form_for(config).example(["[MAX 1 2]"])


@pytest.mark.parametrize(("labels", "dtype"), [(["no", "yes"], "int64"), ([], "float32")])
def test_a_dummy_batch_is_like_one_of_examples(labels, dtype):
    """It has the shapes and types that `collate` gives, with a mask, and ids that the body knows."""
    made = form(labels=labels)
    body = type("Body", (), {"vocabulary": 11})()
    found, real = made.dummy_batch(body, 5, 16), made.collate([encoded(1), encoded(0)])
    (read,), (given,) = found.sequences, real.sequences
    assert read.tokens.shape == read.types.shape == (5, 16) and int(read.tokens.max()) < 11
    assert read.mask is not None and read.mask.sum(1).tolist() == [15] * 5
    assert str(found.labels.dtype) == str(real.labels.dtype if labels else found.labels.dtype) == f"torch.{dtype}"
    assert (read.tokens.dtype, read.types.dtype) == (given.tokens.dtype, given.types.dtype)
