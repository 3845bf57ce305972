"""Whether a draft's tokenizer fits its target's, told from two headers.

What is at stake? The target alone turns text into ids and ids into text, and it judges every
proposed id, so a draft can change the speed of an answer but not its words. Three things remain:

- a proposed id has to exist in the target: ids from the target's size on are never proposed;
- a committed id has to exist in the draft, which cannot read the others;
- an id should stand for the same piece of text in both. Where it does not, a proposal is a guess
  at another text and as good as lost: such ids are found out here and never proposed.

The rest (how text is split, merge rules, begin and end tokens, chat templates) makes the draft
guess worse, not wrong. A pair is incompatible where the pieces are spelled by other rules or
differ so much that hardly a proposal could be right.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
from gguf.constants import TokenType
from numpy.typing import NDArray

from homespec.errors import IncompatiblePairError
from homespec.models.gguf_header import Header
from homespec.models.gguf_parser import StringArray

# A handful of pieces, or one in a hundred, may differ.
MAX_DIFFERING_PIECES = 16
MAX_DIFFERING_SHARE = 0.01
_ONLY_SPLITS = "the target alone splits text, so this costs speed at most"

Outcome = Literal["pass", "note", "difference", "fail"]
"""`note`: a difference that has no part in the verdict."""
Verdict = Literal["same", "usable", "incompatible"]


@dataclass(frozen=True, slots=True)
class CompatibilityTest:
    """One test, what came out of it, and why, as a clause without a full stop."""

    name: str
    outcome: Outcome
    reason: str


@dataclass(frozen=True, slots=True)
class Compatibility:
    """How far a draft fits a target.

    shared_vocabulary: the ids below it exist in both. A draft may propose an id that is below it
    and not in `forbidden_ids`, which lists the ids, in order, whose pieces differ.
    """

    verdict: Verdict
    tests: tuple[CompatibilityTest, ...]
    forbidden_ids: tuple[int, ...]
    shared_vocabulary: int

    @property
    def reason(self) -> str:
        """The clause that tells the verdict best."""
        for outcome in ("fail", "difference"):
            for test in self.tests:
                if test.outcome == outcome:
                    return test.reason
        return "both have the same tokenizer"


def check_tokenizers(target: Header, draft: Header) -> Compatibility:
    """Compare the tokenizers of two models, id by id. Raises ModelError for a senseless header."""
    sides = _Side("target", target), _Side("draft", draft)
    differing = _differing_ids(*sides)
    tests = (
        _tokenizer_model(*sides),
        _vocabulary_size(*sides),
        _pieces(*sides, differing),
        _token_types(*sides),
        _pre_tokenizer(*sides),
        _merges(*sides),
        *(_special_id(*sides, name) for name in ("bos", "eos", "eot")),
        *(_flag(*sides, name) for name in ("bos", "eos")),
        _chat_template(*sides),
    )
    outcomes = {test.outcome for test in tests}
    verdict: Verdict = "usable" if differing or "difference" in outcomes else "same"
    if "fail" in outcomes:
        verdict = "incompatible"
    return Compatibility(verdict, tests, differing, _shared(*sides))


def require_compatible(draft: str, target: str, found: Compatibility) -> None:
    """Raise IncompatiblePairError, with both files' names, where the verdict is that."""
    if found.verdict == "incompatible":
        raise IncompatiblePairError(
            f"{draft} cannot draft for {target}: {found.reason}.",
            hint="Choose a draft of the same model family, or go without one.",
        )


