"""Errors as the OpenAI API has them: a status, and a body that clients understand."""

from __future__ import annotations

from typing import Any

from starlette.responses import JSONResponse, Response

from homespec.errors import (
    CannotRunError,
    ContextFullError,
    HomespecError,
    PlanError,
    RefusedError,
    UsageError,
)

INVALID = "invalid_request_error"


class ApiError(HomespecError):
    """A refusal that has its own status. retry_after: seconds, where trying again can help."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = INVALID,
        code: str | None = None,
        param: str | None = None,
        hint: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message, hint=hint)
        self.status, self.kind, self.code, self.param = status, kind, code, param
        self.retry_after = retry_after


def unavailable(message: str, *, retry_after: int = 5) -> ApiError:
    """It cannot be served now, but perhaps later."""
    return ApiError(503, message, kind="server_error", code="unavailable", retry_after=retry_after)


def as_api_error(error: HomespecError) -> ApiError:
    """The status and the code that an error of homespec has for clients."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ContextFullError):
        return ApiError(400, error.message, code="context_length_exceeded", hint=error.hint)
    if isinstance(error, (CannotRunError, PlanError)):
        return unavailable(error.message)
    if isinstance(error, (UsageError, RefusedError)):
        return ApiError(400, error.message, code="invalid_value", hint=error.hint)
    return unavailable(error.message)


def error_body(error: HomespecError) -> dict[str, Any]:
    """The body; also an event of a stream that has begun."""
    found = as_api_error(error)
    message = f"{found.message} {found.hint}" if found.hint else found.message
    return {
        "error": {
            "message": message,
            "type": found.kind,
            "param": found.param,
            "code": found.code,
        }
    }


def error_response(error: HomespecError) -> Response:
    """The whole answer."""
    found = as_api_error(error)
    headers = {} if found.retry_after is None else {"Retry-After": str(found.retry_after)}
    if found.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse(error_body(found), found.status, headers)
