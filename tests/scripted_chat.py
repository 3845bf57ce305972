"""A chat whose engine says what a script has it say; run as a program, it is the real terminal.

    python -m tests.scripted_chat SCRIPT.json

SCRIPT.json: {"answers": [[piece, ...], ...], "n_ctx": 100, "delay": seconds, "settings": {...}}.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from homespec.chat.conversation import Conversation
from homespec.chat.settings import Settings
from homespec.chat.types import Answer, Figures, Message, Piece, Reading
from homespec.cli.chat import make_loop
from homespec.cli.chat_view import PipeView, TerminalView, is_plain_terminal
from homespec.decoding.types import FinishReason


class ScriptedEngine:
    """Gives the answers of a script in turn; a word is a token, and so is each message."""

    name = "scripted.gguf"

    def __init__(self, answers: Sequence[Sequence[str]], n_ctx: int = 1000, delay: float = 0):
        self.answers, self.n_ctx, self.delay = [list(a) for a in answers], n_ctx, delay
        self.asked: list[list[Message]] = []
        self.settings: list[Settings] = []
        self.notice = self.opens_reasoning = ""
        self.aborted = False

    def measure(self, messages: Sequence[Message], settings: Settings) -> Reading:
        count = sum(1 + len(message["content"].split()) for message in messages)
        return Reading(count, self.notice, self.opens_reasoning)

    def answer(self, messages: Sequence[Message], settings: Settings) -> ScriptedAnswer:
        self.aborted = False
        self.asked.append(list(messages))
        self.settings.append(settings)
        return ScriptedAnswer(self, self.measure(messages, settings).num_tokens)

    def describe(self) -> list[tuple[str, str]]:
        return [("model", self.name)]

    def abort(self) -> None:
        self.aborted = True

    def save(self, folder: Path) -> None:
        (folder / "scripted.cache").write_text(str(len(self.asked)))

    def load(self, folder: Path) -> str:
        return "" if (folder / "scripted.cache").exists() else "Nothing was kept."


class ScriptedAnswer:
    def __init__(self, engine: ScriptedEngine, num_prompt_tokens: int) -> None:
        self._engine, self._num_prompt_tokens = engine, num_prompt_tokens
        self._pieces = engine.answers.pop(0)
        self._said: list[str] = []
        self._finished = False

    def __iter__(self) -> Iterator[Piece]:
        for i, piece in enumerate(self._pieces):
            time.sleep(self._engine.delay)
            if self._engine.aborted:
                raise KeyboardInterrupt
            self._said.append(piece)
            yield Piece(piece, accepted=i % 2 == 1)
        self._finished = True

    def end(self) -> Answer:
        reason = FinishReason.STOP if self._finished else FinishReason.CANCELLED
        num = len(self._said)
        figures = Figures(self._num_prompt_tokens, 0, num, 0.5, 20.0, num, num // 2, 1.25)
        return Answer("".join(self._said), reason, figures, ("As the script has it.",))


def main() -> None:
    script = json.loads(Path(sys.argv[1]).read_text())
    engine = ScriptedEngine(script["answers"], script.get("n_ctx", 1000), script.get("delay", 0))
    engine.notice = script.get("notice", "")
    settings = Settings(**script.get("settings", {}))
    tint = script.get("show_accepted", False)
    view = PipeView() if is_plain_terminal() else TerminalView(show_accepted=tint)
    conversation = Conversation(engine, settings)
    try:
        make_loop(conversation, view).run()
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        if len(sys.argv) > 2:
            Path(sys.argv[2]).write_text(json.dumps(conversation.messages, ensure_ascii=False))


if __name__ == "__main__":
    main()
