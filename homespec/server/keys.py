"""API keys: only their hashes are kept, and the comparison takes as long for any key."""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Iterable
from pathlib import Path

from homespec.errors import UsageError

MIN_LENGTH = 8
_HASH = re.compile(r"(?:sha256:)?([0-9a-fA-F]{64})")


class Keys:
    """The keys that are let in; none at all lets everybody in."""

    def __init__(self, hashes: Iterable[bytes] = ()) -> None:
        self._hashes = tuple(hashes)

    def __bool__(self) -> bool:
        return bool(self._hashes)

    @classmethod
    def of(cls, keys: Iterable[str], file: Path | None = None) -> Keys:
        """Keys in plain text, and those of a file of hashes. Raises UsageError."""
        hashes = []
        for key in keys:
            if len(key) < MIN_LENGTH:
                raise UsageError(
                    f"An API key needs at least {MIN_LENGTH} characters.",
                    hint="Make one: openssl rand -hex 24",
                )
            hashes.append(_digest(key))
        return cls([*hashes, *(_read(file) if file else [])])

    def admit(self, authorization: str | None) -> bool:
        """Whether this Authorization header holds one of them."""
        if not self._hashes:
            return True
        scheme, _, key = (authorization or "").partition(" ")
        given = _digest(key.strip() if scheme.lower() == "bearer" else "")
        found = False
        for known in self._hashes:  # all of them: the time tells nothing about which
            found |= hmac.compare_digest(known, given)
        return found


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _read(path: Path) -> list[bytes]:
    """A SHA-256 a line, as sha256sum writes it; # begins a comment."""
    hint = "A line holds one SHA-256: printf %s KEY | sha256sum"
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as exc:
        raise UsageError(f"{path} cannot be read.", hint=hint) from exc
    hashes = []
    for number, line in enumerate(lines, 1):
        text = line.partition("#")[0].split()
        if not text:
            continue
        found = _HASH.fullmatch(text[0])
        if found is None:
            raise UsageError(f"Line {number} of {path} is no SHA-256.", hint=hint)
        hashes.append(bytes.fromhex(found[1]))
    if not hashes:
        raise UsageError(f"{path} holds no key.", hint=hint)
    return hashes
