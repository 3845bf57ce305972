"""A conversation: its messages, its turns, and what may be taken back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from homespec.chat.reasoning import ReasoningSplitter, whole
from homespec.chat.settings import Settings
from homespec.chat.types import Answer, Answering, ChatEngine, Message, Piece, Reading
from homespec.chat.window import first_that_fits, turn_starts
from homespec.decoding.sampling import MAX_SEED
from homespec.decoding.types import FinishReason
from homespec.errors import HomespecError, UsageError


class Conversation:
    """Messages and how they are answered.

    messages: user and assistant in turn, the oldest first, without the system prompt; they are
    kept whole, while those before `start` are no longer sent. changed: called when there is
    something to keep.
    """

    def __init__(
        self,
        engine: ChatEngine,
        settings: Settings | None = None,
        system: str | None = None,
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        self.engine = engine
        self.settings = settings or Settings()
        self.system = system
        self.messages: list[Message] = []
        self.start = 0
        self.changed = changed
        self.attached: list[tuple[str, str]] = []  # files read for the next message: name, text
        self.last: Answer | None = None
        self._told: set[str] = set()
        self._again = 0  # how often the present turn was answered before

    def sent(self, messages: Sequence[Message]) -> list[Message]:
        """Messages as the model gets them, the system prompt first."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, *messages]

    def ask(self, text: str) -> Turn:
        """Begin a turn with a user's message.

        Raises UsageError for an empty one, ContextFullError for one that cannot fit, RefusedError
        where the template cannot take it; the conversation is then as before.
        """
        parts = [f"{name}:\n\n{content.rstrip()}\n" for name, content in self.attached]
        content = "\n".join([*parts, text] if text.strip() else parts)
        if not content.strip():
            raise UsageError("The message is empty.", hint="Give some text to answer.")
        self._again = 0
        turn = self._begin([*self.messages, {"role": "user", "content": content}])
        self.attached.clear()
        return turn

    def edit(self, text: str) -> Turn:
        """Answer another message in place of the last one."""
        if not text.strip():
            raise UsageError("The message is empty.", hint="/undo takes the last one back.")
        last = self._last_turn("/edit")
        self._again = 0
        return self._begin([*self.messages[:last], {"role": "user", "content": text}])

    def last_message(self) -> str:
        """The user's last message."""
        text: str = self.messages[self._last_turn("/edit")]["content"]
        return text

    def regenerate(self) -> Turn:
        """Answer the last message anew."""
        last = self._last_turn("/regen")
        self._again += 1
        turn = self._begin(self.messages[: last + 1])
        if self.settings.sampling.greedy:
            turn.notices.append(
                "At temperature 0 the answer is the same; /set parameter temperature changes it."
            )
        return turn

    def _begin(self, messages: list[Message]) -> Turn:
        readings: dict[int, Reading] = {}

        def count(kept: Sequence[Message]) -> int:
            if len(kept) not in readings:
                readings[len(kept)] = self.engine.measure(self.sent(kept), self.settings)
            return readings[len(kept)].num_tokens

        budget = self.settings.generate.max_tokens
        count(messages[self.start :])  # a server loads its model for it, and knows its context then
        start = first_that_fits(messages, self.start, self.engine.n_ctx, count, budget)
        notices = []
        if start > self.start:
            left = len(turn_starts(messages[:start]))
            notices.append(
                f"The context of {self.engine.n_ctx:,} tokens is full: the model no longer sees "
                f"the {_oldest(left)}. The system prompt and the rest stay."
            )
        kept = messages[start:]
        reading = readings[len(kept)]
        answering = self.engine.answer(self.sent(kept), self._seeded())
        if reading.notice and reading.notice not in self._told:
            self._told.add(reading.notice)
            notices.append(reading.notice)
        before = self.messages, self.start
        self.messages, self.start = messages, start
        return Turn(self, answering, reading.opens_reasoning, notices, before)

    def _seeded(self) -> Settings:
        """The settings of this answer: a seed that is fixed moves on with each new try."""
        sampling = self.settings.sampling
        if sampling.seed is None or not self._again:
            return self.settings
        seed = (sampling.seed + self._again) % (MAX_SEED + 1)
        return replace(self.settings, sampling=replace(sampling, seed=seed))

    def finished(self, answer: Answer, content: str) -> list[str]:
        """Take an answer into the conversation; what a person should know of it."""
        self.last = answer
        self.messages.append({"role": "assistant", "content": content})
        self.changed()
        if answer.finish_reason is not FinishReason.LENGTH:
            return [] if content.strip() else ["The model ended without a word."]
        figures = answer.figures
        if figures.num_prompt_tokens + figures.num_tokens >= self.engine.n_ctx:
            return [
                f"The answer was cut: the context of {self.engine.n_ctx:,} tokens is full. "
                "The next message leaves out the oldest turns."
            ]
        return [f"The answer was cut at {figures.num_tokens:,} tokens, as set (max_tokens)."]

    def undo(self) -> str:
        """Take the last turn back; the user's message of it."""
        last = self._last_turn("/undo")
        text: str = self.messages[last]["content"]
        del self.messages[last:]
        self.start = min(self.start, len(self.messages))
        self.last = None
        self.changed()
        return text

    def _last_turn(self, command: str) -> int:
        starts = turn_starts(self.messages)
        if not starts:
            raise UsageError(f"{command} needs a message, and there is none yet.")
        return starts[-1]

    def clear(self) -> None:
        """Forget all messages; the system prompt and the settings stay."""
        self.messages, self.start, self.last = [], 0, None
        self.attached.clear()
        self.changed()

    def replace_all(
        self, messages: list[Message], system: str | None, settings: Settings, start: int = 0
    ) -> None:
        """Go on with another conversation."""
        self.messages, self.system, self.settings, self.start = messages, system, settings, start
        self.last = None
        self.attached.clear()

    def used(self) -> int:
        """Tokens that the conversation takes now."""
        if not self.sent(self.messages):
            return 0
        return self.engine.measure(self.sent(self.messages[self.start :]), self.settings).num_tokens

    def answers(self) -> list[str]:
        """The model's messages."""
        return [m["content"] for m in self.messages if m["role"] == "assistant"]


