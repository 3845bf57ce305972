"""Network failures in plain sentences: one door for what httpx and the hub raise."""

from __future__ import annotations

from urllib.request import getproxies

import httpx

from homespec.errors import HomespecError, NetworkError, UsageError

_PROXY_HINT = "Check HTTPS_PROXY, HTTP_PROXY and NO_PROXY."
_TOKEN_HINT = "Set HF_TOKEN to a valid access token of the hub, or log in with: hf auth login"

# By the hub's own code, else by HTTP status: error, sentence, hint.
_ANSWERS: dict[str | int, tuple[type[HomespecError], str, str]] = {
    "GatedRepo": (
        NetworkError,
        "{subject} is gated: its owner grants access to each account ({status}).",
        f"Accept the terms on its page on the hub. {_TOKEN_HINT}",
    ),
    "RevisionNotFound": (
        UsageError,
        "{subject}: there is no such revision.",
        "Check what follows the @.",
    ),
    "EntryNotFound": (
        UsageError,
        "{subject}: there is no such file.",
        "Check the name of the file.",
    ),
    401: (
        NetworkError,
        "{subject} does not exist, or is private and wants a token (401).",
        f"Check the spelling. {_TOKEN_HINT}",
    ),
    "bad token": (
        NetworkError,
        "{host} does not accept the token for {subject} (401).",
        f"It may have expired or lack permission. {_TOKEN_HINT}",
    ),
    403: (
        NetworkError,
        "{host} forbids access to {subject} (403).",
        "The token in HF_TOKEN may lack the permission to read it.",
    ),
    404: (
        UsageError,
        "{subject} was not found on {host}.",
        "Check the spelling; a private repository is found only with HF_TOKEN set.",
    ),
    407: (NetworkError, "The proxy wants a name and password (407).", _PROXY_HINT),
    429: (
        NetworkError,
        "{host} limits the rate of requests (429).",
        "Try again {when}; with HF_TOKEN set the limit is higher.",
    ),
    500: (
        NetworkError,
        "{host} has trouble of its own ({status}) when asked for {subject}.",
        "Try again later, or set HF_ENDPOINT to a mirror.",
    ),
}
_OTHER_ANSWER = (NetworkError, "{host} answered {status} when asked for {subject}.", "Try again.")

# The first class that matches: error, sentence, hint.
_FAILURES: tuple[tuple[type[Exception], type[HomespecError], str, str], ...] = (
    (
        httpx.ProxyError,
        NetworkError,
        "The proxy refused the way to {host}: {reason}.",
        _PROXY_HINT,
    ),
    (
        httpx.TimeoutException,
        NetworkError,
        "{host} did not answer in time when asked for {subject}.",
        "Check the network; HF_HUB_DOWNLOAD_TIMEOUT sets the seconds to wait.",
    ),
    (
        httpx.UnsupportedProtocol,
        UsageError,
        "The address of {subject} cannot be used: {reason}.",
        "HF_ENDPOINT and the proxy variables must start with http:// or https://.",
    ),
    (
        httpx.InvalidURL,
        UsageError,
        "The address of {subject} cannot be used: {reason}.",
        "HF_ENDPOINT and the proxy variables must start with http:// or https://.",
    ),
    (
        httpx.TooManyRedirects,
        NetworkError,
        "{host} sends requests for {subject} in a circle.",
        "HF_ENDPOINT may name a server that is no hub.",
    ),
    (
        httpx.TransportError,
        NetworkError,
        "The connection to {host} was cut while {subject} was read.",
        "Start again: a download goes on where it stopped.",
    ),
    (Exception, NetworkError, "{subject} could not be fetched: {reason}.", "Try again."),
)


def explain(exc: Exception, subject: str) -> HomespecError:
    """The plain sentence for a failed request about `subject` (a file or a repository)."""
    response = getattr(exc, "response", None)
    if isinstance(response, httpx.Response):
        return _explain_answer(response, subject)
    if isinstance(exc, httpx.ConnectError):
        return _explain_connect(exc, subject)
    error, sentence, hint = next(row[1:] for row in _FAILURES if isinstance(exc, row[0]))
    reason = (str(exc).strip() or type(exc).__name__).splitlines()[0].rstrip(".")
    return error(sentence.format(subject=subject, host=_host(exc), reason=reason), hint=hint)


def _explain_answer(response: httpx.Response, subject: str) -> HomespecError:
    status: str | int = response.status_code
    key = response.headers.get("X-Error-Code", "")
    if key not in _ANSWERS:
        key = 500 if response.status_code >= 500 else status
    if key == 401 and "Authorization" in response.request.headers:
        key = "bad token"
    error, sentence, hint = _ANSWERS.get(key, _OTHER_ANSWER)
    if "://" in subject and key in (401, 403, 404):
        hint = "Check the address."  # no file of the hub: its token is of no use
    wait = retry_after(response)
    when = f"in {wait:.0f} seconds" if wait else "in some minutes"
    return error(
        sentence.format(subject=subject, host=response.url.host, status=status),
        hint=hint.format(when=when),
    )


def _explain_connect(exc: httpx.ConnectError, subject: str) -> HomespecError:
    if "SSL" in str(exc) or "certificate" in str(exc):
        return NetworkError(
            f"The certificate of {_host(exc)} is not trusted here.",
            hint="A company proxy may sign its own: name its certificate file in SSL_CERT_FILE.",
        )
    hint = "Check the network, or set HF_ENDPOINT to a mirror that can be reached."
    if getproxies():
        hint = f"A proxy is set, and it may be the proxy that cannot be reached. {_PROXY_HINT}"
    return NetworkError(f"{_host(exc)} could not be reached for {subject}.", hint=hint)


def retry_after(response: httpx.Response) -> float | None:
    """The seconds the server asks to wait, where it says so in seconds."""
    value = response.headers.get("Retry-After", "")
    return float(value) if value.isdecimal() else None


def is_transient(exc: Exception) -> bool:
    """Whether the same request may succeed a moment later."""
    response = getattr(exc, "response", None)
    if isinstance(response, httpx.Response):
        return response.status_code in (408, 429, 500, 502, 503, 504)
    if isinstance(exc, httpx.ProxyError | httpx.UnsupportedProtocol):
        return False
    return isinstance(exc, httpx.TransportError)


def _host(exc: Exception) -> str:
    request = getattr(exc, "_request", None)
    return request.url.host if isinstance(request, httpx.Request) else "the server"
