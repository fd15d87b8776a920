"""Drives the Python client against a daemon that is killed meanwhile, and compares the types of both clients with the
OpenAPI document."""

from __future__ import annotations

import asyncio
import gc
import json
import pathlib
import re
import sys
import threading
import time
import typing
import unittest.mock
from collections.abc import AsyncIterator, Callable, Iterator
from types import FrameType
from typing import Any

import httpx
from daemon import Daemon
from typing_extensions import NotRequired

import axed_client
from axed_client import AsyncClient, Client, Run, RunEvent, protocol, types
from axed_client import events as event_types

ROOT = pathlib.Path(__file__).parent.parent.parent


def fails_with(kind: type[axed_client.AxedError], call: Callable[[], object]) -> Any:
    try:
        call()
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__}")


def check_events(events: list[RunEvent], run: Run) -> None:
    numbers = [event["seq"] for event in events if "seq" in event]
    assert numbers == list(range(1, run["last_event"] + 1)), numbers
    assert events[-1]["type"] == "run.completed", events[-1]
    assert run["status"] == "completed" and run["content"] == "the\u2028final\u0085text", run
    assert any(event["type"] == "text.delta" for event in events)


class Unreliable(httpx.BaseTransport):
    """Loses the first response to each kind of request, and answers the first wait as a proxy does."""

    def __init__(self) -> None:
        self._inner = httpx.HTTPTransport()
        self._seen: set[str] = set()
        self.keys: list[str] = []

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        response = self._inner.handle_request(request)
        if key := request.headers.get("idempotency-key"):
            self.keys.append(key)
        kind = request.method + ("?wait" if "wait" in request.url.params else "")
        if kind in self._seen:
            return response
        self._seen.add(kind)
        response.read()
        response.close()
        if kind == "GET?wait":
            return httpx.Response(504, text="<html>gateway timeout</html>", request=request)
        raise httpx.ReadError("the connection broke", request=request)


def restart_meanwhile(daemon: Daemon) -> threading.Thread:
    thread = threading.Thread(target=daemon.restart)
    thread.start()
    return thread


def check_dropped_stream(client: Client, run_id: str) -> None:
    """The garbage collector finds a dropped stream at any time: here while the connection pool's lock is held."""

    def collect(frame: FrameType, event: str, argument: object) -> None:
        if frame.f_code.co_name == "_assign_requests_to_connections":
            collected.append(gc.collect())

    dropped: list[Any] = [client.events(run_id)]
    collected: list[int] = []
    gc.disable()
    try:
        assert next(dropped[0]).get("seq") == 1
        dropped.append(dropped)
        del dropped
        sys.setprofile(collect)
        client.get(run_id)
    finally:
        sys.setprofile(None)
        gc.enable()
    assert any(collected), collected
    assert client.get(run_id)["id"] == run_id


class Broken(httpx.SyncByteStream, httpx.AsyncByteStream):
    """Possibly an event, comments for longer than the clients below try again, and the end of the connection."""

    def __init__(self, *first: bytes) -> None:
        self._first = first

    def __iter__(self) -> Iterator[bytes]:
        yield from self._first
        for _ in range(4):
            time.sleep(0.2)
            yield b": the run continues\n\n"
        raise httpx.ReadError("the connection broke")

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for chunk in self:
            yield chunk


def event(seq: int, kind: str) -> bytes:
    text = json.dumps({"type": kind, "seq": seq, "run_id": "run_x", "root_id": "run_x"})
    return f"data: {text}\n\n".encode()


def responses(*all: httpx.Response | httpx.TransportError) -> httpx.MockTransport:
    """One after the other, and the last one again and again."""
    rest = list(all)

    def handle(_: httpx.Request) -> httpx.Response:
        response = rest.pop(0) if len(rest) > 1 else rest[0]
        if isinstance(response, httpx.TransportError):
            raise response
        return response

    return httpx.MockTransport(handle)


