"""Keeps the tokens a model wrote where a new prompt says the same.

A text has many spellings in tokens, and the one that a model wrote need not be the one that the
tokenizer gives for the same text. The cache holds what was written: a prompt spelt anew would part
from it in the middle of an answer, and all behind that place would be read again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from homespec.decoding.speculative import common_prefix_length


def keep_written(
    written: Sequence[int], fresh: Sequence[int], piece: Callable[[int], bytes]
) -> list[int]:
    """`fresh`, spelt as in `written` as far as both say the same.

    piece: the bytes of a token, none for a control token. Texts are compared from one control
    token to the next, for only there is a border that no spelling crosses.
    """
    shared = common_prefix_length(list(written), list(fresh))
    while shared and piece(fresh[shared - 1]):
        shared -= 1
    kept = list(fresh[:shared])
    at = shared
    runs = zip(_runs(written[shared:], piece), _runs(fresh[shared:], piece), strict=False)
    for ours, theirs in runs:
        if ours != theirs and _text(ours, piece) != _text(theirs, piece):
            break
        kept += ours
        at += len(theirs)
    return [*kept, *fresh[at:]]


def _runs(tokens: Sequence[int], piece: Callable[[int], bytes]) -> Iterator[list[int]]:
    """Control tokens one by one, and what stands between them."""
    run: list[int] = []
    for token in tokens:
        if piece(token):
            run.append(token)
            continue
        if run:
            yield run
            run = []
        yield [token]
    if run:
        yield run


def _text(tokens: list[int], piece: Callable[[int], bytes]) -> bytes | int:
    """What a run says; a control token says itself."""
    text = b"".join(map(piece, tokens))
    return text or tokens[0]
