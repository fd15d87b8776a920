#!/usr/bin/env python3
"""Performs the Dockerfile's steps in directories, with mounts and chroot, and runs the images.

Each instruction of a stage is performed in its order: COPY honours .dockerignore, --from and --chown; RUN is executed by a shell in the
stage, with its cache mounts. An image runs as its user, without new privileges, with a read-only root, its volume and /tmp.

The base images are in registries that a test should not need, so others take their places:
- rust: this machine, below an overlay; it must be Debian 12 and have Rust;
- distroless: the Debian packages that it consists of, unpacked;
- node: a minimal Debian 12 with this machine's Node.
What is not tested: the base images themselves, layers, the build's cache, and the network and filters of a container engine.
"""

import argparse
import fnmatch
import json
import os
import pathlib
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
CACHE = pathlib.Path(os.environ.get("XDG_CACHE_HOME", pathlib.Path.home() / ".cache")) / "axed-ci" / "dockerfile"
DISTROLESS = ["base-files", "ca-certificates", "libc6", "libgcc-s1", "libgomp1", "libssl3", "libstdc++6", "netbase", "tzdata"]
NONROOT = "65532:65532"
# How this machine reaches package registries; mounted for RUN, and not part of an image.
MACHINE_FILES = {"/etc/resolv.conf": "/etc/resolv.conf", "/etc/pip.conf": "/etc/pip.conf"}
if "PIP_CERT" in os.environ:
    # Under another name: the package ca-certificates writes the usual one.
    MACHINE_FILES[os.environ["PIP_CERT"]] = "/run/pip-cert.crt"
    os.environ["PIP_CERT"] = "/run/pip-cert.crt"


def fail(message):
    sys.exit(f"dockerfile: {message}")


def run(command, **options):
    return subprocess.run([str(it) for it in command], check=True, **options)


