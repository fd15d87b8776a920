#!/usr/bin/env python3
"""Kills the daemon again and again while runs are started, forked, steered, approved, answered and woken, then checks that nothing is
lost or done twice.

    tests/kill_loop.py AXED [--kills 25] [--seed N]

Checks after the last restart, over the API alone: every accepted request is one run; every run has ended; its events have
no gap and one end, and none is interrupted; a call that is not safe to repeat is recorded before it is performed, and performed once
(a person who can read the ledger says whether it was, if its end is not known);
an answer that was accepted is the only one to its question, and the result of its call; a wait ends once, with an event that its run
has not received before; the end of a child in the background is delivered once; a message that was accepted is read or has a warning;
the usage is the sum over all runs.
"""

import argparse, collections, http.client, http.server, json, os, pathlib, random, signal, subprocess, sys, tempfile
import threading, time, uuid

# In this time a run has to end while others wait for it.
SETTLE_SECONDS = 120
# Of the events that wake runs.
KEYS = ("1", "2", "3")
# Speaks the protocol without a handshake, or with "pipes" the one with it. An order is paid for once a person has agreed.
LEDGER = """
import json, sys
on_pipes = "pipes" in sys.argv
waiting = {}

def pay(id):
    with open(sys.argv[1], "a") as ledger:
        ledger.write(id + "\\n")

def text(text, **more):
    return {"content": [{"type": "text", "text": text}], **more}

def order(id, answer):
    if answer["action"] != "accept":
        return text("not ordered", isError=True)
    pay(id)
    return text("ordered: " + answer["content"]["word"])

for line in sys.stdin:
    request = json.loads(line)
    if "method" not in request:
        call, id = waiting.pop(request["id"])
        print(json.dumps({"jsonrpc": "2.0", "id": call, "result": order(id, request["result"])}), flush=True)
        continue
    if "id" not in request:
        continue
    method, params, result = request["method"], request.get("params") or {}, {}
    schema = {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]}
    form = {"message": "Order?", "requestedSchema": schema}
    if method == "initialize" and not on_pipes:
        error = {"code": -32601, "message": "no handshake"}
        print(json.dumps({"jsonrpc": "2.0", "id": request["id"], "error": error}), flush=True)
        continue
    elif method == "initialize":
        result = {"protocolVersion": params["protocolVersion"], "capabilities": {"tools": {}},
                  "serverInfo": {"name": "ledger", "version": "1"}}
    elif method == "server/discover":
        result = {"resultType": "complete", "supportedVersions": ["2026-07-28"], "capabilities": {"tools": {}},
                  "serverInfo": {"name": "ledger", "version": "1"}, "ttlMs": 0, "cacheScope": "private"}
    elif method == "tools/list":
        schema = {"type": "object", "properties": {"id": {"type": "string"}}, "required": ["id"]}
        result = {"tools": [{"name": name, "description": "Pays once.", "inputSchema": schema} for name in ("pay", "order")]}
    elif method == "tools/call" and params["name"] == "pay":
        pay(params["arguments"]["id"])
        result = text("paid")
    elif method == "tools/call" and on_pipes:
        waiting[f"q{len(waiting)}-{request['id']}"] = request["id"], params["arguments"]["id"]
        question = {"id": f"q{len(waiting) - 1}-{request['id']}", "method": "elicitation/create", "params": form}
        print(json.dumps({"jsonrpc": "2.0", **question}), flush=True)
        continue
    elif method == "tools/call" and "requestState" in params:
        result = order(params["requestState"], params["inputResponses"]["sure"])
    elif method == "tools/call":
        requests = {"sure": {"method": "elicitation/create", "params": form}}
        result = {"resultType": "input_required", "requestState": params["arguments"]["id"], "inputRequests": requests}
    print(json.dumps({"jsonrpc": "2.0", "id": request["id"], "result": result}), flush=True)
"""
CONFIG = '[providers.fake]\nkind = "openai"\nbase_url = "http://{host}:{port}"\n[runs]\nmax_running = 8\n[server]\ndefault_timeout = 3600\n'
SERVER = '\n[[mcp_servers]]\nname = "ledger"\ntransport = "stdio"\ncommand = "python3"\nargs = ["{home}/ledger.py", "{home}/ledger"]\n'
PIPES = SERVER.replace('"ledger"', '"shop"').replace('/ledger"]', '/ledger", "pipes"]')
AGENTS = {
    "boss": 'sub_agents = ["worker", "patient"]\n',
    "worker": "",
    "careful": 'approve = ["ledger__pay"]\n',
    "curious": "[ask]\nenabled = true\n",
    "patient": "[wait]\nenabled = true\n",
    "buyer": PIPES.replace("{home}", "."),
    "chief": 'sub_agents = ["worker"]\n[sub_agents_config]\nbackground = true\n',
}


