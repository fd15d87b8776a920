"""Drives a run with the client of openapi-generator: creates it, waits, reads its text, tokens and events."""

import sys

from axed_client import ApiClient, Configuration
from axed_client.api import AgentsApi, RunsApi
from axed_client.exceptions import NotFoundException
from axed_client.models import (
    AgentCalledEvent,
    ContentInput,
    RunCompletedEvent,
    RunInput,
    RunQueuedEvent,
    RunRequest,
    RunStatus,
)

with ApiClient(Configuration(host=sys.argv[1])) as client:
    runs = RunsApi(client)
    request = RunRequest(input=RunInput(ContentInput("Prepare the release")))
    run = runs.create_run("planner-scripted", run_request=request, idempotency_key="pydantic")
    run = runs.get_run(run.id, wait="30")
    assert run.status == RunStatus.COMPLETED, run
    assert run.content and run.tree.input_tokens > run.input_tokens, run

    events = []
    after = 0
    while after is not None:
        page = runs.list_run_events(run.id, after=after)
        events += [event.actual_instance for event in page.data]
        after = page.next_after
    assert isinstance(events[0], RunQueuedEvent), events[0]
    assert any(isinstance(event, AgentCalledEvent) for event in events), events
    last = events[-1]
    assert isinstance(last, RunCompletedEvent) and last.content == run.content, last

    try:
        AgentsApi(client).get_agent("nobody")
        raise AssertionError("an agent that does not exist was found")
    except NotFoundException as error:
        assert error.data.code == "agent_not_found", error.data
    print(f"openapi_clients: openapi-generator: {run.tree.input_tokens} tokens in, {len(events)} events")