class Turn:
    """An answer under way: iterate for its pieces, then `end` it, stopped or not.

    notices: what a person should know before the answer.
    """

    def __init__(
        self,
        conversation: Conversation,
        answering: Answering,
        opened: str,
        notices: list[str],
        before: tuple[list[Message], int],
    ) -> None:
        self.notices = notices
        self._conversation, self._answering = conversation, answering
        self._opened, self._before = opened, before
        self._splitter = ReasoningSplitter(opened)

    def __iter__(self) -> Iterator[Piece]:
        """The pieces, the reasoning marked; after an error the conversation is as before."""
        try:
            for piece in self._answering:
                for text, reasoning in self._splitter.push(piece.text):
                    yield Piece(text, piece.accepted, reasoning)
        except HomespecError:
            self._take_back()
            raise
        yield from self.rest()

    def rest(self) -> Iterator[Piece]:
        """What was held back of an answer that was stopped."""
        for text, reasoning in self._splitter.flush():
            yield Piece(text, False, reasoning)

    def end(self) -> tuple[Answer, list[str]]:
        """Take what came into the conversation; the answer, and what a person should know."""
        answer = self._answering.end()
        if not answer.text.strip() and answer.finish_reason is FinishReason.CANCELLED:
            self._take_back()
            return answer, ["Nothing had come yet: the conversation is as before."]
        content = whole(answer.text, self._opened)
        return answer, self._conversation.finished(answer, content)

    def _take_back(self) -> None:
        self._conversation.messages, self._conversation.start = self._before


def _oldest(turns: int) -> str:
    return "oldest turn" if turns == 1 else f"{turns} oldest turns"
