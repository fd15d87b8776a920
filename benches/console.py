#!/usr/bin/env python3
"""Times the pages of the console on a store with 300,000 runs, and the page of a tree of 1,000 runs.

    benches/console.py AXED [--runs N] [--limit SECONDS]

The daemon performs one run of each kind and the tree; copies of these runs are then written into the database. Prints the
size of each page with its assets, and the median time of the daemon's answer; with Chromium (`CHROMIUM=FILE`) and the driver
that `tests/console.sh` installs, also the time until the page is drawn. Fails if a page is slower than 200 ms (`--limit`),
the tree slower than 1 s, or a first view larger than 80 KB.
"""

import argparse
import gzip
import json
import os
import re
import shutil
import socket
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
import uuid
from pathlib import Path

CALLS = 31  # of the root and of each of its children: 1 + 31 + 31 * 31 runs
LOOKS = 7  # calls of each leaf
DAYS = 60
REPEATS = 5
MAX_KILOBYTES = 80

SCRIPT = '[[replies]]\ntext = "The report is good."\ninput_tokens = 900\noutput_tokens = 300\n'
CALL = '[[replies.tool_calls]]\nname = "call_agent"\narguments = {{ agent = "{}", task = "part {} of the work" }}\n'
LOOK = '[[replies]]\ntext = "I look."\ntool_calls = [{{ name = "find_path", arguments = {{ pattern = "*{}.md" }} }}]\n'
DONE = '[[replies]]\ntext = "done"\n'


def calling(agent):
    return '[[replies]]\ntext = "go"\n' + "".join(CALL.format(agent, n) for n in range(CALLS)) + DONE


def write_home(home, port):
    scripts = {f"reporter{n}": SCRIPT for n in range(10)}
    scripts |= {"root": calling("middle"), "middle": calling("leaf")}
    scripts["leaf"] = "".join(LOOK.format(n) for n in range(LOOKS)) + DONE
    more = {
        "root": 'sub_agents = ["middle"]\n',
        "middle": 'sub_agents = ["leaf"]\n',
        "leaf": 'tools = ["find_path"]\nworkdir = "work"\n',
    }
    for folder in ("config", "agents", "scripts", "work"):
        (home / folder).mkdir()
    for name, script in scripts.items():
        (home / "scripts" / f"{name}.toml").write_text(script)
        agent = f'name = "{name}"\ndescription = "Reports."\nmodel = "scripted/{name}"\nsystem_prompt = "Be short."\n'
        (home / "agents" / f"{name}.toml").write_text(agent + more.get(name, ""))
    prices = "".join(f'[prices."scripted/{name}"]\ninput = 3.0\noutput = 15.0\n' for name in scripts)
    (home / "config" / "axed.toml").write_text(
        f'[server]\nlisten = "127.0.0.1:{port}"\n[providers.scripted]\nscripts = ["../scripts"]\n[runs]\nmax_tree = 2000\n{prices}'
    )


class Daemon:
    def __init__(self, axed, home, port):
        environment = {"HOME": str(home), "PATH": os.environ["PATH"]}
        self.base = f"http://127.0.0.1:{port}"
        self.log = (home / "log").open("a")
        command = [axed, "serve", "--data", "data"]
        self.process = subprocess.Popen(command, cwd=home, env=environment, stdout=subprocess.PIPE, stderr=self.log)
        if b"listening" not in self.process.stdout.readline():
            sys.exit(f"the daemon did not start:\n{(home / 'log').read_text()}")

    def send(self, method, path, body=None):
        data = None if body is None else json.dumps(body).encode()
        headers = {"Accept-Encoding": "gzip", "Content-Type": "application/json"}
        request = urllib.request.Request(self.base + path, data, headers, method=method)
        with urllib.request.urlopen(request, timeout=300) as response:
            return response.read()

    def json(self, method, path, body=None):
        answer = self.send(method, path, body)
        return json.loads(gzip.decompress(answer) if answer[:2] == b"\x1f\x8b" else answer)

    def stop(self):
        self.process.terminate()
        self.process.wait()
        self.log.close()


