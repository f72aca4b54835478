"""The common part of forms: columns that metrics read, answers of texts, and the form that a task names."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megasparse.tasks.batches import Encoded, Segments
from megasparse.tasks.form import Form, column
from megasparse.tasks.task import Example, SourceLocation
from tests.helpers.finetuning import ENCODER, configured, form_for


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


def form(**task: Any) -> Form:
    return form_for(configured(Path("run"), Path("none.csv"), model=ENCODER, task={"labels": ["no", "yes"], **task}))


def encoded(label: Any) -> Encoded:
    ids = np.array([1, 2, 3])
    return Encoded((Segments(ids, ids * 0),), label, SourceLocation(Path("made"), 1), "0")


def test_a_sketch_learns_the_tasks_classes_or_as_many_as_its_numbers_are_high():
    place = SourceLocation(Path("made"), 1)
    train = [Example(("a",), label, place, "0") for label in (0.4, 3.6, None)]
    assert form(labels=["a", "b", "c"]).sketch_labels(train) == 3
    assert form(labels=[]).sketch_labels(train) == 5
    assert form(labels=[]).sketch_labels(train[:1]) == 2


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