def streamed(body: bytes | Broken) -> httpx.Response:
    headers = {"content-type": "text/event-stream"}
    if isinstance(body, bytes):
        return httpx.Response(200, headers=headers, content=body)
    return httpx.Response(200, headers=headers, stream=body)


def broken_stream() -> httpx.MockTransport:
    end = streamed(event(2, "run.completed"))
    return responses(httpx.ConnectError("away"), streamed(Broken(event(1, "run.started"))), end)


def check_broken_streams() -> None:
    stream = Client(http=httpx.Client(transport=broken_stream()), retry_time=0.5).events("run_x")
    time.sleep(0.6)
    assert [event.get("seq") for event in stream] == [1, 2]

    async def read() -> list[int | None]:
        client = AsyncClient(http=httpx.AsyncClient(transport=broken_stream()), retry_time=0.5)
        return [event.get("seq") async for event in client.events("run_x")]

    assert asyncio.run(read()) == [1, 2]
    # A proxy that closes at once, also after a comment of its own.
    for body in [b"", b": keep-alive\n\n"]:
        closing = Client(http=httpx.Client(transport=responses(streamed(body))), retry_time=0.5)
        fails_with(axed_client.ConnectionFailed, lambda: list(closing.events("run_x")))

        async def read_closing() -> list[RunEvent]:
            client = AsyncClient(http=httpx.AsyncClient(transport=responses(streamed(body))), retry_time=0.5)
            return [event async for event in client.events("run_x")]

        fails_with(axed_client.ConnectionFailed, lambda: asyncio.run(read_closing()))
    # A proxy that limits the time of a connection, while the run has no events.
    with unittest.mock.patch.object(protocol, "STREAM_STEADY", 0.3):
        quiet = responses(streamed(Broken()), streamed(Broken()), streamed(event(1, "run.completed")))
        patient = Client(http=httpx.Client(transport=quiet), retry_time=0.5)
        assert [event.get("seq") for event in patient.events("run_x")] == [1]


def check_other_servers() -> None:
    def client(*all: httpx.Response | httpx.TransportError) -> Client:
        return Client(http=httpx.Client(transport=responses(*all)))

    location = {"location": "https://axed.example.com/runs/run_x?token=secret"}
    redirecting = client(httpx.Response(307, headers=location))
    for call in [lambda: redirecting.get("run_x"), lambda: list(redirecting.events("run_x"))]:
        redirect = fails_with(axed_client.Problem, call)
        assert redirect.status == 307 and "https://axed.example.com/runs/run_x" in str(redirect), redirect
        assert "secret" not in str(redirect), redirect
    page = client(httpx.Response(200, html="<h1>It works</h1>"))
    fails_with(axed_client.UnexpectedResponse, lambda: page.get("run_x"))
    fails_with(axed_client.UnexpectedResponse, lambda: list(page.events("run_x")))
    for body in [{"status": "ok"}, {}, []]:
        fails_with(axed_client.UnexpectedResponse, lambda: client(httpx.Response(200, json=body)).wait("run_x"))

    # What cannot succeed is not tried again, and a wait ends on time.
    started = time.monotonic()
    fails_with(axed_client.ConnectionFailed, lambda: Client("ftp://127.0.0.1").get("run_x"))
    fails_with(axed_client.ConnectionFailed, lambda: client(httpx.LocalProtocolError("a line break")).get("run_x"))
    away = httpx.ConnectError("away")
    fails_with(axed_client.ConnectionFailed, lambda: client(away).wait("run_x", timeout=0.5))
    fails_with(axed_client.ConnectionFailed, lambda: client(away).run("quick", timeout=0.5))
    running = httpx.Response(200, json={"id": "run_x", "status": "running", "pending_approvals": []})
    assert time.monotonic() - started < 60
    started = time.monotonic()
    timeout = fails_with(axed_client.WaitTimeout, lambda: client(running, away).wait("run_x", timeout=1.5))
    assert timeout.run["id"] == "run_x" and 1.4 < time.monotonic() - started < 60
    for status in [429, 502, 503, 504]:
        failing = httpx.Response(status, headers={"retry-after": "3600"}, text="<html>no upstream</html>")
        started = time.monotonic()
        timeout = fails_with(axed_client.WaitTimeout, lambda: client(running, failing).wait("run_x", timeout=1.5))
        assert timeout.run["id"] == "run_x" and 1.4 < time.monotonic() - started < 60
    fails_with(axed_client.NotFound, lambda: client(running, httpx.Response(404)).wait("run_x", timeout=1.5))
    # A decision is repeated also if it may have arrived.
    losses: list[httpx.Response | httpx.TransportError] = [httpx.PoolTimeout("full"), httpx.ReadError("lost")]
    for lost in [*losses, httpx.Response(502)]:
        assert client(lost, running).approve("run_x", "call_1")["status"] == "running"


