"""How often a draft says what its target says, token by token on the same text.

The target reads (or writes) each text once, and what it would say at each place is kept: its best
token, and its distribution under the default sampling. Then every draft reads the same tokens.

- greedy: the share of places where both have the same best token
- sampled: the mean of sum min(p, q), which is the chance that rejection sampling accepts a token
  drawn from q (Leviathan et al. 2023, theorem 3.5)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from homespec.decoding.sampling import SamplingParams, reference_distribution
from homespec.decoding.types import Distribution
from homespec.errors import ModelError, RefusedError
from homespec.llama.chat_template import ChatTemplate
from homespec.llama.context import Context
from homespec.llama.tokenizer import Tokenizer
from homespec.tuning.texts import SAMPLES, Sample

SAMPLING = SamplingParams()
ROWS = 64  # tokens a pass, each with its row
_CANDIDATES = 64  # top-k keeps 40


@dataclass(frozen=True, slots=True)
class Place:
    """What a model would say at one place of a text."""

    best: int
    q: Distribution

    @classmethod
    def of(cls, logits: NDArray[np.float32]) -> Place:
        """From (n_vocab,) logits."""
        count = min(_CANDIDATES, len(logits))
        top = np.sort(np.argpartition(logits, -count)[-count:])
        chosen = reference_distribution(logits[top], SAMPLING)
        ids = top[chosen.ids].astype(np.int32)
        return cls(int(np.argmax(logits)), Distribution(ids, chosen.probabilities))


@dataclass(frozen=True, slots=True)
class Reading:
    """A text and what the target would say from token `start` on: places[i] judges start + i."""

    kind: str
    tokens: tuple[int, ...]
    start: int
    places: tuple[Place, ...]

    def as_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return {
            "kind": self.kind,
            "tokens": list(self.tokens),
            "start": self.start,
            "best": [place.best for place in self.places],
            "ids": [place.q.ids.tolist() for place in self.places],
            "probabilities": [
                [round(p, 5) for p in place.q.probabilities.tolist()] for place in self.places
            ],
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Reading:
        """From `as_dict`."""
        places = tuple(
            Place(best, Distribution(np.array(ids, np.int32), np.array(probabilities)))
            for best, ids, probabilities in zip(
                values["best"], values["ids"], values["probabilities"], strict=True
            )
        )
        return cls(values["kind"], tuple(values["tokens"]), values["start"], places)


@dataclass(frozen=True, slots=True)
class Agreement:
    """Shares between 0 and 1 over `count` places."""

    greedy: float
    sampled: float
    count: int

    @classmethod
    def pooled(cls, parts: Sequence[Agreement]) -> Agreement:
        """Of all places together."""
        count = sum(part.count for part in parts) or 1
        return cls(
            sum(part.greedy * part.count for part in parts) / count,
            sum(part.sampled * part.count for part in parts) / count,
            count,
        )


def read_samples(
    context: Context,
    tokenizer: Tokenizer,
    max_tokens: int,
    progress: Callable[[float], None] = lambda _: None,
    samples: Sequence[Sample] = SAMPLES,
) -> list[Reading]:
    """Have the target read the answers, and write those that are missing.

    max_tokens: the most of each answer. progress: called with the share done.
    """
    readings = []
    for number, sample in enumerate(samples):
        prompt = _prompt(context, tokenizer, sample.prompt)
        room = min(max_tokens, context.n_ctx - len(prompt) - 1)
        if room > 0 and sample.answer is None:
            readings.append(_written(context, tokenizer, sample, prompt, room))
        elif room > 0 and sample.answer is not None:
            answer = tokenizer.encode(sample.answer, add_special=False)[:room]
            tokens = [*prompt, *answer]
            places = read_places(context, tokens, len(prompt))
            readings.append(Reading(sample.kind, tuple(tokens), len(prompt), tuple(places)))
        progress((number + 1) / len(samples))
    return readings


def _prompt(context: Context, tokenizer: Tokenizer, text: str) -> list[int]:
    try:
        template = ChatTemplate(context.model, tokenizer)
        return template.encode([{"role": "user", "content": text}])
    except (ModelError, RefusedError):  # a model that does not chat
        return tokenizer.encode(f"{text}\n\n")


def _written(
    context: Context, tokenizer: Tokenizer, sample: Sample, prompt: list[int], room: int
) -> Reading:
    rng = np.random.default_rng(len(prompt))
    context.clear()
    [row] = context.extend(prompt, 1)
    tokens, places = list(prompt), []
    while True:
        place = Place.of(row.logits)
        places.append(place)
        token = place.best if sample.greedy else place.q.sample(rng.random())
        tokens.append(token)
        if token in tokenizer.end_tokens or len(places) >= room:
            return Reading(sample.kind, tuple(tokens), len(prompt), tuple(places))
        [row] = context.extend([token], 1)


def read_places(context: Context, tokens: Sequence[int], start: int) -> list[Place]:
    """What the model would say at each token from `start` on, reading the ones before it."""
    context.clear()
    context.extend(tokens[: start - 1], 0)
    places = []
    for at in range(start - 1, len(tokens) - 1, ROWS):
        block = tokens[at : min(at + ROWS, len(tokens) - 1)]
        places += [Place.of(row.logits) for row in context.extend(block, len(block))]
    return places


def agreement(context: Context, reading: Reading) -> Agreement:
    """Of a draft with the target on one text; a token the draft does not know ends it."""
    known = context.model.n_vocab
    strange = next((i for i, t in enumerate(reading.tokens) if t >= known), len(reading.tokens))
    tokens = reading.tokens[: min(strange, context.n_ctx)]
    if len(tokens) <= reading.start:
        return Agreement(0.0, 0.0, 0)
    drafted = read_places(context, tokens, reading.start)
    judged = list(zip(reading.places, drafted, strict=False))
    same = sum(target.best == draft.best for target, draft in judged)
    shared = sum(overlap(target.q, draft.q) for target, draft in judged)
    return Agreement(same / len(judged), shared / len(judged), len(judged))


def overlap(p: Distribution, q: Distribution) -> float:
    """sum min(p, q)."""
    _, at_p, at_q = np.intersect1d(p.ids, q.ids, assume_unique=True, return_indices=True)
    return float(np.minimum(p.probabilities[at_p], q.probabilities[at_q]).sum())
