"""Polarity of sentences of film reviews (Pang and Lee 2005): 5,331 that praise, and 5,331 that do not."""

from collections.abc import Iterator
from pathlib import Path

from megasparse.tasks.readers.parts import is_in, parts_of, split_name
from megasparse.tasks.readers.rows import whole_bytes
from megasparse.tasks.task import Example, SourceLocation, Task


class SentencePolarity(Task):
    """The official rt-polarity.neg and rt-polarity.pos, a sentence a line. There are no official splits: see
    readers/parts.py.

    The authors' files are Latin-1, the ones that NLTK ships UTF-8: a file that is no UTF-8 is read as Latin-1. What
    another file has (its name ends neither in .neg nor in .pos) is sentences without labels.
    """

    name = "sentence_polarity"
    metrics = ("accuracy",)
    classes = ("neg", "pos")

    def files(self, folder: Path) -> dict[str, list[Path]]:
        return parts_of([folder / f"rt-polarity.{name}" for name in self.classes])

    def read(self, file: Path) -> Iterator[Example]:
        file, part = split_name(file)
        name = file.suffix.removeprefix(".")
        label = self.classes.index(name) if name in self.classes else None
        *sentences, rest = _text(file).split("\n")  # not splitlines: Latin-1 has one character more that it splits at
        for number, sentence in enumerate([*sentences, rest] if rest else sentences):
            if is_in(part, number):
                yield Example((sentence.removesuffix("\r"),), label, SourceLocation(file, number + 1), str(number))


def _text(file: Path) -> str:
    data = whole_bytes(file)
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        return data.decode("latin-1")
