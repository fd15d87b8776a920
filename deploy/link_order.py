#!/usr/bin/env python3
"""Writes deploy/link_order.ld, by which the linker places what a daemon executes when it starts side by side (build.rs).

    cargo rustc --release --locked --bin axed -- -C strip=none
    deploy/link_order.py target/release/axed > deploy/link_order.ld

Executes a daemon without work in valgrind. Functions are named by the beginning of their symbols, because the end of a symbol is a
hash that changes with the compiler and with each crate. Needs Python 3, valgrind and nm.
"""

import argparse, collections, pathlib, re, signal, subprocess, sys, tempfile

CONFIG = '[providers.openai]\nbase_url = "http://127.0.0.1:1/v1"\napi_key = "none"\n'
# How long the daemon has nothing to do, in seconds.
REST = 10
# The kernel maps a file in parts of this size.
PART = 65536
# A beginning stands for all its functions if those that are executed have this share of their size.
SHARE = 0.5
HEAD = """\
/* Places the functions that every daemon executes when it starts side by side. Written by deploy/link_order.py; build.rs passes it
   to the linker. What it names and is not there is ignored. */
SECTIONS
{
  .text.start :
  {
"""


def executed_functions(folder, axed):
    """The symbols of what a daemon executes that starts, has nothing to do, and ends."""
    counts = folder / "counts"
    (folder / "agents").mkdir()
    (folder / "axed.toml").write_text(CONFIG)
    (folder / "agents/solo.toml").write_text('name = "solo"\nmodel = "openai/gpt"\n')
    command = ["valgrind", "--tool=callgrind", "--demangle=no", f"--callgrind-out-file={counts}", axed, "serve",
               "--config", "axed.toml", "--agents", "agents", "--data", "data", "--listen", "127.0.0.1:0"]
    with open(folder / "log", "w") as log:
        daemon = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=log)
        daemon.stdout.readline()
        try:
            daemon.wait(REST)
        except subprocess.TimeoutExpired:
            daemon.send_signal(signal.SIGTERM)
        try:
            code = daemon.wait(60)
        finally:
            daemon.kill()
        if code != 0:
            sys.exit(f"link_order: the daemon failed: {(folder / 'log').read_text()[-2000:]}")
    # A name is in the file once: where its function is executed, or called, first.
    names = re.findall(r"^c?fn=\(\d+\) (\S+)", counts.read_text(errors="replace"), re.MULTILINE)
    return {re.sub(r"'\d+$", "", name) for name in names}


def sizes(axed):
    """The size of each function in bytes, by its symbol."""
    listed = subprocess.run(["nm", "--defined-only", "-S", axed], check=True, capture_output=True, text=True).stdout
    columns = [line.split() for line in listed.splitlines()]
    found = {column[3]: int(column[1], 16) for column in columns if len(column) == 4 and column[2] in "tTwW"}
    return found or sys.exit("link_order: the program has no symbols; build it with -C strip=none")


def without_hash(symbol):
    """The symbol's pattern, without the hashes of the compiler."""
    if symbol.startswith("_ZN"):
        return re.sub(r"17h[0-9a-f]{16}E.*$", "17h*", symbol)
    return re.sub(r"Cs[0-9A-Za-z]+_", "Cs*_", symbol)


def patterns(size, executed):
    """Patterns for the executed functions that do not cover too much else."""
    groups = collections.defaultdict(list)
    for symbol in size:
        groups[without_hash(symbol)].append(symbol)
    names = sorted(groups)
    total = {name: sum(size[symbol] for symbol in groups[name]) for name in names}
    used = {name: [symbol for symbol in groups[name] if symbol in executed] for name in names}

    def visit(start, end, length):
        """Patterns for these names, which begin with the same letters."""
        part = names[start:end]
        functions = [symbol for name in part for symbol in used[name]]
        if not functions:
            return []
        whole = sum(total[name] for name in part)
        if len(part) == 1:
            # Elsewhere in the file each of its functions takes one part of it.
            return part if whole <= len(functions) * PART else []
        while length < min(len(part[0]), len(part[-1])) and part[0][length] == part[-1][length]:
            length += 1
        if length > len("_ZN4axed") and sum(size[symbol] for symbol in functions) >= SHARE * whole:
            return [part[0][:length].rstrip("*") + "*"]
        found = []
        while start < end:
            stop = next((at for at in range(start, end) if names[at][length:length + 1] != names[start][length:length + 1]), end)
            found += visit(start, stop, length)
            start = stop
        return found

    return visit(0, len(names), 0)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("axed", type=pathlib.Path, help="a release build with symbols")
    axed = parser.parse_args().axed.resolve()
    size = sizes(axed)
    with tempfile.TemporaryDirectory(prefix="axed-link-order-") as folder:
        found = patterns(size, executed_functions(pathlib.Path(folder), axed))
    print(HEAD + "".join(f"    *(.text.{name})\n" for name in found) + "  }\n}\nINSERT BEFORE .text;")
    print(f"link_order: {len(found)} patterns", file=sys.stderr)


if __name__ == "__main__":
    main()
