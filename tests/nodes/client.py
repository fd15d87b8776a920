"""What clients do: as in kill_loop.py, and sessions, batches, and requests that are sent twice."""

import concurrent.futures, json, time, uuid

import kill_loop

SCHEDULES = "".join(
    f'[[schedules]]\nname = "{name}"\ncron = "* * * * *"\noverlap = "allow"\nlabels = {{ schedule = "{name}" }}\n'
    for name in ("first", "second", "third"))
BATCH_SECONDS = 300


def agents(webhook):
    """Those of kill_loop.py, and one that schedules start."""
    all_agents = kill_loop.AGENTS | {"timed": SCHEDULES}
    return {name: f'{settings}[webhook]\nurl = "{webhook}"\n' for name, settings in all_agents.items()}


class Client(kill_loop.Client):
    # The last owner may be paused or cut off in the middle of the call, and go on with it.
    unpaid = "unknown"

    def __init__(self, name, dice):
        super().__init__(dice)
        self.name = name
        # Of requests that were answered, by their key; the batches by theirs, with their numbers of lines.
        self.answered, self.batches = {}, {}
        self.others = concurrent.futures.ThreadPoolExecutor(1)

    def act(self, daemon):
        choice = self.dice.random()
        if choice < 0.06 and self.answered:
            return self.repeat(daemon)
        if choice < 0.08:
            return self.start_batch(daemon)
        return super().act(daemon)

    def start(self, daemon, path, body):
        """Some runs have a session."""
        if "/agents/careful/" in path and self.dice.random() < 0.5:
            body = {**body, "session": f"talk-{self.name}-{self.dice.randrange(3)}"}
        super().start(daemon, path, body)

    def finish(self, daemon, key):
        """Some requests are sent twice at the same time; a fork may be refused at one moment and accepted at the next."""
        path, body = self.open[key]
        is_doubled = path.endswith("/runs") and self.dice.random() < 0.2
        other = self.others.submit(daemon.send, "POST", path, body, key) if is_doubled else None
        super().finish(daemon, key)
        if key in self.roots:
            self.answered[key] = (path, body, self.roots[key])
        if other:
            status, answer = other.result()
            assert status in (200, 202) and answer["id"] == self.roots[key], f"POST {path}: {status} {answer}, not {self.roots[key]}"
            self.counts["doubled"] += 1

    def repeat(self, daemon):
        """Sends a request again that had an answer, also of a batch."""
        key = self.dice.choice(list(self.answered))
        path, body, id = self.answered[key]
        status, answer = daemon.send("POST", path, body, key)
        assert status in (200, 202) and answer["id"] == id, f"POST {path} again: {status} {answer}, not {id}"
        self.counts["repeated"] += 1

    def start_batch(self, daemon):
        key, inputs = uuid.uuid4().hex, [f"task {uuid.uuid4().hex}" for _ in range(self.dice.randint(2, 5))]
        body = "".join(json.dumps({"input": input, "labels": {"batch": key}}) + "\n" for input in inputs)
        status, answer = daemon.send("POST", "/agents/worker/runs:batch", body, key)
        if status == 429 and answer["code"] == "queue_full":
            # Runs are started faster than they end.
            self.counts["batch refused: queue_full"] += 1
            return
        assert status == 202, f"batch: {status} {answer}"
        self.answered[key] = ("/agents/worker/runs:batch", body, answer["id"])
        self.batches[key] = (answer["id"], inputs)
        self.counts["batch"] += 1

    def play(self, daemon, seconds):
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.act(daemon)

    def take_over(self, other):
        """What the other one has started counts as started by this one."""
        for name in ("open", "roots", "messages", "answers", "published", "answered", "batches", "counts"):
            getattr(self, name).update(getattr(other, name))

    def wait_for_batches(self, daemon):
        """Each line has one run, which from now on counts as started by this client."""
        end = time.monotonic() + BATCH_SECONDS
        for key, (id, inputs) in self.batches.items():
            while (batch := daemon.get(f"/batches/{id}?wait=2"))["status"] != "completed":
                assert time.monotonic() < end, f"{id} does not end: {batch}"
            runs = list(daemon.pages(f"/runs?label.batch={key}"))
            # Forks have the labels of their source.
            runs = [run for run in runs if not run.get("forked_from")]
            assert sorted(run["input"] for run in runs) == sorted(inputs), f"{id}: runs {runs}"
            self.roots |= {f"{key} {run['id']}": run["id"] for run in runs}
