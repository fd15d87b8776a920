"""Checks the results of the suite of Open Responses: suite.py <results.json>"""

import json
import sys

PASSING = {
    "assistant-phase",
    "basic-response",
    "image-input",
    "multi-turn",
    "response-output-phase-schema",
    "streaming-response",
    "system-prompt",
    "tool-calling",
}
# axed has no WebSocket, and no opaque items of compacted conversations.
NOT_OFFERED = ("websocket-", "compact-")

with open(sys.argv[1], encoding="utf-8") as file:
    results = json.load(file)["results"]
passed = {result["id"] for result in results if result["status"] == "passed"}
for result in results:
    if result["id"] in PASSING - passed:
        print(f"suite: {result['id']}: {result.get('errors')}", file=sys.stderr)
unknown = {
    result["id"]
    for result in results
    if result["id"] not in PASSING and not result["id"].startswith(NOT_OFFERED)
}
assert passed >= PASSING, f"no longer passed: {sorted(PASSING - passed)}"
assert not unknown, f"new tests: {sorted(unknown)}"
print(f"suite: {len(PASSING)} tests of Open Responses")
