"""Drives a daemon with OpenAI's official client for Python: check.py <address> <key>"""

import sys

import openai
from pydantic import BaseModel

address, key = sys.argv[1:]
client = openai.OpenAI(base_url=f"{address}/v1", api_key=key)
hello = [{"role": "user", "content": "hello"}]
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]


class Sorted(BaseModel):
    urgency: str


def models():
    assert [model.id for model in client.models.list()] == ["caller", "chat", "sorter", "suite"]
    assert client.models.retrieve("chat").owned_by == "axed"


def completion():
    got = client.chat.completions.create(model="chat", messages=hello)
    assert got.choices[0].message.content == "You said: hello", got
    assert got.choices[0].finish_reason == "stop"
    assert (got.usage.prompt_tokens, got.usage.completion_tokens) == (12, 5)
    raw = client.chat.completions.with_raw_response.create(model="chat", messages=hello)
    assert raw.headers["x-run-id"].startswith("run_")


def stream():
    chunks = list(
        client.chat.completions.create(
            model="chat", messages=hello, stream=True, stream_options={"include_usage": True}
        )
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == "You said: hello", chunks
    assert chunks[-1].usage.total_tokens == 17
    with client.chat.completions.stream(model="chat", messages=hello) as events:
        final = events.get_final_completion()
    assert final.choices[0].message.content == "You said: hello"


def json_schema():
    got = client.chat.completions.parse(
        model="sorter", messages=hello, response_format=Sorted
    )
    assert got.choices[0].message.parsed == Sorted(urgency="now"), got


def pictures():
    url = f"data:image/png;base64,{PIXEL}"
    parts = [{"type": "text", "text": "hello"}, {"type": "image_url", "image_url": {"url": url}}]
    got = client.chat.completions.create(model="chat", messages=[{"role": "user", "content": parts}])
    assert "hello" in got.choices[0].message.content, got


def tools():
    messages = [{"role": "user", "content": "How is it?"}]
    first = client.chat.completions.with_raw_response.create(
        model="caller", messages=messages, tools=TOOLS
    )
    message = first.parse().choices[0].message
    assert first.parse().choices[0].finish_reason == "tool_calls", first.parse()
    call = message.tool_calls[0]
    assert (call.function.name, call.function.arguments) == ("weather", '{"city":"Bonn"}')
    messages += [message, {"role": "tool", "tool_call_id": call.id, "content": "rain"}]
    last = client.chat.completions.with_raw_response.create(
        model="caller", messages=messages, tools=TOOLS
    )
    assert last.parse().choices[0].message.content == "The weather: rain", last.parse()
    assert last.headers["x-run-id"] == first.headers["x-run-id"]


def responses():
    first = client.responses.create(model="chat", input="hello", instructions="Be brief.")
    assert (first.status, first.output_text) == ("completed", "You said: hello"), first
    assert first.usage.total_tokens == 17
    assert client.responses.retrieve(first.id).output_text == first.output_text
    items = list(client.responses.input_items.list(first.id))
    assert items[0].content[0].text == "hello", items
    second = client.responses.create(model="chat", input="again", previous_response_id=first.id)
    assert second.output_text == "You said: again", second
    parsed = client.responses.parse(model="sorter", input="hello", text_format=Sorted)
    assert parsed.output_parsed == Sorted(urgency="now"), parsed


def response_stream():
    with client.responses.stream(model="chat", input="hello") as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert "".join(deltas) == final.output_text == "You said: hello", final


def response_tools():
    function = {"type": "function", **TOOLS[0]["function"], "strict": False}
    first = client.responses.create(model="caller", input="How is it?", tools=[function])
    call = first.output[-1]
    assert (call.type, call.name) == ("function_call", "weather"), first
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    last = client.responses.create(
        model="caller", input=[result], tools=[function], previous_response_id=first.id
    )
    assert last.output_text.endswith("The weather: rain") and last.id == f"{first.id}_2", last


def resumed_stream():
    stream = client.responses.create(model="chat", input="hello", background=True, stream=True)
    events = list(stream)
    response_id = events[0].response.id
    for at, event in enumerate(events):
        rest = list(
            client.responses.retrieve(response_id, stream=True, starting_after=event.sequence_number)
        )
        expected = [it.type for it in events[at + 1 :] if not it.type.endswith(".delta")]
        assert [it.type for it in rest] == expected, (event, rest)
    with client.responses.stream(response_id=response_id, starting_after=events[1].sequence_number) as again:
        final = again.get_final_response()
    assert final.output_text == "You said: hello", final


def background():
    got = client.responses.create(model="chat", input="hello", background=True)
    while got.status in ("queued", "in_progress"):
        got = client.responses.retrieve(got.id)
    assert got.output_text == "You said: hello", got
    assert client.responses.cancel(got.id).status == "completed"


def errors():
    try:
        client.chat.completions.create(model="nobody", messages=hello)
        raise AssertionError("an unknown model")
    except openai.NotFoundError as error:
        assert error.code == "agent_not_found" and error.type == "invalid_request_error"
    try:
        client.chat.completions.create(model="chat", messages=[])
        raise AssertionError("no messages")
    except openai.BadRequestError as error:
        assert error.param == "messages"
    stranger = openai.OpenAI(base_url=f"{address}/v1", api_key="wrong")
    try:
        stranger.models.list()
        raise AssertionError("a wrong key")
    except openai.AuthenticationError as error:
        assert error.code == "unauthorized"


chats = (models, completion, stream, json_schema, pictures, tools)
kept = (responses, response_stream, resumed_stream, response_tools, background)
for check in (*chats, *kept, errors):
    check()
    print(f"python: {check.__name__}")
