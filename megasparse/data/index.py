"""The index of a folder of shards, as a run uses it. Read and checked before anything else of a run."""

import hashlib
import json
import shlex
from dataclasses import dataclass
from functools import cached_property
from io import BytesIO
from pathlib import Path

from megasparse.data.index_file import INDEX_FILE, MOST_BYTES, SEPARATOR, IndexFile, Shard, Split, parse, parse_content
from megasparse.data.shard_file import ShardFile, check_size
from megasparse.data.tokenizers import Tokenizer
from megasparse.data.urls import Requests, ShardCache, check_url, is_url
from megasparse.errors import ConfigError, DataError, did_you_mean
from megasparse.files import Progress


@dataclass(frozen=True)
class Index:
    """The checked index of a folder of shards."""

    directory: Path | str
    """Path or URL of the folder."""
    file: IndexFile
    cache: ShardCache | None = None
    """Cache of the shards of a URL."""

    @classmethod
    def load(cls, directory: str | Path, cache: ShardCache | None = None) -> "Index":
        """Read DIRECTORY/index.json and check it against the sizes of the shards on disk.

        directory: a path or a URL. The shards of a URL are fetched into `cache`; the content of shards is checked as
        they are first read. Raises DataError if the index is missing or invalid, or a shard is missing or differs in
        size.
        """
        if is_url(str(directory)):
            directory, content = check_url(str(directory)), BytesIO()
            Requests().fetch(url := f"{directory}/{INDEX_FILE}", content, MOST_BYTES)
            return cls(directory, parse_content(content.getvalue(), url, IndexFile), cache or ShardCache())
        directory = Path(directory)
        path = directory / INDEX_FILE
        if not path.exists():
            raise DataError(directory, f"there is no data here: {INDEX_FILE} is missing", _how_to_prepare(directory))
        index = cls(directory, parse(path, IndexFile))
        for split in index.file.splits.values():
            for shard in split.shards:
                check_size(index.path(shard), shard, index.path(shard))
        return index

    def split(self, name: str) -> Split:
        """Return the split of this name. Raises DataError naming the splits there are."""
        if name not in self.file.splits:
            problem = f'there is no split "{name}" in this data'
            raise DataError(f"{self.directory}/{INDEX_FILE}", problem, did_you_mean(name, self.file.splits))
        return self.file.splits[name]

    def path(self, shard: Shard) -> Path:
        """Return the path of a shard: of a URL, once it was fetched."""
        return self.cache.path(shard) if self.cache else Path(self.directory, shard.file)

    def open(self, shard: Shard, progress: Progress) -> ShardFile:
        """Open a shard, fetched if needed. Raises DataError, and ConfigError if the cache is too small for it."""
        if self.cache is not None:
            return self.cache.open(shard, f"{self.directory}/{shard.file}", self.sample_bytes, progress)
        return ShardFile(self.path(shard), shard, self.sample_bytes)

    @property
    def sample_bytes(self) -> int:
        """Size of every sample but the last of a split."""
        return self.file.settings["sample_bytes"]

    @property
    def record(self) -> int | None:
        """Tokens of a record (an image, a pair), which every sequence must be; None for running text."""
        return self.file.settings.get("record")

    @cached_property
    def fingerprint(self) -> str:
        """The sha256 over all that decides which tokens a run sees."""
        splits = {
            name: [[s.sha256, s.tokens, s.samples, *([s.width] if s.width > 1 else [])] for s in split.shards]
            for name, split in self.file.splits.items()
        }
        identity = {"format": self.file.format, "tokenizer": self.file.tokenizer.model_dump(), "splits": splits}
        return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()

    def require_tokenizer(self, tokenizer: Tokenizer) -> None:
        """Raise ConfigError unless the shards were made with exactly this tokenizer."""
        entry = self.file.tokenizer
        if (entry.name, entry.sha256) != (tokenizer.name, tokenizer.sha256):
            problem = (
                f'"{tokenizer.name}" (sha256 {tokenizer.sha256[:12]}…), but the shards in {self.directory} '
                f'were made with "{entry.name}" (sha256 {entry.sha256[:12]}…)'
            )
            raise ConfigError("data.tokenizer", problem, "Set data.tokenizer to theirs, or prepare the data again")

    def require_length(
        self, sequence_length: int, source_length: int | None = None, evaluation_length: int | None = None
    ) -> None:
        """Raise ConfigError unless the shards' records fit the lengths of training and evaluation, and start with
        `source_length` source tokens if a model's encoder takes so many.
        """
        for key, length in (
            ("data.sequence_length", sequence_length),
            ("evaluation.sequence_length", evaluation_length or sequence_length),
        ):
            if self.record not in (None, length):
                problem = f"{length} tokens, but each record of the shards in {self.directory} has {self.record}"
                raise ConfigError(key, problem, f"Set it to {self.record}")
        stated = self.file.settings.get("source_length")
        if source_length is not None and type(stated) is int and stated != source_length:
            problem = f"{source_length} tokens, but in the records of {self.directory} the source has {stated}"
            raise ConfigError("model.source.length", problem, f"Set it to {stated}")

    def require_room(self, tokenizer: Tokenizer, vocabulary: int, padding_token: int | None) -> None:
        """Raise ConfigError unless the vocabulary covers every token of the shards, and the padding token is theirs.

        Records contain special tokens if their width fits those: only padded texts do.
        """
        width = max(shard.width for split in self.file.splits.values() for shard in split.shards)
        special = tokenizer.special if self.record is not None and SEPARATOR not in self.file.source else None
        if special is not None and max(special) >= 256**width:
            special = None
        highest = max(tokenizer.vocabulary - 1, *(special or (0,)))
        if highest >= vocabulary:
            problem = f"{vocabulary} is too small: tokens of the shards in {self.directory} go up to {highest}"
            raise ConfigError("model.vocabulary", problem, f"Set it to {highest + 1} or more")
        if special is not None and padding_token != special.padding:
            problem = f"{json.dumps(padding_token)}, but the padding in {self.directory} is {special.padding}"
            raise ConfigError("model.padding_token", problem, f"Set it to {special.padding}")


def _how_to_prepare(directory: Path) -> str:
    from megasparse.data.corpora import CORPORA  # takes a second to import

    name = next((corpus for corpus in CORPORA if corpus in directory.name), "text")
    options = CORPORA[name].EXAMPLE.rpartition("--output")[0]
    command = f"megasparse prepare-data {name} {options}--output {shlex.quote(str(directory))}"
    return f"Prepare it: {command}; or give pretrain your texts: --data my_books/"
