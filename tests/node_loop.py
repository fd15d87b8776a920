#!/usr/bin/env python3
"""Three daemons on one PostgreSQL under faults, again and again, while runs are started, forked, steered, paused and approved at
any of them, in batches and sessions and by schedules; then checks that nothing is lost, done twice or out of order.

    tests/postgres.sh --server tests/node_loop.py AXED [--rounds 12] [--seed N] [--faults kill,…] [--before AXED] [--pooler]

Faults: kill, pause, drain (SIGTERM), cut (nothing passes between a node and the database), database (away) and crash (its server is
killed) are the default;
drop (all packets of a node, in a network namespace; root only); clock (a node's wall clock jumps by an hour; needs libfaketime);
upgrade (nodes start with the binary of --before and are restarted with AXED).

With --pooler, nodes reach the database through the PgBouncer that postgres.sh has started, and directly for notifications.

The checks are those of kill_loop.py, and: each session had one run at a time, in the order of acceptance; each time of a schedule has
one run; each line of a batch has one run; a request that is sent again, at any node, also at the same time, has the same run; the end
of each run was delivered to its webhook, with one id. What a failed loop leaves is kept: logs, the faults with their times, the
database.
"""

import argparse, collections, concurrent.futures, os, pathlib, random, shutil, signal, sys, tempfile, time

import kill_loop
from nodes import receiver
from nodes.checks import Schedules, check_sessions
from nodes.client import Client, agents
from nodes.cluster import Clocks, Cluster, Loopback, Namespaces
from nodes.faults import FAULTS

CLIENTS = 3
DEFAULT_FAULTS = "kill,pause,drain,cut,database,crash"


def play(clients, cluster, seconds):
    with concurrent.futures.ThreadPoolExecutor(len(clients)) as threads:
        for played in [threads.submit(client.play, cluster, seconds) for client in clients]:
            played.result()


def perform(rounds, faults, clients, cluster, timeline):
    """Begins and ends faults, all of them before one comes again."""
    counts, next_faults = collections.Counter(), []
    for number in range(rounds):
        next_faults = next_faults or cluster.dice.sample(faults, len(faults))
        fault = next_faults.pop()
        play(clients, cluster, cluster.dice.uniform(0.2, 2))
        n = cluster.dice.randrange(len(cluster.nodes))
        seconds, end = FAULTS[fault](cluster, n)
        timeline.write(f"{time.strftime('%H:%M:%S', time.gmtime())} round {number}: {fault} of node{n} for {seconds:.1f} s\n")
        timeline.flush()
        with concurrent.futures.ThreadPoolExecutor(1) as other:
            ended = other.submit(lambda: (time.sleep(seconds), end()))
            play(clients, cluster, seconds)
            ended.result()
        counts[fault] += 1
    return counts


def check(home, client, cluster, schedules, hooks):
    """Waits until all has ended, and checks it. Returns what there was, as a text."""
    for key in list(client.open):
        client.finish(cluster, key)
    kill_loop.settle(cluster, client)
    client.wait_for_batches(cluster)
    times = schedules.end()
    kill_loop.settle(cluster, client)
    check = kill_loop.Check(cluster, client, home / "ledger")
    failures = check.ends()
    check.payments()
    check.answers()
    check.waits()
    check.messages()
    check.usage()
    in_sessions = check_sessions(check, not cluster.clocks)
    repeats = hooks.check(cluster, [check.runs[id] for id in client.roots.values()])
    counts = ", ".join(f"{count} {what}" for what, count in sorted(client.counts.items()))
    return (f"{len(check.runs)} runs, {in_sessions} in sessions, {times} by schedules, {sum(check.paid.values())} payments, "
            f"{len(hooks.delivered)} webhooks and {repeats} repeats, {failures['interrupted']} interrupted; {counts}")


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("axed")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--faults", default=DEFAULT_FAULTS, type=lambda text: text.split(","))
    parser.add_argument("--before", metavar="AXED")
    parser.add_argument("--pooler", action="store_true")
    arguments = parser.parse_args()
    if unknown := set(arguments.faults) - set(FAULTS):
        parser.error(f"unknown faults: {', '.join(unknown)}; known ones: {', '.join(FAULTS)}")
    return arguments


def main():
    arguments = parse_arguments()
    # So that it cleans up.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("node_loop: stopped"))
    dice = random.Random(arguments.seed)
    print(f"node_loop: seed {arguments.seed}")
    home = pathlib.Path(tempfile.mkdtemp(prefix="axed-node-loop-"))
    network = Namespaces() if "drop" in arguments.faults else Loopback()
    clocks = Clocks(home) if "clock" in arguments.faults else None
    hooks = receiver.Receiver(network.host)
    kill_loop.prepare(home, network.host, receiver.CONFIG.format(host=network.host), agents(hooks.url))
    binaries = [os.path.abspath(it) for it in (arguments.before, arguments.axed) if it]
    # Each has sessions of its own, in which it knows the order of acceptance.
    pooler = os.environ["AXED_TEST_POOLER"] if arguments.pooler else None
    clients = [Client(n, random.Random(dice.random())) for n in range(CLIENTS)]
    client, cluster = clients[0], Cluster(binaries, home, dice, network, clocks, pooler)
    try:
        schedules = Schedules(cluster, client)
        with open(home / "timeline", "w") as timeline:
            counts = perform(arguments.rounds, arguments.faults, clients, cluster, timeline)
        for other in clients[1:]:
            client.take_over(other)
        result = check(home, client, cluster, schedules, hooks)
        faults = ", ".join(f"{count} {what}" for what, count in counts.items())
        print(f"node_loop: ok: {faults}; {result}")
    except BaseException:
        cluster.dump()
        for log in ["timeline", *(node.log.name for node in cluster.nodes)]:
            sys.stderr.write(f"---- {log}\n{(home / log).read_text()[-4000:]}\n")
        sys.stderr.write(f"node_loop: seed {arguments.seed} failed; all that it left is in {home}\n")
        raise
    finally:
        cluster.end()
    shutil.rmtree(home, ignore_errors=True)


if __name__ == "__main__":
    main()
