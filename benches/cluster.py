#!/usr/bin/env python3
"""Measures short runs on one, two and three nodes that share a PostgreSQL: a client sends a request, waits for the end of its run
and sends the next one; the model replies at once. Then clients follow slow replies at the node that drives the run and at another one.

    AXED_TEST_POSTGRES_SYNC=on tests/postgres.sh --server benches/cluster.py AXED [--clients 1,16,64] [--seconds 4] [--rounds 3] [--json FILE]

Nodes, database and clients share this machine. Of the rounds the one with the most runs counts, since others may use the machine.
Without AXED_TEST_POSTGRES_SYNC the server syncs nothing; AXED is a release binary. "Transactions" and "rows" are PostgreSQL's
statistics of the database divided by the runs, with what nodes do beside runs.
"""

import argparse, http.client, json, os, pathlib, re, selectors, signal, socket, subprocess, sys, tempfile, threading, time
import urllib.parse, uuid

TICKS = os.sysconf("SC_CLK_TCK")
# What PostgreSQL's processes hold back of their statistics while they are idle.
STATISTICS_SECONDS = 2
IDLE_SECONDS = 5
SCRIPT = '[[replies]]\ntext = "The report is good."\ninput_tokens = 900\noutput_tokens = 300\n'
# Each word says which one it is.
FOLLOWED_RUNS, WORDS, WORD_MS = 8, 200, 20
SLOW_SCRIPT = f'delay_ms = {WORD_MS}\n[[replies]]\ntext = "{" ".join(f"w{number}" for number in range(WORDS))}"\n'
BODY = b'{"input":"Summarise the attached report in three sentences."}'


class Database:
    def __init__(self):
        self.server = os.environ["AXED_TEST_POSTGRES"]
        self.name = f"bench_{uuid.uuid4().hex[:12]}"
        self.url = self.server.replace("/postgres?", f"/{self.name}?")
        place = urllib.parse.parse_qs(urllib.parse.urlsplit(self.server).query)["host"][0]
        self.process = int(pathlib.Path(place, "data/postmaster.pid").read_text().split()[0])
        self.ask(f"CREATE DATABASE {self.name}")

    def ask(self, sql):
        command = ["psql", "-qAt", "-d", self.server, "-c", sql]
        return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()

    def counters(self):
        """Transactions, rows that were written, bytes of the log."""
        time.sleep(STATISTICS_SECONDS)
        return [int(it) for it in self.ask(
            "SELECT xact_commit, tup_inserted + tup_updated + tup_deleted, pg_wal_lsn_diff(pg_current_wal_lsn(), '0/0')"
            f" FROM pg_stat_database WHERE datname = '{self.name}'").split("|")]

    def connections(self):
        return int(self.ask(f"SELECT count(*) FROM pg_stat_activity WHERE datname = '{self.name}'"))

    def processor_seconds(self):
        """Of all its processes."""
        children = pathlib.Path(f"/proc/{self.process}/task/{self.process}/children").read_text().split()
        return sum(processor_seconds(pid) for pid in [self.process, *map(int, children)])


def processor_seconds(pid):
    """With what its children had used when they ended; none if it has ended."""
    try:
        fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except FileNotFoundError:
        return 0
    return sum(int(it) for it in fields[11:15]) / TICKS


class Node:
    def __init__(self, axed, home, number, url):
        environment = {"HOME": str(home), "PATH": os.environ["PATH"], "AXED_DATA__URL": url, "AXED_CLUSTER__NODE": f"node{number}"}
        self.process = subprocess.Popen(
            [axed, "serve", "--config", "axed.toml", "--agents", "agents", "--data", f"data{number}", "--listen", "127.0.0.1:0"],
            cwd=home, env=environment, stdout=subprocess.PIPE, stderr=(home / f"log{number}").open("w"), text=True)
        line = self.process.stdout.readline()
        if "listening on http://" not in line:
            sys.exit(f"node {number} did not start:\n{(home / f'log{number}').read_text()}")
        host, port = line.strip().rsplit("/", 1)[1].split(":")
        self.address = (host, int(port))

    def stop(self):
        self.process.send_signal(signal.SIGTERM)
        self.process.wait()


class Client:
    """A connection with one request at a time."""

    def __init__(self, address):
        self.socket = socket.create_connection(address)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.request = (f"POST /agents/solo/runs?wait=30 HTTP/1.1\r\nhost: {address[0]}:{address[1]}\r\n"
                        f"content-type: application/json\r\ncontent-length: {len(BODY)}\r\n\r\n").encode() + BODY

    def send(self):
        self.answer, self.sent_at = b"", time.perf_counter()
        self.socket.sendall(self.request)

    def read(self):
        """The seconds that the answer took, once it is here."""
        self.answer += self.socket.recv(65536)
        head, _, body = self.answer.partition(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0] or -1)
        if len(body) != length:
            return None
        if b'"status":"completed"' not in body:
            sys.exit(f"a run has not completed: {self.answer}")
        return time.perf_counter() - self.sent_at


def load(addresses, count, seconds):
    """The seconds of each answer, sorted."""
    times, selector = [], selectors.DefaultSelector()
    for number in range(count):
        client = Client(addresses[number % len(addresses)])
        selector.register(client.socket, selectors.EVENT_READ, client)
        client.send()
    end, waiting = time.perf_counter() + seconds, count
    while waiting:
        for key, _ in selector.select():
            if (took := key.data.read()) is None:
                continue
            times.append(took)
            if time.perf_counter() < end:
                key.data.send()
            else:
                waiting -= 1
                selector.unregister(key.data.socket)
                key.data.socket.close()
    return sorted(times)


