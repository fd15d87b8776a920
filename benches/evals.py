#!/usr/bin/env python3
"""Times an evaluation, and live runs beside one.

    benches/evals.py AXED [--cases N] [--trees N] [--background N]

First `axed eval` of the shipped planner on its scripted model: N cases in two versions (500), six runs each. Then N of its trees are
recorded, which list and read files (1,000), and played again with their recorded results. Last, live runs of one turn, whose scripted model takes 50 ms, from eight clients: alone, and while an evaluation of N runs (10,000) is under way. Prints
both p99 and their ratio, which fails above 1.3.
"""

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from console import Daemon

CLONE = Path(__file__).resolve().parent.parent
CLIENTS = 8
LIVE_RUNS = 1200
MAX_RATIO = 1.3


def write_home(home, port):
    for folder in ("agents", "datasets"):
        shutil.copytree(CLONE / folder, home / folder)
    (home / "agents" / "live.toml").write_text('name = "live"\nmodel = "scripted/live"\n')
    (home / "agents" / "scripts" / "live.toml").write_text('delay_ms = 50\n[[replies]]\ntext = "done"\noutput_tokens = 1\n')
    (home / "config").mkdir()
    (home / "config" / "axed.toml").write_text(
        f'[server]\nlisten = "127.0.0.1:{port}"\n[providers.scripted]\nscripts = ["../agents/scripts"]\n[telemetry]\nlog = "warn"\n'
    )


def time_evaluation(axed, home, cases):
    lines = (json.dumps({"id": f"c{n}", "input": f"Release version 3.{n}"}) + "\n" for n in range(cases))
    (home / "datasets" / "bench.jsonl").write_text("".join(lines))
    command = [axed, "eval", "planner-scripted", "--against", "planner-scripted", "--dataset", "bench"]
    begin = time.perf_counter()
    done = subprocess.run(command, cwd=home, capture_output=True, text=True)
    took = time.perf_counter() - begin
    if done.returncode:
        sys.exit(done.stderr)
    print(f"{cases} cases x 2 versions, {cases * 12} runs: {took:.1f} s")


def time_backtest(daemon, count):
    def record(number):
        body = {"input": f"Release version 2.0, part {number}"}
        daemon.json("POST", "/agents/planner-scripted/runs?wait=60", body)

    with ThreadPoolExecutor(32) as clients:
        list(clients.map(record, range(count)))
    begin = time.perf_counter()
    body = {"agent": "planner-scripted", "since": "1d", "limit": count, "tools": "recorded"}
    played = daemon.json("POST", "/evals", body)
    while not played["finished_at"]:
        played = daemon.json("GET", f"/evals/{played['id']}?wait=30")
    took = time.perf_counter() - begin
    result = played["result"]
    print(f"backtest of {result['cases']} recorded trees, {result['diverged']} diverged: {took:.1f} s")


def live_times(daemon, count):
    """Seconds of each of so many live runs."""

    def client(share):
        times = []
        for _ in range(share):
            begin = time.perf_counter()
            run = daemon.json("POST", "/agents/live/runs?wait=60", {"input": "hello"})
            times.append(time.perf_counter() - begin)
            if run["status"] != "completed":
                sys.exit(f"a live run is {run['status']}")
        return times

    with ThreadPoolExecutor(CLIENTS) as clients:
        return sum(clients.map(client, [count // CLIENTS] * CLIENTS), [])


def p99(times):
    return statistics.quantiles(times, n=100)[98] * 1000


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("axed", type=lambda path: str(Path(path).resolve()))
    parser.add_argument("--cases", type=int, default=500)
    parser.add_argument("--trees", type=int, default=1000)
    parser.add_argument("--background", type=int, default=10_000)
    args = parser.parse_args()
    home = Path(tempfile.mkdtemp(prefix="axed-evals-"))
    write_home(home, port := 18_933)
    try:
        time_evaluation(args.axed, home, args.cases)
        daemon = Daemon(args.axed, home, port)
        time_backtest(daemon, args.trees)
        live_times(daemon, 200)
        alone = p99(live_times(daemon, LIVE_RUNS))
        cases = [{"input": f"Release version 4.{n}"} for n in range(args.background // 100)]
        body = {"agent": "planner-scripted", "cases": cases, "repeat": 100}
        accepted = daemon.json("POST", "/evals", body)
        beside = p99(live_times(daemon, LIVE_RUNS))
        eval_now = daemon.json("GET", f"/evals/{accepted['id']}")
        daemon.stop()
    finally:
        shutil.rmtree(home)
    print(f"live runs alone: p99 {alone:.0f} ms; beside {eval_now['ended']} runs of an evaluation: p99 {beside:.0f} ms")
    print(f"ratio {beside / alone:.2f}")
    if eval_now["state"] != "running":
        sys.exit("the evaluation ended before the live runs")
    if beside / alone > MAX_RATIO:
        sys.exit(f"more than {MAX_RATIO}")


if __name__ == "__main__":
    main()
