"""What a server is told when it is started."""

from __future__ import annotations

from dataclasses import dataclass, field

MiB = 1 << 20


@dataclass(frozen=True, slots=True)
class Limits:
    """The largest request that is read. json_depth: lists and objects inside one another.

    body_seconds: for it to come. choices: answers of one request (`n`, times the prompts of a
    list). schema_bytes, grammar_bytes: of a JSON schema, and of the grammar it or a client makes.
    """

    body_bytes: int = 8 * MiB
    body_seconds: float = 60.0
    messages: int = 1024
    json_depth: int = 48
    choices: int = 16
    stops: int = 16
    biases: int = 1024
    tools: int = 64
    schema_bytes: int = 64 << 10
    grammar_bytes: int = 256 << 10


@dataclass(frozen=True, slots=True)
class ServerParams:
    """queue: answers that wait for a place before a request is refused.

    name: what the model is called, None for its file's name. time_limit: seconds of a request,
    waiting included. keep_alive: seconds after which an idle model is let go, None for never.
    drain: seconds that running answers have at the end. hosts: names by which a server without
    keys may be called, besides addresses, None for any. reserve_bytes: memory that is watched to
    stay free.
    """

    queue: int = 64
    name: str | None = None
    time_limit: float = 600.0
    keep_alive: float | None = None
    drain: float = 30.0
    hosts: tuple[str, ...] | None = None
    log_prompts: bool = False
    reserve_bytes: int | None = None
    limits: Limits = field(default_factory=Limits)
