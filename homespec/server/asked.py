"""What a request asks for: the shared reading of its body, and what only a server can do."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

from homespec.api import CHAT, Call, Defaults, read_call
from homespec.decoding.sampling import MAX_SEED
from homespec.errors import UsageError
from homespec.llama.chat_template import ChatTemplate, Message
from homespec.scheduling.job import Request
from homespec.server.errors import ApiError
from homespec.server.functions import with_tools
from homespec.server.grammars import check_grammar, check_schemas
from homespec.server.host import Resident
from homespec.server.settings import Limits
from homespec.server.tools import Tools, read_tools

MAX_TOP_LOGPROBS = 20
# Apps send these to every model; they steer services, or models that reason by steps.
_PASSED_OVER = frozenset(("reasoning_effort", "verbosity", "prediction", "timings_per_token"))


@dataclass(frozen=True, slots=True)
class Asked:
    """A request that was read. calls: one for each prompt; n: answers to each.

    num_logprobs: of the best tokens told beside each one, None for none at all.
    """

    calls: tuple[Call, ...]
    n: int
    stream: bool
    include_usage: bool
    num_logprobs: int | None
    tools: Tools | None

    @property
    def chat(self) -> bool:
        """Whether messages were sent."""
        return self.calls[0].chat

    @property
    def num_choices(self) -> int:
        """Answers in all."""
        return len(self.calls) * self.n


def read_asked(url: str, body: Mapping[str, Any], defaults: Defaults, limits: Limits) -> Asked:
    """What the body of this endpoint asks for. Raises UsageError and ApiError."""
    left = {
        key: value for key, value in body.items() if value is not None and key not in _PASSED_OVER
    }
    chat = url == CHAT
    stream = _flag(left, "stream")
    options = left.pop("stream_options", {})
    if not isinstance(options, dict):
        raise UsageError("stream_options must be an object.")
    n = _count(left, "n", 1, limits.choices)
    num_logprobs = _logprobs(left, chat)
    tools = read_tools(left, limits) if chat else None
    if "messages" in left:
        left["messages"] = with_tools(left["messages"])
    _check_lists(left, limits)
    check_schemas(left, limits)
    calls = tuple(read_call(url, each, defaults) for each in _bodies(left, chat, limits, n))
    if "seed" not in left:
        calls = tuple(_seeded(call, defaults.sampling.seed) for call in calls)
    grammar = calls[0].sampling.grammar
    if grammar is not None:
        if tools is not None and tools.forced:
            raise UsageError("A tool that must be called and a grammar exclude each other.")
        check_grammar(grammar, limits)
    include_usage = bool(options.get("include_usage", False))
    return Asked(calls, n, stream, include_usage, num_logprobs, tools)


def _seeded(call: Call, seed: int | None) -> Call:
    return replace(call, sampling=replace(call.sampling, seed=seed))


def _bodies(left: dict[str, Any], chat: bool, limits: Limits, n: int) -> list[dict[str, Any]]:
    """A body for each prompt of a list."""
    prompts = left.get("prompt")
    if chat or not isinstance(prompts, list) or not prompts or isinstance(prompts[0], int):
        return [left]
    if len(prompts) * n > limits.choices:
        raise UsageError(f"{len(prompts) * n} answers are more than {limits.choices}.")
    return [{**left, "prompt": prompt} for prompt in prompts]


def _flag(left: dict[str, Any], name: str) -> bool:
    value = left.pop(name, False)
    if not isinstance(value, bool):
        raise UsageError(f"{name} must be true or false.")
    return value


def _count(left: dict[str, Any], name: str, default: int, most: int) -> int:
    value = left.pop(name, default)
    if type(value) is not int or not 1 <= value <= most:
        raise UsageError(f"{name} must be a whole number from 1 to {most}.")
    return value


def _logprobs(left: dict[str, Any], chat: bool) -> int | None:
    wanted, best = left.pop("logprobs", False), left.pop("top_logprobs", 0)
    if not chat:
        if wanted is False:
            return None
        best, wanted = wanted, True
    if not isinstance(wanted, bool):
        raise UsageError("logprobs must be true or false.")
    if type(best) is not int or not 0 <= best <= MAX_TOP_LOGPROBS:
        name = "top_logprobs" if chat else "logprobs"
        raise UsageError(f"{name} must be a whole number from 0 to {MAX_TOP_LOGPROBS}.")
    if best and not wanted:
        raise UsageError("top_logprobs needs logprobs to be true.")
    return best if wanted else None


def _check_lists(left: dict[str, Any], limits: Limits) -> None:
    for name, most in (("stop", limits.stops), ("logit_bias", limits.biases)):
        value = left.get(name)
        if isinstance(value, (list, dict)) and len(value) > most:
            raise UsageError(f"{name} has {len(value)} entries; {most} are the most.")


def requests_of(resident: Resident, asked: Asked) -> list[Request]:
    """What the scheduler is to do, by choice. Raises UsageError, RefusedError, ContextFullError."""
    found = []
    for call in asked.calls:
        tokens = _tokens(resident, asked, call)
        _check_biases(resident, call)
        sampling = call.sampling
        if asked.tools is not None and asked.tools.forced:
            sampling = replace(sampling, grammar=asked.tools.grammar(resident.template))
        request = resident.engine.request(tokens, sampling=sampling, params=call.params)
        seed = request.sampling.seed or 0
        for i in range(asked.n):
            own = replace(request.sampling, seed=(seed + i) % (MAX_SEED + 1))
            found.append(replace(request, sampling=own, num_logprobs=asked.num_logprobs))
    return found


def rendered(template: ChatTemplate | None, asked: Asked) -> str:
    """The prompt of a chat. Raises RefusedError, and ApiError for a model without a template."""
    if template is None:
        raise ApiError(
            400,
            "This model has no chat template: it continues text, but does not chat.",
            hint="Use /v1/completions.",
        )
    [call] = asked.calls
    messages = cast("list[Message]", list(call.prompt))
    if call.system:
        messages = [{"role": "system", "content": call.system}, *messages]
    if asked.tools is None:
        return template.render(messages)
    return asked.tools.render(template, messages)


def _tokens(resident: Resident, asked: Asked, call: Call) -> list[int]:
    engine, template = resident.engine, resident.template
    if call.chat:
        text = rendered(template, asked)
        assert template is not None
        tokens = template.tokenize(text)
    elif isinstance(call.prompt, list):
        tokens = [int(token) for token in call.prompt]
    else:
        tokens = engine.encode(call.prompt, raw=True)
    if len(tokens) > engine.row_ctx:
        raise ApiError(
            400,
            f"The prompt has {len(tokens)} tokens, but the context holds {engine.row_ctx}.",
            code="context_length_exceeded",
            hint="Shorten it; nothing was cut off.",
        )
    return tokens


def _check_biases(resident: Resident, call: Call) -> None:
    n_vocab = resident.engine.model.n_vocab
    for token, bias in call.sampling.logit_bias:
        if not 0 <= token < n_vocab:
            raise UsageError(f"logit_bias names token {token}, but ids go to {n_vocab - 1}.")
        if math.isnan(bias) or bias == math.inf:
            raise UsageError("A bias must be a number.")
