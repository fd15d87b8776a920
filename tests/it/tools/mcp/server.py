"""A small MCP server for the stories: speaks on stdin and stdout, and misbehaves on demand."""
import json, os, signal, subprocess, sys, threading

HOME = os.environ["HOME"]
MODE = sys.argv[1] if len(sys.argv) > 1 else ""
TEXT = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
NONE = {"type": "object"}
READS = {"readOnlyHint": True}
tools = [
    {"name": "echo", "description": "says it again", "inputSchema": TEXT, "annotations": READS},
    {"name": "hang", "inputSchema": NONE},
    {"name": "hang_reading", "inputSchema": NONE, "annotations": READS},
    {"name": "die", "inputSchema": NONE},
    {"name": "big", "inputSchema": NONE},
    {"name": "endless", "inputSchema": NONE},
    {"name": "pictures", "inputSchema": NONE},
    {"name": "grow", "inputSchema": NONE},
    {"name": "env", "inputSchema": NONE},
    {"name": "fail", "inputSchema": NONE},
    {"name": "dotted.name", "inputSchema": {"properties": {"a": {"pattern": "("}}}},
    {"name": "dotted/name", "inputSchema": NONE},
]


def note(name, text):
    with open(os.path.join(HOME, name), "a") as file:
        file.write(text + "\n")


def send(message):
    sys.stdout.write(json.dumps({"jsonrpc": "2.0", **message}) + "\n")
    sys.stdout.flush()


def say(id, text, **more):
    send({"id": id, "result": {"content": [{"type": "text", "text": text}], **more}})


def call(id, name, arguments):
    if name == "echo":
        say(id, arguments["text"])
    elif name.startswith("hang"):
        note("hanging", name)
    elif name == "die":
        os._exit(3)
    elif name == "big":
        say(id, "ä" * 1_000_000)
    elif name == "endless":
        while True:
            sys.stdout.write("x" * 65536)
    elif name == "pictures":
        content = [
            {"type": "image", "mimeType": "image/gif", "data": "R0lGODlhIQ=="},
            {"type": "resource_link", "uri": "file:///a", "name": "a"},
        ]
        if arguments.get("with_token"):
            content.append({"type": "resource", "resource": {
                "uri": "file:///" + os.environ["TOKEN"], "mimeType": "application/pdf", "blob": "JVBERi0xLjc=",
            }})
        send({"id": id, "result": {"content": content}})
    elif name == "grow":
        tools.append({"name": "grown", "inputSchema": NONE})
        send({"method": "notifications/tools/list_changed"})
        say(id, "done")
    elif name == "env":
        say(id, json.dumps(dict(os.environ)))
    elif name == "fail":
        more = ": " + os.environ["TOKEN"] if arguments.get("with_token") else ""
        say(id, "it did not work" + more, isError=True)
    elif name == "dotted.name":
        say(id, "dotted with " + json.dumps(arguments))
    else:
        send({"id": id, "error": {"code": -32602, "message": "no such tool"}})


if MODE == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
note("started", str(os.getpid()))
child = subprocess.Popen(["sleep", "1000"], stdin=subprocess.DEVNULL)
note("children", str(child.pid))
print("my token is " + os.environ.get("TOKEN", "none"), file=sys.stderr, flush=True)
print("this line is no JSON", flush=True)
if MODE == "silent":
    threading.Event().wait()
for line in sys.stdin:
    message = json.loads(line)
    id, method, params = message.get("id"), message.get("method"), message.get("params") or {}
    if method == "initialize":
        send({"id": id, "result": {
            "protocolVersion": params["protocolVersion"],
            "capabilities": {"tools": {"listChanged": True}},
            "serverInfo": {"name": "story", "version": "1"},
        }})
    elif method == "tools/list":
        note("listed", params.get("cursor") or "start")
        at = int(params.get("cursor") or 0)
        page = {"tools": tools[at:at + 5]}
        if at + 5 < len(tools):
            page["nextCursor"] = str(at + 5)
        send({"id": id, "result": page})
    elif method == "tools/call":
        call(id, params["name"], params.get("arguments") or {})
    elif method == "notifications/cancelled":
        note("cancelled", json.dumps(params))
if MODE == "stubborn":
    note("refuses", "to end")
    threading.Event().wait()
child.kill()
