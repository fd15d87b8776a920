"""Three daemons on one PostgreSQL, each with a way to the database that can be cut."""

import atexit, http.client, json, os, pathlib, shlex, signal, socket, subprocess, sys, threading, time, urllib.parse, uuid

import kill_loop
from nodes.receiver import SECRET

NODES = 3
# How long a request is tried again elsewhere: longer than the database is away.
RETRY_SECONDS = 300


class Link:
    """A node's way to the database, which can be cut: then nothing passes, and connections stay open."""

    def __init__(self, host, target):
        """`target` is the path of a socket, or host and port."""
        self.target, self.is_open = target, threading.Event()
        self.is_open.set()
        self.listener = socket.create_server((host, 0))
        self.address = f"{host}:{self.listener.getsockname()[1]}"
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self):
        while True:
            near, _ = self.listener.accept()
            threading.Thread(target=self.connect, args=(near,), daemon=True).start()

    def connect(self, near):
        self.is_open.wait()
        far = socket.socket(socket.AF_UNIX if isinstance(self.target, str) else socket.AF_INET)
        try:
            far.connect(self.target)
        except OSError:
            return near.close()
        # Small pieces would wait for acknowledgements, 40 ms for each answer of the database.
        for end in (near, far):
            if end.family == socket.AF_INET:
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
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


def is_alive(process):
    """Not if only its parent has not taken notice yet."""
    try:
        return pathlib.Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


class Loopback:
    """All nodes and the script share the loopback interface."""

    host = "127.0.0.1"

    def before(self, n):
        return []

    def options(self, n):
        return ["--listen", "127.0.0.1:0"]


class Namespaces:
    """Each node has a network of its own, whose packets can be dropped: a bridge, and a pair of interfaces a node. Root only."""

    def __init__(self):
        number = os.getpid() % 60000
        # Of the addresses for benchmarks (RFC 2544).
        self.net, self.name = f"198.18.{number % 250}", f"axl{number}"
        self.host = f"{self.net}.1"
        atexit.register(self.remove)
        self.ip("link", "add", self.name, "type", "bridge")
        self.ip("addr", "add", f"{self.host}/24", "dev", self.name)
        self.ip("link", "set", self.name, "up")
        for n in range(NODES):
            space, port = f"{self.name}-{n}", f"{self.name}p{n}"
            self.ip("netns", "add", space)
            self.ip("link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", space)
            self.ip("link", "set", port, "master", self.name, "up")
            self.ip("-n", space, "addr", "add", f"{self.net}.{n + 2}/24", "dev", "eth0")
            for interface in ("eth0", "lo"):
                self.ip("-n", space, "link", "set", interface, "up")

    def ip(self, *arguments, check=True):
        subprocess.run(["ip", *arguments], check=check)

    def drop(self, n, is_dropped):
        self.ip("link", "set", f"{self.name}p{n}", "down" if is_dropped else "up")

    def before(self, n):
        return ["ip", "netns", "exec", f"{self.name}-{n}"]

    def options(self, n):
        return ["--listen", f"{self.net}.{n + 2}:0", "--insecure-no-auth"]

    def remove(self):
        for n in range(NODES):
            self.ip("netns", "del", f"{self.name}-{n}", check=False)
        self.ip("link", "del", self.name, check=False)


class Clocks:
    """The wall clock of each node, by libfaketime; clocks that run on are as they are."""

    def __init__(self, home):
        self.files = [home / f"clock{n}" for n in range(NODES)]
        # When a clock was wrong.
        self.spans = []
        libraries = pathlib.Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1")
        self.library = next(libraries, None) or sys.exit("node_loop: install Debian's libfaketime for the fault clock")
        for n in range(NODES):
            self.set(n, 0)

    def set(self, n, seconds):
        self.files[n].write_text(f"{seconds:+d}\n")

    def environment(self, n):
        return {"LD_PRELOAD": str(self.library), "FAKETIME_TIMESTAMP_FILE": str(self.files[n]), "NO_FAKE_STAT": "1",
                "FAKETIME_DONT_FAKE_MONOTONIC": "1", "FAKETIME_CACHE_DURATION": "1", "FAKETIME_DONT_RESET": "1"}


