"""One row's way through a model: from its body to a request, and from the result to its line."""

from __future__ import annotations

import hashlib
import json
import logging
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from homespec.api import Call, Defaults, answer_body, read_call
from homespec.batch.rows import Row
from homespec.errors import HomespecError
from homespec.generation import Result
from homespec.models.files import remembered_sha256
from homespec.models.references import shard_names
from homespec.scheduling.engine import ParallelEngine
from homespec.scheduling.job import Request

logger = logging.getLogger(__name__)

ERROR_CODES = {
    "ContextFullError": "context_too_small",
    "UsageError": "invalid_request",
    "RefusedError": "refused",
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a row: the body of its answer, or an error."""

    row: Row
    body: dict[str, Any] | None
    seed: int | None = None
    code: str = ""
    message: str = ""

    @classmethod
    def of_error(cls, row: Row, error: Exception) -> Outcome:
        """An error with its hint; one that is a fault of ours, with its name."""
        if not isinstance(error, HomespecError):
            logger.debug("A row failed.", exc_info=error)
            error = HomespecError(f"The row failed: {type(error).__name__}: {error}.")
        code = ERROR_CODES.get(type(error).__name__, "failed")
        hint = f" {error.hint}" if error.hint else ""
        return cls(row, None, None, code, error.message + hint)

    def line(self, key: str) -> dict[str, Any]:
        """The row of the output."""
        named = json.dumps([key, self.row.custom_id])  # rows may share a body, and so a key
        id_ = hashlib.sha256(named.encode()).hexdigest()[:24]
        response, error = None, None
        if self.body is None:
            error = {"code": self.code, "message": self.message}
        else:
            response = {"status_code": 200, "request_id": f"req_{id_}", "body": self.body}
        return {
            "id": f"batch_req_{id_}",
            "custom_id": self.row.custom_id,
            "response": response,
            "error": error,
            "homespec": {"key": key, "seed": self.seed, "line": self.row.line},
        }


def row_seed(seed: int, custom_id: str) -> int:
    """The seed of a row's own random stream, whatever runs beside it."""
    text = f"{seed}/{custom_id}".encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.sha256(text).digest()[:4], "little")


def request_of(engine: ParallelEngine, row: Row, defaults: Defaults) -> tuple[Call, Request]:
    """The request of a row. Raises HomespecError for what cannot be done."""
    call = read_call(row.url, row.body, defaults)
    seed = call.sampling.seed if call.sampling.seed is not None else defaults.sampling.seed or 0
    sampling = replace(call.sampling, seed=row_seed(seed, row.custom_id))
    return call, engine.request(
        call.prompt, system=call.system, sampling=sampling, params=call.params
    )


def outcome_of(engine: ParallelEngine, row: Row, chat: bool, result: Result) -> Outcome:
    """The outcome of a finished row."""
    named = row.body.get("model")
    model = named if isinstance(named, str) else engine.model.path.stem
    id_ = hashlib.sha256(row.custom_id.encode("utf-8", "surrogatepass")).hexdigest()[:24]
    return Outcome(row, answer_body(result, id_=id_, model=model, chat=chat), result.seed)


def model_digest(engine: ParallelEngine) -> str:
    """The sha256 of the model's file, or of those of its parts."""
    return file_digest(engine.model.path)


def file_digest(path: Path) -> str:
    """The sha256 of a file of a model, or of those of its parts."""
    parts = [remembered_sha256(path.with_name(name)) for name in shard_names(path.name)]
    return parts[0] if len(parts) == 1 else hashlib.sha256("".join(parts).encode()).hexdigest()


def settings_digest(model: str, defaults: Defaults) -> str:
    """A hash of the model and of all defaults that an answer depends on.

    How it was drafted and what ran beside it are not among them.
    """
    params = {name: getattr(defaults.params, name) for name in ("max_tokens", "stop", "ignore_eos")}
    text = json.dumps([model, asdict(defaults.sampling), params, defaults.system], sort_keys=True)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
