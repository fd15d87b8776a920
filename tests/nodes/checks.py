"""What has to hold at the end, besides the checks of kill_loop.py."""

import collections, datetime, json, time

MINUTE = 60
# A run of a schedule starts within a minute of its time; the rest is what this script takes.
LATE_SECONDS = MINUTE + 90


class Schedules:
    """The times of schedules that had to start a run, since all of them were known."""

    def __init__(self, cluster, client):
        self.cluster, self.client = cluster, client
        end = time.monotonic() + 300
        while not all(it["next"] for it in cluster.get("/schedules?agent=timed")["data"]):
            assert time.monotonic() < end, "the schedules do not begin"
            time.sleep(0.1)
        self.began = time.time()

    def started(self):
        """The runs by schedule and time, in seconds."""
        rows = self.cluster.query(
            "SELECT route, convert_from(key, 'UTF8'), run FROM claims WHERE route LIKE 'SCHEDULE %'")
        return {(route.split("/")[1], datetime.datetime.fromisoformat(at.replace("Z", "+00:00")).timestamp()): run
                for route, at, run in rows}

    def expected(self, names):
        slots = range(int(self.began // MINUTE + 1) * MINUTE, int(time.time()) + 1, MINUTE)
        spans = self.cluster.clocks.spans if self.cluster.clocks else []
        # The node that leads may have had another time then.
        slots = [at for at in slots if not any(began - MINUTE < at < ended for began, ended in spans)]
        return {(name, at) for name in names for at in slots}

    def end(self):
        """Pauses the schedules once each time since the begin has one run, which counts as started by the client."""
        names = [it["name"] for it in self.cluster.get("/schedules?agent=timed")["data"]]
        # Between two times, so that none is at work when the pause comes.
        while (missing := self.expected(names) - set(started := self.started())) or not 5 < time.time() % MINUTE < MINUTE - 20:
            oldest = min((at for _, at in missing), default=time.time())
            assert time.time() < oldest + LATE_SECONDS, f"no run at {oldest}: {self.cluster.get('/schedules')}, {started}"
            time.sleep(0.5)
        for name in names:
            status, answer = self.cluster.send("POST", f"/schedules/timed/{name}/pause")
            assert status == 200, f"pause of {name}: {status} {answer}"
        runs = [it for it in self.cluster.pages("/runs?agent=timed") if not it.get("forked_from")]
        by_name = collections.Counter(it["labels"]["schedule"] for it in runs)
        assert by_name == collections.Counter(name for name, _ in started), f"runs {by_name}, times {started}"
        self.client.roots |= {f"schedule {run['id']}": run["id"] for run in runs}
        return len(runs)


def sortable(at):
    """A time of the API, which omits zeros at the end of its fraction."""
    seconds, _, fraction = at.removesuffix("Z").partition(".")
    return seconds, fraction.ljust(9, "0")


def check_sessions(check, has_one_clock):
    """Of each session one run at a time was at work, in the order of acceptance. Returns the number of runs."""
    sessions = collections.defaultdict(list)
    for id in check.client.roots.values():
        if name := check.runs[id]["session"]:
            sessions[name].append(check.runs[id])
    for name, runs in sessions.items():
        started = [run for run in runs if run["started_at"]]
        for earlier, later in zip(started, started[1:]):
            in_order = not has_one_clock or sortable(earlier["finished_at"]) <= sortable(later["started_at"])
            assert in_order, f"{name}: {later['id']} started before {earlier['id']} ended"
        # The model repeats all that was said in a session.
        completed = [run for run in runs if run["status"] == "completed"]
        for number, run in enumerate(completed):
            for other in completed[max(number - 1, 0):]:
                has_said = other["input"] in run["content"]
                expected = other in completed[:number + 1]
                assert has_said == expected, f"{name}: {json.dumps([other, run], indent=1)}"
    return sum(len(runs) for runs in sessions.values())