class Provider(http.server.BaseHTTPRequestHandler):
    """A model that pays, delegates and then repeats what the user has said."""

    protocol_version = "HTTP/1.1"
    payments = ["ledger__pay"]

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        time.sleep(random.random() * 0.06)
        messages = body["messages"]
        said = [text(m) for m in messages if m["role"] == "user"]
        calls = []
        if not any(m["role"] == "assistant" for m in messages):
            calls += [(tool, {"id": uuid.uuid4().hex}) for tool in self.payments]
            if body["model"] == "curious":
                calls = [("ask_person", {"question": f"{n}?"}) for n in (1, 2)]
            if body["model"] == "buyer":
                calls = [(f"{server}__order", {"id": uuid.uuid4().hex}) for server in ("ledger", "shop")]
            if body["model"] == "patient":
                calls = [("sleep", {"seconds": random.randint(1, 4)}), ("wait_for", {"event": "tick", "key": random.choice(KEYS)})]
            if body["model"] == "boss":
                calls += [("call_agent", {"agent": agent, "task": f"part of {agent}"}) for agent in ("worker", "patient")]
            if body["model"] == "chief":
                task = {"agent": "worker", "background": True}
                calls += [("call_agent", {**task, "task": f"part {n}"}) for n in (1, 2)]
        elif body["model"] == "chief" and messages[-1]["role"] == "tool" and random.random() < 0.5:
            calls.append(("await_agents", {"any": random.random() < 0.5}))
        delta = {"content": " | ".join(said)}
        if calls:
            delta = {"tool_calls": [
                {"index": n, "id": f"call_{uuid.uuid4().hex[:12]}", "type": "function",
                 "function": {"name": name, "arguments": json.dumps(arguments)}}
                for n, (name, arguments) in enumerate(calls)]}
        usage = {"prompt_tokens": 10 + len(messages), "completion_tokens": 5, "total_tokens": 15 + len(messages)}
        reason = "tool_calls" if calls else "stop"
        chunks = [{"choices": [{"index": 0, "delta": {"role": "assistant", **delta}, "finish_reason": None}]},
                  {"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]}, {"choices": [], "usage": usage}]
        data = "".join(f"data: {json.dumps({'id': 'x', 'model': body['model'], **c})}\n\n" for c in chunks)
        data = (data + "data: [DONE]\n\n").encode()
        try:
            self.send_response(200)
            self.send_header("content-type", "text/event-stream")
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)
        except OSError:
            pass  # The daemon was killed.

    def log_message(self, *_):
        pass


class Server(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_):
        pass  # The daemon was killed.


def text(message):
    content = message["content"]
    return content if isinstance(content, str) else " ".join(part.get("text", "") for part in content)


class Daemon:
    def __init__(self, axed, home, node="", before=(), options=("--listen", "127.0.0.1:0"), environment={}):
        """`before` is a command that starts the daemon."""
        arguments = ["serve", "--config", "axed.toml", "--agents", "agents", "--data", f"data{node}", *options]
        self.log = home / f"log{node}"
        environment = {"HOME": str(home), "PATH": os.environ["PATH"], **environment}
        self.process = subprocess.Popen(
            [*before, axed, *arguments], cwd=home, env=environment,
            stdout=subprocess.PIPE, stderr=open(self.log, "ab"), text=True)
        line = self.process.stdout.readline()
        if not line.startswith("axed listening on http://"):
            sys.exit(f"kill_loop: axed does not start:\n{self.log.read_text()[-3000:]}")
        self.address = line.strip().removeprefix("axed listening on http://")

    def kill(self):
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def send(self, method, path, body=None, key=None):
        """Status and JSON; raises if the daemon is gone."""
        connection = http.client.HTTPConnection(self.address, timeout=60)
        headers = {}
        if body is not None:
            headers["content-type"] = "application/jsonl" if path.endswith(":batch") else "application/json"
            body = body if isinstance(body, str) else json.dumps(body)
        if key:
            headers["idempotency-key"] = key
        connection.request(method, path, body, headers)
        response = connection.getresponse()
        data = response.read()
        connection.close()
        return response.status, json.loads(data) if data else None

    def get(self, path):
        status, value = self.send("GET", path)
        assert status == 200, f"GET {path}: {status} {value}"
        return value

    def pages(self, path):
        cursor, separator = "", "&" if "?" in path else "?"
        while True:
            page = self.get(path + (f"{separator}cursor={cursor}" if cursor else ""))
            yield from page["data"]
            cursor = page.get("next_cursor")
            if not cursor:
                return


class Client:
    """Remembers every request until it has an answer, over all restarts."""

    # What is said of a payment that had begun and is not in the ledger: the daemon is dead, so it will not be.
    unpaid = "not_done"
    # Roots. A fork may have made the same payment, and the ledger does not say whose it is.
    forked = set()

    def __init__(self, dice):
        self.dice, self.roots, self.open, self.messages, self.answers = dice, {}, {}, {}, {}
        self.published = set()
        self.counts = collections.Counter()

    def start(self, daemon, path, body):
        key = uuid.uuid4().hex
        self.open[key] = (path, body)
        self.finish(daemon, key)

    def finish(self, daemon, key):
        """Sends a request, or sends it again under the same key if its answer was lost."""
        path, body = self.open[key]
        kind = path.rsplit("/", 1)[1]
        if kind == "fork":
            Client.forked.add(path.split("/")[2])
        status, answer = daemon.send("POST", path, body, key)
        if status >= 500:
            raise AssertionError(f"POST {path}: {status} {answer}")
        del self.open[key]
        if status not in (200, 202):
            # The run may have ended, or may not have reached the turn.
            assert status in (409, 422) and kind in ("fork", "messages"), f"POST {path}: {status} {answer}"
            self.counts[f"{kind} refused: {answer['code']}"] += 1
        elif kind == "messages":
            self.messages[body["content"]] = path.split("/")[2]
        else:
            assert answer["id"] not in self.roots.values(), f"two keys have the run {answer['id']}"
            self.roots[key] = answer["id"]
        self.counts[kind] += 1

    def act(self, daemon):
        choice = self.dice.random()
        runs = list(self.roots.values())
        if choice < 0.35 or not runs:
            agent = self.dice.choice(["boss", "boss", "careful", "curious", "patient", "buyer", "chief", "chief"])
            return self.start(daemon, f"/agents/{agent}/runs", {"input": f"task {uuid.uuid4().hex}"})
        run = self.dice.choice(runs[-12:])
        tree = [it["id"] for it in nodes(daemon.get(f"/runs/{run}/tree"))] if self.dice.random() < 0.4 else [run]
        some = self.dice.choice(tree)
        if choice < 0.5:
            at = {"run": some, "turn": self.dice.choice([0, 1, 1, 2])}
            if at["turn"] and self.dice.random() < 0.3:
                at["after"] = "reply"
            return self.start(daemon, f"/runs/{run}/fork", {"at": at} if self.dice.random() < 0.8 else {})
        if choice < 0.7:
            return self.start(daemon, f"/runs/{some}/messages", {"content": f"note {uuid.uuid4().hex}"})
        if choice < 0.85:
            status, answer = daemon.send("POST", f"/runs/{run}/{self.dice.choice(['pause', 'resume', 'resume'])}")
            assert status in (200, 202, 409), (status, answer)
            self.counts["pause or resume"] += 1
            return None
        if choice < 0.9:
            return self.publish(daemon, self.dice.choice(KEYS))
        return self.decide(daemon)

    def publish(self, daemon, key):
        data = uuid.uuid4().hex
        self.published.add(data)
        status, answer = daemon.send("POST", "/events", {"event": "tick", "key": key, "data": data})
        assert status == 202, (status, answer)
        self.counts["event"] += 1

    def decide(self, daemon):
        for call in daemon.get("/approvals")["data"]:
            decision = {"decision": self.dice.choice(["approve", "approve", "deny"])}
            path = f"/runs/{call['run_id']}/approvals/{call['tool_call_id']}"
            status, answer = daemon.send("POST", path, decision)
            assert status in (200, 202, 404, 409), (status, answer)
            self.counts["decision"] += 1
        for question in daemon.get("/inputs")["data"]:
            if "began_at" in question:
                self.reconcile(daemon, question)
                continue
            word = uuid.uuid4().hex
            answer = {"word": word} if "server" in question else word
            body = {"answer": answer} if self.dice.random() < 0.8 else {"decline": word}
            status, answer = daemon.send("POST", f"/runs/{question['run_id']}/inputs/{question['id']}", body)
            assert status in (202, 404, 409), (status, answer)
            if status == 202:
                assert (question["run_id"], question["id"]) not in self.answers, f"answered twice: {question}"
                self.answers[question["run_id"], question["id"]] = body
            self.counts["answer"] += 1

    def reconcile(self, daemon, call):
        """Says whether a payment was made that had begun."""
        is_paid = call["arguments"]["id"] in Client.ledger.read_text().split()
        body = {"outcome": "done", "result": "paid"} if is_paid else {"outcome": self.unpaid}
        root = daemon.get(f"/runs/{call['root_id']}")
        if root["id"] in Client.forked or "forked_from" in root:
            body = {"outcome": "unknown"}
        status, answer = daemon.send("POST", f"/runs/{call['run_id']}/calls/{call['call_id']}", body)
        assert status in (202, 404, 409), (status, answer)
        self.counts["reconciled"] += 1


def settle(daemon, client):
    """Answers everything that waits until all runs have ended. A long loop leaves many: as long as some of them end, it goes on."""
    end, fewest = time.monotonic() + SETTLE_SECONDS, None
    while time.monotonic() < end:
        client.decide(daemon)
        for key in KEYS:
            client.publish(daemon, key)
        open_runs = [it for it in daemon.pages("/runs?limit=100") if it["status"] not in ("completed", "failed", "cancelled")]
        if not open_runs:
            return
        if fewest is None or len(open_runs) < fewest:
            end, fewest = time.monotonic() + SETTLE_SECONDS, len(open_runs)
        for run in open_runs:
            daemon.send("POST", f"/runs/{run['id']}/resume")
        time.sleep(0.1)
    raise AssertionError(f"runs do not end: {[(it['id'], it['status'], it.get('waiting_for')) for it in open_runs]}")


def nodes(tree):
    yield tree
    for child in tree["children"]:
        yield from nodes(child)


def events_of(daemon, root):
    after = 0
    while after is not None:
        page = daemon.get(f"/runs/{root}/events?limit=1000&after={after}")
        yield from page["data"]
        after = page["next_after"]


class Check:
    """Reads everything after the last restart."""

    def __init__(self, daemon, client, ledger):
        self.daemon, self.client = daemon, client
        self.paid = collections.Counter(ledger.read_text().split())
        roots = {run["id"] for run in daemon.pages("/runs?limit=100")}
        wanted = set(client.roots.values())
        assert roots == wanted, f"lost: {wanted - roots}, unexpected: {roots - wanted}"
        self.runs, self.events = {}, collections.defaultdict(list)
        for root in roots:
            for node in nodes(daemon.get(f"/runs/{root}/tree")):
                self.runs[node["id"]] = {**daemon.get(f"/runs/{node['id']}"), "usage": node["usage"]}
            events = list(events_of(daemon, root))
            assert [it["seq"] for it in events] == list(range(1, len(events) + 1)), f"{root}: gaps in the events"
            for event in events:
                self.events[event["run_id"]].append(event)

    def ends(self):
        """The failures by code."""
        failures = collections.Counter()
        for id, run in self.runs.items():
            ends = [it for it in self.events[id] if it["type"] in ("run.completed", "run.failed", "run.cancelled")]
            assert len(ends) == 1, f"{id}: {len(ends)} ends"
            if run["status"] == "failed":
                failures[run["error"]["code"]] += 1
                raise AssertionError(json.dumps({"run": run, "events": self.events[id]}, indent=1))
        return failures

    def payments(self):
        started, completed = collections.Counter(), collections.Counter()
        for id, events in self.events.items():
            payments = {}
            for event in events:
                if event.get("tool") not in ("ledger__pay", "ledger__order", "shop__order"):
                    continue
                if event["type"] == "tool.started":
                    # Once for a call, also if it was started again because a person said that it had not been done.
                    started[event["arguments"]["id"]] += event["tool_call_id"] not in payments
                    payments[event["tool_call_id"]] = event["arguments"]["id"]
                if event["type"] == "tool.completed" and not event["is_error"]:
                    completed[payments[event["tool_call_id"]]] += 1
        # A fork after a reply has calls of its own with the same arguments.
        for payment in set(self.paid) | set(completed):
            bounds = (completed[payment], self.paid[payment], started[payment])
            assert sorted(bounds) == list(bounds), f"{payment}: completed, performed, recorded: {bounds}"

    def answers(self):
        accepted = dict(self.client.answers)
        for id, events in self.events.items():
            requested = {it["input_id"]: it for it in events if it["type"] == "input.requested" and "begun" not in it}
            answered = [it for it in events if it["type"] == "input.answered" and it["input_id"] in requested]
            given = {it["input_id"]: it for it in answered}
            count = sum(it["type"] == "input.requested" and "begun" not in it for it in events)
            assert len(requested) == count and len(given) == len(answered), f"{id}: requested or answered twice"
            results = {it["tool_call_id"]: it for it in events if it["type"] == "tool.completed"}
            # Nobody could say what became of them.
            unknown = {it["input_id"].split(".")[0] for it in events if it.get("answer") == {"outcome": "unknown"}}
            for question, event in given.items():
                body = accepted.pop((id, question), None)
                said = event.get("answer") or event["reason"]
                assert body is None or said in body.values(), f"{id}: {event} instead of {body}"
                asks = requested[question]
                result = results[asks["tool_call_id"]]
                if "server" not in asks:
                    assert result["result"].endswith(said), f"{id}: {result} is not {said}"
                elif asks["server"] == "ledger":
                    # One on a connection that broke comes again.
                    is_agreed, is_unknown = event["outcome"] == "answered", asks["tool_call_id"] in unknown
                    assert result["is_error"] != (is_agreed and not is_unknown), f"{id}: {result} after {event}"
                    assert result["is_error"] or said["word"] in result["result"] or result["result"] == "paid", f"{id}: {result}"
        assert not accepted, f"lost answers: {accepted}"

    def waits(self):
        for id, events in self.events.items():
            started = [it["tool_call_id"] for it in events if it["type"] == "wait.started"]
            ended = {it["tool_call_id"]: it.get("data") for it in events if it["type"] == "wait.ended"}
            count = sum(it["type"] == "wait.ended" for it in events)
            assert len(set(started)) == len(started) and len(ended) == count, f"{id}: a wait began or ended twice"
            received = [data for data in ended.values() if data]
            assert len(set(received)) == len(received), f"{id}: received twice: {received}"
            assert set(received) <= self.client.published, f"{id}: {received}"
            results = {it["tool_call_id"]: it["result"] for it in events if it["type"] == "tool.completed" and not it["is_error"]}
            for call, data in ended.items():
                assert not data or data in results.get(call, data), f"{id}: {results[call]} is not {data}"

    def background(self):
        """The end of each child in the background is in one message or in one result."""
        count = 0
        for id, events in self.events.items():
            called = [it["child_id"] for it in events if it["type"] == "agent.called" and it.get("background")]
            returned = [it for it in events if it["type"] == "agent.returned" and it["child_id"] in called]
            delivered = collections.Counter(it["child_id"] for it in returned)
            assert all(number == 1 for number in delivered.values()), f"{id}: delivered twice: {delivered}"
            is_unread = any(it["code"] == "message_unread" for it in self.runs[id]["warnings"])
            if self.runs[id]["status"] == "completed" and not is_unread:
                assert set(delivered) == set(called), f"{id}: of {called} only {delivered} are delivered"
            results = {it["tool_call_id"]: it["result"] for it in events if it["type"] == "tool.completed"}
            messages = {it["number"]: it["content"] for it in events if it["type"] == "message.added"}
            for it in returned:
                text = results.get(it["awaited_by"], it["child_id"]) if it.get("awaited_by") else messages[it["message"]]
                assert it["child_id"] in text, f"{id}: the end of {it['child_id']} is not in {text}"
            count += len(returned)
        return count

    def messages(self):
        for content, id in self.client.messages.items():
            run = self.runs[id]
            added = [it for it in self.events[id] if it["type"] == "message.added" and content in json.dumps(it)]
            assert len(added) == 1, f"{id}: {content} was added {len(added)} times"
            is_unread = any(it["code"] == "message_unread" for it in run["warnings"])
            has_read = run["status"] != "completed" or is_unread or content in run["content"]
            assert has_read, f"{id} has not read {content}: {run['content']}"

    def usage(self):
        totals = self.daemon.get("/usage")["totals"]
        for field in ("input_tokens", "output_tokens", "model_calls", "tool_calls"):
            own = sum(run["usage"][field] for run in self.runs.values())
            assert totals[field] == own, f"{field}: usage has {totals[field]}, the runs {own}"
        assert totals["runs"] == len(self.runs), totals


def prepare(home, host="127.0.0.1", config="", agents={}, provider=Provider, tools=SERVER):
    """Starts the provider and writes the files of a daemon."""
    server = Server((host, 0), provider)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    (home / "agents").mkdir()
    (home / "ledger.py").write_text(LEDGER)
    Client.ledger = home / "ledger"
    Client.ledger.touch()
    (home / "axed.toml").write_text(CONFIG.format(host=host, port=server.server_address[1]) + config)
    for name, settings in (agents or AGENTS).items():
        text = f'name = "{name}"\nmodel = "fake/{name}"\n{settings}' + tools.format(home=home)
        (home / f"agents/{name}.toml").write_text(text)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("axed")
    parser.add_argument("--kills", type=int, default=25)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    arguments = parser.parse_args()
    dice = random.Random(arguments.seed)
    print(f"kill_loop: seed {arguments.seed}")
    with tempfile.TemporaryDirectory(prefix="axed-kill-loop-") as directory:
        home = pathlib.Path(directory)
        prepare(home)
        client, daemon = Client(dice), Daemon(os.path.abspath(arguments.axed), home)
        try:
            for _ in range(arguments.kills):
                play(client, daemon, 0.1 + dice.random() * 0.6)
                daemon = Daemon(os.path.abspath(arguments.axed), home)
            for key in list(client.open):
                client.finish(daemon, key)
            settle(daemon, client)
            check = Check(daemon, client, home / "ledger")
            failures = check.ends()
            check.payments()
            check.answers()
            check.waits()
            ends = check.background()
            check.messages()
            check.usage()
            counts = ", ".join(f"{count} {what}" for what, count in sorted(client.counts.items()))
            print(f"kill_loop: ok: {arguments.kills} kills, {len(check.runs)} runs, {sum(check.paid.values())} payments, "
                  f"{failures['interrupted']} interrupted, {ends} ends in the background; {counts}")
        except BaseException:
            sys.stderr.write(daemon.log.read_text()[-6000:])
            raise
        finally:
            daemon.kill()


def play(client, daemon, seconds):
    """Sends requests until the daemon is killed in the middle of them."""
    killer = threading.Timer(seconds, daemon.kill)
    killer.start()
    try:
        for key in list(client.open):
            client.finish(daemon, key)
        while True:
            client.act(daemon)
    except (OSError, http.client.HTTPException, json.JSONDecodeError):
        killer.join()
        assert daemon.process.poll() is not None, "the daemon refused a connection"


if __name__ == "__main__":
    main()
