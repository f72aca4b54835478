"""Polarity of sentences in the form of rt-polarity.neg and rt-polarity.pos."""

import pytest


@pytest.fixture
def folder(tmp_path):
    for name in ("neg", "pos"):
        text = "".join(f"{name} sentence {n} . \n" for n in range(23))
        (tmp_path / f"rt-polarity.{name}").write_text(text)
    return tmp_path


@pytest.mark.parametrize("encoding", ["utf-8", "latin-1"])
def test_both_encodings_give_the_same_text(task, folder, encoding):
    file = folder / "rt-polarity.pos"
    sentences = ["un café \x85 à l'été .", "plain", "señor"]
    file.write_bytes("".join(f"{each}\r\n" for each in sentences).encode(encoding))
    assert [example.inputs[0] for example in task.read(file)] == sentences


def test_sentences_of_another_file_have_no_label(task, tmp_path):
    file = tmp_path / "new.txt"
    file.write_text("one\n\nthree")
    assert [(example.inputs, example.label) for example in task.read(file)] == [
        (("one",), None),
        (("",), None),
        (("three",), None),
    ]
    file.write_text("")
    assert list(task.read(file)) == []
