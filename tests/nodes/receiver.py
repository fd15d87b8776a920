"""A receiver of webhooks, which fails at times, and what it has to have received."""

import base64, collections, hashlib, hmac, http.server, json, random, threading, time

import kill_loop

SECRET = "a secret of the loop"
CONFIG = '[webhooks]\nallow_hosts = ["{host}"]\nsecret_env = "HOOK_SECRET"\nfirst_retry_ms = 200\n'
# Of the wait for what is due at the end: a node that was killed leads for 8 s more, and a retry may be due after that.
LAST_SECONDS = 300


class Receiver(kill_loop.Server):
    def __init__(self, host):
        # The ids of the deliveries of each run and event, and how often each id came.
        self.ids, self.attempts = collections.defaultdict(set), collections.Counter()
        self.delivered, self.lock, self.problems = set(), threading.Lock(), []
        super().__init__((host, 0), Handler)
        self.url = f"http://{host}:{self.server_address[1]}/"
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def receive(self, headers, body):
        """The status of the answer."""
        id = headers["webhook-id"]
        signed = f"{id}.{headers['webhook-timestamp']}.".encode() + body
        signature = base64.b64encode(hmac.digest(SECRET.encode(), signed, hashlib.sha256)).decode()
        event = json.loads(body)
        with self.lock:
            if headers["webhook-signature"] != f"v1,{signature}":
                self.problems.append(f"{id}: wrong signature {headers['webhook-signature']}")
            self.attempts[id] += 1
            self.ids[event["data"]["id"], event["type"]].add(id)
            if random.random() < 0.1:
                return 500
            self.delivered.add(id)
            return 204

    def check(self, cluster, runs):
        """Each run's end was delivered, and all attempts of a delivery had one id. Returns the number of repeats."""
        ends = {(run["id"], f"run.{run['status']}") for run in runs}
        end = time.monotonic() + LAST_SECONDS
        while missing := [it for it in ends if not self.ids.get(it, set()) & self.delivered]:
            listed = [cluster.get(f"/runs/{run}/deliveries")["data"] for run, _ in missing[:3]]
            assert time.monotonic() < end, f"{len(missing)} webhooks were not delivered: {json.dumps(listed, indent=1)}"
            time.sleep(0.2)
        assert not self.problems, self.problems
        assert set(self.ids) == ends, f"webhooks of what has not happened: {set(self.ids) - ends}"
        doubled = {it: ids for it, ids in self.ids.items() if len(ids) > 1}
        assert not doubled, f"webhooks with several ids: {doubled}"
        return sum(self.attempts.values()) - len(self.attempts)


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        body = self.rfile.read(int(self.headers["content-length"]))
        try:
            self.send_response(self.server.receive(self.headers, body))
            self.send_header("content-length", "0")
            self.end_headers()
        except OSError:
            pass  # The daemon was killed.

    def log_message(self, *_):
        pass
