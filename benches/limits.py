#!/usr/bin/env python3
"""Has many runs share the rate limit of a provider: a stub that allows so many input tokens a minute and refuses the rest with 429,
and runs of two keys that all start at once, on one daemon or on several that share a PostgreSQL.

    benches/limits.py AXED [--runs 1000] [--limit 100000] [--tokens 300] [--kind bucket] [--learn] [--json FILE]
    tests/postgres.sh --server benches/limits.py AXED --nodes 3

The stub counts the bytes of a message as tokens, four each, with an error of up to 20 % that axed does not know, because tokenizers
differ from its estimate. "--kind" is how it limits: "bucket" holds a minute's limit and refills evenly, "minute" allows the limit in
each period of 60 seconds that has just passed. "--learn" leaves out the configuration: axed learns the limit from headers.
Aims: fewer than 0.1 % of requests refused, more than 95 % of the limit used after the first minute, equal shares of both keys while both
wait, and no run that fails.
"""

import argparse, asyncio, collections, hashlib, http.client, json, os, pathlib, random, signal, subprocess, sys, tempfile
import threading, time, uuid

MINUTE = 60.0
REPLY_SECONDS = 0.3


class Stub:
    def __init__(self, limit, kind):
        self.limit, self.kind, self.free, self.at = limit, kind, float(limit), time.monotonic()
        self.used, self.accepted, self.refused = collections.deque(), [], 0
        self.random = random.Random(1)

    def remaining(self, now):
        if self.kind == "bucket":
            self.free = min(self.limit, self.free + (now - self.at) * self.limit / MINUTE)
            self.at = now
            return self.free
        while self.used and self.used[0][0] <= now - MINUTE:
            self.used.popleft()
        return self.limit - sum(tokens for _, tokens in self.used)

    def answer(self, body):
        request, now = json.loads(body), time.monotonic()
        text = request["messages"][-1]["content"]
        text = text if isinstance(text, str) else text[0]["text"]
        size = sum(len(json.dumps(message)) for message in request["messages"])
        tokens = max(1, int(size / 4 * self.random.uniform(0.8, 1.2)))
        remaining = self.remaining(now)
        headers = {"x-ratelimit-limit-tokens": self.limit, "x-ratelimit-remaining-tokens": max(0, int(remaining - tokens))}
        if tokens > remaining:
            self.refused += 1
            error = {"message": "Rate limit reached", "type": "tokens", "code": "rate_limit_exceeded"}
            return 429, {**headers, "retry-after": "1"}, {"error": error}
        self.free -= tokens
        self.used.append((now, tokens))
        self.accepted.append((now, tokens, text.split(" ", 1)[0]))
        usage = {"prompt_tokens": tokens, "completion_tokens": 1, "total_tokens": tokens + 1}
        choice = {"index": 0, "message": {"role": "assistant", "content": "done"}, "finish_reason": "stop"}
        return 200, headers, {"id": "x", "object": "chat.completion", "model": "m", "choices": [choice], "usage": usage}

    async def serve(self, reader, writer):
        try:
            while line := await reader.readline():
                length = 0
                while (line := await reader.readline()) not in (b"\r\n", b""):
                    name, _, value = line.partition(b":")
                    if name.lower() == b"content-length":
                        length = int(value)
                status, headers, answer = self.answer(await reader.readexactly(length))
                if status == 200:
                    await asyncio.sleep(REPLY_SECONDS)
                answer = json.dumps(answer).encode()
                head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
                writer.write(f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\n{head}"
                             f"content-length: {len(answer)}\r\n\r\n".encode() + answer)
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    def start(self):
        """Serves on a thread of its own; returns the port."""
        ready = threading.Event()

        async def main():
            server = await asyncio.start_server(self.serve, "127.0.0.1", 0, backlog=4096)
            self.port = server.sockets[0].getsockname()[1]
            ready.set()
            await server.serve_forever()

        threading.Thread(target=lambda: asyncio.run(main()), daemon=True).start()
        ready.wait()
        return self.port


def create_database():
    server, name = os.environ["AXED_TEST_POSTGRES"], f"bench_{uuid.uuid4().hex[:12]}"
    subprocess.run(["psql", "-qAt", "-d", server, "-c", f"CREATE DATABASE {name}"], check=True)
    return server.replace("/postgres?", f"/{name}?")