class _Side:
    """One of the two vocabularies, taken apart once and only where it is asked for."""

    def __init__(self, role: str, header: Header) -> None:
        self.role, self.header = role, header
        self.size = len(header.tokens)

    @cached_property
    def pieces(self) -> list[bytes]:
        return list(self.header.tokens)

    @cached_property
    def types(self) -> NDArray[np.int64]:
        """The type of each token; normal where the file states none."""
        types = self.header.integers("tokenizer.ggml.token_type")
        if types is None or len(types) < self.size:
            return np.full(self.size, int(TokenType.NORMAL), np.int64)
        return types[: self.size]

    @property
    def used(self) -> NDArray[np.bool_]:
        """Which tokens stand for something: converters mark padding as unused."""
        used: NDArray[np.bool_] = self.types != int(TokenType.UNUSED)
        return used

    @property
    def scores(self) -> NDArray[np.generic]:
        scores = self.header.metadata.get("tokenizer.ggml.scores")
        return scores if isinstance(scores, np.ndarray) else np.zeros(0)

    def readable(self, token: int) -> str:
        """A piece in quotes, shortened."""
        text = self.pieces[token].decode("utf-8", "backslashreplace") if token < self.size else ""
        return repr(text if len(text) <= 40 else text[:39] + "…")


def _shared(target: _Side, draft: _Side) -> int:
    return min(target.size, draft.size)


def _differing_ids(target: _Side, draft: _Side) -> tuple[int, ...]:
    """The shared ids that stand for another piece."""
    short, long = sorted((target.header.tokens.raw, draft.header.tokens.raw), key=len)
    if long.startswith(short):  # the usual case, at no cost
        return ()
    return tuple(_differences(target.pieces, draft.pieces))


def _differences(left: Iterable[bytes], right: Iterable[bytes]) -> Iterator[int]:
    pairs = enumerate(zip(left, right, strict=False))
    return (index for index, (one, other) in pairs if one != other)


def _tokenizer_model(target: _Side, draft: _Side) -> CompatibilityTest:
    name = "tokenizer model"
    for side in (target, draft):
        if not side.size or side.header.text("tokenizer.ggml.model") is None:
            return CompatibilityTest(name, "fail", f"the {side.role} has no tokenizer")
    models = [side.header.text("tokenizer.ggml.model") for side in (target, draft)]
    if models[0] != models[1]:
        return CompatibilityTest(
            name,
            "fail",
            f"the target's tokenizer is {models[0]!r}, the draft's {models[1]!r}: "
            "they spell pieces by other rules",
        )
    return CompatibilityTest(name, "pass", f"both are {models[0]!r}")


def _vocabulary_size(target: _Side, draft: _Side) -> CompatibilityTest:
    name, shared = "vocabulary size", _shared(target, draft)
    if target.size == draft.size:
        return CompatibilityTest(name, "pass", f"both have {shared:,} pieces")
    longer = target if target.size > shared else draft
    used = int(longer.used[shared:].sum())
    sizes = f"the target has {target.size:,} pieces, the draft {draft.size:,}"
    if not used:
        beyond = longer.size - shared
        return CompatibilityTest(name, "pass", f"{sizes}; the {beyond:,} beyond are padding")
    fate = "the draft can neither read nor propose" if longer is target else "are never proposed"
    return CompatibilityTest(
        name, "difference", f"{sizes}; beyond the shared ones are {used:,} that {fate}"
    )


def _pieces(target: _Side, draft: _Side, differing: tuple[int, ...]) -> CompatibilityTest:
    shared = _shared(target, draft)
    if not differing:
        return CompatibilityTest("pieces", "pass", f"all {shared:,} shared ids are the same piece")
    # An id that is padding in one of them is never drafted, or never met.
    used = target.used[:shared] & draft.used[:shared]
    limit = max(MAX_DIFFERING_PIECES, MAX_DIFFERING_SHARE * shared)
    first = differing[0]
    return CompatibilityTest(
        "pieces",
        "fail" if used[list(differing)].sum() > limit else "difference",
        f"{len(differing):,} of {shared:,} ids differ, the first is {first}: "
        f"{target.readable(first)} in the target, {draft.readable(first)} in the draft",
    )


