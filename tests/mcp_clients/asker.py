"""A server of the official SDK that asks people, with the protocol of today or with that of 2025."""

import json
import subprocess
import sys
from typing import Annotated

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.resolve import Elicit, Resolve
from pydantic import BaseModel


class Guest(BaseModel):
    name: str


server = MCPServer("asker")


def guest() -> Elicit[Guest]:
    return Elicit("For whom?", Guest)


@server.tool()
def book(table: int, guest: Annotated[Guest, Resolve(guest)]) -> str:
    return f"table {table} for {guest.name}"


def without_handshake():
    """Passes everything on to the server, but refuses the handshake, as one that has only the protocol of today."""
    process = subprocess.Popen([sys.executable, __file__], stdin=subprocess.PIPE)
    for line in sys.stdin.buffer:
        if b'"initialize"' in line:
            error = {"code": -32601, "message": "no handshake"}
            print(json.dumps({"jsonrpc": "2.0", "id": json.loads(line)["id"], "error": error}), flush=True)
        else:
            process.stdin.write(line)
            process.stdin.flush()
    process.stdin.close()
    process.wait()


without_handshake() if "today" in sys.argv else server.run()
