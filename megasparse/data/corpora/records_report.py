"""What was read of a source of records, as a file beside its shards."""

from pathlib import Path

import numpy as np
from pydantic import BaseModel

from megasparse.data.corpora.records import RecordSource
from megasparse.data.files import replacing
from megasparse.data.index import Index

QUANTILES = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)


class Lengths(BaseModel):
    """Lengths of the documents, in bytes."""

    mean: float
    quantiles: dict[str, int]
    edges: list[int]
    """Powers of two: the i-th class is of lengths from edges[i] to below edges[i + 1]."""
    documents: list[int]
    """Documents of each class."""
    bytes: list[int]
    """Bytes of all documents of each class."""


class Report(BaseModel):
    """A source of records: what there was, and what is kept of it."""

    source: list[str]
    revision: str | None
    """The revision of the source, where it has one."""
    sha256: str
    files: int
    records: int
    documents: int
    bytes: int
    left_out: dict[str, int]
    """Records by the reason for which they are left out."""
    lengths: Lengths
    splits: dict[str, dict[str, int | float]]
    """Documents, bytes, tokens and bytes a token of each."""
    read: list[dict[str, str | int]]
    """Each file, its records and documents."""


def write_report(source: RecordSource, index: Index, path: Path) -> Report:
    """Write the report of a source whose shards have this index. It depends on nothing but the two."""
    lengths = [found for _, found in source.lengths()]
    records = [len(each.lengths) + each.unfit.total() for each in source.examined]
    counts = index.file.source["documents"]
    splits = {}
    for name, split in index.file.splits.items():
        size = {"documents": counts[name], "bytes": split.raw_bytes or 0, "tokens": split.tokens}
        splits[name] = {**size, "bytes_per_token": round(size["bytes"] / split.tokens, 4)}
    report = Report(
        source=list(source.locations),
        revision=source.facts.get("revision"),
        sha256=source.sha256,
        files=len(source.parts),
        records=sum(records),
        documents=sum(map(len, lengths)),
        bytes=source.total_bytes,
        left_out=source.left_out(),
        lengths=_lengths(np.concatenate(lengths)),
        splits=splits,
        read=[
            {"file": part.name, "records": count, "documents": len(found)}
            for part, count, found in zip(source.parts, records, lengths, strict=True)
        ],
    )
    with replacing(path) as file:
        file.write(report.model_dump_json(indent=1).encode() + b"\n")
    return report


def _lengths(lengths: np.ndarray) -> Lengths:
    """lengths: int64 (documents,), each above 0."""
    classes = np.frexp(lengths.astype(np.float64))[1] - 1  # 2^class <= length < 2^(class + 1)
    first, last = int(classes.min()), int(classes.max())
    count = last - first + 1
    size = np.zeros(count, dtype=np.int64)
    np.add.at(size, classes - first, lengths)
    quantiles = np.quantile(lengths, QUANTILES, method="inverted_cdf").tolist()
    return Lengths(
        mean=round(float(lengths.mean()), 2),
        quantiles={str(part): int(value) for part, value in zip(QUANTILES, quantiles, strict=True)},
        edges=[1 << power for power in range(first, last + 2)],
        documents=np.bincount(classes - first, minlength=count).tolist(),
        bytes=size.tolist(),
    )
