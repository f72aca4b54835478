"""Files whose digest their makers, or others, have published."""

import hashlib
from collections.abc import Mapping
from pathlib import PurePosixPath

from megasparse.data.corpora.source import Source
from megasparse.errors import DataError


def verify_official(source: Source, known: Mapping[str, str]) -> list[str]:
    """Names of a source's files that are the official ones. Raises DataError for one that only has the name.

    known: md5 (32 digits) or sha256 by the name of the file, which files in folders and behind URLs alike have.
    """
    verified = []
    for part in source.parts:
        name = PurePosixPath(part.name).name
        if name in known:
            kind = "md5" if len(known[name]) == 32 else "sha256"
            digest = hashlib.new(kind, usedforsecurity=False)
            for piece in part.pieces():
                digest.update(piece)
            if (found := digest.hexdigest()) != known[name]:
                problem = f"its {kind} is {found[:12]}…, the official file's is {known[name][:12]}…"
                raise DataError(str(part), problem, "Get it again; rename it if it is a file of your own")
            verified.append(name)
    return verified