class Daemon:
    def __init__(self, axed, home, number, url):
        environment = {"HOME": str(home), "PATH": os.environ["PATH"], "RUST_LOG": "error"}
        if url:
            environment |= {"AXED_DATA__URL": url, "AXED_CLUSTER__NODE": f"node{number}"}
        self.process = subprocess.Popen(
            [axed, "serve", "--config", "axed.toml", "--agents", "agents", "--data", f"data{number}", "--listen", "127.0.0.1:0"],
            cwd=home, env=environment, stdout=subprocess.PIPE, stderr=(home / f"log{number}").open("w"), text=True)
        line = self.process.stdout.readline()
        if "listening on http://" not in line:
            sys.exit(f"the daemon did not start:\n{(home / f'log{number}').read_text()}")
        self.host, self.port = line.strip().rsplit("/", 1)[1].split(":")

    def request(self, method, path, key, body=None):
        connection = http.client.HTTPConnection(self.host, int(self.port), timeout=120)
        headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
        connection.request(method, path, body and json.dumps(body), headers)
        response = connection.getresponse()
        text = response.read()
        connection.close()
        return response.status, text

    def stop(self):
        self.process.send_signal(signal.SIGTERM)
        self.process.wait()


def write_files(home, port, arguments):
    keys = "".join(f'[auth.keys.{name}]\nsha256 = "{hashlib.sha256(name.encode()).hexdigest()}"\nscopes = ["admin"]\n'
                   for name in ("ada", "bob"))
    limits = f'[providers.stub.limits."*"]\ninput_tokens_per_minute = {arguments.limit}\n'
    (home / "axed.toml").write_text(
        f'[server]\nmax_timeout = 86400\n{keys}[providers.stub]\nkind = "openai"\napi = "chat"\n'
        f'base_url = "http://127.0.0.1:{port}/v1"\napi_key = "k"\n{"" if arguments.learn else limits}')
    (home / "agents").mkdir()
    (home / "agents/solo.toml").write_text('name = "solo"\nmodel = "stub/m"\ntimeout = 7200\n')


def measure(arguments, home):
    stub = Stub(arguments.limit, arguments.kind)
    write_files(home, stub.start(), arguments)
    url = create_database() if arguments.nodes > 1 else None
    daemons = [Daemon(arguments.axed, home, number, url) for number in range(arguments.nodes)]
    text = "x" * (arguments.tokens * 4)
    if arguments.learn:
        # Where nothing is known, the first reply says it.
        daemons[0].request("POST", "/agents/solo/runs?wait=30", "ada", {"input": "first"})
    begin = time.monotonic()
    for number in range(arguments.runs):
        key = ("ada", "bob")[number % 2]
        status, answer = daemons[number % len(daemons)].request("POST", "/agents/solo/runs", key, {"input": f"{key} {text}"})
        if status != 202:
            sys.exit(f"{status}: {answer.decode()}")
    seconds = arguments.seconds or float("inf")
    while len(stub.accepted) < arguments.runs and time.monotonic() - begin < seconds:
        time.sleep(1)
    end = stub.accepted[-1][0]
    time.sleep(2)
    failed = json.loads(daemons[0].request("GET", "/runs?status=failed&limit=1", "ada")[1])["data"]
    for daemon in daemons:
        daemon.stop()
    after = [tokens for at, tokens, _ in stub.accepted if begin + MINUTE <= at < end]
    # Both have runs that wait until shortly before the end.
    shares = collections.Counter()
    for at, tokens, key in stub.accepted:
        if at < end - (end - begin) * 0.05:
            shares[key] += tokens
    requests = len(stub.accepted) + stub.refused
    return {
        "nodes": arguments.nodes, "kind": arguments.kind, "learned": arguments.learn, "runs": arguments.runs,
        "seconds": round(end - begin, 1), "requests": requests, "refused_percent": round(100 * stub.refused / requests, 3),
        "used_percent": round(100 * sum(after) / max(1.0, (end - begin - MINUTE) * arguments.limit / MINUTE), 1),
        "share_of_ada_percent": round(100 * shares["ada"] / max(1, shares["ada"] + shares["bob"]), 1),
        "a_run_failed": bool(failed),
    }


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("axed", type=pathlib.Path)
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--limit", type=int, default=100_000)
    parser.add_argument("--tokens", type=int, default=300)
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--kind", choices=["bucket", "minute"], default="bucket")
    parser.add_argument("--learn", action="store_true")
    parser.add_argument("--seconds", type=float, help="stop after this time")
    parser.add_argument("--json", type=pathlib.Path)
    arguments = parser.parse_args()
    arguments.axed = arguments.axed.resolve()
    with tempfile.TemporaryDirectory() as home:
        result = measure(arguments, pathlib.Path(home))
    print(json.dumps(result, indent=2))
    if arguments.json:
        arguments.json.write_text(json.dumps(result))


main()
