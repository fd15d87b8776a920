"""The client for asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
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


class AsyncClient:
    """A daemon, as `Client` for asyncio."""

    def __init__(
        self,
        url: str = "http://127.0.0.1:8080",
        *,
        key: str | None = None,
        retry_time: float = 60.0,
        http: httpx.AsyncClient | None = None,
    ) -> None:
        self._url = url.rstrip("/")
        self._headers = [("authorization", f"Bearer {key}")] if key else []
        self._retry_time = retry_time
        self._http = http or httpx.AsyncClient(limits=protocol.LIMITS)

    async def close(self) -> None:
        await self._http.aclose()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def start(
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
        return cast(Run, await self._call(request))

    async def run(
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
        return await self._run(protocol.run(request, timeout, self._retry_time))

    def stream(
        self,
        agent: str,
        input: Any = None,
        *,
        idempotency_key: str | None = None,
        provider_keys: Mapping[str, str] | None = None,
        **fields: Unpack[RunRequest],
    ) -> AsyncRunStream:
        """Starts a run with streamed replies and returns its events, over restarts of the daemon."""
        request = protocol.start_request(agent, input, fields, idempotency_key, provider_keys)
        return self._stream(None, 0, "tree", protocol.stream_of(request))

    def events(self, run_id: str, *, after: int = 0, scope: str = "tree") -> AsyncRunStream:
        """The events of a run after the one with this number, until the run ends. `scope="self"`: without those of its
        descendants."""
        return self._stream(run_id, after, scope, None)

    async def wait(
        self, run_id: str, *, timeout: float | None = None, until_approval: bool = False, until_input: bool = False
    ) -> Run:
        """Waits until the run has ended.

        Also until calls wait for approval if `until_approval` is true, or questions for an answer if `until_input` is.
        """
        until = protocol.pending(until_approval, until_input)
        return await self._run(protocol.wait(run_id, protocol.end_of(timeout), until, self._retry_time))

    async def get(self, run_id: str) -> Run:
        return cast(Run, await self._call(Request("GET", f"/runs/{segment(run_id)}")))

    async def cancel(self, run_id: str, reason: str | None = None) -> Run:
        """Cancels a run with its descendants. It may still be `cancelling` afterwards."""
        body = {} if reason is None else {"reason": reason}
        return cast(Run, await self._call(Request("POST", f"/runs/{segment(run_id)}/cancel", body=body)))

    async def score(
        self, run_id: str, name: str, value: float | bool | str, *, comment: str | None = None, turn: int | None = None
    ) -> Score:
        """Scores a run that has ended. Another score of this name replaces it."""
        body = {"name": name, "value": value, "comment": comment, "turn": turn}
        return cast(Score, await self._call(Request("POST", f"/runs/{segment(run_id)}/scores", body=body)))

    async def feedback_link(self, run_id: str, name: str, expires_in: int | str) -> FeedbackLink:
        """A URL that scores the run by `POST` without a key. `expires_in`: seconds, or a text such as "7d"."""
        body = {"name": name, "expires_in": expires_in}
        return cast(FeedbackLink, await self._call(Request("POST", f"/runs/{segment(run_id)}/feedback-links", body=body)))

    async def create_eval(self, **fields: Unpack[EvalRequest]) -> Eval:
        """Evaluates an agent over the cases of a dataset. It is sent once, without repetition."""
        return await self._run(protocol.create_eval(fields))

    async def get_eval(self, eval_id: str) -> Eval:
        return cast(Eval, await self._call(Request("GET", f"/evals/{segment(eval_id)}")))

    async def wait_for_eval(self, eval_id: str, *, timeout: float | None = None) -> Eval:
        """Waits for the end of an evaluation. `finished_at` is `None` if the time was over before."""
        return await self._run(protocol.wait_for_eval(eval_id, protocol.end_of(timeout), self._retry_time))

    async def cancel_eval(self, eval_id: str, reason: str | None = None) -> Eval:
        """Cancels an evaluation. Its runs may still have to end afterwards."""
        body = {} if reason is None else {"reason": reason}
        return cast(Eval, await self._call(Request("POST", f"/evals/{segment(eval_id)}/cancel", body=body)))

    async def pause(self, run_id: str) -> Run:
        return cast(Run, await self._call(Request("POST", f"/runs/{segment(run_id)}/pause")))

    async def resume(self, run_id: str) -> Run:
        return cast(Run, await self._call(Request("POST", f"/runs/{segment(run_id)}/resume")))

    async def fork(self, run_id: str, *, idempotency_key: str | None = None, **fields: Unpack[ForkRequest]) -> Run:
        """Starts a run from a part of another. `fields` are those of the request's body, such as `at` and `edit`."""
        return cast(Run, await self._call(protocol.fork_request(run_id, fields, idempotency_key)))

    async def add_message(self, run_id: str, content: Any, *, idempotency_key: str | None = None) -> AddedMessage:
        """Adds a user message to a run that has not ended."""
        headers = protocol.idempotency(idempotency_key)
        path = f"/runs/{segment(run_id)}/messages"
        return cast(AddedMessage, await self._call(Request("POST", path, body={"content": content}, headers=headers)))

    async def approve(
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
        return cast(Run, await self._call(request))

    async def deny(
        self, run_id: str, tool_call_id: str, *, reason: str | None = None, idempotency_key: str | None = None
    ) -> Run:
        """Denies a tool call. The model gets the reason."""
        body = {"decision": "deny", "reason": reason}
        request = protocol.decision_request(run_id, tool_call_id, body, idempotency_key)
        return cast(Run, await self._call(request))

    async def answer(self, run_id: str, input_id: str, answer: Any, *, idempotency_key: str | None = None) -> Run:
        """Answers a question. The first answer wins."""
        request = protocol.answer_request(run_id, input_id, {"answer": answer}, idempotency_key)
        return cast(Run, await self._call(request))

    async def decline(self, run_id: str, input_id: str, reason: str, *, idempotency_key: str | None = None) -> Run:
        """Declines to answer a question. The model gets the reason."""
        request = protocol.answer_request(run_id, input_id, {"decline": reason}, idempotency_key)
        return cast(Run, await self._call(request))

    async def reconcile(
        self, run_id: str, call_id: str, outcome: CallOutcome, result: Any = None, *, idempotency_key: str | None = None
    ) -> Run:
        """Says whether a call was done whose end is not known; `result` is what it returned. The first answer wins."""
        request = protocol.reconcile_request(run_id, call_id, outcome, result, idempotency_key)
        return cast(Run, await self._call(request))

    async def publish(self, event: str, key: str, data: Any = None, *, id: str | None = None) -> int:
        """Wakes the runs that wait for this event, and returns their number. With `id` it counts once."""
        request = protocol.event_request(event, key, data, id)
        return cast(int, (await self._call(request))["woken"])

    async def delete(self, run_id: str) -> None:
        """Deletes a root run that has ended, with its tree."""
        await self._run(protocol.delete(Request("DELETE", f"/runs/{segment(run_id)}"), self._retry_time))

    async def tree(self, run_id: str) -> RunTree:
        return cast(RunTree, await self._call(Request("GET", f"/runs/{segment(run_id)}/tree")))

    async def turns(self, run_id: str) -> list[Turn]:
        page = await self._call(Request("GET", f"/runs/{segment(run_id)}/turns"))
        return cast("list[Turn]", page["data"])

    async def turn(self, run_id: str, turn: int) -> TurnDetail:
        """A turn with its request and its reply."""
        return cast(TurnDetail, await self._call(Request("GET", f"/runs/{segment(run_id)}/turns/{turn}")))

    async def agents(self) -> list[AgentSummary]:
        return cast("list[AgentSummary]", (await self._call(Request("GET", "/agents")))["data"])

    def runs(self, **filters: Unpack[RunFilters]) -> AsyncIterator[Run]:
        """Runs, newest first, over all pages."""
        return cast("AsyncIterator[Run]", self._pages("/runs", {**filters}, "cursor", "next_cursor"))

    def children(self, run_id: str) -> AsyncIterator[ChildRun]:
        path = f"/runs/{segment(run_id)}/children"
        return cast("AsyncIterator[ChildRun]", self._pages(path, {}, "cursor", "next_cursor"))

    def approvals(self, *, root: str | None = None) -> AsyncIterator[PendingApproval]:
        """The tool calls that wait for approval, oldest runs first."""
        return cast("AsyncIterator[PendingApproval]", self._pages("/approvals", {"root": root}, "cursor", "next_cursor"))

    def inputs(self, *, root: str | None = None) -> AsyncIterator[PendingQuestion]:
        """The questions that wait for an answer, oldest runs first."""
        return cast("AsyncIterator[PendingQuestion]", self._pages("/inputs", {"root": root}, "cursor", "next_cursor"))

    def evals(self, *, agent: str | None = None) -> AsyncIterator[Eval]:
        """Evaluations without their results, newest first, over all pages."""
        return cast("AsyncIterator[Eval]", self._pages("/evals", {"agent": agent}, "cursor", "next_cursor"))

    def eval_cases(self, eval_id: str) -> AsyncIterator[EvalCase]:
        """The cases of an evaluation with their runs, over all pages."""
        path = f"/evals/{segment(eval_id)}/cases"
        return cast("AsyncIterator[EvalCase]", self._pages(path, {}, "cursor", "next_cursor"))

    def messages(self, run_id: str) -> AsyncIterator[dict[str, Any]]:
        """The conversation of a run, over all pages."""
        path = f"/runs/{segment(run_id)}/messages"
        return cast("AsyncIterator[dict[str, Any]]", self._pages(path, {}, "after", "next_after"))

    async def _call(self, request: Request) -> Any:
        return await self._run(protocol.call(request, self._retry_time))

    async def _pages(self, path: str, filters: Mapping[str, Any], parameter: str, next_name: str) -> AsyncIterator[Any]:
        position: Any = None
        while True:
            query = protocol.params({**filters, parameter: position})
            page = await self._call(Request("GET", path, query))
            for item in page["data"]:
                yield item
            position = page[next_name]
            if position is None:
                return

    def _stream(self, run_id: str | None, after: int, scope: str, start: Request | None) -> AsyncRunStream:
        cursor = Cursor(run_id, after, scope, self._retry_time, start)
        return AsyncRunStream(self, cursor)

    async def _run(self, operation: Operation[T]) -> T:
        outcome: Outcome = None
        try:
            while True:
                step = operation.send(outcome) if outcome is not None else next(operation)
                outcome = await self._perform(step)
        except StopIteration as end:
            return cast(T, end.value)

    async def _perform(self, step: protocol.Step) -> Outcome:
        if isinstance(step, Sleep):
            await asyncio.sleep(step.seconds)
            return None
        try:
            response = await self._http.send(self._build(step))
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


class AsyncRunStream:
    """The events of a run, as `RunStream` for asyncio."""

    def __init__(self, client: AsyncClient, cursor: Cursor) -> None:
        self._client = client
        self._cursor = cursor
        self._events = self._follow()

    @property
    def run_id(self) -> str | None:
        """The id of the run; `None` before the first event of a run that the stream starts."""
        return self._cursor.run_id

    @property
    def last_event(self) -> int:
        """The number of the last event, to continue after it with `events(run_id, after=…)`."""
        return self._cursor.after

    def __aiter__(self) -> AsyncIterator[RunEvent]:
        return self._events

    async def __anext__(self) -> RunEvent:
        return await self._events.__anext__()

    async def close(self) -> None:
        """Ends the stream; the run continues."""
        await self._events.aclose()

    async def _follow(self) -> AsyncGenerator[RunEvent, None]:
        cursor, client = self._cursor, self._client
        cursor.begin()
        while not cursor.is_over:
            cause: httpx.RequestError | None = None
            try:
                response = await client._http.send(client._build(cursor.request()), stream=True)
                try:
                    content = await response.aread() if response.status_code >= 300 else b""
                    pause = cursor.opened(response.status_code, response.headers, content)
                    if pause is not None:
                        await asyncio.sleep(pause)
                        continue
                    parser = EventParser()
                    async for chunk in response.aiter_bytes():
                        cursor.received()
                        for event in parser.feed(chunk):
                            if cursor.accept(event):
                                yield event
                            if cursor.is_over:
                                return
                finally:
                    await response.aclose()
            except httpx.RequestError as error:
                cause = error
            if not cursor.is_over:
                await asyncio.sleep(cursor.lost(cause))
