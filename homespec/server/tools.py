"""Tools: given to the chat template, and calls read out of what the model writes.

Two ways of writing a call are known: between <tool_call> tags (Qwen, Hermes and many more), and as
an answer that is nothing but JSON (Llama 3). A call that must come is forced by a grammar.
"""

from __future__ import annotations

import json
import re
import secrets
from dataclasses import dataclass
from typing import Any

from homespec.errors import UsageError
from homespec.llama.chat_template import ChatTemplate, Message
from homespec.llama.sampler import json_schema_grammar
from homespec.server.errors import ApiError
from homespec.server.functions import as_tools
from homespec.server.grammars import check_grammar, check_schema
from homespec.server.references import with_definitions
from homespec.server.settings import Limits

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_TAGGED = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_BARE = ("<|python_tag|>", "[TOOL_CALLS]")


@dataclass(frozen=True, slots=True)
class Tools:
    """Functions that the model may call. choice: `auto`, `required`, or the name of one.

    old: whether the client knows them as functions only.
    """

    functions: tuple[dict[str, Any], ...]
    choice: str
    limits: Limits
    old: bool = False

    @property
    def forced(self) -> bool:
        """Whether the answer is to be a call."""
        return self.choice != "auto"

    @property
    def names(self) -> frozenset[str]:
        """What can be called."""
        return frozenset(function["name"] for function in self.functions)

    def render(self, template: ChatTemplate, messages: list[Message]) -> str:
        """The prompt. Raises RefusedError, and ApiError for a template without tools."""
        if "tools" not in template.source:
            raise ApiError(
                400, "The chat template of this model has no place for tools.", param="tools"
            )
        offered = [{"type": "function", "function": function} for function in self.functions]
        prompt = template.render([_with_objects(one) for one in messages], tools=offered)
        if self.forced and is_tagged(template):
            prompt += OPEN + "\n"
        return prompt

    def grammar(self, template: ChatTemplate | None) -> str:
        """GBNF for one call of what was chosen."""
        key = "arguments" if template is None or is_tagged(template) else "parameters"
        calls: list[dict[str, Any]] = []
        definitions: dict[str, Any] = {}
        for i, function in enumerate(self.functions):
            if self.choice not in ("required", function["name"]):
                continue
            schema, own = with_definitions(
                function.get("parameters") or {"type": "object"}, f"t{i}"
            )
            definitions |= own
            properties = {"name": {"const": function["name"]}, key: schema}
            calls.append({"type": "object", "properties": properties, "required": ["name", key]})
        wanted = calls[0] if len(calls) == 1 else {"anyOf": calls}
        grammar = json_schema_grammar({**wanted, "$defs": definitions})
        check_grammar(grammar, self.limits)
        return grammar

    def read(self, text: str) -> tuple[str, list[dict[str, Any]]]:
        """(content, calls) of an answer; text that is no call of what was offered stays text."""
        if self.forced or OPEN not in text:
            calls = self._calls(text)
            return ("", calls) if calls else (text, [])
        content, calls = text, []
        for found in _TAGGED.finditer(text):
            own = self._calls(found[1])
            if own:
                calls += own
                content = content.replace(found[0], "", 1)
        return (content.strip() if calls else text), calls

    def _calls(self, text: str) -> list[dict[str, Any]]:
        text = text.strip().removesuffix(CLOSE)
        for prefix in _BARE:
            text = text.removeprefix(prefix)
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            return []
        found = [self._call(one) for one in (value if isinstance(value, list) else [value])]
        return [one for one in found if one is not None] if all(found) else []

    def _call(self, value: Any) -> dict[str, Any] | None:
        if not isinstance(value, dict) or value.get("name") not in self.names:
            return None
        arguments = value.get("arguments", value.get("parameters", {}))
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        function = {"name": value["name"], "arguments": arguments}
        return {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}


class Held:
    """Streams text up to where a call may begin; `rest` is what was held back."""

    def __init__(self, tools: Tools) -> None:
        self._forced = tools.forced
        self._begun = False
        self.rest = ""

    def push(self, text: str) -> str:
        """What of the text may be shown."""
        self.rest += text
        if self._forced:
            return ""
        start = self.rest.lstrip()
        if not self._begun and (not start or _may_begin(start)):
            return ""
        self._begun = True
        at = self.rest.find(OPEN)
        if at < 0:
            at = len(self.rest) - _beginning(self.rest)
        shown, self.rest = self.rest[:at], self.rest[at:]
        return shown


def _beginning(text: str) -> int:
    """How many characters at the end may be the beginning of a tag."""
    return max((n for n in range(1, len(OPEN)) if text.endswith(OPEN[:n])), default=0)


def _may_begin(start: str) -> bool:
    """Whether an answer that begins like this may be a call."""
    if start[0] == "{":
        return True
    return any(one.startswith(start) or start.startswith(one) for one in (OPEN, *_BARE, "[{"))


def is_tagged(template: ChatTemplate) -> bool:
    """Whether calls stand between tags."""
    return OPEN in template.source


def read_tools(left: dict[str, Any], limits: Limits) -> Tools | None:
    """The tools of a body, taken out of it. Raises UsageError and ApiError."""
    old = as_tools(left)
    value, choice = left.pop("tools", []), left.pop("tool_choice", "auto")
    left.pop("parallel_tool_calls", None)
    if not isinstance(value, list) or len(value) > limits.tools:
        raise UsageError(f"tools must be a list of at most {limits.tools} functions.")
    functions = tuple(_function(one) for one in value)
    check_schema(list(functions), limits)
    names = {function["name"] for function in functions}
    if len(names) < len(functions):
        raise UsageError("Two tools have the same name.")
    if isinstance(choice, dict):
        function = choice.get("function")
        choice = function.get("name") if isinstance(function, dict) else None
        if choice not in names:
            raise UsageError("tool_choice names a function that tools does not have.")
    elif choice not in ("auto", "none", "required"):
        raise UsageError("tool_choice must be auto, none, required or a function.")
    if choice == "required" and not functions:
        raise UsageError("tool_choice is required, but there are no tools.")
    return Tools(functions, choice, limits, old) if functions and choice != "none" else None


def _function(value: Any) -> dict[str, Any]:
    function = value.get("function") if isinstance(value, dict) else None
    if not isinstance(function, dict) or value.get("type", "function") != "function":
        raise UsageError('A tool is {"type": "function", "function": {"name": ...}}.')
    if not isinstance(function.get("name"), str) or not function["name"]:
        raise UsageError("A function of tools needs a name.")
    if not isinstance(function.get("parameters") or {}, dict):
        raise UsageError("The parameters of a function must be a JSON schema.")
    return function


def _with_objects(message: Message) -> Message:
    """Arguments of earlier calls as objects: templates write them as JSON themselves."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    return {**message, "tool_calls": [_with_object(call) for call in calls]}


def _with_object(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except (ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": arguments}}
