"""Drives a run with the client of openapi-python-client: creates it, waits, reads its text, tokens and events."""

import sys

from axed_client import Client
from axed_client.api.agents import get_agent
from axed_client.api.runs import create_run, get_run, list_run_events
from axed_client.models import (
    AgentCalledEvent,
    Problem,
    ProblemCode,
    Run,
    RunCompletedEvent,
    RunEventPage,
    RunQueuedEvent,
    RunRequest,
    RunStatus,
)

client = Client(base_url=sys.argv[1], timeout=60)

request = RunRequest(input_="Prepare the release")
run = create_run.sync("planner-scripted", client=client, body=request, idempotency_key="attrs")
assert isinstance(run, Run), run
run = get_run.sync(run.id, client=client, wait="30")
assert isinstance(run, Run) and run.status == RunStatus.COMPLETED, run
assert run.content and run.tree.input_tokens > run.input_tokens, run

events = []
after = 0
while after is not None:
    page = list_run_events.sync(run.id, client=client, after=after)
    assert isinstance(page, RunEventPage), page
    events += page.data
    after = page.next_after
assert isinstance(events[0], RunQueuedEvent), events[0]
assert any(isinstance(event, AgentCalledEvent) for event in events), events
last = events[-1]
assert isinstance(last, RunCompletedEvent) and last.content == run.content, last

problem = get_agent.sync("nobody", client=client)
assert isinstance(problem, Problem) and problem.code == ProblemCode.AGENT_NOT_FOUND, problem
print(f"openapi_clients: openapi-python-client: {run.tree.input_tokens} tokens in, {len(events)} events")
