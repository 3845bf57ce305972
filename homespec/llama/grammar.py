"""GBNF text, read as far as it takes to refuse what llama.cpp's parser does not survive.

It takes a piece of the stack for each parenthesis. Then it looks for rules that begin with
themselves, and follows what a rule may begin with each time it is named: rules that begin with
another one twice, and so on, make that exponential.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import lru_cache

from homespec.errors import UsageError

_MAX_DEPTH = 2048  # a schema's longest text, written in groups, has 1024
_MAX_CALLS = 10_000_000  # half a second
_MAX_REPEATS = 2000  # llama.cpp refuses more
_TOKEN = re.compile(
    r"""(?P<text>"(?:[^"\\]|\\.)*"|\[(?:[^\]\\]|\\.)*\]|!?<[^>]*>|\.)
    |(?P<name>[a-zA-Z0-9-]+)(?P<head>\s*::=)?
    |(?P<sign>[|()?*+]|\{[^}]*\})
    |\#[^\r\n]*""",
    re.VERBOSE,
)
_TEXT = re.compile(r'"(?:[^"\\]|\\.)*"|\[(?:[^\]\\]|\\.)*\]|#[^\r\n]*')

Alternatives = list[list[str | None]]
"""Of a rule: names of rules, None for text."""


def bare_grammar(grammar: str) -> str:
    """It without literals, sets of characters and comments."""
    return _TEXT.sub("", grammar)


@lru_cache(maxsize=8)  # the choices of a request have one grammar
def check_grammar_text(grammar: str) -> None:
    """Raises UsageError for a grammar that would overflow the stack or never be parsed."""
    depth = 0
    for sign in re.findall("[()]", bare_grammar(grammar)):
        depth += 1 if sign == "(" else -1
        if depth > _MAX_DEPTH:
            raise UsageError(
                f"The grammar has more than {_MAX_DEPTH} parentheses inside one another."
            )
    if _num_calls(_rules(grammar)) > _MAX_CALLS:
        raise UsageError(
            "The grammar's rules begin with one another in too many ways.",
            hint="Name what several alternatives begin with once, before a group of them.",
        )


def _rules(grammar: str) -> dict[str, Alternatives]:
    """The rules by name; groups and repetitions are rules of their own, as llama.cpp has them."""
    rules: dict[str, Alternatives] = {}

    def new(alternatives: Alternatives) -> str:
        name = f"({len(rules)}"
        rules[name] = alternatives
        return name

    path: list[Alternatives] = [[[]]]  # of the rule, and of the groups that are open in it
    for found in _TOKEN.finditer(grammar):
        here, sign = path[-1][-1], found["sign"]
        if found["head"]:
            path = [rules.setdefault(found["name"], [])]
            path[0].append([])
        elif found["name"]:
            here.append(found["name"])
        elif found["text"]:
            if found["text"] not in ('""', "[]"):
                here.append(None)
        elif sign == "|":
            path[-1].append([])
        elif sign == "(":
            here.append(new([[]]))
            path.append(rules[str(here[-1])])
        elif sign == ")":
            path = path[:-1] or path
        elif sign and here:
            here += _repeated(here.pop(), sign, new)
    return rules


def _repeated(last: str | None, sign: str, new: Callable[[Alternatives], str]) -> list[str | None]:
    """What stands in the place of `last` and its `?`, `*`, `+` or `{m,n}`."""
    counts = [min(int(text[:9]), _MAX_REPEATS) for text in re.findall(r"\d+", sign)]
    if sign == "?" or len(counts) > 1 or (counts and "," not in sign):
        least, most = (counts[0], counts[-1]) if counts else (0, 1)
        optional: Alternatives = [[last] * (most - least), []]
        return [last] * least + ([new(optional)] if most > least else [])
    repeated: Alternatives = [[last], []]
    name = new(repeated)
    repeated[0].append(name)
    return [last] * (1 if sign == "+" else sum(counts)) + [name]


def _num_calls(rules: dict[str, Alternatives]) -> int:
    """How often llama.cpp looks at a rule, at most: what one begins with is looked at each time."""
    calls: dict[str, int] = {}
    for start in rules:
        active = {start}
        stack = [(start, _begins(rules, start))]
        while stack:
            name, rest = stack[-1]
            below = next((one for one in rest if one not in calls and one not in active), None)
            if below is not None:
                active.add(below)
                stack.append((below, _begins(rules, below)))
                continue
            # A rule that begins with itself is refused at its first sight.
            calls[name] = 1 + sum(calls.get(one, 0) for one in _begins(rules, name))
            if calls[name] > _MAX_CALLS:
                return calls[name]
            active.discard(name)
            stack.pop()
    return sum(calls.values())


def _begins(rules: dict[str, Alternatives], name: str) -> Iterator[str]:
    """The rules that a rule may begin with, as often as it may."""
    for alternative in rules.get(name, []):
        for one in alternative:
            if one is None:
                break
            yield one
            if [] not in rules.get(one, []):
                break
