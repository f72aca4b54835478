"""A file from an http(s) URL, downloaded once: an interrupted download goes on where it stopped."""

import hashlib
import json
import os
import re
import shutil
import time
import urllib.error
import urllib.request
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from urllib.parse import unquote, urlsplit

from tqdm import tqdm

from megasparse.data.files import file_sha256, replacing, sync_folder
from megasparse.data.urls import http_opener, resumed_at
from megasparse.errors import ConfigError, DataError

PIECE = 1 << 20
TIMEOUT_SECONDS = 60
LEAST_BYTES = 60_000  # that must come in each such time: a server that drips would hold us up for ever


def is_url(location: str) -> bool:
    """Whether this is a URL. Raises ConfigError for one that is neither http nor https."""
    scheme, separator, _ = location.partition("://")
    if separator and scheme.lower() not in ("http", "https"):
        raise ConfigError("--source", f'"{scheme}" is not a kind of URL we read', "Give a path, or an http(s) URL")
    return bool(separator)


def download(url: str, folder: Path) -> Path:
    """The local copy of `url` in `folder`, downloaded unless it is there already.

    Beside it NAME.json records the URL and the sha256 of what came. Raises DataError when the server refuses, the
    connection ends early or hardly gets on (the next call goes on from there), the disk has no room for what the
    server announces, or the copy was altered since.
    """
    name = unquote(urlsplit(url).path).rsplit("/", 1)[-1]
    name = f"{hashlib.sha256(url.encode()).hexdigest()[:8]}-{re.sub(r'[^A-Za-z0-9._-]', '_', name)[-120:]}"
    copy, record = folder / name, folder / f"{name}.json"
    if not copy.exists():
        partial = folder / f"{name}.partial"
        try:
            _fetch(url, partial, folder / f"{name}.validator")
        except (OSError, EOFError, HTTPException, ValueError) as error:
            have = partial.stat().st_size if partial.exists() else 0
            reason = f"{str(error) or type(error).__name__} ({have:,} bytes are here)"
            hint = "Run the command again, it goes on from there; or give the path of a file"
            raise DataError(url, f"the download did not complete: {reason}", hint) from None
        partial.replace(copy)
        sync_folder(folder)
    if not record.exists():
        content = {"url": url, "bytes": copy.stat().st_size, "sha256": file_sha256(copy)}
        with replacing(record) as file:
            file.write(json.dumps(content, indent=2).encode() + b"\n")
    elif json.loads(record.read_bytes())["sha256"] != file_sha256(copy):
        raise DataError(copy, "this download was altered since", "Delete it and run the command again")
    return copy


def _fetch(url: str, partial: Path, validator: Path) -> None:
    """Append to `partial` what it lacks, or start over where the server's file may be another one by now."""
    have = partial.stat().st_size if partial.exists() and validator.exists() else 0
    headers = {"Range": f"bytes={have}-", "If-Range": validator.read_text()} if have else {}
    request = urllib.request.Request(url, headers={"User-Agent": "megasparse", **headers})
    try:
        response = http_opener().open(request, timeout=TIMEOUT_SECONDS)
    except urllib.error.HTTPError as error:
        if error.code == 416:  # nothing to go on with: what is here is as long as the server's file, or longer
            partial.unlink()
        raise
    with response:
        have = resumed_at(response, have)
        total = have + _length(response)
        partial.parent.mkdir(parents=True, exist_ok=True)
        _check_room(partial.parent, total - have)
        with partial.open("r+b" if have else "wb") as file:
            _remember(validator, response)  # after the truncation: what it names is always what is in the file
            file.seek(have)
            file.truncate()
            with tqdm(desc="downloading", total=total, initial=have, unit="B", unit_scale=True, disable=None) as bar:
                due, enough = time.monotonic() + TIMEOUT_SECONDS, have + LEAST_BYTES
                while have < total and (piece := response.read1(min(PIECE, total - have))):
                    have += file.write(piece)
                    bar.update(len(piece))
                    if time.monotonic() > due:
                        if have < min(enough, total):
                            raise TimeoutError(f"less than {LEAST_BYTES:,} bytes came in {TIMEOUT_SECONDS} s")
                        due, enough = time.monotonic() + TIMEOUT_SECONDS, have + LEAST_BYTES
            file.flush()
            os.fsync(file.fileno())
    if have < total:
        raise EOFError(f"the connection ended after {have:,} of {total:,} bytes")
    validator.unlink(missing_ok=True)


def _remember(validator: Path, response: HTTPResponse) -> None:
    """Keep the validator by which the server knows next time whether its file has changed; without it we start over."""
    tag = response.headers.get("ETag", "")
    tag = response.headers.get("Last-Modified", "") if not tag or tag.startswith("W/") else tag
    if tag:
        validator.write_text(tag)
    else:
        validator.unlink(missing_ok=True)


def _length(response: HTTPResponse) -> int:
    length = response.headers.get("Content-Length")
    if length is None:
        raise ValueError("the server does not say how long the file is")
    return int(length)


def _check_room(folder: Path, wanted: int) -> None:
    free = shutil.disk_usage(folder).free
    if wanted > free:
        raise OSError(f"the server announces {wanted:,} bytes more, the disk has {free:,} free")
