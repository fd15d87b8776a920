"""A small MCP server that asks people in requests of its own (MCP 2025-11-25): speaks on stdin and stdout."""
import json, os, sys, threading

HOME = os.environ["HOME"]
FORM = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 9}}, "required": ["name"]}
TOOLS = ["book", "twice", "page", "pages", "leave", "withdraw", "odd", "sample"]
waiting = {}
count = 0


def note(name, text):
    with open(os.path.join(HOME, name), "a") as file:
        file.write(text + "\n")


def send(message):
    sys.stdout.write(json.dumps({"jsonrpc": "2.0", **message}) + "\n")
    sys.stdout.flush()


def say(id, text):
    send({"id": id, "result": {"content": [{"type": "text", "text": text}]}})


def ask(call, params, then=None, method="elicitation/create"):
    global count
    count += 1
    waiting[f"q{count}"] = (call, then)
    send({"id": f"q{count}", "method": method, "params": params})


def form(message):
    return {"message": message, "requestedSchema": FORM}


def page(id):
    return {"mode": "url", "message": "Log in", "url": "https://login.example/" + id, "elicitationId": id}


def call(id, name):
    if name == "book":
        ask(id, form("For whom? " + os.environ["TOKEN"]))
    elif name == "twice":
        ask(id, form("For whom?"), then=form("And who pays?"))
    elif name == "page":
        ask(id, page("e1"))
    elif name == "pages" and not os.path.exists(os.path.join(HOME, "opened")):
        note("opened", "once")
        send({"id": id, "error": {"code": -32042, "message": "log in", "data": {"elicitations": [page("e2")]}}})
    elif name == "leave":
        ask(id, form("For whom?"))
        say(id, "never mind")
    elif name == "withdraw":
        ask(id, form("For whom?"))
        send({"method": "notifications/cancelled", "params": {"requestId": "q%d" % count}})
        del waiting["q%d" % count]
        threading.Timer(0.3, say, [id, "never mind"]).start()
    elif name == "odd":
        ask(id, {"message": "For whom?", "requestedSchema": {"type": 5}})
    elif name == "sample":
        ask(id, {"messages": [], "maxTokens": 1}, method="sampling/createMessage")
    else:
        say(id, "done")


for line in sys.stdin:
    message = json.loads(line)
    id, method, params = message.get("id"), message.get("method"), message.get("params") or {}
    if method == "initialize":
        note("capabilities", json.dumps(params["capabilities"]))
        send({"id": id, "result": {
            "protocolVersion": params["protocolVersion"],
            "capabilities": {"tools": {}},
            "serverInfo": {"name": "asking", "version": "1"},
        }})
    elif method == "tools/list":
        send({"id": id, "result": {"tools": [{"name": name, "inputSchema": {"type": "object"}} for name in TOOLS]}})
    elif method == "tools/call":
        note("calls", json.dumps(params))
        call(id, params["name"])
    elif method == "ping":
        send({"id": id, "result": {}})
    elif method == "notifications/cancelled":
        note("cancelled", json.dumps(params))
    elif method is None and id in waiting:
        (called, then), answer = waiting.pop(id), message.get("result") or message["error"]
        if then:
            ask(called, then)
        else:
            say(called, json.dumps(answer))
