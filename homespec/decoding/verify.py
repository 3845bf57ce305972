"""The acceptance rules: what the target makes of a draft, one row at a time.

Each rule emits tokens that follow the target's own (filtered) distribution p exactly, whatever the
drafter proposed. They differ in what they share with plain decoding beyond that:

- `greedy`:    the text of plain greedy decoding
- `match`:     with a seed, the very text that plain sampling with that seed gives
- `rejection`: most tokens accepted where the draft was sampled from a known q

A row is looked at only when all tokens before it were accepted, so the sampler's state (penalties,
grammar) always stands on committed tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import numpy as np

from homespec.decoding.types import Acceptance, Distribution, Draft, Row, Sampler, TokenId

Uniform = Callable[[], float]
"""Draws from [0, 1)."""

AcceptanceRule = Callable[
    [Draft, Sequence[Row], Sampler, Uniform, Collection[TokenId]],
    Acceptance,
]
"""(draft, rows, sampler, uniform, end_tokens) -> acceptance.

rows: len(draft.tokens) + 1 of them; row i judges token i, the last one gives the bonus token.
An accepted end token closes the block: no bonus follows it.
"""


def greedy(
    draft: Draft,
    rows: Sequence[Row],
    sampler: Sampler,
    uniform: Uniform,
    end_tokens: Collection[TokenId],
) -> Acceptance:
    """Accept while the draft names the target's best token."""
    return _agree(draft, rows, sampler, sampler.best, end_tokens)


def match(
    draft: Draft,
    rows: Sequence[Row],
    sampler: Sampler,
    uniform: Uniform,
    end_tokens: Collection[TokenId],
) -> Acceptance:
    """Sample from p; accept while the draft happens to name the sampled token.

    One uniform number a token is used, as in plain decoding: the same seed gives the same text.
    """
    return _agree(
        draft, rows, sampler, lambda row: sampler.distribution(row).sample(uniform()), end_tokens
    )


def _agree(
    draft: Draft,
    rows: Sequence[Row],
    sampler: Sampler,
    choose: Callable[[Row], TokenId],
    end_tokens: Collection[TokenId],
) -> Acceptance:
    tokens: list[TokenId] = []
    for i, row in enumerate(rows):
        token = choose(row)
        sampler.accept(token)
        tokens.append(token)
        drafted = i < len(draft.tokens) and draft.tokens[i] == token
        if not drafted or token in end_tokens:
            return Acceptance(tuple(tokens), i + drafted)
    raise AssertionError("the bonus row always ends the block")


def rejection(
    draft: Draft,
    rows: Sequence[Row],
    sampler: Sampler,
    uniform: Uniform,
    end_tokens: Collection[TokenId],
) -> Acceptance:
    """Speculative sampling (Leviathan et al. 2023, algorithm 1; Chen et al. 2023).

    A drafted x is accepted with probability min(1, p(x) / q(x)). At the first rejection the token
    is drawn from the residual (p - q)+ / sum (p - q)+, so that in all P(x) = p(x).
    """
    tokens: list[TokenId] = []
    for i, (drafted, row) in enumerate(zip(draft.tokens, rows[:-1], strict=True)):
        p = sampler.distribution(row)
        q = draft.distributions[i] if draft.distributions else Distribution.point(drafted)
        # u < p(x) / q(x), written without the division: q(x) > 0 since x was drawn from q
        accepted = uniform() * q.probability(drafted) < p.probability(drafted)
        token = drafted if accepted else residual(p, q).sample(uniform())
        sampler.accept(token)
        tokens.append(token)
        if not accepted or token in end_tokens:
            return Acceptance(tuple(tokens), i + accepted)
    bonus = sampler.distribution(rows[-1]).sample(uniform())
    sampler.accept(bonus)
    return Acceptance((*tokens, bonus), len(draft.tokens))


def residual(p: Distribution, q: Distribution) -> Distribution:
    """(p - q)+ / sum (p - q)+; p itself where rounding leaves nothing (p equals q)."""
    _, at_p, at_q = np.intersect1d(p.ids, q.ids, assume_unique=True, return_indices=True)
    mass = p.probabilities.copy()
    mass[at_p] = np.maximum(mass[at_p] - q.probabilities[at_q], 0.0)
    total = mass.sum()
    return Distribution(p.ids, mass / total) if total > 0 else p


RULES: dict[str, AcceptanceRule] = {"greedy": greedy, "match": match, "rejection": rejection}
