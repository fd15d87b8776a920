"""An MCP server with 400 tools, which writes down each call; one that is to hang hangs once."""
import json, os, sys

HOME = os.environ["HOME"]
VERBS = ("get list search count watch create update delete archive restore "
         "copy move send share approve reject assign tag export import").split()
NOUNS = ("invoice customer order ticket product shipment payment refund contract meeting "
         "document folder message channel project task branch release server account").split()


def tool(verb, noun):
    about = "billing" if noun in ("invoice", "payment", "refund") else "everyday work"
    return {
        "name": f"{verb}_{noun}",
        "description": f"Does {verb} with one {noun} of the company, for {about}.\nTakes the {noun}'s id." + " Much more." * 30,
        "inputSchema": {
            "type": "object",
            "properties": {
                "id": {"type": "string", "description": f"The id of the {noun}, as the list of all of them has it."},
                "hang": {"type": "boolean", "description": "Whether it takes for ever the first time."},
            },
            "required": ["id"],
        },
        "annotations": {"readOnlyHint": verb in ("get", "list", "search", "count", "watch")},
    }


TOOLS = [tool(verb, noun) for verb in VERBS for noun in NOUNS]


def send(message):
    sys.stdout.write(json.dumps({"jsonrpc": "2.0", **message}) + "\n")
    sys.stdout.flush()


for line in sys.stdin:
    message = json.loads(line)
    id, method, params = message.get("id"), message.get("method"), message.get("params") or {}
    if method == "initialize":
        send({"id": id, "result": {
            "protocolVersion": params["protocolVersion"],
            "capabilities": {"tools": {}},
            "serverInfo": {"name": "many", "version": "1"},
        }})
    elif method == "tools/list":
        send({"id": id, "result": {"tools": TOOLS}})
    elif method == "tools/call":
        arguments = params.get("arguments") or {}
        with open(os.path.join(HOME, "calls"), "a+") as file:
            file.seek(0)
            has_hung = "hung" in file.read()
            is_stuck = arguments.get("hang") and not has_hung
            file.write(params["name"] + (" hung" if is_stuck else "") + "\n")
        if not is_stuck:
            text = params["name"] + " of " + arguments["id"]
            send({"id": id, "result": {"content": [{"type": "text", "text": text}]}})
