"""An MCP server that fails on demand: at its start, as its first argument says, or when a tool is called."""
import json, os, sys

MODE = sys.argv[1] if len(sys.argv) > 1 else ""


def send(message):
    sys.stdout.write(json.dumps({"jsonrpc": "2.0", **message}) + "\n")
    sys.stdout.flush()


def write(line):
    print(line, file=sys.stderr, flush=True)


def result(id, method, params):
    if method == "initialize":
        return {
            "protocolVersion": params["protocolVersion"],
            "capabilities": {"tools": {"listChanged": True}},
            "serverInfo": {"name": "faulty", "version": "1"},
        }
    if method == "tools/list":
        names = ["pid", "die", "wrong_id", "no_id", "close", "deep", "freeze", "slow", "noise"]
        return {"tools": [{"name": name, "inputSchema": {"type": "object"}} for name in names]}
    return {}


def call(id, name):
    if name == "die":
        write("cannot open the store")
        write("with " + os.environ["TOKEN"])
        os._exit(3)
    elif name == "wrong_id":
        send({"id": 999, "result": {"content": []}})
    elif name == "no_id":
        send({"id": None, "error": {"code": -32700, "message": "no such thing"}})
    elif name == "close":
        os.close(1)
    elif name == "deep":
        nested = []
        for _ in range(200):
            nested = [nested]
        send({"id": id, "result": {"content": [], "structuredContent": {"nested": nested}}})
    elif name == "freeze":
        while sys.stdin.readline():
            pass
    elif name == "slow":
        pass
    else:
        if name == "noise":
            print("a line of a log", flush=True)
            print('{"level": "info"}', flush=True)
        send({"id": id, "result": {"content": [{"type": "text", "text": str(os.getpid())}]}})


if MODE == "exit":
    for line in ["one", "two", "three", "four", "five", "no licence: " + os.environ["TOKEN"]]:
        write(line)
    # Its client is not disturbed while it writes.
    sys.stdin.readline()
    sys.exit(7)
if MODE == "close":
    os.close(1)
    while sys.stdin.readline():
        pass
for line in sys.stdin:
    message = json.loads(line)
    id, method, params = message.get("id"), message.get("method"), message.get("params") or {}
    if id is None or method is None:
        continue
    if method == "tools/call":
        call(id, params["name"])
    elif MODE == "wrong_id":
        send({"id": 12345, "result": result(id, method, params)})
    else:
        send({"id": id, "result": result(id, method, params)})