def check_many_streams(client: Client, run_id: str) -> None:
    streams = [client.events(run_id) for _ in range(101)]
    assert {next(stream).get("seq") for stream in streams} == {1}
    assert client.get(run_id)["id"] == run_id
    for stream in streams:
        stream.close()


def check_evals(client: Client) -> None:
    cases = [{"id": name, "input": name} for name in ("a", "b", "c")]
    accepted = client.create_eval(agent="quick", against="wordy", cases=cases, gates=["short.mean >= 1"])
    assert accepted["planned"] == 6 and accepted["result"] is None
    ended = client.wait_for_eval(accepted["id"], timeout=60)
    assert ended["state"] == "completed" and ended == client.get_eval(accepted["id"])
    result = ended["result"]
    assert result is not None and result["against"] is not None
    short = result["scorers"]["short"]
    assert [version["mean"] for version in short["versions"]] == [1, 0] and short["wins"] == 3
    assert result["gates"][0]["held"] and len(result["flipped"]) == 3
    found = list(client.eval_cases(accepted["id"]))
    assert [(case["case"], len(case["runs"])) for case in found] == [("a", 2), ("b", 2), ("c", 2)]
    endless = client.create_eval(agent="endless", cases=cases, tools="live")
    assert client.wait_for_eval(endless["id"], timeout=1.5)["finished_at"] is None
    client.cancel_eval(endless["id"], "enough")
    ended = client.wait_for_eval(endless["id"], timeout=60)
    assert (ended["state"], ended["reason"]) == ("cancelled", "enough")
    assert [it["id"] for it in client.evals()] == [endless["id"], accepted["id"]]
    assert [it["id"] for it in client.evals(agent="quick")] == [accepted["id"]]
    invalid = fails_with(axed_client.Invalid, lambda: client.create_eval(agent="quick", dataset="nowhere"))
    assert invalid.errors[0]["pointer"] == "/dataset"


