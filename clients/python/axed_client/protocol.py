"""The operations without input and output: generators that yield what to do next and get the outcome sent. A driver
for threads and one for asyncio run them."""

from __future__ import annotations

import json
import math
import random
import time
import uuid
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, TypeVar, Union, cast
from urllib.parse import quote

import httpx

from axed_client.errors import (
    ConnectionFailed,
    NotFound,
    Problem,
    RunNotCompleted,
    UnexpectedResponse,
    WaitTimeout,
    problem,
)
from axed_client.events import RunEvent
from axed_client.types import CallOutcome, Eval, EvalRequest, ForkRequest, Run, RunFields

T = TypeVar("T")

#: A list of what waits for a person, in a run.
Pending: TypeAlias = Literal["pending_approvals", "pending_inputs"]

ENDED = ("completed", "failed", "cancelled")
#: One request waits at most this long: proxies often give up after 30 or 60 seconds.
WAIT_SECONDS = 20.0
#: An event stream without a byte for this long is dead: the daemon sends a comment every ten seconds.
STREAM_SILENCE = 30.0
#: One that brings a byte after this long works, even if it brings no event: a proxy may send a comment and close.
STREAM_STEADY = 5.0
#: Other answers come at once.
READ_SECONDS = 30.0
CONNECT_SECONDS = 10.0
#: A response may be this late after the end of a call's time.
GRACE_SECONDS = 1.0
#: Each stream and each wait has a connection of its own, of any number at once.
LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=20)
EVENT_STREAM = ("accept", "text/event-stream")
_RETRIED = (429, 502, 503, 504)
_FIRST_PAUSE, _MAX_PAUSE = 0.2, 5.0


Query: TypeAlias = "list[tuple[str, str | int | float | bool | None]]"


@dataclass
class Request:
    method: str
    path: str
    query: Query = field(default_factory=list)
    body: Any = None
    headers: list[tuple[str, str]] = field(default_factory=list)
    read_timeout: float = READ_SECONDS
    give_up_at: float = math.inf
    """By the monotonic clock; the last attempt has `GRACE_SECONDS` more."""

    def remaining(self) -> float:
        return max(0.0, self.give_up_at - time.monotonic())

    def timeouts(self) -> httpx.Timeout:
        """Those of an attempt that starts now."""
        limit = self.remaining() + GRACE_SECONDS
        return httpx.Timeout(min(CONNECT_SECONDS, limit), read=min(self.read_timeout, limit))


@dataclass
class Response:
    status: int
    headers: Mapping[str, str]
    content: bytes

    def json(self) -> Any:
        return json.loads(self.content)


@dataclass
class Lost:
    """The connection could not be opened, or it broke."""

    cause: httpx.RequestError


@dataclass
class Sleep:
    seconds: float


Step = Union[Request, Sleep]
Outcome = Union[Response, Lost, None]
Operation = Generator[Step, Outcome, T]


def is_final(cause: httpx.RequestError) -> bool:
    """Whether another attempt would fail in the same way."""
    is_transient = isinstance(cause, httpx.TransportError)
    return not is_transient or isinstance(cause, (httpx.UnsupportedProtocol, httpx.LocalProtocolError))


class Retries:
    """How long to pause before a request is sent again."""

    def __init__(self, retry_time: float) -> None:
        self.retry_time = retry_time
        self.restart()

    def restart(self) -> None:
        self._give_up_at = time.monotonic() + self.retry_time
        self._pause = _FIRST_PAUSE

    def next_pause(self, at_least: float | None = None) -> float | None:
        """`None` if there is no time for another attempt."""
        pause = max(at_least or 0.0, self._pause * random.uniform(0.5, 1.0))
        self._pause = min(self._pause * 2, _MAX_PAUSE)
        return pause if time.monotonic() + pause < self._give_up_at else None


def send(request: Request, retry_time: float) -> Operation[Response]:
    """Sends a request until there is a response that another attempt would not change."""
    retries = Retries(min(retry_time, request.remaining()))
    while True:
        outcome = yield request
        if isinstance(outcome, Lost):
            pause = None if is_final(outcome.cause) else retries.next_pause()
            if pause is None:
                raise ConnectionFailed(f"{request.method} {request.path}: {outcome.cause!r}") from outcome.cause
        else:
            assert isinstance(outcome, Response)
            if outcome.status < 300:
                return outcome
            error = problem(outcome.status, outcome.headers, outcome.content)
            pause = retries.next_pause(error.retry_after) if error.status in _RETRIED else None
            if pause is None:
                raise error
        yield Sleep(pause)


def call(request: Request, retry_time: float) -> Operation[Any]:
    response = yield from send(request, retry_time)
    if not response.content:
        return None
    try:
        return response.json()
    except ValueError as error:
        raise UnexpectedResponse(f"{request.method} {request.path}: not JSON: {response.content[:100]!r}") from error


