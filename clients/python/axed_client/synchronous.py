"""The client for threads."""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Generator, Iterator, Mapping
from types import TracebackType
from typing import Any, TypeVar, cast

import httpx
from typing_extensions import Unpack

from axed_client import protocol
from axed_client.events import RunEvent
from axed_client.protocol import Cursor, EventParser, Lost, Operation, Outcome, Request, Response, Sleep, segment
from axed_client.types import (
    AddedMessage,
    AgentSummary,
    CallOutcome,
    ChildRun,
    Eval,
    EvalCase,
    EvalRequest,
    FeedbackLink,
    ForkRequest,
    PendingApproval,
    PendingQuestion,
    Run,
    RunFields,
    RunFilters,
    RunRequest,
    RunTree,
    Score,
    Turn,
    TurnDetail,
)

T = TypeVar("T")

#: Streams that were dropped before their end. The garbage collector may run anywhere, also while httpcore holds the lock of
#: its pool, which closing a response takes again: the next call closes them, not the collector.
_abandoned: deque[Generator[RunEvent, None, None]] = deque()


class Client:
    """A daemon. Safe to share between threads.

    A request is sent again, with the same idempotency key, while the daemon does not answer or says that it cannot
    now, for `retry_time` seconds: longer than a restart takes."""

    def __init__(
        self,
        url: str = "http://127.0.0.1:8080",
        *,
        key: str | None = None,
        retry_time: float = 60.0,
        http: httpx.Client | None = None,
    ) -> None:
        self._url = url.rstrip("/")
        self._headers = [("authorization", f"Bearer {key}")] if key else []
        self._retry_time = retry_time
        self._http = http or httpx.Client(limits=protocol.LIMITS)

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def start(
        self,
        agent: str,
        input: Any = None,
        *,
        idempotency_key: str | None = None,
        provider_keys: Mapping[str, str] | None = None,
        **fields: Unpack[RunRequest],
    ) -> Run:
        """Starts a run and returns it as soon as it is recorded. `fields` are those of the request's body, such as
        `session`, `labels`, `model` or `budget`."""
        request = protocol.start_request(agent, input, fields, idempotency_key, provider_keys)
        return cast(Run, self._call(request))

    def run(
        self,
        agent: str,
        input: Any = None,
        *,
        timeout: float | None = None,
        idempotency_key: str | None = None,
        provider_keys: Mapping[str, str] | None = None,
        **fields: Unpack[RunFields],
    ) -> Run:
        """Starts a run and waits for its end.

        Raises `RunNotCompleted` if it fails or is cancelled, `WaitTimeout` if it has not ended in time."""
        request = protocol.start_request(agent, input, fields, idempotency_key, provider_keys)
        return self._run(protocol.run(request, timeout, self._retry_time))

    def stream(
        self,
        agent: str,
        input: Any = None,
        *,
        idempotency_key: str | None = None,
        provider_keys: Mapping[str, str] | None = None,
        **fields: Unpack[RunRequest],
    ) -> RunStream:
        """Starts a run with streamed replies and returns its events, over restarts of the daemon."""
        request = protocol.start_request(agent, input, fields, idempotency_key, provider_keys)
        return self._stream(None, 0, "tree", protocol.stream_of(request))

    def events(self, run_id: str, *, after: int = 0, scope: str = "tree") -> RunStream:
        """The events of a run after the one with this number, until the run ends. `scope="self"`: without those of its
        descendants."""
        return self._stream(run_id, after, scope, None)

    def wait(
        self, run_id: str, *, timeout: float | None = None, until_approval: bool = False, until_input: bool = False
    ) -> Run:
        """Waits until the run has ended.

        Also until calls wait for approval if `until_approval` is true, or questions for an answer if `until_input` is.
        """
        until = protocol.pending(until_approval, until_input)
        return self._run(protocol.wait(run_id, protocol.end_of(timeout), until, self._retry_time))

    def get(self, run_id: str) -> Run:
        return cast(Run, self._call(Request("GET", f"/runs/{segment(run_id)}")))

    def cancel(self, run_id: str, reason: str | None = None) -> Run:
        """Cancels a run with its descendants. It may still be `cancelling` afterwards."""
        body = {} if reason is None else {"reason": reason}
        return cast(Run, self._call(Request("POST", f"/runs/{segment(run_id)}/cancel", body=body)))

    def score(
        self, run_id: str, name: str, value: float | bool | str, *, comment: str | None = None, turn: int | None = None
    ) -> Score:
        """Scores a run that has ended. Another score of this name replaces it."""
        body = {"name": name, "value": value, "comment": comment, "turn": turn}
        return cast(Score, self._call(Request("POST", f"/runs/{segment(run_id)}/scores", body=body)))

    def feedback_link(self, run_id: str, name: str, expires_in: int | str) -> FeedbackLink:
        """A URL that scores the run by `POST` without a key. `expires_in`: seconds, or a text such as "7d"."""
        body = {"name": name, "expires_in": expires_in}
        return cast(FeedbackLink, self._call(Request("POST", f"/runs/{segment(run_id)}/feedback-links", body=body)))

    def create_eval(self, **fields: Unpack[EvalRequest]) -> Eval:
        """Evaluates an agent over the cases of a dataset. It is sent once, without repetition."""
        return self._run(protocol.create_eval(fields))

    def get_eval(self, eval_id: str) -> Eval:
        return cast(Eval, self._call(Request("GET", f"/evals/{segment(eval_id)}")))

    def wait_for_eval(self, eval_id: str, *, timeout: float | None = None) -> Eval:
        """Waits for the end of an evaluation. `finished_at` is `None` if the time was over before."""
        return self._run(protocol.wait_for_eval(eval_id, protocol.end_of(timeout), self._retry_time))

    def cancel_eval(self, eval_id: str, reason: str | None = None) -> Eval:
        """Cancels an evaluation. Its runs may still have to end afterwards."""
        body = {} if reason is None else {"reason": reason}
        return cast(Eval, self._call(Request("POST", f"/evals/{segment(eval_id)}/cancel", body=body)))

    def pause(self, run_id: str) -> Run:
        return cast(Run, self._call(Request("POST", f"/runs/{segment(run_id)}/pause")))

    def resume(self, run_id: str) -> Run:
        return cast(Run, self._call(Request("POST", f"/runs/{segment(run_id)}/resume")))

    def fork(self, run_id: str, *, idempotency_key: str | None = None, **fields: Unpack[ForkRequest]) -> Run:
        """Starts a run from a part of another. `fields` are those of the request's body, such as `at` and `edit`."""
        return cast(Run, self._call(protocol.fork_request(run_id, fields, idempotency_key)))

    def add_message(self, run_id: str, content: Any, *, idempotency_key: str | None = None) -> AddedMessage:
        """Adds a user message to a run that has not ended."""
        headers = protocol.idempotency(idempotency_key)
        path = f"/runs/{segment(run_id)}/messages"
        return cast(AddedMessage, self._call(Request("POST", path, body={"content": content}, headers=headers)))

    def approve(
        self,
        run_id: str,
        tool_call_id: str,
        *,
        arguments: Mapping[str, Any] | None = None,
        reason: str | None = None,
        idempotency_key: str | None = None,
    ) -> Run:
        """Approves a tool call, with other arguments if they are given."""
        body = {"decision": "approve", "arguments": arguments, "reason": reason}
        request = protocol.decision_request(run_id, tool_call_id, body, idempotency_key)
        return cast(Run, self._call(request))

    def deny(
        self, run_id: str, tool_call_id: str, *, reason: str | None = None, idempotency_key: str | None = None
    ) -> Run:
        """Denies a tool call. The model gets the reason."""
        body = {"decision": "deny", "reason": reason}
        request = protocol.decision_request(run_id, tool_call_id, body, idempotency_key)
        return cast(Run, self._call(request))

    def answer(self, run_id: str, input_id: str, answer: Any, *, idempotency_key: str | None = None) -> Run:
        """Answers a question. The first answer wins."""
        request = protocol.answer_request(run_id, input_id, {"answer": answer}, idempotency_key)
        return cast(Run, self._call(request))

    def decline(self, run_id: str, input_id: str, reason: str, *, idempotency_key: str | None = None) -> Run:
        """Declines to answer a question. The model gets the reason."""
        request = protocol.answer_request(run_id, input_id, {"decline": reason}, idempotency_key)
        return cast(Run, self._call(request))

    def reconcile(
        self, run_id: str, call_id: str, outcome: CallOutcome, result: Any = None, *, idempotency_key: str | None = None
    ) -> Run:
        """Says whether a call was done whose end is not known; `result` is what it returned. The first answer wins."""
        request = protocol.reconcile_request(run_id, call_id, outcome, result, idempotency_key)
        return cast(Run, self._call(request))

    def publish(self, event: str, key: str, data: Any = None, *, id: str | None = None) -> int:
        """Wakes the runs that wait for this event, and returns their number. With `id` it counts once."""
        request = protocol.event_request(event, key, data, id)
        return cast(int, (self._call(request))["woken"])

    def delete(self, run_id: str) -> None:
        """Deletes a root run that has ended, with its tree."""
        self._run(protocol.delete(Request("DELETE", f"/runs/{segment(run_id)}"), self._retry_time))

    def tree(self, run_id: str) -> RunTree:
        return cast(RunTree, self._call(Request("GET", f"/runs/{segment(run_id)}/tree")))

    def turns(self, run_id: str) -> list[Turn]:
        page = self._call(Request("GET", f"/runs/{segment(run_id)}/turns"))
        return cast("list[Turn]", page["data"])

    def turn(self, run_id: str, turn: int) -> TurnDetail:
        """A turn with its request and its reply."""
        return cast(TurnDetail, self._call(Request("GET", f"/runs/{segment(run_id)}/turns/{turn}")))

    def agents(self) -> list[AgentSummary]:
        return cast("list[AgentSummary]", (self._call(Request("GET", "/agents")))["data"])

    def runs(self, **filters: Unpack[RunFilters]) -> Iterator[Run]:
        """Runs, newest first, over all pages."""
        return cast("Iterator[Run]", self._pages("/runs", {**filters}, "cursor", "next_cursor"))

    def children(self, run_id: str) -> Iterator[ChildRun]:
        path = f"/runs/{segment(run_id)}/children"
        return cast("Iterator[ChildRun]", self._pages(path, {}, "cursor", "next_cursor"))

    def approvals(self, *, root: str | None = None) -> Iterator[PendingApproval]:
        """The tool calls that wait for approval, oldest runs first."""
        return cast("Iterator[PendingApproval]", self._pages("/approvals", {"root": root}, "cursor", "next_cursor"))

    def inputs(self, *, root: str | None = None) -> Iterator[PendingQuestion]:
        """The questions that wait for an answer, oldest runs first."""
        return cast("Iterator[PendingQuestion]", self._pages("/inputs", {"root": root}, "cursor", "next_cursor"))

    def evals(self, *, agent: str | None = None) -> Iterator[Eval]:
        """Evaluations without their results, newest first, over all pages."""
        return cast("Iterator[Eval]", self._pages("/evals", {"agent": agent}, "cursor", "next_cursor"))

    def eval_cases(self, eval_id: str) -> Iterator[EvalCase]:
        """The cases of an evaluation with their runs, over all pages."""
        path = f"/evals/{segment(eval_id)}/cases"
        return cast("Iterator[EvalCase]", self._pages(path, {}, "cursor", "next_cursor"))

    def messages(self, run_id: str) -> Iterator[dict[str, Any]]:
        """The conversation of a run, over all pages."""
        path = f"/runs/{segment(run_id)}/messages"
        return cast("Iterator[dict[str, Any]]", self._pages(path, {}, "after", "next_after"))

    def _call(self, request: Request) -> Any:
        return self._run(protocol.call(request, self._retry_time))

    def _pages(self, path: str, filters: Mapping[str, Any], parameter: str, next_name: str) -> Iterator[Any]:
        position: Any = None
        while True:
            query = protocol.params({**filters, parameter: position})
            page = self._call(Request("GET", path, query))
            yield from page["data"]
            position = page[next_name]
            if position is None:
                return

    def _stream(self, run_id: str | None, after: int, scope: str, start: Request | None) -> RunStream:
        cursor = Cursor(run_id, after, scope, self._retry_time, start)
        return RunStream(self, cursor)

    def _run(self, operation: Operation[T]) -> T:
        outcome: Outcome = None
        try:
            while True:
                step = operation.send(outcome) if outcome is not None else next(operation)
                outcome = self._perform(step)
        except StopIteration as end:
            return cast(T, end.value)

    def _perform(self, step: protocol.Step) -> Outcome:
        if isinstance(step, Sleep):
            time.sleep(step.seconds)
            return None
        _close_abandoned()
        try:
            response = self._http.send(self._build(step))
        except httpx.RequestError as error:
            return Lost(error)
        return Response(response.status_code, response.headers, response.content)

    def _build(self, request: Request) -> httpx.Request:
        return self._http.build_request(
            request.method,
            self._url + request.path,
            params=request.query or None,
            json=request.body,
            headers=[*self._headers, *request.headers],
            timeout=request.timeouts(),
        )