def drive(daemon: Daemon) -> None:
    client = Client(daemon.url)
    assert {agent["name"] for agent in client.agents()} >= {"quick", "slow"}
    run = client.run("quick", "go", labels={"team": "blue"})
    assert run["content"] == "done" and client.get(run["id"]) == run

    check_dropped_stream(client, run["id"])
    check_many_streams(client, run["id"])

    # The daemon is killed in the middle of a stream and of a wait.
    stream = client.stream("slow", "go")
    events = []
    for event in stream:
        events.append(event)
        if event["type"] == "tool.completed" and event["turn"] == 2:
            daemon.restart()
    assert stream.run_id is not None
    check_events(events, client.get(stream.run_id))
    assert next(client.events(stream.run_id, after=3)).get("seq") == 4
    assert list(client.events(stream.run_id, after=stream.last_event)) == []
    waited = client.start("slow", "go")
    restart = restart_meanwhile(daemon)
    assert client.wait(waited["id"], timeout=60)["status"] == "completed"
    restart.join()

    # Responses are lost: each call takes effect once.
    transport = Unreliable()
    unreliable = Client(daemon.url, http=httpx.Client(transport=transport))
    before = len(list(client.runs(agent="quick")))
    run = unreliable.run("quick", "go")
    assert len(list(client.runs(agent="quick"))) == before + 1
    assert len(transport.keys) == 2 and len(set(transport.keys)) == 1
    unreliable.delete(run["id"])
    fails_with(axed_client.NotFound, lambda: client.delete(run["id"]))

    # Approvals, messages, forks and pages.
    careful = client.start("careful", "go")
    careful = client.wait(careful["id"], until_approval=True)
    (pending,) = client.approvals(root=careful["id"])
    assert pending == careful["pending_approvals"][0]
    call = (pending["run_id"], pending["tool_call_id"])
    invalid = fails_with(axed_client.Invalid, lambda: client.approve(*call, arguments={"path": 1}))
    assert invalid.code == "invalid_field" and invalid.errors[0]["pointer"] == "/arguments"
    assert client.pause(careful["id"])["id"] == client.resume(careful["id"])["id"]
    for _ in range(2):
        client.approve(*call, arguments={"path": "other.md", "content": "x"}, idempotency_key="once")
    done = client.wait(careful["id"], timeout=30)
    assert "wrote 1 bytes to other.md" in (done["content"] or ""), done
    fails_with(axed_client.Conflict, lambda: client.approve(*call))
    assert client.score(done["id"], "thumbs", True, comment="fine")["value"] == 1
    assert client.get(done["id"])["scores"] == {"thumbs": {"n": 1, "mean": 1.0}}
    assert "/feedback/" in client.feedback_link(done["id"], "thumbs", "7d")["url"]
    check_evals(client)
    roles = [message["role"] for message in client.messages(careful["id"])]
    assert roles[:3] == ["user", "assistant", "tool"], roles
    assert client.turn(careful["id"], 1)["turn"] == client.turns(careful["id"])[0]["turn"] == 1
    forked = client.wait(client.fork(careful["id"], at={"turn": 2})["id"], timeout=30)
    assert forked["forked_from"] == {"run": careful["id"], "at_run": careful["id"], "turn": 2}
    assert not client.tree(forked["id"])["children"] and not list(client.children(forked["id"]))
    ids = [run["id"] for run in client.runs(limit=1)]
    assert len(ids) == len(set(ids)) >= 5, ids
    assert [run["labels"] for run in client.runs(labels={"team": "blue"})] == [{"team": "blue"}]
    denied = client.wait(client.start("careful", "go")["id"], until_approval=True)
    pending = denied["pending_approvals"][0]
    client.deny(pending["run_id"], pending["tool_call_id"], reason="not today")
    assert "not today" in (client.wait(denied["id"], timeout=30)["content"] or "")

    # Questions.
    asking = client.wait(client.start("asking", "go")["id"], until_input=True)
    (question,) = client.inputs(root=asking["id"])
    assert question == asking["pending_inputs"][0] and asking["wait"] and asking["wait"]["reason"] == "input"
    key = (question["run_id"], question["id"])
    fails_with(axed_client.Invalid, lambda: client.answer(*key, "three"))
    for _ in range(2):
        client.answer(*key, 3, idempotency_key="once")
    fails_with(axed_client.Conflict, lambda: client.decline(*key, "too late"))
    assert client.wait(asking["id"], timeout=30)["content"] == "A person answered: 3"

    # What goes wrong.
    endless = client.start("endless", "go")
    timeout = fails_with(axed_client.WaitTimeout, lambda: client.wait(endless["id"], timeout=1.5))
    assert timeout.run["id"] == endless["id"]
    assert client.add_message(endless["id"], "be brief")["number"] == 1
    client.cancel(endless["id"], "enough")
    assert client.wait(endless["id"])["cancel_reason"] == "enough"
    failed = fails_with(axed_client.RunNotCompleted, lambda: client.run("failing", "go"))
    assert failed.run["error"]["code"] == "provider_bad_request", failed
    assert fails_with(axed_client.NotFound, lambda: client.start("nobody")).code == "agent_not_found"
    unknown = fails_with(axed_client.Problem, lambda: client.start("quick", inptu="x"))  # type: ignore[call-arg]
    assert unknown.code == "unknown_field" and unknown.request_id, unknown
    nowhere = Client("http://127.0.0.1:9", retry_time=0.5)
    fails_with(axed_client.ConnectionFailed, lambda: nowhere.get("run_x"))
    client.close()