def delete(request: Request, retry_time: float) -> Operation[None]:
    """Like `send`; a repetition that finds nothing has deleted it before."""
    operation = send(request, retry_time)
    attempts = 0
    try:
        step = next(operation)
        while True:
            attempts += isinstance(step, Request)
            step = operation.send((yield step))
    except StopIteration:
        return
    except NotFound:
        if attempts < 2:
            raise


def run(request: Request, timeout: float | None, retry_time: float) -> Operation[Run]:
    """Starts a run and waits for its completion."""
    request.give_up_at = end_of(timeout)
    started = _as_run(request, (yield from call(request, retry_time)))
    ended = yield from wait(started["id"], request.give_up_at, (), retry_time, started)
    if ended["status"] != "completed":
        raise RunNotCompleted(ended)
    return ended


def wait(
    run_id: str, give_up_at: float, until: Sequence[Pending], retry_time: float, run: Run | None = None
) -> Operation[Run]:
    """Waits for the end of a run, or until one of these lists has something, with as many requests as it takes.

    `run` is its last known state.
    """
    seconds = 0.0
    while True:
        query: Query = [("wait", int(seconds))] if seconds >= 1 else []
        path = f"/runs/{segment(run_id)}"
        request = Request("GET", path, query, read_timeout=READ_SECONDS + seconds, give_up_at=give_up_at)
        is_short_of_time = request.remaining() < retry_time
        try:
            run = _as_run(request, (yield from call(request, retry_time)))
            if run["status"] in ENDED or any(run[name] for name in until):
                return run
        except ConnectionFailed:
            if run is None or not is_short_of_time:
                raise
            yield Sleep(min(_FIRST_PAUSE, request.remaining()))
        except Problem as error:
            if run is None or not is_short_of_time or error.status not in _RETRIED:
                raise
            yield Sleep(min(max(_FIRST_PAUSE, error.retry_after or 0.0), request.remaining()))
        remaining = request.remaining()
        if remaining <= 0:
            raise WaitTimeout(run)
        seconds = min(WAIT_SECONDS, remaining)
        if seconds < 1:
            # The daemon waits for whole seconds.
            yield Sleep(seconds)


def create_eval(fields: EvalRequest) -> Operation[Eval]:
    """It is sent once: the daemon would evaluate again, which costs money."""
    request = Request("POST", "/evals", body={**fields})
    return cast(Eval, (yield from call(request, retry_time=0.0)))


def wait_for_eval(eval_id: str, give_up_at: float, retry_time: float) -> Operation[Eval]:
    """Waits for the end of an evaluation with as many requests as it takes; when the time is over it may not have ended."""
    while True:
        seconds = int(min(WAIT_SECONDS, max(0.0, give_up_at - time.monotonic())))
        query: Query = [("wait", seconds)] if seconds else []
        request = Request("GET", f"/evals/{segment(eval_id)}", query, read_timeout=READ_SECONDS + seconds)
        found = cast(Eval, (yield from call(request, retry_time)))
        if found["finished_at"] is not None or give_up_at - time.monotonic() < 1:
            return found


def end_of(timeout: float | None) -> float:
    return math.inf if timeout is None else time.monotonic() + timeout


def _as_run(request: Request, body: Any) -> Run:
    # Later versions may have more statuses.
    if not isinstance(body, dict) or not all(isinstance(body.get(key), str) for key in ("id", "status")):
        raise UnexpectedResponse(f"{request.method} {request.path}: not a run: {str(body)[:100]}")
    return cast(Run, body)


def stream_of(request: Request) -> Request:
    """The same request, answered with the events of the new run."""
    request.headers.append(EVENT_STREAM)
    request.read_timeout = STREAM_SILENCE
    return request


def start_request(
    agent: str,
    input: Any,
    fields: RunFields,
    idempotency_key: str | None,
    provider_keys: Mapping[str, str] | None,
) -> Request:
    body: dict[str, Any] = {**fields} if input is None else {"input": input, **fields}
    headers = idempotency(idempotency_key)
    headers += [("x-provider-key", f"{name}={key}") for name, key in (provider_keys or {}).items()]
    return Request("POST", f"/agents/{segment(agent)}/runs", body=body, headers=headers)


def fork_request(run_id: str, fields: ForkRequest, idempotency_key: str | None) -> Request:
    return Request("POST", f"/runs/{segment(run_id)}/fork", body={**fields}, headers=idempotency(idempotency_key))


def idempotency(key: str | None) -> list[tuple[str, str]]:
    """One key for all attempts of a call, so that it takes effect once."""
    return [("idempotency-key", key or str(uuid.uuid4()))]


def decision_request(run_id: str, tool_call_id: str, body: dict[str, Any], idempotency_key: str | None) -> Request:
    path = f"/runs/{segment(run_id)}/approvals/{segment(tool_call_id)}"
    body = {k: v for k, v in body.items() if v is not None}
    return Request("POST", path, body=body, headers=idempotency(idempotency_key))


def answer_request(run_id: str, input_id: str, body: dict[str, Any], idempotency_key: str | None) -> Request:
    path = f"/runs/{segment(run_id)}/inputs/{segment(input_id)}"
    return Request("POST", path, body=body, headers=idempotency(idempotency_key))


