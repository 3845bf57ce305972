"""`functions` and `function_call`: what tools were called before, and what some apps still send.

They are read as tools. The old form knows one call an answer: of several the first is told.
"""

from __future__ import annotations

from typing import Any

from homespec.errors import UsageError

_OLD, _NEW = ("functions", "function_call"), ("tools", "tool_choice")


def as_tools(body: dict[str, Any]) -> bool:
    """Put tools in the place of functions; whether there were any. Raises UsageError."""
    if not any(name in body for name in _OLD):
        return False
    if any(name in body for name in _NEW):
        raise UsageError("functions and tools exclude each other.", hint="Give tools alone.")
    functions, call = body.pop("functions", []), body.pop("function_call", "auto")
    if not isinstance(functions, list):
        raise UsageError("functions must be a list.")
    body["tools"] = [_function(one) for one in functions]
    body["tool_choice"] = _function(call) if isinstance(call, dict) else call
    return True


def with_tools(messages: Any) -> Any:
    """Messages whose calls and results are those of tools."""
    return [_message(one) for one in messages] if isinstance(messages, list) else messages


def _message(message: Any) -> Any:
    if not isinstance(message, dict):
        return message
    if message.get("role") == "function":
        return {**message, "role": "tool"}
    call = message.get("function_call")
    return {**message, "tool_calls": [_function(call)]} if isinstance(call, dict) else message


def _function(value: Any) -> dict[str, Any]:
    return {"type": "function", "function": value}