def instructions(text):
    """The instructions with their arguments, without comments, with lines joined."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n", " ", "\n".join(lines))
    return [line.strip().split(None, 1) for line in joined.splitlines() if line.strip()]


def stage_definitions(text):
    found = []
    for name, arguments in instructions(text):
        if name == "FROM":
            base, *alias = re.split(r"\s+AS\s+", arguments)
            found.append((base, alias[0] if alias else "final", []))
        else:
            found[-1][2].append((name, arguments))
    return found


class Stage:
    def __init__(self, base, name, work, stages, build_arguments):
        self.base, self.name, self.root, self.stages = base, name, work / name, stages
        self.build_arguments = build_arguments
        self.environment = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
        self.arguments, self.workdir, self.user = {}, "/", "0:0"
        self.healthcheck, self.entrypoint, self.command, self.volumes = None, [], [], []
        self.is_overlay = base.startswith("rust:")

    def inside(self, path):
        return self.root / os.path.normpath(os.path.join(self.workdir, path)).lstrip("/")

    def build(self, steps):
        print(f"dockerfile: {self.name}, from {self.base}", flush=True)
        self.unpack_base()
        for name, arguments in steps:
            step = getattr(self, f"do_{name.lower()}", None) or fail(f"{name} is not known to this script")
            print(f"dockerfile:   {name} {' '.join(arguments.split())[:100]}", flush=True)
            step(arguments)

    def unpack_base(self):
        self.root.mkdir()
        if self.is_overlay:
            self.environment = {name: os.environ[name] for name in ("PATH", "HOME")}
        elif self.base == "gcr.io/distroless/cc-debian12:nonroot":
            run(["cp", "-a", f"{distroless()}/.", self.root])
            self.user = NONROOT
        elif self.base.startswith("node:"):
            run(["cp", "-a", f"{debian_with_node()}/.", self.root])
        else:
            fail(f"nothing takes the place of {self.base}")

    def do_arg(self, text):
        name, _, default = text.partition("=")
        self.arguments[name] = self.build_arguments.get(name, default)

    def do_workdir(self, text):
        self.workdir = os.path.join(self.workdir, text)
        self.inside("").mkdir(parents=True, exist_ok=True)

    def do_env(self, text):
        self.environment.update(pair.split("=", 1) for pair in shlex.split(text))

    def do_user(self, text):
        self.user = text

    def do_volume(self, text):
        self.volumes += text.split()

    def do_expose(self, _):
        """Documentation only."""

    def do_healthcheck(self, text):
        self.healthcheck = json.loads(text.split("CMD", 1)[1])

    def do_entrypoint(self, text):
        self.entrypoint = json.loads(text)

    def do_cmd(self, text):
        self.command = json.loads(text)

    def do_copy(self, text):
        words = shlex.split(text)
        flags = dict(word[2:].split("=", 1) for word in words if word.startswith("--"))
        source, target = [word for word in words if not word.startswith("--")]
        origin, ignored = ROOT, (ROOT / ".dockerignore").read_text().split()
        if "from" in flags:
            origin, ignored = self.stages[flags["from"]].root, []
        copy(origin / source.lstrip("/"), self.inside(target), origin, ignored)
        run(["chown", "-R", "--no-dereference", flags.get("chown", "0:0"), self.inside(target)])

    def do_run(self, text):
        mounts, script = re.fullmatch(r"((?:--mount=\S+\s+)*)(.*)", text, re.DOTALL).groups()
        setup, root = [], self.root
        if self.is_overlay:
            root, upper = pathlib.Path(f"{self.root}.merged"), pathlib.Path(f"{self.root}.work")
            root.mkdir(exist_ok=True)
            upper.mkdir(exist_ok=True)
            setup.append(f"mount -t overlay overlay -o lowerdir=/,upperdir={self.root},workdir={upper} {root}")
        else:
            setup += [bind(here, root, "touch", there) for here, there in MACHINE_FILES.items() if os.path.exists(here)]
        setup += [f"mount -t proc proc {root}/proc", f"mount --rbind /dev {root}/dev"]
        for mount in mounts.split():
            target = dict(it.split("=", 1) for it in mount.removeprefix("--mount=").split(","))["target"]
            place = CACHE / "mounts" / target.strip("/").replace("/", "-")
            if target == "/src/target":
                # Where the dependencies are built already.
                place = pathlib.Path(os.environ.get("CARGO_TARGET_DIR", place))
            place.mkdir(parents=True, exist_ok=True)
            setup.append(bind(place, root, "mkdir -p", target))
        passed = {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
        environment = {**passed, **self.arguments, **self.environment, "DEBIAN_FRONTEND": "noninteractive"}
        script = shlex.quote(f"cd {self.workdir} && {script}")
        in_namespace([*setup, f"exec chroot {root} /bin/sh -ec {script}"], env=environment)
        if not self.is_overlay:
            shutil.rmtree(self.root / "var/lib/apt/lists", ignore_errors=True)


def bind(source, root, create, target):
    target = f"{root}{target}"
    return f"mkdir -p $(dirname {target}); {create} {target}; mount --bind {source} {target}"


def in_namespace(commands, **options):
    """Runs these where the mounts end with them."""
    script = "; ".join(commands)
    return run(["unshare", "--mount", "--pid", "--fork", "sh", "-ec", script], stdin=subprocess.DEVNULL, **options)


def copy(source, target, origin, ignored):
    def ignore(folder, names):
        paths = {name: (pathlib.Path(folder) / name).relative_to(origin).as_posix() for name in names}
        return [name for name, path in paths.items() if any(fnmatch.fnmatch(path, it) for it in ignored)]

    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, target, symlinks=True, ignore=ignore, dirs_exist_ok=True)
    else:
        shutil.copy2(source, target)


def cached(name, build):
    """A directory that is built once on a machine."""
    place = CACHE / name
    if not place.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        scratch = pathlib.Path(tempfile.mkdtemp(dir=CACHE))
        build(scratch)
        scratch.chmod(0o755)
        scratch.rename(place)
    return place


def distroless():
    def build(root):
        with tempfile.TemporaryDirectory() as packages:
            os.chmod(packages, 0o777)
            download = ["apt-get", "download", "-qq", *DISTROLESS]
            # A new machine has no list of packages, or an old one.
            if subprocess.run(download, cwd=packages, check=False).returncode != 0:
                run(["apt-get", "update", "-qq"])
                run(download, cwd=packages)
            for package in pathlib.Path(packages).iterdir():
                run(["dpkg-deb", "--extract", package, root])
        certificates = sorted((root / "usr/share/ca-certificates").rglob("*.crt"))
        bundle = root / "etc/ssl/certs/ca-certificates.crt"
        bundle.parent.mkdir(parents=True, exist_ok=True)
        bundle.write_text("".join(it.read_text() for it in certificates))
        (root / "etc/passwd").write_text("root:x:0:0:root:/root:/sbin/nologin\nnonroot:x:65532:65532:nonroot:/home/nonroot:/sbin/nologin\n")
        (root / "etc/group").write_text("root:x:0:\nnonroot:x:65532:\n")
        for folder in ("proc", "dev", "tmp"):
            (root / folder).mkdir(exist_ok=True)

    return cached("distroless", build)


def debian_with_node():
    def build(root):
        run(["debootstrap", "--variant=minbase", "bookworm", root], stdout=subprocess.DEVNULL)
        node = pathlib.Path(shutil.which("node") or fail("the target full needs Node on this machine")).resolve()
        shutil.copy2(node, root / "usr/local/bin/node")
        modules = node.parent.parent / "lib/node_modules/npm"
        shutil.copytree(modules, root / "usr/local/lib/node_modules/npm", symlinks=True)
        for name in ("npm", "npx"):
            (root / f"usr/local/bin/{name}").symlink_to(f"../lib/node_modules/npm/bin/{name}-cli.js")

    return cached("debian-with-node", build)


# Becomes a command of the image. An image without a shell has no program that could change directory and user.
ENTER = """
import os, sys
root, workdir, user, group, *command = sys.argv[1:]
os.chroot(root)
os.chdir(workdir)
os.setgroups([])
os.setgid(int(group))
os.setuid(int(user))
os.execvp(command[0], command)
"""


class Container:
    """Runs an image as a careful operator does: its user, no new privileges, a read-only root, a volume and /tmp."""

    def __init__(self, image, work):
        self.image, self.tmp = image, work / f"{image.name}.tmp"
        self.tmp.mkdir()
        self.tmp.chmod(0o1777)
        self.volume = work / f"{image.name}.data"
        # A new volume takes content and owner from the image.
        run(["cp", "-a", f"{image.root}{image.volumes[0]}", self.volume])
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            # The network is this machine's, so the image's own port may be in use.
            self.address = f"127.0.0.1:{free.getsockname()[1]}"

    def start(self, command, environment=None):
        root, options = self.image.root, [self.image.workdir, *self.image.user.split(":")]
        script = "; ".join([
            f"mount --bind {root} {root}",
            f"mount -o remount,bind,ro {root}",
            f"mount --bind {self.volume} {root}{self.image.volumes[0]}",
            f"mount --bind {self.tmp} {root}/tmp",
            f"mount -t proc proc {root}/proc",
            f"mount --rbind /dev {root}/dev",
            "exec setpriv --no-new-privs " + shlex.join(["python3", "-c", ENTER, str(root), *options, *command]),
        ])
        environment = {**self.image.environment, **(environment or {})}
        return subprocess.Popen(
            ["unshare", "--mount", "sh", "-ec", script], env=environment, cwd="/", stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )

    def output(self, command, code=0, environment=None):
        process = self.start(command, environment)
        text, _ = process.communicate(timeout=120)
        if process.returncode != code:
            fail(f"{shlex.join(command)} in {self.image.name} ended with {process.returncode}, not {code}:\n{text}")
        return text

    def axed(self, *arguments, **options):
        return self.output([*self.image.entrypoint, *arguments], **options)


def check_image(image, work):
    print(f"dockerfile: running {image.name} as {image.user}", flush=True)
    container = Container(image, work)
    print("dockerfile:  ", container.axed("--version").strip())
    refusal = container.axed(*image.command, code=2)
    if "--insecure-no-auth" not in refusal:
        fail(f"without keys the image should say what to do, but it says:\n{refusal}")
    own = {"AXED_SERVER__LISTEN": container.address}
    daemon = container.start([*image.entrypoint, *image.command], own)
    try:
        line = next((line for line in daemon.stdout if line.startswith("axed listening")), None)
        line or fail(f"the daemon of {image.name} did not start")
        container.output(image.healthcheck, environment=own)
        server = ["--server", f"http://{container.address}"]
        reply = container.axed("run", "planner-scripted", "go", *server)
        print("dockerfile:   healthy, and a run replied", repr(reply.strip().splitlines()[-1][:60]))
        if image.name == "full":
            check_tools(container)
    finally:
        daemon.send_signal(signal.SIGTERM)
        daemon.stdout.read()
    if daemon.wait(timeout=60) != 0:
        fail(f"the daemon of {image.name} ended with {daemon.returncode} after SIGTERM")
    database = container.volume / "axed.db"
    if f"{database.stat().st_uid}:{database.stat().st_gid}" != NONROOT:
        fail("the database does not belong to the image's user")


def check_tools(container):
    for command in (["node", "--version"], ["npx", "--version"], ["uvx", "--version"], ["git", "--version"]):
        print("dockerfile:  ", shlex.join(command), container.output(command).strip())
    shutil.copy(ROOT / "tests/it/tools/mcp/server.py", container.tmp / "server.py")
    agent = container.tmp / "agents"
    agent.mkdir()
    (agent / "mcp.toml").write_text(
        'name = "mcp"\nmodel = "scripted/mcp"\n[[mcp_servers]]\nname = "s"\ntransport = "stdio"\n'
        'command = "python3"\nargs = ["/tmp/server.py", ""]\nenv = { TOKEN = "x" }\n'
    )
    (container.tmp / "scripts").mkdir()
    (container.tmp / "scripts/mcp.toml").write_text(
        '[[replies]]\n[[replies.tool_calls]]\nname = "s__echo"\narguments = { text = "through Python" }\n'
        '[[replies]]\ntext = "{{result.1}}"\n'
    )
    (container.tmp / "axed.toml").write_text('[providers.scripted]\nscripts = ["scripts"]\n')
    run(["chmod", "-R", "a+rX", container.tmp])
    reply = container.axed("run", "mcp", "go", "--config", "/tmp/axed.toml", "--agents", "/tmp/agents")
    if "through Python" not in reply:
        fail(f"the MCP server did not reply:\n{reply}")
    print("dockerfile:   an MCP server in Python replied")


def main():
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--profile", default="dev", help="of the build; the Dockerfile's own is release")
    options.add_argument("--full", action="store_true", help="the target full, too")
    options = options.parse_args()
    work = pathlib.Path(tempfile.mkdtemp(prefix="axed-dockerfile-"))
    work.chmod(0o755)
    try:
        built = {}
        for base, name, steps in stage_definitions((ROOT / "Dockerfile").read_text()):
            if name == "full" and not options.full:
                print("dockerfile: the target full is left out; --full performs it", flush=True)
                continue
            built[name] = Stage(base, name, work, built, {"PROFILE": options.profile})
            built[name].build(steps)
        for image in built.values():
            if image.entrypoint:
                check_image(image, work)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    print("dockerfile: all steps were performed, and the images work")


main()
