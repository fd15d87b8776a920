#!/usr/bin/env python3
"""Runs the examples of the documentation against a real daemon whose models are scripted.

    tests/guide.py [--axed BINARY] [page ...]        e.g. tests/guide.py approve api/runs

Each page gets a directory and a daemon of its own. What follows a block's language decides what happens to it:

    sh              runs, in the order of the page, in one shell; a command that fails fails the page
    sh norun        is checked for syntax only: it needs a key, root, or another terminal
    sh|python|ts|go run
                    runs as a program of its own
    toml|python <path>
                    is written to this path before the daemon starts; config/axed.toml is appended to
    toml config     is loaded as a configuration
    toml            has to parse
    text output     occurs in the output of the block before; "…" stands for anything
    json, text      json has to parse; text is not checked

Outside of docs/guide json is not checked, since it has "…" in place of values. Pages of docs/api begin with the first block
of docs/api/README.md.

http://127.0.0.1:8080 becomes the daemon's address, and 9000 a free port. The agents of agents/ are there. Models of
`anthropic` are replied to by the scripts in tests/guide/, so that pages can show real models. The exit code is 0 if every
page passed. TypeScript needs node 22.18 or the compiler in $AXED_GUIDE_TOOLS/node_modules; Go needs go. Programs of a
language that is missing are skipped, with a line that names it. Needs python 3.11 and curl 7.81.
"""

import argparse
import json
import os
import pathlib
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import tomllib
from concurrent.futures import ThreadPoolExecutor

ROOT = pathlib.Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
API = DOCS / "api/README.md"
FENCE = re.compile(r"^```(\w*)[ ]?([^\n]*)\n(.*?)^```$", re.M | re.S)
CONFIG = f"""
[providers.scripted]
scripts = ["../agents/scripts"]
[providers.anthropic]
kind = "scripted"
scripts = ["{ROOT}/tests/guide"]
"""
PRELUDE = r"""
set -euo pipefail
curl() {
  local code=0 body
  body=$(command curl --fail-with-body --max-time 300 "$@") || code=$?
  printf '%s\n' "$body"
  [ $code = 0 ] || [[ $body == *'"status":409'* ]]
}
cargo() { while [ "$1" != -- ]; do shift; done; shift; axed "$@"; }  # cargo run --release -- …
axed() { case "$1" in runs) command axed "$@" --server "$URL" ;; *) command axed "$@" ;; esac; }
"""
TIMEOUT = 900


class Failure(Exception):
    pass


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def blocks(page):
    text = page.read_text()
    found = [(match[1], match[2].strip(), match[3]) for match in FENCE.finditer(text)]
    if 2 * len(found) != text.count("```"):
        raise Failure("a block is indented or has no end")
    if any(re.search(r"\bcurl\b(\\\n|[^|\n])* --json\b", block) for language, _, block in found if language == "sh"):
        raise Failure("curl 7.81 has no --json: write -H 'content-type: application/json' -d")
    return found


