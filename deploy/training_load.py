#!/usr/bin/env python3
"""Lets a daemon execute what daemons usually execute, for deploy/optimized.sh, which counts what that is.

    deploy/training_load.py AXED [--seconds 30]

Runs with one turn, trees of runs, tool calls, streams and readers of the record, with models on the wires of OpenAI and of
Anthropic. The model replies at once. Ends with an error if a run does not complete.
"""

import argparse, http.client, http.server, json, os, pathlib, signal, subprocess, sys, tempfile, threading, time

CONFIG = """
[providers.openai]
base_url = "http://127.0.0.1:{port}/v1"
api_key = "none"
[providers.anthropic]
base_url = "http://127.0.0.1:{port}"
api_key = "none"
"""
AGENTS = {
    "solo": "",
    "boss": 'sub_agents = ["solo"]\n',
    "reader": 'tools = ["read_file", "grep"]\nworkdir = "."\n',
    "streamer": "stream = true\n",
}
TOOL_CALLS = {"boss": 3, "reader": 2}
MODELS = {"openai": "gpt", "anthropic": "claude"}
TEXT = "Hello to everybody in the building, and to those who work outside."
# How often each is used: in most daemons the runs with one turn are by far the most.
TURNS = ["solo"] * 5 + ["boss"] * 2 + ["reader", "streamer"]


def calls_of(model):
    """The tools that a model calls before it says its text."""
    _, provider, agent = model.split("-")
    if agent == "boss":
        return [("call_agent", {"agent": f"solo-{provider}", "task": f"greet floor {n}"}) for n in range(3)]
    if agent == "reader":
        return [("read_file", {"path": "notes.txt"}), ("grep", {"pattern": "office"})]
    return []


