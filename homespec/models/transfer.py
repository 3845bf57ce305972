"""Bytes over HTTP: a download that goes on after any interruption, and reads of single ranges.

huggingface_hub 1.x writes each download to a file of a random name and throws it away when
interrupted, so that a killed download starts from nothing. Here every network read is written at
once to a partial file bound to the content's digest, and the next run appends to it.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import httpx

from homespec.disk import disk_error
from homespec.errors import HomespecError, NetworkError, NoRangesError
from homespec.models.explain import explain, is_transient, retry_after
from homespec.models.files import (
    PART,
    human,
    remember_verified,
    require_free,
    sha256_of,
)
from homespec.models.references import Progress

_T = TypeVar("_T")
_TRIES = 4  # without a single new byte
_TRIES_TO_REACH = 2  # a server that does not answer at all
_FIRST_DELAY_SECONDS = 0.5
_LONGEST_DELAY_SECONDS = 30.0
_READ_AHEAD_BYTES = 256 << 10
_LONGEST_READ_AHEAD_BYTES = 4 << 20


def patiently(request: Callable[[], _T], subject: str) -> _T:
    """The result of `request`, tried again after failures that pass; others are explained."""
    attempt = 0
    while True:
        try:
            return request()
        except HomespecError:
            raise
        except Exception as exc:
            attempt += 1
            answered = hasattr(exc, "response")
            _wait_or_raise(exc, attempt, _TRIES if answered else _TRIES_TO_REACH, subject)


def _wait_or_raise(exc: Exception, attempt: int, tries: int, subject: str) -> None:
    """Sleep before another attempt, or raise the plain sentence where none makes sense."""
    delay = _FIRST_DELAY_SECONDS * 2 ** (attempt - 1)
    response = getattr(exc, "response", None)
    if isinstance(response, httpx.Response):
        delay = max(delay, retry_after(response) or 0)
    if attempt >= tries or not is_transient(exc) or delay > _LONGEST_DELAY_SECONDS:
        raise explain(exc, subject) from exc
    time.sleep(delay)


@dataclass(frozen=True, slots=True)
class Request:
    """A file on a server, and how to ask for it; `subject` names it in sentences."""

    client: httpx.Client
    url: str
    subject: str
    headers: dict[str, str]
    timeout: float

    def stream(self, **headers: str) -> AbstractContextManager[httpx.Response]:
        """Ask for the file, unpacked, with more headers."""
        return self.client.stream(
            "GET",
            self.url,
            headers={**self.headers, "Accept-Encoding": "identity", **headers},
            timeout=self.timeout,
        )


def download(
    request: Request,
    part: Path,
    *,
    name: str,
    size_bytes: int | None,
    progress: Progress | None = None,
) -> None:
    """Append to `part` until it is whole.

    Where the size is not known, `part` is not bound to a content either: then the server's ETag
    (or date) is kept beside it and sent along, so that a file that changed starts afresh. Raises
    NetworkError where no byte comes in several tries; what has come so far stays.
    """
    attempt = 0
    while size_bytes is None or _size(part) != size_bytes:
        if size_bytes is not None and _size(part) > size_bytes:
            part.unlink()
        before = _size(part)
        try:
            _append(request, part, size_bytes, lambda d, t: progress and progress(name, d, t))
            if size_bytes is None:
                break
        except (httpx.HTTPError, httpx.InvalidURL) as exc:
            if before and (total := _unsatisfied(exc)) is not None:
                if total == before and size_bytes is None:
                    break
                part.unlink()  # longer than what the server has: not of this content
                continue
            attempt = 1 if _size(part) > before else attempt + 1
            _wait_or_raise(exc, attempt, _TRIES, request.subject)
        except OSError as exc:
            raise disk_error(exc, part) from exc
    _validator(part).unlink(missing_ok=True)


def bring(
    request: Request,
    target: Path,
    *,
    name: str,
    size_bytes: int | None,
    sha256: str | None,
    progress: Progress | None,
) -> None:
    """Download to `target`, verified; other content is fetched once more, then explained."""
    part = target.with_name(target.name + PART)
    try:
        part.parent.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise disk_error(exc, part.parent) from exc
    require_free(part.parent, (size_bytes or 0) - _size(part), request.subject)
    found: list[str] = []
    while not found or found[-1] != sha256:
        if len(found) == 2:
            raise _mismatch(request.subject, str(sha256), found)
        download(request, part, name=name, size_bytes=size_bytes, progress=progress)
        if sha256 is None:
            break
        found.append(sha256_of(part, progress=progress, label=f"verifying {name}"))
        if found[-1] != sha256:
            part.unlink()
    os.replace(part, target)
    if sha256 is not None:
        remember_verified(target, sha256)


def _mismatch(subject: str, expected: str, found: list[str]) -> NetworkError:
    if found[0] == found[1]:
        reason = "both downloads agree: the server, or a proxy on the way, has another file"
    else:
        reason = "each download differed: suspect a proxy that changes files, the disk or the RAM"
    return NetworkError(
        f"{subject} has the sha256 {found[1]} instead of {expected}, also after a second download.",
        hint=f"Nothing of it was kept; {reason}.",
    )


def _append(
    request: Request,
    part: Path,
    size_bytes: int | None,
    tell: Callable[[int, int | None], object],
) -> None:
    """One request for the bytes that are missing; each network read goes to the disk at once."""
    have = _size(part)
    headers = {"Range": f"bytes={have}-"} if have else {}
    if have and size_bytes is None and (known := _read_validator(part)):
        headers["If-Range"] = known
    with request.stream(**headers) as response:
        response.raise_for_status()
        start, total = _extent(response)
        if start not in (0, have) or (total is not None and total != (size_bytes or total)):
            raise _other_file(response, request)
        if start != have:  # the server sends the whole file: it changed, or knows no ranges
            part.unlink()
            have = 0
        if total is not None:
            require_free(part.parent, total - have, request.subject)
        if size_bytes is None:
            _write_validator(part, response)
        with part.open("ab", buffering=0) as output:
            for block in response.iter_raw():
                output.write(block)
                have += len(block)
                tell(have, total or size_bytes)
                if size_bytes is not None and have > size_bytes:
                    raise _other_file(response, request)  # longer than `total` or than pinned
    if size_bytes is not None and have < size_bytes:
        raise httpx.ReadError("the answer ended early", request=response.request)


def _other_file(response: httpx.Response, request: Request) -> NetworkError:
    return NetworkError(
        f"{response.url.host} sent something else than {request.subject}.",
        hint="A proxy may be in the way, or the file was replaced just now. Try again.",
    )


def _extent(response: httpx.Response) -> tuple[int, int | None]:
    """Offset of the first byte of an answer, and the length of the whole file where told."""
    if response.status_code == 206:
        match = re.fullmatch(r"bytes (\d+)-\d+/(\d+|\*)", response.headers.get("Content-Range", ""))
        if match:
            return int(match[1]), None if match[2] == "*" else int(match[2])
        return -1, None
    length = response.headers.get("Content-Length", "")
    return 0, int(length) if length.isdecimal() else None


def _validator(part: Path) -> Path:
    return part.with_name(f"{part.name}.etag")


def _read_validator(part: Path) -> str:
    with contextlib.suppress(OSError):
        return _validator(part).read_text()
    return ""


def _write_validator(part: Path, response: httpx.Response) -> None:
    etag = response.headers.get("ETag", "")
    known = etag if etag.startswith('"') else response.headers.get("Last-Modified", "")
    if known:
        _validator(part).write_text(known)
    else:
        _validator(part).unlink(missing_ok=True)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _unsatisfied(exc: Exception) -> int | None:
    """The file's length where the server has nothing at the offset asked for (-1: not told)."""
    if not isinstance(exc, httpx.HTTPStatusError) or exc.response.status_code != 416:
        return None
    match = re.fullmatch(r"bytes \*/(\d+)", exc.response.headers.get("Content-Range", ""))
    return int(match[1]) if match else -1


