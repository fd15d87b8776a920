#!/usr/bin/env python3
"""Three daemons on one PostgreSQL: kills them, pauses them, drains them, cuts them off from the database and takes it away, again
and again, while runs are started, forked, steered, paused and approved at any of them; then checks that nothing is lost, done twice or out of order.

    tests/postgres.sh --server tests/node_loop.py AXED [--rounds 12] [--seed N] [--faults kill,pause,drain,cut,database]

The checks are those of kill_loop.py, and that of each session one run at a time was at work, in the order of acceptance.
"""

import argparse, collections, http.client, json, os, pathlib, random, signal, socket, subprocess, sys, tempfile
import threading, time, urllib.parse, uuid

import kill_loop

NODES = 3
# A node that is paused longer loses its runs.
PAUSE_SECONDS = (2, 12)
AWAY_SECONDS = (1, 30)


class Link:
    """A node's way to the database, which can be cut: then nothing passes, and connections stay open."""

    def __init__(self, path):
        self.path, self.is_open = path, threading.Event()
        self.is_open.set()
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self):
        while True:
            near, _ = self.listener.accept()
            threading.Thread(target=self.connect, args=(near,), daemon=True).start()

    def connect(self, near):
        self.is_open.wait()
        far = socket.socket(socket.AF_UNIX)
        try:
            far.connect(self.path)
        except OSError:
            return near.close()
        for source, target in ((near, far), (far, near)):
            threading.Thread(target=self.pass_on, args=(source, target), daemon=True).start()

    def pass_on(self, source, target):
        try:
            while data := source.recv(65536):
                self.is_open.wait()
                target.sendall(data)
        except OSError:
            pass
        for end in (source, target):
            try:
                end.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass


class Cluster:
    """The daemons; a request goes to any that is not stopped."""

    def __init__(self, axed, home, dice):
        server = os.environ["AXED_TEST_POSTGRES"]
        self.database = f"nodes_{uuid.uuid4().hex[:12]}"
        self.server, self.axed, self.home, self.dice = server, axed, home, dice
        self.execute(f"CREATE DATABASE {self.database}")
        place = urllib.parse.parse_qs(urllib.parse.urlsplit(server).query)["host"][0]
        self.links = [Link(f"{place}/.s.PGSQL.5432") for _ in range(NODES)]
        self.nodes = [self.start(n) for n in range(NODES)]
        self.stopped = set()

    def start(self, n):
        url = f"postgres://axed@127.0.0.1:{self.links[n].port}/{self.database}?sslmode=disable"
        return kill_loop.Daemon(self.axed, self.home, str(n), url)

    def execute(self, sql):
        subprocess.run(["psql", "-q", "-d", self.server, "-c", sql], check=True, stdout=subprocess.DEVNULL)

    def send(self, method, path, body=None, key=None):
        """Tries again elsewhere what failed for want of a node or the database: requests have a key, or may be repeated."""
        end = time.monotonic() + 90
        while True:
            node = self.dice.choice([it for n, it in enumerate(self.nodes) if n not in self.stopped])
            try:
                status, answer = node.send(method, path, body, key)
                if status < 500:
                    return status, answer
                problem = (status, answer)
            except (OSError, http.client.HTTPException, json.JSONDecodeError) as error:
                problem = error
            if time.monotonic() > end:
                raise AssertionError(f"{method} {path}: {problem}")
            time.sleep(0.05)

    get = kill_loop.Daemon.get
    pages = kill_loop.Daemon.pages

    def begin(self, fault):
        """What ends the fault, and when."""
        n = self.dice.randrange(NODES)
        node = self.nodes[n]
        self.stopped.add(n)
        if fault == "kill":
            node.kill()
            return self.dice.uniform(0, 12), lambda: self.restart(n)
        if fault == "drain":
            node.process.send_signal(signal.SIGTERM)
            return self.dice.uniform(1, 3), lambda: (kill_loop.Daemon.kill(node), self.restart(n))
        if fault == "pause":
            node.process.send_signal(signal.SIGSTOP)
            return self.dice.uniform(*PAUSE_SECONDS), lambda: (node.process.send_signal(signal.SIGCONT), self.stopped.discard(n))
        if fault == "cut":
            self.links[n].is_open.clear()
            return self.dice.uniform(*PAUSE_SECONDS), lambda: (self.links[n].is_open.set(), self.stopped.discard(n))
        self.stopped.discard(n)
        self.execute(f"ALTER DATABASE {self.database} ALLOW_CONNECTIONS false")
        self.execute(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{self.database}'")
        away = self.dice.uniform(*AWAY_SECONDS)
        return away, lambda: self.execute(f"ALTER DATABASE {self.database} ALLOW_CONNECTIONS true")

    def restart(self, n):
        self.nodes[n] = self.start(n)
        self.stopped.discard(n)


class Client(kill_loop.Client):
    """Some of its runs have a session."""

    def start(self, daemon, path, body):
        if "/agents/careful/" in path and self.dice.random() < 0.5:
            body = {**body, "session": f"talk-{self.dice.randrange(3)}"}
        super().start(daemon, path, body)


def play(client, cluster, seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        client.act(cluster)


def check_sessions(check):
    sessions = collections.defaultdict(list)
    for run in check.runs.values():
        if run["session"] and run["parent_id"] is None and run["started_at"]:
            sessions[run["session"]].append(run)
    for name, runs in sessions.items():
        runs.sort(key=lambda run: run["id"])
        for earlier, later in zip(runs, runs[1:]):
            assert earlier["finished_at"] <= later["started_at"], f"{name}: {later['id']} started before {earlier['id']} ended"
    return sum(len(runs) for runs in sessions.values())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("axed")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--faults", default="kill,pause,drain,cut,database")
    arguments = parser.parse_args()
    dice = random.Random(arguments.seed)
    print(f"node_loop: seed {arguments.seed}")
    with tempfile.TemporaryDirectory(prefix="axed-node-loop-") as directory:
        home = pathlib.Path(directory)
        kill_loop.prepare(home)
        client, cluster = Client(dice), Cluster(os.path.abspath(arguments.axed), home, dice)
        faults, counts = arguments.faults.split(","), collections.Counter()
        try:
            for number in range(arguments.rounds):
                fault = faults[number % len(faults)]
                counts[fault] += 1
                play(client, cluster, dice.uniform(0.2, 2))
                seconds, undo = cluster.begin(fault)
                if fault == "database":
                    time.sleep(seconds)
                else:
                    play(client, cluster, seconds)
                undo()
            for key in list(client.open):
                client.finish(cluster, key)
            kill_loop.settle(cluster, client)
            check = kill_loop.Check(cluster, client, home / "ledger")
            failures = check.ends()
            check.payments()
            check.messages()
            check.usage()
            in_sessions = check_sessions(check)
            faults = ", ".join(f"{count} {what}" for what, count in counts.items())
            counts = ", ".join(f"{count} {what}" for what, count in sorted(client.counts.items()))
            print(f"node_loop: ok: {faults}; {len(check.runs)} runs, {in_sessions} in sessions, {sum(check.paid.values())} payments, "
                  f"{failures['interrupted']} interrupted; {counts}")
        except BaseException:
            for node in cluster.nodes:
                sys.stderr.write(f"---- {node.log.name}\n{node.log.read_text()[-4000:]}\n")
            raise
        finally:
            for node in cluster.nodes:
                node.process.send_signal(signal.SIGCONT)
                node.kill()


main()
