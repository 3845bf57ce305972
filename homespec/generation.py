"""One generation: what it is to do, its pieces of text while it runs, and its result."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from homespec.decoding.speculative import SpeculativeDecoder
from homespec.decoding.stats import GenerationStats
from homespec.decoding.text import TextStream
from homespec.decoding.types import FinishReason, Round
from homespec.drafters import DRAFTERS
from homespec.errors import RefusedError, UsageError
from homespec.llama.memory import peak_memory_bytes

MAX_DRAFT_DEPTH = 32
ADAPTIVE_CEILING = 31  # a pass over 32 tokens: many kernels take eights or sixteens of them
DEPTHS = ("adaptive", "fixed")
SPEC_TYPES = ("auto", *DRAFTERS)
WITHOUT_DRAFT_MODEL = ("none", "ngram")  # kinds that need no second model
DRAFT_SAMPLING = ("auto", "greedy", "probabilistic")


class Closable(Protocol):
    """Something native to free at the end."""

    def close(self) -> None:
        """Free it."""
        ...


@dataclass(frozen=True, slots=True)
class GenerateParams:
    """What one generation is to do.

    max_tokens: None for as many as the context holds. spec_type: `none`, `ngram`, `draft_model`, or
    `auto` (None) for lookup and, where a draft is loaded, the model. depth: `adaptive` drafts what
    pays, at most draft_depth tokens a round (None for 31); `fixed` drafts draft_depth of them (None
    for 3). rule: `match` or `rejection`, None for the one that fits the draft, and for `match` with
    a seed. min_draft: shorter drafts are not verified (sampled drafts always
    are: dropping some would change the distribution). draft_sampling: `probabilistic` samples the
    draft from its own distribution, `greedy` does not, `auto` does at a temperature above 0.
    """

    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    raw: bool = False
    spec_type: str | None = None
    depth: str = "adaptive"
    draft_depth: int | None = None
    min_draft: int = 0
    p_min: float = 0.0
    draft_sampling: str = "auto"
    rule: str | None = None

    def __post_init__(self) -> None:
        if self.spec_type not in (None, *SPEC_TYPES):
            raise UsageError(
                f"{self.spec_type!r} is no kind of speculation.",
                hint=f"Known: {', '.join(SPEC_TYPES)}.",
            )
        if self.depth not in DEPTHS:
            raise UsageError(f"{self.depth!r} is no depth policy; {' and '.join(DEPTHS)} are.")
        if self.draft_depth is not None and not 0 <= self.draft_depth <= MAX_DRAFT_DEPTH:
            raise UsageError(
                f"The draft depth is {self.draft_depth}, "
                f"but must lie between 0 and {MAX_DRAFT_DEPTH}."
            )
        if self.rule not in (None, "match", "rejection"):
            raise UsageError(f"{self.rule!r} is no acceptance rule; match and rejection are.")
        if self.draft_sampling not in DRAFT_SAMPLING:
            raise UsageError(
                f"{self.draft_sampling!r} is no draft sampling; {', '.join(DRAFT_SAMPLING)} are."
            )
        if self.max_tokens is not None and self.max_tokens < 1:
            raise UsageError(f"max_tokens is {self.max_tokens}, but must be at least 1.")


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of text of a running generation; `accepted`: the token was drafted, then accepted."""

    text: str
    token: int
    accepted: bool


@dataclass(frozen=True, slots=True)
class Result:
    """A finished generation. `tokens` are those of `text`, without the end token.

    seed: given again, it repeats what was drawn under the match rule.
    """

    text: str
    tokens: tuple[int, ...]
    finish_reason: FinishReason
    seed: int
    stats: GenerationStats
    explanation: tuple[str, ...] = ()  # why it drafted as it did

    def as_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return {
            "text": self.text,
            "tokens": list(self.tokens),
            "finish_reason": self.finish_reason.value,
            "seed": self.seed,
            "stats": self.stats.as_dict(),
            "explanation": list(self.explanation),
        }


class Answer:
    """What the rounds of a decoder make of text: pieces as they come, and a result at the end."""

    def __init__(
        self,
        decoder: SpeculativeDecoder,
        prompt: list[int],
        *,
        text: TextStream,
        seed: int,
        explain: Callable[[], list[str]],
        resources: Sequence[Closable],
    ) -> None:
        self.decoder = decoder
        self._prompt, self._text, self._seed = prompt, text, seed
        self._explain, self._resources = explain, resources
        self._tokens: list[int] = []
        self._result: Result | None = None

    def push(self, finished: Round) -> Iterator[Chunk]:
        """The chunks of a round; a stop string in them sets the decoder's `finish_reason`."""
        for i, token in enumerate(finished.tokens):
            if token in self.decoder.end_tokens:
                return
            self._tokens.append(token)
            text = self._text.push(token)
            if self._text.stopped:
                self.decoder.finish_reason = FinishReason.STOP
            if text:
                yield Chunk(text, token, accepted=i < finished.num_accepted)
            if self._text.stopped:
                return

    def rest(self) -> Iterator[Chunk]:
        """What was held back until the end."""
        text = self._text.flush()
        if text:
            yield Chunk(text, self._tokens[-1], accepted=False)

    def finish(self) -> Result:
        """Cut ids and cache to the text, free the samplers, make the result; once is enough."""
        if self._result is not None:
            return self._result
        self._text.flush()
        kept = self._tokens[: self._text.num_kept]
        if self._text.stopped:
            history = len(self._prompt) + len(kept)
            target = self.decoder.target
            with suppress(RefusedError):  # what cannot be cut was emptied: the answer stands
                target.truncate(min(history, len(target.tokens)))
        for resource in self._resources:
            resource.close()
        stats = self.decoder.stats
        stats.peak_memory_bytes = peak_memory_bytes()
        reason = self.decoder.finish_reason or FinishReason.CANCELLED
        self._result = Result(
            self._text.text, tuple(kept), reason, self._seed, stats, tuple(self._explain())
        )
        return self._result


class Generation:
    """A generation under way: iterate for its chunks, then read `result`.

    `cancel` (or leaving the loop) ends it; what came so far is the result.
    """

    def __init__(
        self,
        answer: Answer,
        prompt: list[int],
        max_tokens: int | None,
        observe: Callable[[Round], None] | None = None,
    ) -> None:
        self._answer, self._observe = answer, observe
        self._prompt, self._max_tokens = prompt, max_tokens
        self._chunks = self._run()

    def __iter__(self) -> Iterator[Chunk]:
        return self._chunks

    def _run(self) -> Generator[Chunk]:
        answer = self._answer
        try:
            for finished in answer.decoder.generate(self._prompt, self._max_tokens):
                if self._observe is not None:
                    self._observe(finished)
                yield from answer.push(finished)
            yield from answer.rest()
        finally:
            answer.finish()

    def cancel(self) -> None:
        """End it here."""
        self._chunks.close()
        self._answer.finish()

    @property
    def result(self) -> Result:
        """The result; a generation that is not finished yet is run to its end."""
        for _ in self._chunks:
            pass
        return self._answer.finish()
