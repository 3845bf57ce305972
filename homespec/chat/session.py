"""Named conversations that outlive the process, with what the models had read of them."""

from __future__ import annotations

import fcntl
import os
import re
from pathlib import Path
from typing import IO

from homespec import paths
from homespec.chat import transcript
from homespec.chat.conversation import Conversation
from homespec.chat.settings import Settings
from homespec.errors import CannotRunError, DiskError, UsageError

_NAME = re.compile(r"[\w][\w.-]{0,99}")


def sessions_dir() -> Path:
    """Where sessions are kept, a folder each."""
    return paths.state_dir() / "chats"


class Session:
    """A conversation on disk; one process has it at a time.
    `close` and `release` it at the end.

    The messages are written after each turn, the caches when it is closed.
    """

    def __init__(self, name: str) -> None:
        """Open or begin a session. Raises UsageError, DiskError, and CannotRunError if in use."""
        if not _NAME.fullmatch(name):
            raise UsageError(
                f"{name!r} is no name for a session.",
                hint="Use letters, digits, dot, dash and underscore.",
            )
        self.name = name
        self.folder = sessions_dir() / name
        self._path = self.folder / "chat.json"
        self._lock = self._take()
        self._conversation: Conversation | None = None
        self._dirty = False

    def _take(self) -> IO[str]:
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            lock = open(self.folder / "lock", "a")  # noqa: SIM115 - held until the end
        except OSError as exc:
            raise DiskError(f"{self.folder} cannot be written: {exc.strerror}.") from exc
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as exc:
            lock.close()
            raise CannotRunError(
                f"The session {self.name} is open in another process.",
                hint="Leave the chat there first, or take another name.",
            ) from exc
        return lock

    def attach(self, conversation: Conversation) -> list[str]:
        """Fill the conversation with what is kept, and keep it from now on; notes for a person.

        A system prompt that was given to the conversation wins over the kept one, and so do
        settings that are not the defaults.
        """
        self._conversation = conversation
        notes = []
        if self._path.exists():
            kept = transcript.read(self._path)
            system, settings = conversation.system or kept.system, conversation.settings
            if settings == Settings():
                settings = kept.settings
            conversation.replace_all(kept.messages, system, settings, kept.start)
            if kept.model != conversation.engine.name:
                notes.append(f"The session {self.name} was held with {kept.model}.")
            elif reason := conversation.engine.load(self.folder):
                notes.append(reason)
        conversation.changed = self.write
        return notes

    def write(self) -> None:
        """Keep the messages. Raises DiskError."""
        assert self._conversation is not None
        transcript.write(self._path, of(self._conversation))
        self._dirty = True

    def close(self) -> None:
        """Keep the caches, too. Raises DiskError."""
        if self._dirty and self._conversation is not None:
            self._conversation.engine.save(self.folder)
            self._dirty = False

    def release(self) -> None:
        """Let another process have it."""
        self._lock.close()


def of(conversation: Conversation) -> transcript.Transcript:
    """What a file keeps of a conversation."""
    return transcript.Transcript(
        conversation.engine.name,
        conversation.system,
        conversation.messages,
        conversation.settings,
        conversation.start,
    )


def save_file(conversation: Conversation, path: Path) -> None:
    """Write the conversation to a file of the user's; only a saved chat is written over.

    Raises UsageError, DiskError.
    """
    if path.exists() or path.is_symlink():
        try:
            transcript.read(path)
        except UsageError as exc:
            raise UsageError(
                f"{path} is there already, and is no saved chat.", hint="Choose another name."
            ) from exc
    transcript.write(Path(os.path.realpath(path)), of(conversation))


def load_file(conversation: Conversation, path: Path) -> list[str]:
    """Go on with a saved conversation; notes for a person. Raises UsageError."""
    kept = transcript.read(path)
    conversation.replace_all(kept.messages, kept.system, kept.settings, kept.start)
    conversation.changed()
    if kept.model != conversation.engine.name:
        return [f"It was held with {kept.model}; {conversation.engine.name} goes on."]
    return []