def _token_types(target: _Side, draft: _Side) -> CompatibilityTest:
    shared = _shared(target, draft)
    differing = np.flatnonzero(target.types[:shared] != draft.types[:shared])
    if not len(differing):
        return CompatibilityTest("token types", "pass", "the same for every shared id")
    first = int(differing[0])
    names = [_type_name(int(side.types[first])) for side in (target, draft)]
    return CompatibilityTest(
        "token types",
        "difference",
        f"{len(differing):,} ids are of another type, the first is {first} "
        f"({target.readable(first)}): {names[0]} in the target, {names[1]} in the draft",
    )


def _type_name(kind: int) -> str:
    return TokenType(kind).name.lower() if kind in set(TokenType) else f"type {kind}"


def _pre_tokenizer(target: _Side, draft: _Side) -> CompatibilityTest:
    names = [side.header.text("tokenizer.ggml.pre") or "default" for side in (target, draft)]
    if names[0] == names[1]:
        return CompatibilityTest("pre-tokenizer", "pass", f"both are {names[0]!r}")
    return CompatibilityTest(
        "pre-tokenizer",
        "difference",
        f"{names[0]!r} in the target, {names[1]!r} in the draft; {_ONLY_SPLITS}",
    )


def _merges(target: _Side, draft: _Side) -> CompatibilityTest:
    """Merge rules, or the scores that other tokenizers have instead: how text is split."""
    rules = [
        side.header.strings("tokenizer.ggml.merges") or StringArray(b"", 0)
        for side in (target, draft)
    ]
    if rules[0] != rules[1]:
        first = next(_differences(*rules), None)
        where = "" if first is None else f", the first difference is rule {first}"
        return CompatibilityTest(
            "merge rules",
            "difference",
            f"the target has {len(rules[0]):,} rules, the draft {len(rules[1]):,}{where}; "
            f"{_ONLY_SPLITS}",
        )
    shared = _shared(target, draft)
    if not np.array_equal(target.scores[:shared], draft.scores[:shared]):
        return CompatibilityTest(
            "merge rules", "difference", f"the pieces have other scores; {_ONLY_SPLITS}"
        )
    return CompatibilityTest("merge rules", "pass", f"the same {len(rules[0]):,} rules and scores")


def _special_id(target: _Side, draft: _Side, name: str) -> CompatibilityTest:
    key, label = f"tokenizer.ggml.{name}_token_id", f"{name.upper()} id"
    ids = [side.header.integer(key, high=2**32 - 1) for side in (target, draft)]
    words = [
        "not stated" if token is None else f"{token} ({side.readable(token)})"
        for side, token in zip((target, draft), ids, strict=True)
    ]
    if ids[0] == ids[1]:
        return CompatibilityTest(label, "pass", f"both: {words[0]}")
    # Where one states none, llama.cpp looks for it by its text, which the pieces' test covers.
    return CompatibilityTest(
        label,
        "note" if None in ids else "difference",
        f"target: {words[0]}, draft: {words[1]}; the draft is given the target's",
    )


def _flag(target: _Side, draft: _Side, name: str) -> CompatibilityTest:
    key, label = f"tokenizer.ggml.add_{name}_token", f"adds {name.upper()}"
    flags = [side.header.flag(key) for side in (target, draft)]
    words = [{True: "yes", False: "no", None: "not stated"}[flag] for flag in flags]
    if flags[0] == flags[1]:
        return CompatibilityTest(label, "pass", f"both: {words[0]}")
    return CompatibilityTest(
        label,
        "note" if None in flags else "difference",
        f"target: {words[0]}, draft: {words[1]}; the draft is given what the target reads",
    )


def _chat_template(target: _Side, draft: _Side) -> CompatibilityTest:
    templates = target.header.chat_template, draft.header.chat_template
    if templates[0] == templates[1]:
        what = "neither has one" if templates[0] is None else "the same"
        return CompatibilityTest("chat template", "pass", what)
    if None in templates:
        role = draft.role if templates[1] is None else target.role
        return CompatibilityTest("chat template", "note", f"the {role} has none")
    return CompatibilityTest(
        "chat template", "note", "another one; the target's is used, which the draft may know less"
    )
