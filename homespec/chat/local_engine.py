"""The engine of this process as a chat needs it: what was read is kept from turn to turn."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

from homespec.chat.kept_tokens import keep_written
from homespec.chat.settings import Settings
from homespec.chat.template import Rendered, render
from homespec.chat.types import Answer, Figures, Message, Piece, Reading
from homespec.decoding.speculative import common_prefix_length
from homespec.decoding.stats import GenerationStats
from homespec.disk import whole_file
from homespec.engine import Engine
from homespec.errors import ModelError, RefusedError
from homespec.generation import Generation, Result
from homespec.llama.cache_file import load_cache, save_cache
from homespec.llama.chat_template import ChatTemplate
from homespec.llama.context import Context


class LocalEngine:
    """An `Engine` behind the `ChatEngine` protocol; closing it stays with its owner."""

    def __init__(self, engine: Engine) -> None:
        """Raises ModelError for a model that does not chat."""
        self._engine = engine
        self.name = engine.model.path.name
        self.n_ctx = engine.context.n_ctx
        self._written: list[int] = []  # the last prompt and the tokens of its answer
        self._spelt: tuple[str, list[int]] = ("", [])  # what was tokenized last
        try:
            self._template = ChatTemplate(engine.model, engine.tokenizer)
        except ModelError as exc:
            raise ModelError(
                exc.message, hint="`homespec generate --raw` continues a text with it."
            ) from exc

    def _render(self, messages: Sequence[Message], settings: Settings) -> Rendered:
        extra = {} if settings.think is None else {"enable_thinking": settings.think}
        return render(messages, lambda changed: self._template.render(changed, **extra))

    def _tokens(self, text: str) -> list[int]:
        """A prompt is measured, then answered: it is tokenized once."""
        if text != self._spelt[0]:
            self._spelt = text, self._template.tokenize(text)
        return self._spelt[1]

    def measure(self, messages: Sequence[Message], settings: Settings) -> Reading:
        """What the messages come to as a prompt."""
        rendered = self._render(messages, settings)
        count = len(self._tokens(rendered.text))
        return Reading(count, rendered.notice, rendered.opens_reasoning)

    def answer(self, messages: Sequence[Message], settings: Settings) -> LocalAnswering:
        """Start an answer."""
        fresh = self._tokens(self._render(messages, settings).text)
        prompt = keep_written(self._written, fresh, self._engine.tokenizer.piece)
        for context in self._contexts():
            context.resume()
            _align(context, prompt)
        options = {
            name: getattr(settings.generate, name) for name in type(settings.generate).__slots__
        }
        generation = self._engine.stream(prompt, sampling=settings.sampling, **options)
        self._written = prompt
        return LocalAnswering(self, generation, prompt)

    def finished(self, prompt: list[int], result: Result) -> Answer:
        """Note what an answer wrote."""
        self._written = [*prompt, *result.tokens]
        figures = _figures(result.stats, self._plain_seconds(len(self._written)))
        return Answer(result.text, result.finish_reason, figures, result.explanation)

    def _plain_seconds(self, context_length: int) -> float:
        """A token of plain decoding, as learned while drafting; inf where nothing is known."""
        return self._engine.learned.cost.seconds(1, context_length)

    def _contexts(self) -> list[Context]:
        draft = self._engine.draft_context
        return [self._engine.context, *([draft] if draft else [])]

    def describe(self) -> list[tuple[str, str]]:
        """Model, draft and plan."""
        engine = self._engine
        draft = engine.draft_context
        return [
            ("model", f"{self.name} ({engine.model.description})"),
            ("draft", draft.model.path.name if draft else "none: text is looked up"),
            ("memory", engine.plan.sentence),
        ]

    def abort(self) -> None:
        """End a pass under way; may be called by any thread."""
        for context in self._contexts():
            context.abort()

    def save(self, folder: Path) -> None:
        """Keep both caches on disk. Raises DiskError."""
        for context, name in zip(self._contexts(), _CACHES, strict=False):
            save_cache(context, folder / name)
        with whole_file(folder / _WRITTEN) as part:
            part.write_text(json.dumps(self._written))

    def load(self, folder: Path) -> str:
        """Take up the caches in the folder; "" or why the conversation is read anew."""
        for context, name in zip(self._contexts(), _CACHES, strict=False):
            if not (folder / name).exists():
                continue
            try:
                load_cache(context, folder / name)
            except RefusedError as exc:
                if context is self._engine.context:
                    return f"{exc.message} The conversation is read anew."
        held = self._engine.context.tokens
        self._written = list(held)
        with contextlib.suppress(OSError, ValueError, TypeError):
            written = json.loads((folder / _WRITTEN).read_text())
            if written[: len(held)] == held:
                self._written = written
        return ""


_CACHES = ("target.cache", "draft.cache")
_WRITTEN = "written.json"  # the cache lacks the last token of an answer that was cut


class LocalAnswering:
    """A `Generation` as a chat sees it."""

    def __init__(self, engine: LocalEngine, generation: Generation, prompt: list[int]) -> None:
        self._engine, self._generation, self._prompt = engine, generation, prompt
        self._answer: Answer | None = None

    def __iter__(self) -> Iterator[Piece]:
        """The pieces, as they come."""
        for chunk in self._generation:
            yield Piece(chunk.text, chunk.accepted)

    def end(self) -> Answer:
        """What came; an answer that is not finished is stopped."""
        if self._answer is None:
            self._generation.cancel()
            self._answer = self._engine.finished(self._prompt, self._generation.result)
        return self._answer


def _align(context: Context, prompt: list[int]) -> None:
    """Cut a cache to what it shares with the prompt; one that cannot be cut is read anew."""
    shared = common_prefix_length(context.tokens, prompt)
    with contextlib.suppress(RefusedError):  # the cache is cleared then
        context.truncate(min(shared, len(prompt) - 1))


def _figures(stats: GenerationStats, plain_seconds: float) -> Figures:
    """speedup: what plain decoding would have taken, to what it took."""
    speedup = None
    if stats.num_drafted and stats.decode_seconds and math.isfinite(plain_seconds):
        sampling = stats.sample_seconds / stats.num_tokens
        plain = (stats.num_tokens - 1) * (plain_seconds + sampling)
        speedup = plain / stats.decode_seconds
    return Figures(
        num_prompt_tokens=stats.num_prompt_tokens,
        num_cached_tokens=stats.num_cached_tokens,
        num_tokens=stats.num_tokens,
        first_token_seconds=stats.time_to_first_token_seconds,
        tokens_per_second=stats.decode_tokens_per_second,
        num_drafted=stats.num_drafted,
        num_accepted=stats.num_accepted,
        speedup=speedup,
    )
