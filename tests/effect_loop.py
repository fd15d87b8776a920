#!/usr/bin/env python3
"""Kills the daemon again and again in the middle of calls of an HTTP tool with keys, then checks that each call had exactly one
effect, and that no run was interrupted.

    tests/effect_loop.py AXED [--kills 100] [--seed N]

The service keeps a ledger by key: the first request with a key has an effect, later ones get its result. Some requests are answered
late, some connections break before the response, and the daemon is killed at a random moment around a request.
"""

import argparse, collections, http.server, json, os, pathlib, random, sys, tempfile, threading, time

import kill_loop
from kill_loop import Client, Daemon, Provider, Server

TOOL = """
[[http_tools]]
name = "pay"
description = "Pays"
method = "POST"
url = "http://127.0.0.1:{port}/pay"
repeat = "with_key"
idempotency_header = "Idempotency-Key"
parameters = {{ type = "object", properties = {{ id = {{ type = "string" }} }} }}
"""


class Ledger(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    lock, arrived = threading.Lock(), threading.Event()
    effects, requests, payments = collections.Counter(), collections.Counter(), {}
    broken = 0

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        key = self.headers["idempotency-key"]
        Ledger.arrived.set()
        time.sleep(random.random() * 0.03)
        with Ledger.lock:
            Ledger.requests[key] += 1
            if key not in Ledger.payments:
                Ledger.effects[body["id"]] += 1
            assert Ledger.payments.setdefault(key, body["id"]) == body["id"], "one key for two payments"
            breaks = random.random() < 0.1 and Ledger.requests[key] == 1
            Ledger.broken += breaks
        time.sleep(random.random() * 0.03)
        if breaks:
            self.close_connection = True
            return
        data = f"paid {body['id']}".encode()
        try:
            self.send_response(200)
            self.send_header("content-type", "text/plain")
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)
        except OSError:
            pass  # The daemon was killed.

    def log_message(self, *_):
        pass


class Payer(Provider):
    """A model that pays three times in one reply."""

    payments = ["pay"] * 3


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("axed")
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    arguments = parser.parse_args()
    random.seed(arguments.seed)
    print(f"effect_loop: seed {arguments.seed}")
    with tempfile.TemporaryDirectory(prefix="axed-effect-loop-") as directory:
        home = pathlib.Path(directory)
        service = Server(("127.0.0.1", 0), Ledger)
        threading.Thread(target=service.serve_forever, daemon=True).start()
        agent = TOOL.format(port=service.server_address[1])
        kill_loop.prepare(home, "127.0.0.1", '[tools.url_fetch]\nallow_hosts = ["127.0.0.1"]\n', {"payer": agent}, Payer, "")
        start = lambda: Daemon(os.path.abspath(arguments.axed), home)
        client, daemon = Client(random.Random(arguments.seed)), start()
        try:
            kills = 0
            while kills < arguments.kills:
                Ledger.arrived.clear()
                for _ in range(2):
                    client.start(daemon, "/agents/payer/runs", {"input": "pay"})
                if Ledger.arrived.wait(5):
                    time.sleep(random.random() * 0.08)
                    daemon.kill()
                    kills += 1
                    daemon = start()
            kill_loop.settle(daemon, client)
            runs = list(daemon.pages("/runs?limit=100"))
            assert {it["id"] for it in runs} == set(client.roots.values()), "lost runs"
            failed = [(it["id"], it["status"], it["error"]) for it in runs if it["status"] != "completed"]
            assert not failed, f"runs that did not complete: {failed}"
            calls = 0
            for run in runs:
                for event in kill_loop.events_of(daemon, run["id"]):
                    if event["type"] == "tool.completed":
                        assert not event["is_error"], event
                        calls += 1
                        payment = event["result"].removeprefix("paid ")
                        assert Ledger.effects.pop(payment) == 1, f"{payment} had several effects"
            assert not Ledger.effects, f"effects without a call: {Ledger.effects}"
            again = sum(Ledger.requests.values()) - len(Ledger.requests)
            print(f"effect_loop: ok: {kills} kills, {len(runs)} runs, {calls} calls with one effect each, {again} sent again, "
                  f"{Ledger.broken} broken connections, 0 interrupted")
        except BaseException:
            sys.stderr.write(daemon.log.read_text()[-6000:])
            raise
        finally:
            daemon.kill()


if __name__ == "__main__":
    main()
