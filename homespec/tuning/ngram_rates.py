"""How often a text goes on as it did after an earlier match, by the length of the match."""

from __future__ import annotations

from collections.abc import Sequence

from homespec.tuning.profile import MatchRate

LENGTHS = (1, 2, 3, 4, 6, 9, 14, 22)
"""Matches are counted under the longest of these they reach."""


def match_rates(texts: Sequence[tuple[Sequence[int], int]]) -> tuple[MatchRate, ...]:
    """Rates over (tokens, where the answer starts), the prompt being looked up too.

    One hit and one miss are added to each count, so that a few tries prove nothing.
    """
    tries, hits = dict.fromkeys(LENGTHS, 0), dict.fromkeys(LENGTHS, 0)
    for tokens, start in texts:
        for at in range(start, len(tokens)):
            length, follower = longest_match(tokens[:at])
            if length:
                bucket = max(n for n in LENGTHS if n <= length)
                tries[bucket] += 1
                hits[bucket] += follower == tokens[at]
    return tuple(MatchRate(n, round((hits[n] + 1) / (tries[n] + 2), 3), tries[n]) for n in LENGTHS)


def longest_match(tokens: Sequence[int]) -> tuple[int, int]:
    """(length of the longest end of `tokens` that stood in it before, what followed it last)."""
    best, follower = 0, -1
    for end in range(len(tokens) - 1, 0, -1):
        length = 0
        while length < min(end, LENGTHS[-1]) and tokens[end - 1 - length] == tokens[-1 - length]:
            length += 1
        if length > best:
            best, follower = length, tokens[end]
    return best, follower