def measure(database, nodes, clients, seconds):
    addresses = [node.address for node in nodes]
    before, database_before = database.counters(), database.processor_seconds()
    nodes_before = sum(processor_seconds(node.process.pid) for node in nodes)
    begin = time.perf_counter()
    times = load(addresses, clients, seconds)
    wall, runs = time.perf_counter() - begin, len(times)
    nodes_after = sum(processor_seconds(node.process.pid) for node in nodes)
    connections, database_after = database.connections(), database.processor_seconds()
    transactions, rows, log = (after - it for after, it in zip(database.counters(), before))
    return {
        "nodes": len(nodes), "clients": clients, "runs": runs, "runs_per_second": runs / wall,
        "median_ms": times[runs // 2] * 1000, "p99_ms": times[runs * 99 // 100] * 1000,
        "transactions_per_run": transactions / runs, "rows_per_run": rows / runs, "log_kib_per_run": log / runs / 1024,
        "nodes_us_per_run": (nodes_after - nodes_before) / runs * 1e6,
        "database_us_per_run": (database_after - database_before) / runs * 1e6, "connections": connections,
    }


def follow(address, run, arrivals):
    """Notes when each word of the reply arrives."""
    connection = http.client.HTTPConnection(*address, timeout=60)
    connection.request("GET", f"/runs/{run}/events", headers={"accept": "text/event-stream"})
    for line in connection.getresponse():
        now = time.perf_counter()
        if line.startswith(b"data:") and (event := json.loads(line[5:])).get("type") == "text.delta":
            for word in re.findall(r"w\d+", event["text"]):
                arrivals.setdefault(word, now)
    connection.close()


def measure_lag(nodes):
    """The milliseconds between a word's arrival at a follower of the first node, which drives the runs, and of the second one, sorted."""
    pairs, threads = [], []
    for _ in range(FOLLOWED_RUNS):
        connection = http.client.HTTPConnection(*nodes[0].address)
        connection.request("POST", "/agents/slow/runs", body=BODY, headers={"content-type": "application/json"})
        run = json.load(connection.getresponse())["id"]
        connection.close()
        pairs.append(({}, {}))
        for node, arrivals in zip(nodes, pairs[-1]):
            threads.append(threading.Thread(target=follow, args=(node.address, run, arrivals)))
            threads[-1].start()
    for thread in threads:
        thread.join()
    return sorted((there[word] - here[word]) * 1000 for here, there in pairs for word in here.keys() & there.keys())


COLUMNS = {"nodes": "nodes", "clients": "clients", "runs_per_second": "runs a second", "median_ms": "median, ms", "p99_ms": "p99, ms",
           "nodes_us_per_run": "nodes, µs a run", "database_us_per_run": "database, µs a run",
           "transactions_per_run": "transactions a run", "rows_per_run": "rows a run", "log_kib_per_run": "log, KiB a run",
           "connections": "connections"}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("axed")
    parser.add_argument("--nodes", default="1,2,3")
    parser.add_argument("--clients", default="1,16,64")
    parser.add_argument("--seconds", type=float, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE")
    arguments = parser.parse_args()
    rows, idle, lags = [], {}, None
    print("| " + " | ".join(COLUMNS.values()) + " |\n|" + "---|" * len(COLUMNS))
    for count in map(int, arguments.nodes.split(",")):
        with tempfile.TemporaryDirectory(prefix="axed-cluster-bench-") as directory:
            home = pathlib.Path(directory)
            for path, text in {"axed.toml": '[providers.scripted]\nscripts = ["scripts"]\n', "scripts/solo.toml": SCRIPT, "scripts/slow.toml": SLOW_SCRIPT,
                               "agents/slow.toml": 'name = "slow"\nmodel = "scripted/slow"\nstream = true\n',
                               "agents/solo.toml": 'name = "solo"\nmodel = "scripted/solo"\n'}.items():
                (home / path).parent.mkdir(exist_ok=True)
                (home / path).write_text(text)
            database = Database()
            nodes = [Node(os.path.abspath(arguments.axed), home, number, database.url) for number in range(count)]
            for clients in map(int, arguments.clients.split(",")):
                load([node.address for node in nodes], clients, 1)
                rounds = [measure(database, nodes, clients, arguments.seconds) for _ in range(arguments.rounds)]
                row = max(rounds, key=lambda it: it["runs_per_second"])
                rows.append(row)
                shown = [row[name] for name in COLUMNS]
                print("| " + " | ".join(f"{it:,.1f}" if isinstance(it, float) and it < 100 else f"{it:,.0f}" for it in shown) + " |")
            before = database.counters()[0]
            time.sleep(IDLE_SECONDS)
            idle[count] = (database.counters()[0] - before) / (IDLE_SECONDS + STATISTICS_SECONDS)
            if count == 2:
                lags = measure_lag(nodes)
            for node in nodes:
                node.stop()
    for count, rate in idle.items():
        print(f"without runs, {count} nodes: {rate:.1f} transactions a second")
    if lags is not None:
        print(f"a follower of another node gets a word later: {lags[len(lags) // 2]:.1f} ms at the median, "
              f"{lags[len(lags) * 99 // 100]:.1f} ms at p99 ({len(lags):,} of {FOLLOWED_RUNS * WORDS:,} words)")
    if arguments.json:
        document = {"loads": rows, "idle_transactions_per_second": idle, "follower_lag_ms": lags}
        arguments.json.write_text(json.dumps(document, indent=1) + "\n")


main()
