"""What happens to a node, or to all: each fault begins at once, and returns how long it lasts and what ends it."""

import signal, time

# A node that is paused or cut off for more than 8 s loses its runs.
PAUSE_SECONDS = (2, 12)
AWAY_SECONDS = (1, 30)
DOWN_SECONDS = (0, 10)
HOUR = 3600


def kill(cluster, n):
    cluster.stopped.add(n)
    cluster.nodes[n].kill()
    return cluster.dice.uniform(0, 12), lambda: cluster.restart(n)


def drain(cluster, n):
    """Killed if it takes longer."""
    cluster.stopped.add(n)
    node = cluster.nodes[n]
    node.process.send_signal(signal.SIGTERM)
    return cluster.dice.uniform(1, 3), lambda: (node.kill(), cluster.restart(n))


def upgrade(cluster, n):
    """Restarts a node with the new binary."""
    n = next((n for n, binary in enumerate(cluster.binaries) if binary != cluster.new_binary), n)
    cluster.binaries[n] = cluster.new_binary
    return drain(cluster, n)


def pause(cluster, n):
    cluster.stopped.add(n)
    process = cluster.nodes[n].process
    process.send_signal(signal.SIGSTOP)
    return cluster.dice.uniform(*PAUSE_SECONDS), lambda: (process.send_signal(signal.SIGCONT), cluster.stopped.discard(n))


def cut(cluster, n):
    """Nothing passes between a node and the database; its connections stay open."""
    cluster.stopped.add(n)
    ways = [links[n].is_open for links in (cluster.links, cluster.direct_links) if links]
    for is_open in ways:
        is_open.clear()
    return cluster.dice.uniform(*PAUSE_SECONDS), lambda: ([it.set() for it in ways], cluster.stopped.discard(n))


def drop(cluster, n):
    """All packets of a node are dropped."""
    cluster.stopped.add(n)
    cluster.network.drop(n, True)
    return cluster.dice.uniform(*PAUSE_SECONDS), lambda: (cluster.network.drop(n, False), cluster.stopped.discard(n))


def clock(cluster, n):
    """A node's wall clock jumps by an hour, and back."""
    began = time.time()
    cluster.clocks.set(n, cluster.dice.choice([HOUR, -HOUR]))

    def undo():
        cluster.clocks.set(n, 0)
        cluster.clocks.spans.append((began, time.time()))

    return cluster.dice.uniform(*PAUSE_SECONDS), undo


def database(cluster, _):
    """The database refuses all connections."""
    name = cluster.database
    cluster.execute(f"ALTER DATABASE {name} ALLOW_CONNECTIONS false")
    cluster.execute(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{name}'")
    return cluster.dice.uniform(*AWAY_SECONDS), lambda: cluster.execute(f"ALTER DATABASE {name} ALLOW_CONNECTIONS true")


def crash(cluster, _):
    """All processes of the database's server are killed; it starts again from its log."""
    cluster.kill_server()
    return cluster.dice.uniform(*DOWN_SECONDS), cluster.start_server


FAULTS = {fault.__name__: fault for fault in (kill, pause, drain, cut, database, crash, drop, clock, upgrade)}
