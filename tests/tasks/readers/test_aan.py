import pytest

from megasparse.config.finetuning import TaskConfig
from megasparse.tasks import build_task


@pytest.fixture
def task():
    return build_task(TaskConfig(name="aan"))


def test_a_pair_is_read_as_it_stands(task, tmp_path):
    # A text is what Python shows of bytes; its escapes stay, and a quotation mark is no quotation.
    path = tmp_path / "new_aan_pairs.train.tsv"
    texts = ("b'Parsing \\xe2\\x80\\x93 a survey\\n1 Introduction'", 'b"It\'s \\"quoted"')
    path.write_text(f"1.0\tP05-1022\tW04-0301\t{texts[0]}\t{texts[1]}\n0\tA00\tB11\t\"b''\tb'y'\n", encoding="utf-8")
    first, second = task.read(path)
    assert first.inputs == texts
    assert r"\xe2\x80\x93" in first.inputs[0] and r"\n1 Intro" in first.inputs[0]
    assert (first.label, first.name, str(first.location)) == (1, "P05-1022 W04-0301", f"{path}:1")
    assert (second.label, second.inputs, second.location.line) == (0, ("\"b''", "b'y'"), 2)
    assert task.towers and task.vocabulary is None and task.metrics == ("accuracy",)