def perform(daemon):
    """Performs the runs that are copied, and the tree. Returns the tree's root."""
    for n in range(10):
        body = {"input": "Summarise the attached report in three sentences.", "labels": {"team": "search", "customer": "c1"}}
        daemon.json("POST", f"/agents/reporter{n}/runs?wait=60", body | {"session": f"s{n}"})
    root = daemon.json("POST", "/agents/root/runs", {"input": "Divide the work."})
    deadline = time.monotonic() + 300
    while root["status"] != "completed":
        if root["status"] == "failed" or time.monotonic() > deadline:
            sys.exit(f"the tree ended as {root['status']}: {root['error']}")
        root = daemon.json("GET", f"/runs/{root['id']}?wait=30")
    return root


def run_id(milliseconds, n):
    value = milliseconds << 80 | 7 << 76 | 2 << 62 | n
    return value.to_bytes(16, "big")


def fill(database, count):
    """Writes copies of the reporters' runs: of 60 days, with 5,000 sessions, 1,000 customers, four statuses and costs."""
    db = sqlite3.connect(database)
    found = db.execute("SELECT * FROM runs WHERE agent LIKE 'reporter%'")
    names = [column[0] for column in found.description]
    templates = [dict(zip(names, row)) for row in found]
    now = int(time.time() * 1000) - 60_000
    step = DAYS * 86_400_000 // count
    runs, labels = [], []
    for n in range(count):
        created = now - (count - n) * step
        run = dict(templates[n % len(templates)])
        key = run_id(created, n)
        run |= {"id": key, "root": key, "created_at": created, "started_at": created + 5, "finished_at": created + 900}
        customer = f"c{n % 991}"
        run |= {"session": f"s{n % 4999}", "labels": json.dumps({"team": "search", "customer": customer})}
        run["status"] = "failed" if n % 47 == 1 else "cancelled" if n % 997 == 2 else "completed"
        run["cost"] = run["tree_cost"] = (run["cost"] or 1) * (1 + n % 97)
        runs.append(tuple(run.values()))
        labels += [("team", "search", key), ("customer", customer, key)]
    db.executemany(f"INSERT INTO runs ({', '.join(names)}) VALUES ({', '.join('?' * len(names))})", runs)
    db.executemany("INSERT INTO labels (key, value, run) VALUES (?, ?, ?)", labels)
    fill_usage(db, count, now)
    db.execute("ANALYZE")
    db.commit()
    db.close()


