#!/usr/bin/env python3
"""Checks bodies of OpenAI's Responses wire against the types of the official package, and the rules between items.

  validate_responses.py responses [--allow x] [--kind request|reply|stream] FILE...

Called by validate_wire.sh, which installs the package and has the checker of the other wires, whose tools this one uses.
Prints one line for each fault; exit 0 when every file is good, else 1.
"""
import argparse, json, os, re, sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "shared", "llm"))
from validate_wire import shape, shape_model, sse, short  # noqa: E402
from pydantic import TypeAdapter, ValidationError  # noqa: E402

NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}\Z")


def request(body):
    from openai.types.responses import response_create_params as p
    # The service takes what an assistant said without an id; the package's type says that it must have one.
    typed = json.loads(json.dumps(body))
    for item in typed.get("input") or []:
        if item.get("type") == "message" and item.get("role") == "assistant":
            item.setdefault("id", "msg_1")
            item.setdefault("status", "completed")
    kind = p.ResponseCreateParamsStreaming if body.get("stream") is True else p.ResponseCreateParamsNonStreaming
    faults = shape(kind, typed)
    if body.get("store") is not False:
        faults.append("store: must be false")
    if not body.get("input"):
        faults.append("input: empty")
    if len(body.get("prompt_cache_key", "")) > 64:
        faults.append("prompt_cache_key: longer than 64")
    for n, tool in enumerate(body.get("tools", [{"name": "x", "parameters": {"type": "object"}}])):
        if not NAME.match(tool.get("name", "")):
            faults.append(f"tools.{n}.name: must match {NAME.pattern}")
        if tool.get("parameters", {}).get("type") != "object":
            faults.append(f"tools.{n}.parameters.type: must be object")
    if body.get("tools") == []:
        faults.append("tools: empty (leave it out)")
    called, answered = [], []
    for n, item in enumerate(body.get("input") or []):
        kind = item.get("type")
        if kind == "function_call":
            called.append(item.get("call_id"))
            if not NAME.match(item.get("name", "")):
                faults.append(f"input.{n}.name: must match {NAME.pattern}")
            try:
                if not isinstance(json.loads(item["arguments"]), dict):
                    faults.append(f"input.{n}.arguments: no JSON object")
            except ValueError:
                faults.append(f"input.{n}.arguments: no JSON")
        if kind == "function_call_output":
            answered.append(item.get("call_id"))
            if item.get("call_id") not in called:
                faults.append(f"input.{n}: answers no call before it")
        if kind in ("function_call", "function_call_output") and not NAME.match(item.get("call_id", "")):
            faults.append(f"input.{n}.call_id: must match {NAME.pattern}")
        if kind == "reasoning":
            after = (body["input"][n + 1:] + [{}])[0]
            if after.get("type") not in ("reasoning", "function_call") and after.get("role") != "assistant":
                faults.append(f"input.{n}: a reasoning item without what it led to")
    if sorted(map(str, called)) != sorted(map(str, answered)):
        faults.append(f"input: calls {called}, results of {answered}")
    return faults


def reply(body):
    from openai.types.responses import Response
    return shape_model(Response, body)


def stream(text):
    from openai.types.responses import ResponseStreamEvent
    events, faults, last = TypeAdapter(ResponseStreamEvent), [], None
    for n, (name, data) in enumerate(sse(text)):
        event = json.loads(data)
        last = event.get("type")
        if name != last:
            faults.append(f"event {n}: event: {name!r} but type {last!r}")
        if event.get("sequence_number") != n:
            faults.append(f"event {n}: sequence_number {event.get('sequence_number')}")
        try:
            events.validate_json(data, strict=True)
        except ValidationError as why:
            faults += [f"event {n} ({name}): {fault}" for fault in short(why, event)]
    if last not in ("response.completed", "response.incomplete", "response.failed", "error"):
        faults.append(f"the last event is {last}")
    return faults


if __name__ == "__main__":
    arguments = argparse.ArgumentParser()
    arguments.add_argument("wire", choices=["responses"])
    arguments.add_argument("--kind", choices=["request", "reply", "stream"], default="request")
    arguments.add_argument("--allow")
    arguments.add_argument("files", nargs="+")
    arguments = arguments.parse_args()
    bad = 0
    for path in arguments.files:
        with open(path) as file:
            text = file.read()
        faults = stream(text) if arguments.kind == "stream" else globals()[arguments.kind](json.loads(text))
        bad += bool(faults)
        print(f"{'FAIL' if faults else 'ok  '} {path}")
        for fault in faults:
            print(f"     {fault}")
    sys.exit(1 if bad else 0)
