"""Why a call failed."""

from __future__ import annotations

import json
from typing import Any, Mapping

from axed_client.types import Run


class AxedError(Exception):
    """The base of all errors of this package."""


class ConnectionFailed(AxedError):
    """The daemon could not be reached within `retry_time`, or a request that must not be repeated was interrupted."""


class UnexpectedResponse(AxedError):
    """The response is not one of the daemon: the URL may be that of another server."""


class WaitTimeout(AxedError):
    """The run has not ended in time. It continues."""

    def __init__(self, run: Run) -> None:
        super().__init__(f"{run['id']} is still {run['status']}")
        self.run = run


class RunNotCompleted(AxedError):
    """The run failed or was cancelled."""

    def __init__(self, run: Run) -> None:
        error = run["error"]
        reason = f"{error['code']}: {error['message']}" if error else run["cancel_reason"]
        super().__init__(f"{run['id']} {run['status']}" + (f": {reason}" if reason else ""))
        self.run = run


class Problem(AxedError):
    """The daemon refused a request."""

    def __init__(self, status: int, body: Mapping[str, Any], retry_after: float | None) -> None:
        self.status = status
        self.code: str = body.get("code", "")
        """Stable; the other texts are for people."""
        self.detail: str = body.get("detail", "")
        self.errors: list[dict[str, str]] = body.get("errors", [])
        """The invalid fields: `pointer` and `detail`."""
        self.request_id: str | None = body.get("request_id")
        self.retry_after = retry_after
        """In seconds."""
        super().__init__(f"{status} {self.code}: {self.detail}" if self.code else f"{status}: {self.detail}")


class Unauthorized(Problem):
    """401: the key is missing or wrong."""


class Forbidden(Problem):
    """403: the key lacks a scope."""


class NotFound(Problem):
    """404: there is no such agent or run for this key."""


class Conflict(Problem):
    """409: the run or the call is in another state."""


class Invalid(Problem):
    """422: a field is invalid."""


class TooManyRequests(Problem):
    """429: the queue is full, or a budget is used up."""


class Unavailable(Problem):
    """503: the daemon stops, or its store fails."""


_CLASSES: dict[int, type[Problem]] = {
    401: Unauthorized,
    403: Forbidden,
    404: NotFound,
    409: Conflict,
    422: Invalid,
    429: TooManyRequests,
    503: Unavailable,
}


def problem(status: int, headers: Mapping[str, str], content: bytes) -> Problem:
    """The error of a response, which may be that of a proxy."""
    if status < 400:
        # A query may have secrets.
        target = headers.get("location", "another address").partition("?")[0]
        return Problem(status, {"detail": f"redirected to {target}, which the client does not follow"}, None)
    try:
        body = json.loads(content)
    except ValueError:
        body = None
    if not isinstance(body, dict):
        body = {"detail": content[:200].decode("utf-8", "replace").strip()}
    return _CLASSES.get(status, Problem)(status, body, _seconds(headers.get("retry-after")))


def _seconds(value: str | None) -> float | None:
    try:
        return max(0.0, float(value)) if value is not None else None
    except ValueError:
        return None
