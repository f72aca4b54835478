"""Corpora of text: any files, enwik8, BookCorpus, PG-19 and WikiText-103. White space separates reference words."""

import hashlib
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import accumulate, groupby
from operator import itemgetter
from pathlib import Path, PurePath
from typing import Any, ClassVar

from megasparse.data.corpora.corpus import (
    NAMES,
    SPLIT_NAMES,
    SPLIT_OPTION,
    CorpusSettings,
    CorpusSplits,
    TextCorpus,
    as_bytes,
    cut,
    option,
    require_full,
    split_at,
    split_sizes,
    text_pieces,
)
from megasparse.data.corpora.source import CONVERT, Part, Source, report_left_out
from megasparse.errors import DataError, report_line


class Text(TextCorpus):
    """Any text: one file, several or a folder, concatenated and split by byte position.

    With --documents each file is a document, with a separator after it, in the split that contains its first byte.
    White space separates reference words.
    """

    EXAMPLE = "--source books/ --split 98,1,1 --output data/books"

    DOCUMENTS_OPTION = option("--documents", action="store_true", help="each file is a document, a separator after it")
    OPTIONS = TextCorpus.OPTIONS | SPLIT_OPTION | DOCUMENTS_OPTION

    def open(
        self, locations: Any, member: str | None, downloads: Path, settings: CorpusSettings, workers: int
    ) -> Source:
        return Source.open(locations, member, downloads, "files" if settings.get("documents") else "stream")

    def splits(self, source: Source, settings: CorpusSettings) -> CorpusSplits:
        sizes = split_sizes(settings["split"], source.total_bytes)
        documents = settings.get("documents", False)
        if documents or not as_bytes(settings):
            source.require_text(zeros=not (documents and as_bytes(settings)))
        elif part := next((part for part in source.parts if part.not_utf8 is not None), None):
            report_line(part, f"byte {part.not_utf8:,} is not UTF-8, so it is read as bytes. {CONVERT}")
        starts = list(accumulate((part.size for part in source.parts), initial=0))[:-1]
        if not documents:
            require_full(source, sizes, f"{source.total_bytes} bytes")
            return cut(source.pieces(), sizes, whole_characters=not as_bytes(settings))
        counts = Counter(split_at(start, sizes) for start in starts)
        require_full(source, {name: counts[name] for name in sizes}, f"{len(starts)} documents")
        grouped = groupby(zip(starts, source.parts, strict=True), key=lambda file: split_at(file[0], sizes))
        return ((name, (text_pieces(part.pieces()) for _, part in group)) for name, group in grouped)


class Enwik8(TextCorpus):
    """The corpus enwik8: the first 100,000,000 bytes of an English Wikipedia dump (Mahoney), split 90M/5M/5M by byte
    position, so that figures are comparable. White space separates reference words, which include markup.
    """

    EXAMPLE = "--source https://mattmahoney.net/dc/enwik8.zip --output data/enwik8"
    MD5 = "a1fa5ffddb56f4953e226637dabbb36a"  # as published with the file
    SPLITS: ClassVar = {"train": 90_000_000, "validation": 5_000_000, "test": 5_000_000}

    def splits(self, source: Source, settings: CorpusSettings) -> CorpusSplits:
        """Cut by byte. With other tokenizers than bytes a border inside a character moves to its end."""
        official = sum(self.SPLITS.values())
        if source.total_bytes != official:
            raise DataError(source.name, f"enwik8 has {official:,} bytes, this {source.total_bytes:,}", "Get it again")
        if source.md5 != self.MD5:
            raise DataError(source.name, f"md5 is {source.md5}, enwik8's is {self.MD5}", "Download it again")
        return cut(source.pieces(), self.SPLITS, whole_characters=not as_bytes(settings))