class RemoteFile:
    """A file on a server, read by ranges: the header of a model before it is downloaded.

    What was read is kept, and each request reads somewhat ahead, more so the more was read, for
    headers are read in many small steps.
    """

    def __init__(self, request: Request) -> None:
        self._ask = request
        self._size: int | None = None
        self._spans: dict[int, bytes] = {}  # by offset; they do not overlap
        self.bytes_read = 0

    @property
    def name(self) -> str:
        """What messages call it."""
        return self._ask.subject

    @property
    def size(self) -> int:
        """The length of the whole file in bytes."""
        if self._size is None:
            self._fetch(0, _READ_AHEAD_BYTES)
        assert self._size is not None
        return self._size

    def read(self, offset: int, length: int) -> bytes:
        """The bytes from `offset` on, fewer than `length` only where the file ends."""
        end = min(offset + length, self.size)
        found = bytearray()
        while offset + len(found) < end:
            at = offset + len(found)
            held = self._held_from(at)
            if held is None:
                ahead = max(_READ_AHEAD_BYTES, min(self.bytes_read, _LONGEST_READ_AHEAD_BYTES))
                self._fetch(at, min(max(end - at, ahead), self._gap_after(at)))
            else:
                found += held[: end - at]
        return bytes(found)

    def _held_from(self, at: int) -> bytes | memoryview | None:
        for start, data in self._spans.items():
            if start <= at < start + len(data):
                return memoryview(data)[at - start :]
        return None

    def _gap_after(self, at: int) -> int:
        """How many bytes from `at` on are not held."""
        return min([start for start in self._spans if start > at] + [self.size]) - at

    def _fetch(self, offset: int, length: int) -> None:
        data = patiently(lambda: self._request(offset, length), self._ask.subject)
        if data:
            self._spans[offset] = data

    def _request(self, offset: int, length: int) -> bytes:
        with self._ask.stream(Range=f"bytes={offset}-{offset + length - 1}") as response:
            if response.status_code == 416 and offset == 0:
                self._size = 0
                return b""
            response.raise_for_status()
            start, total = _extent(response)
            if start != offset or total is None or self._size not in (None, total):
                raise NoRangesError(
                    f"{response.url.host} does not give parts of {self._ask.subject}.",
                    hint="Its header cannot be read ahead; download the whole file.",
                )
            self._size = total
            data = bytearray()
            for block in response.iter_raw():
                self.bytes_read += len(block)
                data += block
                if len(data) >= length:  # a server that knows no ranges sends the whole file
                    break
        if len(data) < min(length, total - offset):
            raise httpx.ReadError("short answer", request=response.request)
        return bytes(data[:length])

    def __repr__(self) -> str:
        return f"<RemoteFile {self._ask.subject}, {human(self.bytes_read)} read>"
