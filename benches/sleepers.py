#!/usr/bin/env python3
"""Measures runs that sleep: the memory that they take, and how late they wake.

    benches/sleepers.py AXED [--runs 100000] [--people] [--spread 1000] [--at-once 10000]

First "--runs" runs fall asleep for a day, or ("--people") until a person answers. Beside them "--spread" runs wake at times of their own within 20 seconds, then "--at-once"
runs at one moment. Last, the daemon is started again. Aims for the defaults: at most 100 MB more memory, woken within 1 s of their
time, and those of one moment within 10 s.
"""

import argparse
import datetime
import gzip
import http.client
import json
import random
import re
import sqlite3
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from console import Daemon

CLIENTS = 16
SCRIPT = """[[replies]]
text = "I sleep."
[[replies.tool_calls]]
name = "sleep"
arguments = { until = "{{input}}" }
[[replies]]
text = "I am awake."
"""
ASKS = SCRIPT.replace("sleep\"", "ask_person\"").replace("until", "question")


def write_home(home, port):
    for folder in ("agents", "config", "scripts"):
        (home / folder).mkdir()
    for agent, script, table in [("sleeper", SCRIPT, "wait"), ("asker", ASKS, "ask")]:
        (home / "scripts" / f"{agent}.toml").write_text(script)
        settings = f'name = "{agent}"\nmodel = "scripted/{agent}"\n[{table}]\nenabled = true\n'
        (home / "agents" / f"{agent}.toml").write_text(settings)
    (home / "config" / "axed.toml").write_text(
        f'[server]\nlisten = "127.0.0.1:{port}"\n[providers.scripted]\nscripts = ["../scripts"]\n[telemetry]\nlog = "warn"\n'
    )


def rfc3339(seconds):
    return datetime.datetime.fromtimestamp(seconds, datetime.timezone.utc).isoformat().replace("+00:00", "Z")


def start(port, times, agent="sleeper"):
    """Starts a run for each of these times."""

    def some(part):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
        for at in part:
            body = json.dumps({"input": rfc3339(at)})
            connection.request("POST", f"/agents/{agent}/runs", body, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            text = answer.read()
            if answer.status != 202:
                sys.exit(f"a run was not accepted: {answer.status} {text}")

    with ThreadPoolExecutor(CLIENTS) as clients:
        list(clients.map(some, (times[n::CLIENTS] for n in range(CLIENTS))))


def metric(daemon, name):
    text = daemon.send("GET", "/metrics")
    text = gzip.decompress(text) if text[:2] == b"\x1f\x8b" else text
    found = re.search(rf"^{re.escape(name)} (\S+)$", text.decode(), re.M)
    return float(found[1]) if found else 0.0


def wait_until(daemon, name, value):
    while metric(daemon, name) != value:
        time.sleep(0.2)


def megabytes(daemon):
    status = Path(f"/proc/{daemon.process.pid}/status").read_text()
    return int(re.search(r"VmRSS:\s+(\d+)", status)[1]) / 1024


def lateness(home, times):
    """How much later than at their times these runs ended, in seconds, sorted."""
    database = sqlite3.connect(home / "data" / "axed.db")
    late = []
    while len(late) < len(times):
        time.sleep(0.5)
        rows = database.execute("SELECT finished_at, input FROM runs WHERE finished_at IS NOT NULL").fetchall()
        ended = {text: at / 1000 for at, text in rows}
        late = [ended[rfc3339(at)] - at for at in times if rfc3339(at) in ended]
    return sorted(late)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("axed")
    parser.add_argument("--runs", type=int, default=100_000)
    parser.add_argument("--people", action="store_true")
    parser.add_argument("--spread", type=int, default=1_000)
    parser.add_argument("--at-once", type=int, default=10_000)
    parser.add_argument("--port", type=int, default=18_291)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        home = Path(directory)
        write_home(home, options.port)
        daemon = Daemon(options.axed, home, options.port)
        start(options.port, [time.time() - 1] * 2_000)
        before = megabytes(daemon)
        begin = time.monotonic()
        tomorrow = time.time() + 86_400
        start(options.port, [tomorrow + n for n in range(options.runs)], "asker" if options.people else "sleeper")
        wait_until(daemon, "axed_runs_asleep", options.runs)
        took, after = time.monotonic() - begin, megabytes(daemon)
        # The allocator gives back what runs had on their way to sleep some seconds later.
        time.sleep(15)
        settled = megabytes(daemon)
        print(f"{options.runs} runs asleep after {took:.0f} s: {before:.0f} MB before, {after:.0f} MB then, {settled:.0f} MB 15 s later")

        soon = time.time() + 10
        times = [soon + 20 * random.random() for _ in range(options.spread)]
        start(options.port, times)
        late = lateness(home, times)
        print(f"{options.spread} runs within 20 s end {late[len(late) // 2]:.3f} s after their time (median), {late[-1]:.3f} s at most")

        moment = time.time() + 10 + options.at_once / 500
        times = [moment + n / 1e6 for n in range(options.at_once)]
        start(options.port, times)
        if time.time() > moment - 3:
            sys.exit("the runs were not asleep in time")
        late = lateness(home, times)
        print(f"{options.at_once} runs at one moment end {late[len(late) // 2]:.2f} s after it (median), {late[-1]:.2f} s at most")

        daemon.stop()
        begin = time.monotonic()
        daemon = Daemon(options.axed, home, options.port)
        took = time.monotonic() - begin
        wait_until(daemon, "axed_runs_asleep", options.runs)
        print(f"started again in {took:.1f} s, {megabytes(daemon):.0f} MB")
        daemon.stop()


if __name__ == "__main__":
    main()
