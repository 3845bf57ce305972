"""Schemas and grammars that would explode are refused before they are built.

llama.cpp bounds a single repetition and rules that begin with themselves. What is left is size:
a schema that makes a grammar of megabytes, or repetitions inside one another.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from homespec.llama.grammar import bare_grammar
from homespec.server.errors import ApiError
from homespec.server.settings import Limits

MAX_REPEATS = 1024
"""The most that all repetitions `{m,n}` of a grammar add up to."""
MAX_ALTERNATIVES = 4096
_REPEAT = re.compile(r"\{\s*(\d*)\s*(?:,\s*(\d*)\s*)?\}")
_QUANTIFIER = re.compile(r"\{([^{}]*)\}")
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems")


def check_schemas(body: Mapping[str, Any], limits: Limits) -> None:
    """Refuse a body whose JSON schemas are too large. Raises ApiError."""
    for schema in _schemas(body):
        check_schema(schema, limits)


def _schemas(body: Mapping[str, Any]) -> Iterator[Any]:
    wanted = body.get("response_format")
    if isinstance(wanted, dict):
        yield wanted
    if body.get("json_schema") is not None:
        yield body["json_schema"]


def check_schema(schema: Any, limits: Limits) -> None:
    """Refuse one whose text, counts or references make too large a grammar. Raises ApiError."""
    size = len(json.dumps(schema))
    if size > limits.schema_bytes:
        raise _refused(f"The JSON schema has {size} bytes; {limits.schema_bytes} are the most.")
    level, repeats = [schema], 0
    while level:
        one = level.pop()
        if isinstance(one, dict):
            for name in _COUNTS:
                count = one.get(name)
                if isinstance(count, (int, float)):
                    repeats += max(0, int(count))
            pattern = one.get("pattern")
            if isinstance(pattern, str):
                repeats += sum(map(_quantity, _QUANTIFIER.findall(pattern)))
            reference = one.get("$ref")
            if isinstance(reference, str) and not reference.startswith("#"):
                raise _refused("A JSON schema may refer to itself only: `$ref` begins with #.")
            level += one.values()
        elif isinstance(one, list):
            level += one
    if repeats > MAX_REPEATS:
        raise _refused(f"The JSON schema counts up to {repeats}; {MAX_REPEATS} is the most.")


def check_grammar(grammar: str, limits: Limits) -> None:
    """Refuse GBNF text that makes too many rules. Raises ApiError."""
    if "\0" in grammar:
        raise _refused("The grammar has a null character.")
    size = len(grammar.encode())
    if size > limits.grammar_bytes:
        raise _refused(f"The grammar has {size} bytes; {limits.grammar_bytes} are the most.")
    bare = bare_grammar(grammar)
    repeats = sum(_largest(found) for found in _REPEAT.finditer(bare))
    if repeats > MAX_REPEATS:
        raise _refused(f"The grammar repeats {repeats} times; {MAX_REPEATS} is the most.")
    alternatives = bare.count("|")
    if alternatives > MAX_ALTERNATIVES:
        raise _refused(
            f"The grammar has {alternatives} alternatives; {MAX_ALTERNATIVES} are the most."
        )


def _largest(found: re.Match[str]) -> int:
    return max((int(text[:9]) for text in found.groups() if text), default=0)


def _quantity(quantifier: str) -> int:
    """The largest number of `m,n`, as the converter reads them."""
    counts = [0]
    for text in quantifier.split(","):
        with suppress(ValueError):  # it refuses the pattern then
            counts.append(int(text))
    return max(counts)


def _refused(message: str) -> ApiError:
    return ApiError(400, message, code="grammar_too_large", param="response_format")
