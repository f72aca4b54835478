"""The first three challenges of recognising textual entailment (Dagan et al. 2006, Bar-Haim et al. 2006, Giampiccolo et
al. 2007), the sets that GLUE's RTE is made of, as their XML files: rteN_dev.xml and rteN_test.xml, N from 1 to 3.

`train` is the three development sets, 1,767 pairs, and `test` the three test sets, 2,400 pairs, with labels. GLUE's RTE
deals the same pairs out otherwise and adds a fifth challenge: figures for one are none for the other.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar
from xml.parsers import expat

from megasparse.errors import DataError
from megasparse.tasks.readers.rows import whole_bytes
from megasparse.tasks.task import Example, SourceLocation, Task

HINT = "Put it right, or take the official file"
ENTAILMENT = {
    "YES": "entailment",
    "NO": "not_entailment",
    "TRUE": "entailment",  # the first challenge's words
    "FALSE": "not_entailment",
}


class RTEChallenge(Task):
    """Whether a text entails a hypothesis. `source`: the folder of the six files, or the one that holds it as rte/."""

    name = "rte_challenge"
    metrics = ("accuracy",)
    segments = 2
    classes = ("entailment", "not_entailment")
    official: ClassVar = {
        "train": [f"rte{number}_dev.xml" for number in (1, 2, 3)],
        "test": [f"rte{number}_test.xml" for number in (1, 2, 3)],
    }
    inner = "rte"

    def read(self, file: Path) -> Iterator[Example]:
        with self.skipping(file) as skipping:
            for location, attributes, texts in pairs(file):
                skipping.rows += 1
                with skipping:
                    if "id" not in attributes:
                        raise DataError(str(location), "a pair without an id", HINT)
                    if missing := [name for name in ("t", "h") if name not in texts]:
                        raise DataError(str(location), f"pair {attributes['id']} has no <{missing[0]}>", HINT)
                    answer = attributes.get("entailment", attributes.get("value"))
                    label = None if answer is None else self.class_of(ENTAILMENT.get(answer, answer), location)
                    yield Example((texts["t"], texts["h"]), label, location, attributes["id"])


def pairs(file: Path) -> Iterator[tuple[SourceLocation, dict[str, str], dict[str, str]]]:
    """The location of each <pair>, its attributes, and the text of each element in it.

    Nothing outside the file is read: the DTD that the official files name, which says nothing of their content, is
    not. Raises DataError for what is no XML, and for a file that declares or uses entities of its own, by which a small
    file can become a large one or read others.
    """
    content, reader = whole_bytes(file), _Reader(file)
    try:
        reader.parser.Parse(content, True)
    except expat.ExpatError as error:
        problem = f"is no XML ({expat.ErrorString(error.code)})"
        raise DataError(str(SourceLocation(file, error.lineno)), problem, HINT) from None
    except (LookupError, ValueError) as error:
        raise DataError(file, f"is in an encoding that cannot be read ({error})", "Convert it to UTF-8") from None
    if not reader.found:
        raise DataError(file, "has no <pair>", "Give a file of the task")
    yield from reader.found


class _Reader:
    def __init__(self, file: Path):
        self.file = file
        self.found: list[tuple[SourceLocation, dict[str, str], dict[str, str]]] = []
        self.inside: tuple[SourceLocation, dict[str, str], dict[str, str]] | None = None
        """The <pair> that is being read; `element` is the one inside it."""
        self.element: str | None = None
        self.parser = expat.ParserCreate()
        self.parser.buffer_text = True
        self.parser.StartElementHandler = self._start
        self.parser.EndElementHandler = self._end
        self.parser.CharacterDataHandler = self._text
        self.parser.StartDoctypeDeclHandler = self._doctype
        self.parser.SkippedEntityHandler = self._skipped_entity

    def _start(self, name: str, attributes: dict[str, str]) -> None:
        if name == "pair":
            self._require(self.inside is None, "a <pair> inside a <pair>")
            self.inside = (self._location(), attributes, {})
        elif self.inside is not None:
            self._require(self.element is None, f"<{name}> inside <{self.element}>")
            self._require(name not in self.inside[2], f"a second <{name}> of a pair")
            self.element = name
            self.inside[2][name] = ""

    def _end(self, name: str) -> None:
        if name == "pair":
            assert self.inside is not None
            self.found.append(self.inside)
            self.inside = None
        self.element = None

    def _text(self, text: str) -> None:
        if self.inside is not None and self.element is not None:
            self.inside[2][self.element] += text

    def _doctype(self, name: str, system: str | None, public: str | None, declares: int) -> None:
        self._require(not declares, "declares a document type of its own, and with it perhaps entities")

    def _skipped_entity(self, name: str, parameter: bool) -> None:
        self._require(False, f"&{name}; is declared nowhere")

    def _require(self, holds: bool, problem: str) -> None:
        if not holds:
            raise DataError(str(self._location()), problem, HINT)

    def _location(self) -> SourceLocation:
        return SourceLocation(self.file, self.parser.CurrentLineNumber)