class BookCorpus(TextCorpus):
    """BookCorpus (Zhu et al. 2015) and similar files: one sentence per line; an empty line or a file's end ends a book.

    Empty lines are removed, and the tokenizer's separator follows each book. A book belongs to the split that contains
    its first byte. The published books_large_p1.txt and books_large_p2.txt, without empty lines, are two documents, or
    one text split by byte position if a split would be empty. No checksums are published. White space separates
    reference words.
    """

    EXAMPLE = "--source books_in_sentences/ --split 98,1,1 --output data/bookcorpus"
    KIND = "files"
    OPTIONS = TextCorpus.OPTIONS | SPLIT_OPTION
    DOCUMENTS = True
    EMPTY_LINE = re.compile(rb"(?m)(^[ \t\r\f\v]*\n)")

    def about(self, source: Source, settings: CorpusSettings) -> dict[str, Any]:
        """Return the number of books of each split, none of running text."""
        source.require_text(zeros=not as_bytes(settings))
        sizes = split_sizes(settings["split"], source.total_bytes)
        books = self._counts(source, sizes)
        if not books:
            report_line(source.name, "no empty line is between books, one running text is split")
        else:
            require_full(source, {name: books[name] for name in sizes}, f"{books.total()} books")
        return {"books": dict(books)}

    def splits(self, source: Source, settings: CorpusSettings) -> CorpusSplits:
        sizes = split_sizes(settings["split"], source.total_bytes)
        if not self._counts(source, sizes):
            yield from cut(source.pieces(), sizes, whole_characters=True)
            return
        for name, lines in groupby(self._books(source), key=lambda piece: split_at(piece[0], sizes)):
            yield name, (map(itemgetter(1), book) for _, book in groupby(lines, key=itemgetter(0)))

    def _counts(self, source: Source, sizes: Mapping[str, int]) -> Counter[str]:
        """Return the books of each split; none if no file contains an empty line, and a split would be empty."""
        books = Counter(split_at(start, sizes) for start, _ in groupby(self._books(source), key=itemgetter(0)))
        return Counter() if books.total() == len(source.parts) and len(books) < len(sizes) else books

    def _books(self, source: Source) -> Iterator[tuple[int, bytes]]:
        """Yield (byte of the source that a book starts at, its next lines): each book a piece or more."""
        position = 0
        for part in source.parts:
            book: int | None = None
            for piece in text_pieces(part.pieces()):
                for number, text in enumerate(self.EMPTY_LINE.split(piece)):
                    if number % 2:
                        book = None
                    elif text:
                        book = position if book is None else book
                        yield book, text
                    position += len(text)


class PG19(TextCorpus):
    """PG-19 (Rae et al. 2020): books of Project Gutenberg from before 1919, in folders train/, validation/ (or valid/)
    and test/.

    Each file NNN.txt is a book and a document. No checksums are published: `official` means that the numbers of books
    are the published ones. White space separates reference words; the published counts are 1,973,136,207, 3,007,061
    and 6,966,499.
    """

    EXAMPLE = "--source deepmind-gutenberg/ --output data/pg19"
    KIND = "files"
    DOCUMENTS = True
    OFFICIAL: ClassVar = {"train": 28_602, "validation": 50, "test": 100}

    def about(self, source: Source, settings: CorpusSettings) -> dict[str, Any]:
        source.require_text(zeros=not as_bytes(settings))
        counts = {name: len(parts) for name, parts in self._books(source).items()}
        others = [part.name for part in source.parts if ".txt" not in part.name]
        report_left_out(source.name, sum(counts.values()), others, "they are no books")
        return {"books": counts, "official": counts == self.OFFICIAL}

    def splits(self, source: Source, settings: CorpusSettings) -> CorpusSplits:
        for name, books in self._books(source).items():
            yield name, (text_pieces(part.pieces()) for part in books.values())

    def _books(self, source: Source) -> dict[str, dict[int, Part]]:
        books: dict[str, dict[int, Part]] = {name: {} for name in NAMES}
        for part in source.parts:
            path = part.path if part.member is None else PurePath(part.member)
            if ".txt" not in path.suffixes:
                continue
            split, number = SPLIT_NAMES.get(path.parent.name), path.name.partition(".")[0]
            if split is None or not (number.isascii() and number.isdigit()):
                raise DataError(part, "this is not a book of PG-19, {train,validation,test}/NNN.txt", "Leave it out")
            for other, parts in books.items():
                if int(number) in parts:
                    raise DataError(part, f"the book {number} is in {other} as well ({parts[int(number)]})", "Keep one")
            books[split][int(number)] = part
        if not any(books.values()):
            raise DataError(source.name, "there is no {train,validation,test}/NNN.txt", "Check --source")
        return {name: dict(sorted(parts.items())) for name, parts in books.items() if parts}


