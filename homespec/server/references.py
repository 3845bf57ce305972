"""References of a schema that becomes a part of a larger one."""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote

from homespec.errors import UsageError


def with_definitions(schema: dict[str, Any], prefix: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """(copy, definitions): what the copy refers to, `#/$defs/` and a name, stands in definitions.

    prefix: of the names. They are new ones: the converter to grammars takes references for the same
    that end alike. Raises UsageError for a reference to nothing.
    """
    found: list[Any] = []
    places: dict[int, int] = {}  # where in `found` a part of the schema is, by its id

    def copy(value: Any) -> Any:
        if isinstance(value, list):
            return [copy(one) for one in value]
        if not isinstance(value, dict):
            return value
        if isinstance(value.get("$ref"), str):
            target = _target(schema, value["$ref"])
            if id(target) not in places:
                places[id(target)] = len(found)
                found.append(target)
            return {"$ref": f"#/$defs/{prefix}-{places[id(target)]}"}
        return {key: copy(one) for key, one in value.items()}

    copied, definitions = copy(schema), {}
    for i, target in enumerate(found):  # it grows meanwhile
        definitions[f"{prefix}-{i}"] = copy(target)
    return copied, definitions


def _target(schema: dict[str, Any], reference: str) -> Any:
    """What a JSON pointer (RFC 6901) in a fragment points to."""
    first, *path = unquote(reference).split("/")
    try:
        value: Any = {"#": schema}[first]
        for part in path:
            key = part.replace("~1", "/").replace("~0", "~")
            value = value[int(key)] if isinstance(value, list) else value[key]
    except (LookupError, TypeError, ValueError) as exc:
        raise UsageError(f"The parameters of a tool have no {reference!r}.") from exc
    return value