class Cluster:
    """The daemons; a request goes to any that is not stopped."""

    def __init__(self, binaries, home, dice, network, clocks, pooler=None):
        """Nodes start with the first of the binaries; the last one is what they are upgraded to. `pooler` is the URL of one."""
        self.server = os.environ["AXED_TEST_POSTGRES"]
        self.database = f"nodes_{uuid.uuid4().hex[:12]}"
        self.home, self.dice, self.network, self.clocks = home, dice, network, clocks
        self.new_binary, self.binaries = binaries[-1], [binaries[0]] * NODES
        self.execute(f"CREATE DATABASE {self.database}")
        # What is committed survives a crash of the server, whatever postgres.sh has set.
        self.execute(f"ALTER DATABASE {self.database} SET synchronous_commit = on")
        # After a crash.
        self.server_process = None
        query = urllib.parse.parse_qs(urllib.parse.urlsplit(self.server).query)
        (place,), (port,) = query["host"], query["port"]
        direct, parts = f"{place}/.s.PGSQL.{port}", urllib.parse.urlsplit(pooler or "")
        self.links = [Link(network.host, (parts.hostname, parts.port) if pooler else direct) for _ in range(NODES)]
        # For notifications, beside the pooler.
        self.direct_links = [Link(network.host, direct) for _ in range(NODES)] if pooler else []
        self.nodes = [self.start(n) for n in range(NODES)]
        self.stopped = set()

    def start(self, n):
        environment = {"AXED_DATA__URL": f"postgres://axed@{self.links[n].address}/{self.database}?sslmode=disable",
                       "AXED_CLUSTER__NODE": f"node{n}", "HOOK_SECRET": SECRET}
        if self.direct_links:
            environment["AXED_DATA__LISTEN_URL"] = f"postgres://axed@{self.direct_links[n].address}/{self.database}?sslmode=disable"
        if self.clocks:
            environment |= self.clocks.environment(n)
        return kill_loop.Daemon(self.binaries[n], self.home, str(n), self.network.before(n), self.network.options(n), environment)

    def execute(self, sql):
        """In the database that is always there."""
        subprocess.run(["psql", "-q", "-d", self.server, "-c", sql], check=True, stdout=subprocess.DEVNULL)

    def query(self, sql):
        url = self.server.replace("/postgres?", f"/{self.database}?")
        output = subprocess.run(["psql", "-qAt", "-F", "\t", "-d", url, "-c", sql], check=True, stdout=subprocess.PIPE, text=True)
        return [line.split("\t") for line in output.stdout.splitlines()]

    def dump(self):
        url = self.server.replace("/postgres?", f"/{self.database}?")
        subprocess.run(["pg_dump", "-f", self.home / "database.sql", url], check=False)

    def kill_server(self):
        """Its processes do not end in order: nothing is written any more."""
        ((self.data,),) = self.query("SHOW data_directory")
        postmaster = pathlib.Path(self.data, "postmaster.pid").read_text().split()[0]
        children = subprocess.run(["pgrep", "-P", postmaster], stdout=subprocess.PIPE, text=True).stdout.split()
        # First its own: it would start them again.
        subprocess.run(["kill", "-KILL", postmaster, *children], check=False, stderr=subprocess.DEVNULL)
        if self.server_process:
            self.server_process.wait()
        while any(is_alive(process) for process in (postmaster, *children)):
            time.sleep(0.05)

    def start_server(self):
        """As it was started before, and waits until it has read its log."""
        data = pathlib.Path(self.data)
        (data / "postmaster.pid").unlink(missing_ok=True)
        owner = data.stat()
        as_owner = {"user": owner.st_uid, "group": owner.st_gid, "extra_groups": []} if os.getuid() == 0 else {}
        with open(self.home / "server.log", "a") as log:
            command = shlex.split((data / "postmaster.opts").read_text())
            self.server_process = subprocess.Popen(command, stdout=log, stderr=log, cwd=data, **as_owner)
        is_ready = ["psql", "-q", "-d", self.server, "-c", "SELECT 1"]
        while subprocess.run(is_ready, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode:
            assert self.server_process.poll() is None, "the server of the database does not start"
            time.sleep(0.1)

    def send(self, method, path, body=None, key=None):
        """Tries again elsewhere what failed for want of a node or the database: requests have a key, or may be repeated."""
        end = time.monotonic() + RETRY_SECONDS
        while True:
            n = self.dice.choice([n for n in range(NODES) if n not in self.stopped])
            try:
                status, answer = self.nodes[n].send(method, path, body, key)
                if status < 500:
                    return status, answer
                problem = (status, answer)
            except (OSError, http.client.HTTPException, json.JSONDecodeError) as error:
                problem = error
            if time.monotonic() > end:
                raise AssertionError(f"{method} {path}: node{n}: {problem}")
            time.sleep(0.05)

    get = kill_loop.Daemon.get
    pages = kill_loop.Daemon.pages

    def restart(self, n):
        self.nodes[n] = self.start(n)
        self.stopped.discard(n)

    def end(self):
        for node in self.nodes:
            node.process.send_signal(signal.SIGCONT)
            node.kill()
        if self.server_process:
            # postgres.sh does not know it.
            self.server_process.send_signal(signal.SIGINT)
            self.server_process.wait()