def reconcile_request(
    run_id: str, call_id: str, outcome: CallOutcome, result: Any, idempotency_key: str | None
) -> Request:
    path = f"/runs/{segment(run_id)}/calls/{segment(call_id)}"
    body = {"outcome": outcome, "result": "" if result is None else result} if outcome == "done" else {"outcome": outcome}
    return Request("POST", path, body=body, headers=idempotency(idempotency_key))


def event_request(event: str, key: str, data: Any, id: str | None) -> Request:
    body = {"event": event, "key": key, "data": data}
    return Request("POST", "/events", body=body if id is None else {**body, "id": id})


def pending(until_approval: bool, until_input: bool) -> Sequence[Pending]:
    lists: tuple[tuple[bool, Pending], ...] = ((until_approval, "pending_approvals"), (until_input, "pending_inputs"))
    return [name for is_wanted, name in lists if is_wanted]


def segment(text: str) -> str:
    return quote(text, safe="")


def params(values: Mapping[str, Any]) -> Query:
    """A query; `labels={"team": "blue"}` becomes `label.team=blue`."""
    pairs: Query = []
    for name, value in values.items():
        if value is None:
            continue
        if name == "labels":
            pairs += [(f"label.{key}", str(text)) for key, text in value.items()]
        else:
            pairs.append((name, str(value).lower() if isinstance(value, bool) else str(value)))
    return pairs


class EventParser:
    """Reads events from the bytes of a stream. JSON may contain any line separator but a newline."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[str] = []

    def feed(self, chunk: bytes) -> list[RunEvent]:
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        events: list[RunEvent] = []
        for line in lines:
            text = line.rstrip(b"\r").decode("utf-8", "replace")
            if text.startswith("data:"):
                self._data.append(text[5:].removeprefix(" "))
            elif not text and self._data:
                data, self._data = "\n".join(self._data), []
                try:
                    events.append(json.loads(data))
                except ValueError as error:
                    raise UnexpectedResponse(f"an event that is not JSON: {data[:100]!r}") from error
        return events


class Cursor:
    """The position in a tree's event log, over as many streams as it takes."""

    def __init__(
        self, run_id: str | None, after: int, scope: str, retry_time: float, start: Request | None = None
    ) -> None:
        self.run_id = run_id
        """`None` until the daemon has accepted the run that `start` starts."""
        self.after = after
        self._start = start
        self.is_over = False
        self._retries = Retries(retry_time)
        self._opened_at = math.inf
        self._has_worked = False
        self._scope = scope

    def begin(self) -> None:
        """The consumer may have waited before it iterates."""
        self._retries.restart()

    def received(self) -> None:
        """The connection has brought bytes: events, or a comment."""
        if time.monotonic() - self._opened_at >= STREAM_STEADY:
            self._has_worked = True

    def request(self) -> Request:
        if self.run_id is None:
            assert self._start is not None
            return self._start
        # After the last event the response is 204.
        headers = [EVENT_STREAM, ("last-event-id", str(self.after))]
        query: Query = [("scope", self._scope)]
        path = f"/runs/{segment(self.run_id)}/events"
        return Request("GET", path, query, headers=headers, read_timeout=STREAM_SILENCE)

    def accept(self, event: RunEvent) -> bool:
        """Whether the event is new."""
        if self.run_id is None:
            self.run_id = event["root_id"]
        seq = event.get("seq")
        if seq is not None:
            if seq <= self.after:
                return False
            self.after = seq
        self._has_worked = True
        if event["run_id"] == self.run_id and event["type"] in [f"run.{status}" for status in ENDED]:
            self.is_over = True
        return True

    def opened(self, status: int, headers: Mapping[str, str], content: bytes) -> float | None:
        """Checks the response of a stream. Returns how long to pause before the next attempt, `None` if it is open."""
        if status == 204:
            self.is_over = True
            return None
        if status < 300:
            content_type = headers.get("content-type", "")
            if not content_type.startswith("text/event-stream"):
                raise UnexpectedResponse(f"{status} with the type {content_type!r} instead of a stream of events")
            location = headers.get("location")
            if self.run_id is None and location is not None:
                self.run_id = location.rsplit("/", 1)[-1]
            self._opened_at = time.monotonic()
            return None
        error = problem(status, headers, content)
        pause = self._retries.next_pause(error.retry_after) if status in _RETRIED else None
        if pause is None:
            raise error
        return pause

    def lost(self, cause: httpx.RequestError | None) -> float:
        """How long to pause after a stream that ended before the run."""
        if self._has_worked:
            # The time counts from the loss of a connection that worked: it may have been silent, or the consumer slow.
            self._has_worked = False
            self._retries.restart()
        pause = None if cause is not None and is_final(cause) else self._retries.next_pause()
        if pause is None:
            reason = "the connection ended again and again" if cause is None else repr(cause)
            raise ConnectionFailed(f"the events of {self.run_id or 'a new run'}: {reason}") from cause
        return pause
