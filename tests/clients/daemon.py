"""A daemon with scripted models that can be killed and started again. As a program: runs a command with the addresses of
the daemon and of a server that restarts it at each POST."""

from __future__ import annotations

import faulthandler
import http.server
import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request

CONFIG = """[server]
listen = "127.0.0.1:{port}"
[providers.scripted]
scripts = ["scripts"]
"""
LISTS = """[[replies]]
text = "I look."
[[replies.tool_calls]]
name = "list_directory"
arguments = { path = "." }
"""
# Line separators that are none in an event stream.
FINAL = '[[replies]]\ntext = "the\\u2028final\\u0085text"\n'
WRITES = """[[replies]]
[[replies.tool_calls]]
name = "write_file"
arguments = { path = "note.md", content = "found" }
[[replies]]
text = "{{result.1}}"
"""
ASKS = """[[replies]]
[[replies.tool_calls]]
name = "ask_person"
arguments = { question = "How many?", schema = { type = "integer" } }
[[replies]]
text = "{{result.1}}"
"""
TOOLS = 'workdir = "work"\ntools = ["list_directory", "write_file"]\n'
# The old version of `quick` writes more.
SCORER = """
[[scorers]]
name = "short"
kind = "assert"
expect = { matches = "^done$" }
"""
AGENTS = {
    "quick": (TOOLS + SCORER, "[[replies]]\ntext = \"done\"\n"),
    "wordy": (TOOLS + SCORER, "[[replies]]\ntext = \"done, at last\"\n"),
    "slow": (TOOLS, "delay_ms = 40\n" + LISTS * 4 + FINAL),
    "endless": (TOOLS, "delay_ms = 2000\n" + LISTS + FINAL),
    "careful": (TOOLS + 'approve = ["write_file"]\n', WRITES),
    "asking": (TOOLS + "[ask]\nenabled = true\n", ASKS),
    "failing": (TOOLS, '[[replies]]\nerrors = [{ category = "bad_request", times = 9 }]\ntext = "x"\n'),
}


# Seconds; the checks take half a minute on a slow machine.
TIME_LIMIT = 1200


class Daemon:
    def __init__(self, axed: str) -> None:
        self._axed = axed
        self._directory = tempfile.TemporaryDirectory()
        self._home = pathlib.Path(self._directory.name)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        for name in ["config/scripts", "agents", "work"]:
            (self._home / name).mkdir(parents=True)
        (self._home / "config/axed.toml").write_text(CONFIG.format(port=port))
        for name, (agent, script) in AGENTS.items():
            (self._home / f"agents/{name}.toml").write_text(f'name = "{name}"\nmodel = "scripted/{name}"\n{agent}')
            (self._home / f"config/scripts/{name}.toml").write_text(script)
        self._log = open(self._home / "log", "w")
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [self._axed, "serve", "--data", str(self._home / "data")]
        self._process = subprocess.Popen(command, cwd=self._home, stdout=self._log, stderr=self._log)
        give_up_at = time.monotonic() + 60
        while True:
            try:
                urllib.request.urlopen(self.url + "/readyz", timeout=5)
                return
            except (urllib.error.URLError, OSError):
                assert self._process.poll() is None, (self._home / "log").read_text()
                assert time.monotonic() < give_up_at, (self._home / "log").read_text()
                time.sleep(0.05)

    def kill(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()

    def restart(self) -> None:
        self.kill()
        # A client notices that nobody listens.
        time.sleep(0.5)
        self.start()

    def __enter__(self) -> Daemon:
        timer = threading.Timer(TIME_LIMIT, self._give_up)
        timer.daemon = True
        timer.start()
        self.start()
        return self

    def _give_up(self) -> None:
        faulthandler.dump_traceback(all_threads=True)
        self.kill()
        os._exit(1)

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._log.close()
        self._directory.cleanup()


def main(axed: str, *command: str) -> int:
    with Daemon(axed) as daemon:

        class Control(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                daemon.restart()
                self.send_response(204)
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                pass

        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Control)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        control = f"http://127.0.0.1:{server.server_address[1]}"
        return subprocess.run([*command, daemon.url, control], timeout=TIME_LIMIT - 10).returncode


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
