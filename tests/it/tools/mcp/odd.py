"""An MCP server whose messages differ from the protocol. Its first argument names the cases."""
import json, os, sys, time

HOME = os.environ["HOME"]
MODE = sys.argv[1] if len(sys.argv) > 1 else ""
PICTURE = {"type": "image", "mimeType": "image/png", "data": "R0lGODlhIQ=="}
PLAIN = {"name": "plain", "description": "d", "inputSchema": {"type": "object", "properties": {"a": {"type": "string"}}}}
TOOLS = [
    PLAIN,
    {"name": "bare"},
    {"name": "list", "inputSchema": {"type": "object", "properties": [], "required": None}},
    {"name": "either", "inputSchema": {"anyOf": [
        {"type": "object", "properties": {"b": {"type": "string"}}, "required": ["b"]}, {"type": "null"}]}},
    {"name": "hinted", "inputSchema": {}, "annotations": [], "icons": 7, "description": None, "outputSchema": []},
    {"name": "items", "inputSchema": {"type": "array"}},
    {"name": "task", "inputSchema": {}, "execution": {"taskSupport": "required"}},
    {"description": "nameless"},
    None,
]
TEXT = {"type": "text", "text": "forty-two"}
RESULTS = {
    "link": {"content": [TEXT, {"type": "resource_link", "uri": "file:///a"}]},
    "block": {"content": [TEXT, None, {"type": "image"}, {"type": "resource", "resource": 7}], "_meta": 5, "isError": None},
    "text": {"content": "forty-two"},
    "own": "forty-two",
    "picture": {"content": [PICTURE], "structuredContent": {"content": [PICTURE]}},
}


def write(line):
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def send(message):
    write(json.dumps({"jsonrpc": "2.0", **message}))


def call(id, name):
    if name in RESULTS:
        send({"id": id, "result": RESULTS[name]})
    elif name == "half":
        write('{"jsonrpc":"2.0","id":%d,"result":{"content":[{"type":"text","text":"cut here \\ud83d"}]}}' % id)
    elif name == "nan":
        send({"id": id, "result": {"content": [TEXT], "structuredContent": {"mean": float("nan")}}})
    elif name == "noise":
        write("\ufeff" + json.dumps({"id": str(id), "result": {"content": [TEXT]}, "error": None, "jsonrpc": 2}))
    elif name == "prefix":
        sys.stdout.write("working... ")
        send({"id": id, "result": {"content": [TEXT]}})
    elif name == "batch":
        write(json.dumps([{"jsonrpc": "2.0", "method": "notifications/message", "id": None},
                          {"jsonrpc": "2.0", "id": id, "result": {"content": [TEXT]}}]))
    elif name == "wrong_type":
        send({"id": {"is": id}, "result": {"content": [TEXT]}})
    elif name == "without_id":
        send({"result": {"content": [TEXT]}})
    elif name == "error_text":
        send({"id": id, "error": "out of paper"})


if MODE == "slow":
    # Until the story lets it start.
    while not os.path.exists(os.path.join(HOME, "start")):
        time.sleep(0.01)
for line in sys.stdin:
    message = json.loads(line)
    id, method, params = message.get("id"), message.get("method"), message.get("params") or {}
    if method == "initialize" and MODE == "odd":
        send({"id": id, "result": {"protocolVersion": 2025, "capabilities": [], "serverInfo": None, "instructions": 7}})
    elif method == "initialize":
        send({"id": id, "result": {
            "protocolVersion": params["protocolVersion"], "capabilities": {"tools": True, "logging": None},
            "serverInfo": {"name": "odd"},
        }})
    elif method == "tools/list" and MODE == "odd":
        send({"id": id, "result": {"tools": TOOLS, "nextCursor": None}})
    elif method == "tools/list" and MODE.startswith("cursor"):
        cursors = {"cursor_empty": "", "cursor_same": "a", "cursor_new": str(time.time_ns()), "cursor_false": False}
        send({"id": id, "result": {"tools": [PLAIN], "nextCursor": cursors[MODE]}})
    elif method == "tools/list":
        names = [*RESULTS, "half", "nan", "noise", "prefix", "batch", "wrong_type", "without_id", "error_text"]
        send({"id": id, "result": {"tools": [{**PLAIN, "name": name} for name in names]}})
    elif method == "tools/call":
        call(id, params["name"])
    elif id is not None:
        send({"id": id, "result": None})