class RunStream:
    """The events of a run. Iterating reconnects after the last event, so that none is missed or comes twice; only
    deltas of texts are lost with a connection."""

    def __init__(self, client: Client, cursor: Cursor) -> None:
        self._cursor = cursor
        self._events = _follow(client, cursor)
        weakref.finalize(self, _abandoned.append, self._events)

    @property
    def run_id(self) -> str | None:
        """The id of the run; `None` before the first event of a run that the stream starts."""
        return self._cursor.run_id

    @property
    def last_event(self) -> int:
        """The number of the last event, to continue after it with `events(run_id, after=…)`."""
        return self._cursor.after

    def __iter__(self) -> Iterator[RunEvent]:
        return self

    def __next__(self) -> RunEvent:
        return next(self._events)

    def close(self) -> None:
        """Ends the stream; the run continues."""
        self._events.close()


def _follow(client: Client, cursor: Cursor) -> Generator[RunEvent, None, None]:
    cursor.begin()
    while not cursor.is_over:
        _close_abandoned()
        cause: httpx.RequestError | None = None
        try:
            response = client._http.send(client._build(cursor.request()), stream=True)
            try:
                content = response.read() if response.status_code >= 300 else b""
                pause = cursor.opened(response.status_code, response.headers, content)
                if pause is not None:
                    time.sleep(pause)
                    continue
                parser = EventParser()
                for chunk in response.iter_bytes():
                    cursor.received()
                    for event in parser.feed(chunk):
                        if cursor.accept(event):
                            yield event
                        if cursor.is_over:
                            return
            finally:
                response.close()
        except httpx.RequestError as error:
            cause = error
        if not cursor.is_over:
            time.sleep(cursor.lost(cause))


def _close_abandoned() -> None:
    while _abandoned:
        try:
            events = _abandoned.popleft()
        except IndexError:  # another thread was faster
            return
        events.close()
