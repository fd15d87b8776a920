#!/usr/bin/env bash
# Runs a delegating agent through axed on a real model server of yours: llama.cpp, vLLM, Ollama, or anything else that
# speaks /v1/chat/completions, /v1/responses or /v1/messages. Six ways: OpenAI's two wires and Anthropic's, whole and
# streamed.
#
#   tests/real_model.sh BASE_URL [MODEL]        e.g. tests/real_model.sh http://127.0.0.1:8080
#
# MODEL is the first that the server lists where none is named. Environment:
#   MODEL_KEY  the server's key, where it wants one
#   AXED       the binary; else the release build, else the debug build
#   WIRES      "openai responses anthropic"; name those that the server speaks
#   TRIES      3: small models do not always delegate, so each way is tried this often
# Checks structure, never words: the run completes, at least one child ran, usage is counted, and the tree's tokens are
# the sum of its runs. Needs bash and python3. Exit 0: all ways passed; 1: one did not; 2: it could not be tried.
set -euo pipefail

[ $# -ge 1 ] || { sed -n '2,15s/^# \{0,1\}//p' "$0" >&2; exit 2; }
base=${1%/}; base=${base%/v1}; model=${2:-}
here=$(cd "$(dirname "$0")/.." && pwd)
target=${CARGO_TARGET_DIR:-$here/target}
axed=${AXED:-}
for built in "$target/release/axed" "$target/debug/axed"; do
  [ -n "$axed" ] || { [ -x "$built" ] && axed=$built; } || true
done
[ -x "${axed:-}" ] || { echo "no axed binary: run 'cargo build --release' or set AXED" >&2; exit 2; }

home=$(mktemp -d)
daemon=
finish() {
  [ -z "$daemon" ] || { kill "$daemon" 2>/dev/null && wait "$daemon" 2>/dev/null; } || true
  rm -rf "$home"
}
trap finish EXIT

if [ -z "$model" ]; then
  model=$(MODEL_KEY=${MODEL_KEY:-} python3 - "$base" <<'PY'
import json, os, sys, urllib.request
ask = urllib.request.Request(sys.argv[1] + "/v1/models")
if os.environ["MODEL_KEY"]:
    ask.add_header("Authorization", "Bearer " + os.environ["MODEL_KEY"])
    ask.add_header("x-api-key", os.environ["MODEL_KEY"])
try:
    with urllib.request.urlopen(ask, timeout=20) as answer:
        print(json.load(answer)["data"][0]["id"])
except Exception as why:
    sys.exit(f"{sys.argv[1]}/v1/models names no model ({why}): is the server running? Name one as the second argument.")
PY
  ) || exit 2
fi

mkdir "$home/agents"
cat >"$home/axed.toml" <<TOML
[providers.real-openai]
kind = "openai"
base_url = "$base"
api = "chat"
[providers.real-responses]
kind = "openai"
api = "responses"
base_url = "$base"
[providers.real-anthropic]
kind = "anthropic"
base_url = "$base"
TOML
for wire in openai responses anthropic; do
  cat >"$home/agents/orchestrator-$wire.toml" <<TOML
name = "orchestrator-$wire"
description = "Delegates to the researcher."
model = "real-$wire/$model"
system_prompt = """
You are a coordinator. Call call_agent to delegate each question to the researcher (finds facts). \
When you have the researcher's answer, reply to the user in plain words."""
sub_agents = ["researcher-$wire"]
timeout = 280
[params]
temperature = 0.0
max_tokens = 200
[limits]
max_turns = 6
TOML
  cat >"$home/agents/researcher-$wire.toml" <<TOML
name = "researcher-$wire"
description = "Finds facts."
model = "real-$wire/$model"
system_prompt = "You are a researcher. Answer the task in one short sentence."
[params]
temperature = 0.0
max_tokens = 80
TOML
done

REAL_OPENAI_API_KEY=${MODEL_KEY:-none} REAL_RESPONSES_API_KEY=${MODEL_KEY:-none} REAL_ANTHROPIC_API_KEY=${MODEL_KEY:-none} \
  "$axed" serve --config "$home/axed.toml" --agents "$home/agents" --data "$home/data" --listen 127.0.0.1:0 \
  >"$home/out" 2>"$home/log" &
daemon=$!
for _ in $(seq 100); do
  grep -q 'listening on' "$home/out" && break
  kill -0 "$daemon" 2>/dev/null || { echo "axed did not start:" >&2; cat "$home/log" >&2; exit 2; }
  sleep 0.1
done
url=$(sed -n 's/^axed listening on //p' "$home/out")
[ -n "$url" ] || { echo "axed says no address:" >&2; cat "$home/log" >&2; exit 2; }

echo "model $model at $base"
python3 - "$url" "${TRIES:-3}" ${WIRES:-openai responses anthropic} <<'PY'
import json, sys, urllib.error, urllib.request

url, tries, wires = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
LINE = "{:<10} {:<9} {:<7} {:>5} {:>6} {:>6} {:>7} {:>7} {:>8}  {}"

def call(path, body=None):
    data = None if body is None else json.dumps(body).encode()
    ask = urllib.request.Request(url + path, data, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(ask, timeout=310) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as why:
        raise AssertionError(f"{path}: {why.code} {why.read().decode(errors='replace')[:300]}")

def runs_of(run_id):
    yield call(f"/runs/{run_id}")
    for child in call(f"/runs/{run_id}/children")["data"]:
        yield from runs_of(child["id"])

def count(node):
    return 1 + sum(count(child) for child in node["children"])

def check(run, runs):
    assert run["status"] == "completed", f"{run['status']}: {(run['error'] or {}).get('message', run['cancel_reason'])}"
    assert run["content"] and run["content"].strip(), "the final text is empty"
    assert len(runs) > 1, "it did not delegate"
    assert any(one["status"] == "completed" for one in runs[1:]), f"no child completed: {runs[1]['error']}"
    tree = run["tree"]
    for key in ("input_tokens", "output_tokens", "tool_calls"):
        total = sum(one[key] for one in runs)
        assert tree[key] == total, f"tree.{key} is {tree[key]}, its runs have {total}"
    assert tree["input_tokens"] > 0 and tree["output_tokens"] > 0, "no usage was counted"
    assert tree["complete"] is True, "some reply reported no usage"
    assert tree["runs"] == len(runs) == count(call(f"/runs/{run['id']}/tree")), "the tree has other runs than the record"
    for one in runs[1:]:
        assert one["root_id"] == run["id"] and one["depth"] >= 1 and one["tool_call_id"], "a child has no place in the tree"
    types = [event["type"] for event in call(f"/runs/{run['id']}/events")["data"]]
    assert types[0] == "run.queued" and types[-1] == "run.completed", f"events begin and end with {types[0]}, {types[-1]}"
    for kind in ("tool.started", "agent.called", "agent.returned", "tool.completed"):
        assert kind in types, f"no {kind} among the events"

def once(wire, stream):
    body = {"input": "Ask the researcher when the Rust language 1.0 was released.", "stream": stream}
    run = call(f"/agents/orchestrator-{wire}/runs?wait=300", body)
    runs = list(runs_of(run["id"]))
    why = None
    try:
        check(run, runs)
    except AssertionError as fault:
        why = str(fault)
    return run, runs, why

print(LINE.format("wire", "way", "result", "tries", "runs", "turns", "in", "out", "seconds", ""))
failed = 0
for wire in wires:
    for stream in (False, True):
        why, run, runs, tried = None, None, [], 0
        while tried < tries:
            tried += 1
            try:
                run, runs, why = once(wire, stream)
            except AssertionError as fault:
                run, runs, why = None, [], str(fault)
            if why is None:
                break
        failed += why is not None
        tree = run["tree"] if run else {"runs": 0, "input_tokens": 0, "output_tokens": 0}
        print(LINE.format(
            wire, "streamed" if stream else "whole", "FAILED" if why else "ok", tried, tree["runs"],
            sum(one["turns"] for one in runs), tree["input_tokens"], tree["output_tokens"],
            f"{run['duration_ms'] / 1000:.1f}" if run else "-", why or repr(run["content"].strip()[:60])), flush=True)
sys.exit(1 if failed else 0)
PY
