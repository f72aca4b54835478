"""CNN/DailyMail: news and their editors' summaries of a few lines (Hermann et al. 2015, See et al. 2017)."""

import hashlib
from collections.abc import Iterator
from pathlib import Path

from megasparse.errors import DataError
from megasparse.tasks.readers.parallel_text import ParallelText
from megasparse.tasks.readers.rows import lines
from megasparse.tasks.readers.text_task import ROUGE
from megasparse.tasks.task import Example, SourceLocation, existing

LISTS = {"train": "all_train.txt", "validation": "all_val.txt", "test": "all_test.txt"}
STORIES = ("cnn/stories", "dailymail/stories", "cnn_stories_tokenized", "dm_stories_tokenized")
HIGHLIGHT = "@highlight"


class CNNDailyMail(ParallelText):
    """The stories as they are downloaded (cnn/stories/*.story, dailymail/stories/*.story) or tokenised
    (cnn_stories_tokenized/, dm_stories_tokenized/), and beside them, or in url_lists/, the splits of See et al.:
    all_train.txt, all_val.txt, all_test.txt, a URL a line, whose sha1 is the name of its story.

    A story is the lines before the first @highlight, with a space between them; its summary the highlights, each on
    a line of its own. Case is kept, and no full stop is added to a highlight, where See et al. write lower case and
    add one: ROUGE sees neither.
    The other form has a line a story: train.source and train.target, val, test. There a summary is one line, so that
    rougeLsum is rougeL.

    A .story file is an example too, without a label where it has no highlights.
    """

    name = "cnn_dm"
    metrics = ROUGE

    def sides(self) -> tuple[str, str]:
        return "source", "target"

    def files(self, folder: Path) -> dict[str, list[Path]]:
        return existing(folder, LISTS) or existing(folder / "url_lists", LISTS) or self.found(folder)

    def read(self, file: Path) -> Iterator[Example]:
        if file.suffix == ".story":
            yield story(file)
        elif file.name in LISTS.values():
            with self.skipping(file) as skipping:
                for location, url in lines(file, skipping):
                    with skipping:
                        yield story(_story_file(url, location))
        else:
            yield from super().read(file)


def story(file: Path) -> Example:
    """The example of one .story file. Raises DataError where it cannot be read."""
    found = [line.strip() for _, line in lines(file)]
    end = found.index(HIGHLIGHT) if HIGHLIGHT in found else len(found)
    highlights = [line for line in found[end:] if line and line != HIGHLIGHT]
    text = " ".join(line for line in found[:end] if line)
    return Example((text,), "\n".join(highlights) or None, SourceLocation(file), file.stem)


def _story_file(url: str, location: SourceLocation) -> Path:
    """The file of the story that a list names by its URL."""
    name = hashlib.sha1(url.encode(), usedforsecurity=False).hexdigest() + ".story"
    above = location.file.parent
    folders = [root / inner for root in (above, above.parent) for inner in STORIES]
    for folder in folders:
        if (folder / name).exists():
            return folder / name
    hint = f"Put all stories into {', '.join(STORIES[:2])} beside the lists"
    raise DataError(str(location), f"there is no {name} of {url[:80]}", hint)