async def drive_async(daemon: Daemon) -> None:
    async with AsyncClient(daemon.url) as client:
        run, other = await asyncio.gather(client.run("quick", "a"), client.run("quick", "b"))
        assert run["content"] == other["content"] == "done" and run["id"] != other["id"]
        stream = client.stream("slow", "go")
        events = []
        async for event in stream:
            events.append(event)
            if event["type"] == "tool.completed" and event["turn"] == 2:
                await asyncio.to_thread(daemon.restart)
        assert stream.run_id is not None
        check_events(events, await client.get(stream.run_id))
        waited = await client.start("slow", "go")
        done, _ = await asyncio.gather(client.wait(waited["id"]), asyncio.to_thread(daemon.restart))
        assert done["status"] == "completed"
        assert waited["id"] in [run["id"] async for run in client.runs(agent="slow", limit=1)]
        accepted = await client.create_eval(agent="quick", cases=[{"input": "a"}])
        assert (await client.wait_for_eval(accepted["id"]))["state"] == "completed"
        assert [case["case"] async for case in client.eval_cases(accepted["id"])] == ["1"]
        stopped = client.events(waited["id"])
        assert (await stopped.__anext__())["type"] == "run.queued"
        await stopped.close()


def check_types(url: str) -> None:
    schemas = httpx.get(url + "/openapi.json").json()["components"]["schemas"]
    sources = [(ROOT / f"clients/typescript/src/{name}.ts").read_text() for name in ("types", "events")]
    declaration = r"^(?:export )?interface (\w+)(?: extends (\w+))? \{\n(.*?)^\}"
    interfaces = {name: (base, body) for name, base, body in re.findall(declaration, "\n".join(sources), re.M | re.S)}

    def declared(name: str) -> set[str]:
        base, body = interfaces[name]
        return set(re.findall(r"^  (\w+)\??:", body, re.M)) | (declared(base) if base else set())

    kinds = {part["$ref"].rsplit("/", 1)[1] for part in schemas["RunEvent"]["oneOf"]}
    assert {kind.__name__ for kind in typing.get_args(event_types.RunEvent)} == kinds
    checked = 0
    for name, kind in {**vars(types), **vars(event_types)}.items():
        if not typing.is_typeddict(kind) or name not in schemas:
            continue
        schema = schemas[name]
        known = set(schema["properties"]) | ({"seq"} if name in kinds else set())
        hints = typing.get_type_hints(kind, include_extras=True)
        missing = known - set(hints) if kind.__total__ else set()
        assert set(hints) <= known and not missing, (name, set(hints) ^ known)
        # Fields of a response: those that are always there.
        required = {field for field, hint in hints.items() if typing.get_origin(hint) is not NotRequired}
        surplus = required - set(schema.get("required", [])) if kind.__total__ else set()
        assert not surplus, (name, surplus)
        # A run's input is an argument of its own in Python.
        assert declared(name) - {"input"} == set(hints) - {"input"}, (name, declared(name) ^ set(hints))
        checked += 1
    assert checked >= 40, checked


if __name__ == "__main__":
    with Daemon(sys.argv[1]) as daemon:
        check_types(daemon.url)
        check_broken_streams()
        check_other_servers()
        drive(daemon)
        asyncio.run(drive_async(daemon))
    print("clients: Python: types, streams and waits over restarts, lost responses, approvals, forks, errors")