class WikiText103(TextCorpus):
    """WikiText-103 (Merity et al. 2016): wiki.{train,valid,test}.tokens, or .raw, in a folder or the official zip.

    Each official split is one stream of lines. Ends of lines are reference words, too, as in the word perplexities of
    the literature (245,569 words in the test split). SHA-1 checksums are those of gluonnlp.data.WikiText103 and
    WikiText103Raw, numbers of lines those of torchtext.datasets.WikiText103.
    """

    EXAMPLE = "--source wikitext-103-v1.zip --tokenizer tokenizers/wikitext103.txt --output data/wikitext103"
    KIND = "files"
    LINE_ENDS = True
    FILE = re.compile(r"(?:.*/)?wiki\.(train|valid|test)\.(tokens|raw)", re.DOTALL)
    LINES: ClassVar = {"train": 1_801_350, "validation": 3_760, "test": 4_358}
    SHA1: ClassVar = {
        "tokens": {
            "train": "b7497e2dfe77e72cfef5e3dbc61b7b53712ac211",
            "validation": "c326ac59dc587676d58c422eb8a03e119582f92b",
            "test": "8a5befc548865cec54ed4273cf87dbbad60d1e47",
        },
        "raw": {
            "train": "3d06627c15e834408cfee91293f862c11c1cc9ef",
            "validation": "db78d4db83700cba1b1bf4a9381087043db2876d",
            "test": "6f1fe2054a940eebfc76b284b09680763b37f5ea",
        },
    }

    def about(self, source: Source, settings: CorpusSettings) -> dict[str, Any]:
        """Return the kind of the files, and if all three are official. A file with the official number of lines but
        another checksum is an error.
        """
        source.require_text()
        kind, files = self._files(source)
        others = [part.name for part in source.parts if part not in files.values()]
        report_left_out(source.name, len(files), others, "they are no splits of WikiText-103")
        digests = {}
        for name, part in files.items():
            digest, lines = hashlib.sha1(usedforsecurity=False), 0
            for piece in part.pieces():
                digest.update(piece)
                lines += piece.count(b"\n")
            digests[name] = digest.hexdigest()
            published = self.SHA1[kind][name]
            if lines == self.LINES[name] and digests[name] != published:
                problem = f"its sha1 is {digests[name]}, the official file's is {published}"
                raise DataError(part, problem, "Download it again")
        return {"kind": kind, "official": digests == self.SHA1[kind]}

    def splits(self, source: Source, settings: CorpusSettings) -> CorpusSplits:
        for name, part in self._files(source)[1].items():
            yield name, [text_pieces(part.pieces())]

    def _files(self, source: Source) -> tuple[str, dict[str, Part]]:
        """Return "tokens" or "raw", and the file of each split."""
        parts: dict[str, dict[str, Part]] = {kind: {} for kind in self.SHA1}
        for part in source.parts:
            if match := self.FILE.fullmatch(part.name):
                name, files = SPLIT_NAMES[match[1]], parts[match[2]]
                if name in files:
                    raise DataError(part, f"{files[name]} is the same split", "Give one of the two")
                files[name] = part
        kinds = [kind for kind, files in parts.items() if files]
        if len(kinds) != 1:
            problem = "there are both .tokens and .raw files" if kinds else "there is no wiki.train.tokens"
            raise DataError(source.name, problem, "Give wiki.train, wiki.valid and wiki.test of one kind")
        files = parts[kinds[0]]
        return kinds[0], {name: files[name] for name in NAMES if name in files}