def openai_reply(body, calls):
    """The bytes of a chat completion: JSON, or a stream of chunks."""
    calls = [{"index": n, "id": f"call_{n}", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
             for n, (name, arguments) in enumerate(calls)]
    message = {"role": "assistant", "content": None if calls else TEXT} | ({"tool_calls": calls} if calls else {})
    reason = "tool_calls" if calls else "stop"
    head, usage = {"id": "c", "model": body["model"], "created": 0}, {"prompt_tokens": 20, "completion_tokens": 10, "total_tokens": 30}
    if not body.get("stream"):
        return json.dumps(head | {"choices": [{"index": 0, "message": message, "finish_reason": reason}], "usage": usage})
    deltas = [message] if calls else [{"content": word + " "} for word in TEXT.split()]
    chunks = [{"choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
    chunks += [{"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]}, {"choices": [], "usage": usage}]
    return "".join(f"data: {json.dumps(head | chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"


def anthropic_reply(body, calls):
    """The bytes of a message: JSON, or a stream of events."""
    blocks = [{"type": "tool_use", "id": f"toolu_{n}", "name": name, "input": arguments}
              for n, (name, arguments) in enumerate(calls)] or [{"type": "text", "text": TEXT}]
    reason, usage = "tool_use" if calls else "end_turn", {"input_tokens": 20, "output_tokens": 10}
    message = {"id": "m", "type": "message", "role": "assistant", "model": body["model"], "stop_sequence": None}
    if not body.get("stream"):
        return json.dumps(message | {"content": blocks, "stop_reason": reason, "usage": usage})
    events = [{"type": "message_start", "message": message | {"content": [], "stop_reason": None, "usage": usage}}]
    for n, block in enumerate(blocks):
        if block["type"] == "text":
            begin, deltas = block | {"text": ""}, [{"type": "text_delta", "text": word + " "} for word in TEXT.split()]
        else:
            begin, deltas = block | {"input": {}}, [{"type": "input_json_delta", "partial_json": json.dumps(block["input"])}]
        events.append({"type": "content_block_start", "index": n, "content_block": begin})
        events += [{"type": "content_block_delta", "index": n, "delta": delta} for delta in deltas]
        events.append({"type": "content_block_stop", "index": n})
    events += [{"type": "message_delta", "delta": {"stop_reason": reason}, "usage": usage}, {"type": "message_stop"}]
    return "".join(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n" for event in events)


class Provider(http.server.BaseHTTPRequestHandler):
    """A model that calls its tools once, and then says the same text."""

    protocol_version = "HTTP/1.1"

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        is_first = not any(message["role"] == "assistant" for message in body["messages"])
        reply = anthropic_reply if self.path.endswith("/messages") else openai_reply
        data = reply(body, calls_of(body["model"]) if is_first else []).encode()
        kind = "text/event-stream" if body.get("stream") else "application/json"
        head = f"HTTP/1.1 200 OK\r\ncontent-type: {kind}\r\ncontent-length: {len(data)}\r\n\r\n"
        self.wfile.write(head.encode() + data)

    def log_message(self, *_):
        pass


def use(address, number, end):
    """One client: starts runs until the time is over, follows some and reads some again. Returns how many."""
    connection, count = http.client.HTTPConnection(address, timeout=60), 0

    def send(method, path, body=None, accept="application/json"):
        headers = {"accept": accept} | ({"content-type": "application/json"} if body else {})
        connection.request(method, path, json.dumps(body) if body else None, headers)
        response = connection.getresponse()
        text = response.read().decode()
        if response.status not in (200, 202):
            raise AssertionError(f"{method} {path}: {response.status} {text}")
        return text

    while time.monotonic() < end:
        agent = TURNS[(number + count) % len(TURNS)] + "-" + list(MODELS)[count // len(TURNS) % len(MODELS)]
        request = {"input": "Say hello to the whole office.", "labels": {"team": "training"}}
        if agent.startswith("streamer"):
            id = json.loads(send("POST", f"/agents/{agent}/runs", request))["id"]
            send("GET", f"/runs/{id}/events", accept="text/event-stream")
        run = json.loads(send("POST", f"/agents/{agent}/runs?wait=30", request))
        if run["status"] != "completed" or run["tool_calls"] != TOOL_CALLS.get(agent.split("-")[0], 0):
            raise AssertionError(f"{agent}: {json.dumps(run)}")
        if count % 8 == 0:
            for path in (f"/runs/{run['id']}", f"/runs/{run['id']}/events", f"/runs/{run['id']}/tree", "/runs?limit=20", "/usage"):
                send("GET", path)
        count += 1
    return count


def prepare(home):
    """Starts the provider and writes the files of a daemon."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Provider)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    (home / "axed.toml").write_text(CONFIG.format(port=server.server_address[1]))
    (home / "work").mkdir()
    (home / "work/notes.txt").write_text("The office opens at nine.\n" * 20)
    (home / "agents").mkdir()
    for provider, model in MODELS.items():
        for name, settings in AGENTS.items():
            settings = settings.replace('"solo"', f'"solo-{provider}"').replace('workdir = "."', f'workdir = "{home}/work"')
            text = f'name = "{name}-{provider}"\nmodel = "{provider}/{model}-{provider}-{name}"\n{settings}'
            (home / f"agents/{name}-{provider}.toml").write_text(text)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("axed")
    parser.add_argument("--seconds", type=float, default=30)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="axed-training-") as directory:
        home = pathlib.Path(directory)
        prepare(home)
        command = [os.path.abspath(arguments.axed), "serve", "--config", "axed.toml", "--agents", "agents", "--data", "data"]
        with open(home / "log", "wb") as log:
            daemon = subprocess.Popen([*command, "--listen", "127.0.0.1:0"], cwd=home, stdout=subprocess.PIPE, stderr=log, text=True)
        line = daemon.stdout.readline()
        if not line.startswith("axed listening on http://"):
            sys.exit(f"training_load: axed does not start:\n{(home / 'log').read_text()[-3000:]}")
        address, end, counts = line.strip().removeprefix("axed listening on http://"), time.monotonic() + arguments.seconds, []
        clients = [threading.Thread(target=lambda n=n: counts.append(use(address, n, end))) for n in range(16)]
        for client in clients:
            client.start()
        for client in clients:
            client.join()
        # Stopped in order, because the counts are written at the end.
        daemon.send_signal(signal.SIGTERM)
        status = daemon.wait(timeout=60)
        if status != 0 or len(counts) != len(clients):
            sys.exit(f"training_load: the daemon ended with status {status}, {len(counts)} of {len(clients)} clients did not fail")
        print(f"training_load: {sum(counts)} calls of clients, each a run or a tree")


if __name__ == "__main__":
    main()