def fill_usage(db, count, now):
    """A series for each session, and as many rows by quarter hour as runs."""
    found = db.execute("SELECT owner, labels, agent, model, last_day FROM usage_series WHERE agent LIKE 'reporter%'")
    templates = found.fetchall()
    sums = db.execute(
        "SELECT q.sums FROM usage_quarters q JOIN usage_series s ON s.id = q.series WHERE s.agent LIKE 'reporter%'"
    ).fetchone()[0]
    series, first = [], 1_000
    for n in range(5_000):
        owner, _, agent, model, last_day = templates[n % len(templates)]
        customer = json.dumps({"customer": f"c{n % 1000}", "team": "search"})
        series.append((first + n, owner, f"s{n}", customer, agent, model, last_day))
    db.executemany(
        "INSERT OR IGNORE INTO usage_series (id, owner, session, labels, agent, model, last_day) VALUES (?, ?, ?, ?, ?, ?, ?)",
        series,
    )
    quarters, days = set(), set()
    for n in range(count):
        quarter = now // 900_000 - (count - n) * DAYS * 96 // count
        quarters.add((quarter, first + n % 5_000))
        days.add((quarter // 96, first + n % 5_000))
    for table, rows in (("usage_quarters", quarters), ("usage_days", days)):
        values = ((start, key, sums) for start, key in sorted(rows))
        db.executemany(f"INSERT OR IGNORE INTO {table} (start, series, sums) VALUES (?, ?, ?)", values)


def first_view(daemon):
    """Bytes of the first page and of all that it loads."""
    page = daemon.send("GET", "/ui/")
    html = gzip.decompress(page).decode()
    total, todo, done = len(page), set(re.findall(r'(?:src|href)="(/ui/assets/[^"]+)"', html)), set()
    while todo - done:
        path = (todo - done).pop()
        done.add(path)
        body = daemon.send("GET", path)
        total += len(body)
        text = (gzip.decompress(body) if body[:2] == b"\x1f\x8b" else body).decode()
        if path.endswith(".js"):
            folder = path.rsplit("/", 1)[0]
            todo |= {f"{folder}/{name}" for name in re.findall(r'from "\./([^"]+)"', text)}
    return total


def pages(root, last):
    filters = {
        "status": "status=failed", "rare status": "status=cancelled", "agent": "agent=reporter3", "label": "label=customer%3Dc17",
        "session": "session=s4998", "cost": "cost=0.1", "high cost": "cost=1000",
    }
    names = list(filters)
    yield "runs", "/ui/"
    for name in names:
        yield name, f"/ui/?{filters[name]}"
    for a in range(len(names)):
        for b in range(a + 1, len(names)):
            if filters[names[a]].split("=")[0] != filters[names[b]].split("=")[0]:
                yield f"{names[a]}, {names[b]}", f"/ui/?{filters[names[a]]}&{filters[names[b]]}"
    all_of_them = "&".join(filters[name] for name in ("status", "agent", "label", "session", "cost"))
    yield "all filters", f"/ui/?{all_of_them}"
    yield "none match", "/ui/?agent=none&label=none%3Dnone"
    yield "last page", f"/ui/?cursor={last}"
    for by in ("agent", "model", "label&label=team", "label&label=customer"):
        for days in (30, 90):
            yield f"usage by {by}, {days} days", f"/ui/usage?by={by}&days={days}"
    for name in ("agents", "agents/reporter3", "approvals", "sessions", "sessions?cursor=s4000", "sessions/s4998", "system"):
        yield name, f"/ui/{name}"
    yield "tree", f"/ui/runs/{root['id']}"


def measure(daemon, found, limit):
    failures = []
    print(f"{'ms':>8} {'KB':>7}  page")
    for name, path in found:
        times, size = [], 0
        for _ in range(REPEATS):
            start = time.perf_counter()
            size = len(daemon.send("GET", path))
            times.append((time.perf_counter() - start) * 1000)
        median = statistics.median(times)
        allowed = max(1000, limit * 1000) if name == "tree" else limit * 1000
        is_slow = median > allowed
        print(f"{median:8.1f} {size / 1000:7.1f}  {name}{'  TOO SLOW' if is_slow else ''}")
        failures += [name] * is_slow
    return failures


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("axed", type=Path)
    parser.add_argument("--runs", type=int, default=300_000)
    parser.add_argument("--limit", type=float, default=0.2, help="seconds of an answer")
    arguments = parser.parse_args()
    home = Path(tempfile.mkdtemp(prefix="axed-console-bench-"))
    daemon = None
    try:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        write_home(home, port)
        axed = arguments.axed.resolve()
        daemon = Daemon(axed, home, port)
        root = perform(daemon)
        print(f"The tree has {root['tree']['runs']} runs and {root['last_event']} events.")
        daemon.stop()
        start = time.monotonic()
        fill(home / "data" / "axed.db", arguments.runs)
        print(f"{arguments.runs} runs are stored; that took {time.monotonic() - start:.0f} s.")
        daemon = Daemon(axed, home, port)
        size = first_view(daemon) / 1000
        print(f"The first view has {size:.1f} KB.")
        oldest = run_id(int(time.time() * 1000) - (DAYS - 1) * 86_400_000, 0)
        failures = measure(daemon, pages(root, f"run_{uuid.UUID(bytes=oldest)}"), arguments.limit)
        if size > MAX_KILOBYTES:
            failures.append("the first view")
        failures += in_browser(daemon.base, root["id"])
        if failures:
            sys.exit("too slow or too large: " + ", ".join(failures))
    finally:
        if daemon:
            daemon.process.kill()
        shutil.rmtree(home, ignore_errors=True)


def in_browser(base, root):
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    driver = cache / "axed-ci" / "tools" / "console"
    chromium = os.environ.get("CHROMIUM") or shutil.which("chromium")
    if not chromium or not (driver / "node_modules").exists():
        print("The browser is not measured: run tests/console.sh once, which installs it.")
        return []
    script = driver / "console_bench.mjs"
    shutil.copy(Path(__file__).with_suffix(".mjs"), script)
    done = subprocess.run(["node", script, chromium, base, root], check=False)
    return ["the browser"] * (done.returncode != 0)


if __name__ == "__main__":
    main()