class Page:
    def __init__(self, path, axed):
        self.path, self.blocks, self.axed = path, blocks(path), axed
        self.is_reference = DOCS in path.parents and path.parent != DOCS / "guide"
        if path.parent == API.parent and path != API and self.has_examples():
            self.blocks = [next(block for block in blocks(API) if block[0] == "sh"), *self.blocks]
        self.port = str(free_port())
        self.home = pathlib.Path(tempfile.mkdtemp(prefix="axed-guide-"))

    def run(self):
        environment = dict(os.environ, HOME=str(self.home), AXED_WEBHOOK_SECRET="whsec_Z3VpZGU=")
        environment.update(AXED_KEY="axed_guide", MY_KEY="guide")
        environment.setdefault("GOCACHE", str(pathlib.Path.home() / ".cache/go-build"))
        environment["PATH"] = f"{self.home}/bin:{environment['PATH']}"
        self.write_files(environment)
        if not self.has_examples():
            return shutil.rmtree(self.home)
        daemon = subprocess.Popen(
            ["axed", "serve", "--listen", "127.0.0.1:0"],
            cwd=self.home, env=environment, text=True, stdout=subprocess.PIPE, stderr=open(self.home / "log", "w"),
        )
        try:
            line = daemon.stdout.readline()
            if "http://" not in line:
                raise Failure("the daemon did not start:\n" + (self.home / "log").read_text())
            environment["URL"] = self.url = line.split()[-1]
            self.run_shell(environment)
            self.run_programs(environment)
        finally:
            daemon.terminate()
            daemon.wait()
        shutil.rmtree(self.home)

    def has_examples(self):
        return any(language == "sh" and info == "" or info == "run" for language, info, _ in self.blocks)

    def text(self, block):
        return block.replace("http://127.0.0.1:8080", self.url).replace("9000", self.port)

    def write_files(self, environment):
        for name in ["agents", "config/skills"]:
            shutil.copytree(ROOT / name, self.home / name)
        shutil.copytree(ROOT / "tests/guide/home", self.home, dirs_exist_ok=True)
        (self.home / "bin").mkdir()
        (self.home / "bin/axed").symlink_to(self.axed)
        config = CONFIG
        if not any("[webhooks]" in block for _, info, block in self.blocks if info == "config/axed.toml"):
            config += '[webhooks]\nsecret_env = "AXED_WEBHOOK_SECRET"\n'
        for language, info, block in self.blocks:
            block = block.replace("9000", self.port)
            if language == "toml" and info == "":
                tomllib.loads(block)
            elif language == "python" and info == "":
                compile(block, str(self.path), "exec")
            elif self.is_reference:
                continue
            elif language == "json":
                json.loads(block)
            elif language == "toml" and info == "config":
                (self.home / "config/page.toml").write_text(block)
                self.call(["axed", "openapi", "--config", "config/page.toml"], environment)
            elif info == "config/axed.toml":
                config += block
            elif "." in info and language in ("toml", "python"):
                target = self.home / info
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_text(block)
            elif language not in ("sh", "text", "toml", "python", "ts", "go", "yaml", "nginx"):
                raise Failure(f"a block needs a language, not {language!r}")
        (self.home / "config/axed.toml").write_text(config)

    def run_shell(self, environment):
        script, expected = PRELUDE, []
        for number, (language, info, block) in enumerate(self.blocks):
            if language == "sh" and info == "norun":
                self.call(["bash", "-n", "-c", block], environment)
            elif language == "sh" and info == "":
                script += f"printf '\\n@@%s\\n' {number}\n{self.text(block)}\n"
                last = number
            elif language == "text" and info == "output":
                expected.append((last, block))
        output = self.call(["bash", "-c", script], environment)
        parts = dict(re.findall(r"^@@(\d+)\n(.*?)(?=^@@|\Z)", output, re.M | re.S))
        for number, block in expected:
            at, rest = 0, parts[str(number)]
            for line in filter(None, map(str.strip, re.split(r"…|\n", self.text(block)))):
                at = rest.find(line, at)
                if at < 0:
                    raise Failure(f"the page shows {line!r}, but its commands print:\n{rest}")

    def run_programs(self, environment):
        for number, (language, info, block) in enumerate(self.blocks):
            if info != "run":
                continue
            file = self.home / f"program{number}" / f"main.{ {'python': 'py'}.get(language, language) }"
            file.parent.mkdir()
            file.write_text(self.text(block))
            command = self.command(language, file, environment)
            if command:
                print(f"{name(self.path)}: {language}: {self.call(command, environment).strip().splitlines()[-1]}")
            else:
                print(f"{name(self.path)}: skipped: {language} is not installed")

    def command(self, language, file, environment):
        if language == "sh":
            return ["bash", "-c", PRELUDE + file.read_text()]
        if language == "python":
            return ["python3", str(file)]
        if language == "go" and shutil.which("go"):
            return ["go", "run", str(file)]
        if language == "ts" and shutil.which("node"):
            tools = pathlib.Path(os.environ.get("AXED_GUIDE_TOOLS", "/nowhere")) / "node_modules"
            if tools.is_dir():
                (file.parent / "node_modules").symlink_to(tools)
                (file.parent / "package.json").write_text('{"type": "module"}')
                options = f"--strict --target es2022 --module nodenext --types node --typeRoots {tools}/@types"
                self.call([str(tools / ".bin/tsc"), *options.split(), str(file)], environment)
                return ["node", str(file.with_suffix(".js"))]
            version = subprocess.run(["node", "--version"], capture_output=True, text=True).stdout
            if [int(part) for part in version[1:].split(".")[:2]] >= [22, 18]:
                return ["node", str(file)]
        return None

    def call(self, command, environment):
        try:
            ended = subprocess.run(
                command, cwd=self.home, env=environment, text=True, timeout=TIMEOUT,
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            )
        except subprocess.TimeoutExpired as why:
            raise Failure(f"not done after {TIMEOUT} s:\n{(why.stdout or b'').decode()}") from why
        if ended.returncode != 0:
            raise Failure(f"exit code {ended.returncode}:\n… {ended.stdout[-2000:]}")
        return ended.stdout


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    target = pathlib.Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
    parser.add_argument("--axed", default=os.environ.get("AXED", target / "debug/axed"), type=pathlib.Path)
    parser.add_argument("page", nargs="*")
    arguments = parser.parse_args()
    paths = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
    paths = [path for path in paths if not arguments.page or {path.stem, name(path)} & set(arguments.page)]
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda path: passes(path, arguments.axed.resolve()), paths))
    sys.exit(not all(results))


def name(path):
    return str(path.relative_to(DOCS if DOCS in path.parents else ROOT).with_suffix(""))


def passes(path, axed):
    try:
        Page(path, axed).run()
    except (Failure, ValueError, SyntaxError) as why:
        print(f"{path}: FAILED: {why}", flush=True)
        return False
    print(f"{name(path)}: passed", flush=True)
    return True


if __name__ == "__main__":
    main()
