"""The conversation at a terminal: a line is read, a command run or an answer shown."""

from __future__ import annotations

import signal
import time
from contextlib import nullcontext, suppress

from homespec.chat import commands
from homespec.chat.conversation import Conversation, Turn
from homespec.cli.chat_input import Editor, LineEditor, silent_keys
from homespec.cli.chat_view import View, complain
from homespec.cli.signals import stop_on_signal
from homespec.decoding.types import FinishReason
from homespec.errors import HomespecError

_TWICE = 1.0  # seconds: Ctrl-C again within them leaves


class Loop:
    """Reads and answers until the user leaves."""

    def __init__(self, conversation: Conversation, editor: Editor, view: View) -> None:
        self._conversation, self._editor, self._view = conversation, editor, view
        self._interrupted = 0.0  # when Ctrl-C last did something

    def run(self) -> None:
        """Until /exit or the end of the input. Raises KeyboardInterrupt for Ctrl-C twice."""
        # From one prompt to the next, too: no key must fall between them.
        with silent_keys() if isinstance(self._editor, LineEditor) else nullcontext():
            self._run()

    def _run(self) -> None:
        prefill = ""
        while True:
            try:
                line = self._editor.read(prefill)
            except EOFError:
                return
            except KeyboardInterrupt:
                self._note_interrupt(bool(prefill))
                prefill = ""
                continue
            try:
                outcome = self._do(line, replaces=bool(prefill))
            except HomespecError as exc:
                complain(exc.message, exc.hint)
                continue
            if outcome.leave:
                return
            prefill = outcome.edit or ""

    def _note_interrupt(self, editing: bool) -> None:
        now = time.monotonic()
        if not editing and now - self._interrupted < _TWICE:
            raise KeyboardInterrupt
        self._interrupted = now
        self._view.say(
            "The message stays as it was."
            if editing
            else "Ctrl-C once more leaves, and so do Ctrl-D and /exit."
        )

    def _do(self, line: str, replaces: bool) -> commands.Outcome:
        conversation = self._conversation
        if not line.strip() and not conversation.attached:
            return commands.Outcome()
        if replaces:
            self.show(conversation.edit(line))
            return commands.Outcome()
        if not commands.is_command(line):
            self.show(conversation.ask(commands.message_of(line)))
            return commands.Outcome()
        outcome = commands.run(conversation, line)
        self._view.say(*outcome.lines)
        if outcome.copy is not None:
            self._view.copy(outcome.copy)
        if outcome.turn is not None:
            self.show(outcome.turn)
        return outcome

    def show(self, turn: Turn) -> FinishReason:
        """Show an answer while it comes; Ctrl-C stops it and keeps what came, twice leaves."""
        self._view.say(*turn.notices)
        engine, settings = self._conversation.engine, self._conversation.settings
        self._view.begin(settings)
        with silent_keys(), stop_on_signal(engine) as stopped:
            try:
                with suppress(KeyboardInterrupt):
                    for piece in turn:
                        self._view.write(piece)
                        if stopped:
                            break
                for piece in turn.rest():
                    self._view.write(piece)
            finally:
                self._view.end()
            answer, notices = turn.end()
        if settings.stats and answer.figures.num_tokens:
            self._view.status(answer, engine.n_ctx)
        if stopped:
            self._interrupted = time.monotonic()
        self._view.say(*notices)
        if len(stopped) > 1 or signal.SIGTERM in stopped:
            raise KeyboardInterrupt
        return answer.finish_reason
