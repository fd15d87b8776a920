"""The official Python client drives agents over HTTP and over stdio, with the protocol of today and with that of 2025."""

import asyncio
import json
import sys
import urllib.request

from mcp import Client, MCPError, StdioServerParameters
from mcp.types import ElicitResult

AXED, SERVER = sys.argv[1:3]
STDIO = StdioServerParameters(command=AXED, args=["mcp", "--server", SERVER])


def text(result):
    return result.content[0].text


async def calls(target, mode):
    """Lists and calls tools, reads resources."""
    async with Client(target, mode=mode) as client:
        tools = {tool.name: tool for tool in (await client.list_tools()).tools}
        assert tools["slow"].description == "Takes three seconds.", tools
        assert "session" in tools["slow"].input_schema["properties"]
        progress = []

        async def on_progress(done, total, message):
            progress.append((done, message))

        arguments = {"input": "go"}
        result = await client.call_tool("test_tool_with_progress", arguments, progress_callback=on_progress)
        assert text(result) == "Done: This is a simple text response for testing.", result
        numbers = [done for done, _ in progress]
        assert numbers == sorted(numbers) and len(numbers) >= 3, progress
        run = result.meta["axed/run_id"]
        tree = await client.read_resource(f"axed://runs/{run}/tree")
        children = json.loads(tree.contents[0].text)["children"]
        assert [child["agent"] for child in children] == ["test_simple_text"], children
        failed = await client.call_tool("test_error_handling", arguments)
        assert failed.is_error and "This agent fails for testing" in text(failed), failed
        wrong = await client.call_tool("slow", {"inptu": "go"})
        assert wrong.is_error and 'did you mean "input"?' in text(wrong), wrong
        try:
            await client.call_tool("nobody", {})
            raise AssertionError("a tool that does not exist was called")
        except MCPError as error:
            assert error.error.data["code"] == "agent_not_found", error.error
        return client.protocol_version


async def approvals(target):
    """The client's user approves a call with other arguments."""
    forms = []

    async def on_form(context, params):
        forms.append(params.message)
        edited = json.dumps({"path": "note.txt", "content": "as a person edited it"})
        return ElicitResult(action="accept", content={"decision": "approve", "arguments": edited})

    async with Client(target, elicitation_callback=on_form) as client:
        result = await client.call_tool("careful", {"input": "write"})
        assert text(result).startswith("Done: "), result
        assert len(forms) == 1 and "careful wants to call write_file with" in forms[0], forms


def request(path, body=None):
    data = json.dumps(body).encode() if body is not None else None
    request = urllib.request.Request(SERVER + path, data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)


def questions():
    """Servers of the official SDK ask a person, with the protocol of today and with that of 2025."""
    run = request("/agents/asker/runs?wait=30", {"input": "go"})
    asking = {}
    while len(asking) < 2:
        asking = {it["server"]: it for it in request("/inputs")["data"]}
        assert request(f"/runs/{run['id']}")["status"] in ("running", "waiting"), request(f"/runs/{run['id']}")
    for server, name in (("today", "Ada"), ("before", "Bob")):
        question = asking[server]
        assert question["question"] == "For whom?" and question["schema"]["required"] == ["name"], question
        request(f"/runs/{run['id']}/inputs/{question['id']}", {"answer": {"name": name}})
    # It still waits, until the answers have reached it.
    while (run := request(f"/runs/{run['id']}?wait=30"))["status"] in ("running", "waiting"):
        pass
    assert run["content"] == "Done: table 3 for Ada, table 4 for Bob", run


async def main():
    questions()
    url = f"{SERVER}/mcp"
    for target in (url, STDIO):
        assert await calls(target, "auto") == "2026-07-28"
        assert await calls(target, "legacy") == "2025-11-25"
        await approvals(target)
    print("mcp_clients: the Python client works over HTTP and stdio, and its servers ask people")


asyncio.run(main())
