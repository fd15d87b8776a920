"""Checks the daemon behind reverse proxies; tests/proxies.sh runs this with the path of the binary.

The client connects from an address of its own and claims another, so that the address in the access log shows who was
believed. The run waits for an approval, so a stream whose first events arrive before it was given is not buffered.
"""

import gzip
import http.client
import json
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time

CLIENT = "127.0.0.9"
SPOOFED = {
    "x-forwarded-for": "6.6.6.6",
    "forwarded": "for=6.6.6.6;host=evil.example",
    "x-forwarded-prefix": "/evil",
    "x-forwarded-host": "evil.example",
}
AGENT = """
name = "held"
model = "scripted/held"
tools = ["find_path"]
approve = ["find_path"]
workdir = "work"
"""
SCRIPT = """
[[replies]]
text = "I search."
[[replies.tool_calls]]
name = "find_path"
arguments = { pattern = "*" }

[[replies]]
text = "done"
"""
CONFIG = """
[server]
trusted_proxies = ["127.0.0.1"]
[providers.scripted]
scripts = ["{home}/scripts"]
[telemetry]
log = "axed=debug"
log_format = "json"
"""
CADDY = """{
	admin off
	auto_https off
	servers {
		protocols h1 h2c
	}
}
"""
HAPROXY = """
global
    log stderr format raw local0 warning
defaults
    mode http
    option http-no-delay
    timeout connect 5s
    timeout client 60s
    timeout server 330s
frontend front
    bind 127.0.0.1:{port}
    bind 127.0.0.1:{h2} proto h2
    acl gw path_beg /gw/
    option forwardfor
    http-request set-header X-Forwarded-Proto http
    http-request set-header X-Forwarded-Host %[req.hdr(host)]
    http-request del-header Forwarded
    http-request del-header X-Forwarded-Prefix
    http-request set-header X-Forwarded-Prefix /gw if gw
    http-request replace-path /gw(/.*) \\1 if gw
    default_backend axed
backend axed
    server axed {daemon} proto h2
"""


def free_port():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def wait_for_port(port, process, name):
    for _ in range(1200):
        if process.poll() is not None:
            sys.exit(f"proxies: {name} ended with {process.returncode}")
        with socket.socket() as sock:
            if sock.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    sys.exit(f"proxies: {name} does not listen")


def nginx(home, daemon, port, h2):
    """deploy/nginx.conf, and the same again below a prefix that it removes."""
    text = pathlib.Path("deploy/nginx.conf").read_text()
    text = text.replace("listen 80;", f"listen 127.0.0.1:{port}; listen 127.0.0.1:{h2} http2;")
    text = text.replace("http://axed:8080", f"http://{daemon}")
    location = re.search(r"    location / \{.*?\n    \}\n", text, re.S).group(0)
    below = location.replace("location /", "location /gw/").replace(f"http://{daemon}", f"http://{daemon}/")
    below = below.replace('X-Forwarded-Prefix ""', "X-Forwarded-Prefix /gw")
    assert below.count("/gw") == 2, below
    text = text.replace(location, location + below)
    paths = "".join(
        f"{kind}_temp_path {home}/{kind};\n" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    (home / "nginx.conf").write_text(
        f"daemon off;\nmaster_process off;\npid {home}/nginx.pid;\nerror_log stderr;\nevents {{}}\n"
        f"http {{\naccess_log off;\n{paths}{text}\n}}\n"
    )
    return ["nginx", "-e", "stderr", "-c", str(home / "nginx.conf"), "-p", str(home)]


def caddy(home, daemon, port, h2):
    """deploy/Caddyfile without TLS, and the same again below a prefix that it removes."""
    text = pathlib.Path("deploy/Caddyfile").read_text().replace("axed:8080", daemon)
    text = text.replace("axed.example.com {", f"http://:{port} {{\n\tbind 127.0.0.1")
    site = re.search(r"\treverse_proxy .*?\n\t\}\n", text, re.S).group(0)
    below = site.replace("header_up -X-Forwarded-Prefix", "header_up X-Forwarded-Prefix /gw")
    text = text.replace(site, f"\thandle_path /gw/* {{\n{below}\t}}\n{site}")
    (home / "Caddyfile").write_text(CADDY + text)
    return ["caddy", "run", "--config", str(home / "Caddyfile"), "--adapter", "caddyfile"]


def haproxy(home, daemon, port, h2):
    (home / "haproxy.cfg").write_text(HAPROXY.format(daemon=daemon, port=port, h2=h2))
    return ["haproxy", "-db", "-q", "-f", str(home / "haproxy.cfg")]


class Client:
    def __init__(self, port, log):
        self.port, self.log = port, log

    def send(self, method, path, headers=(), body=None):
        """The response, whose body is still to be read."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120, source_address=(CLIENT, 0))
        data = None if body is None else json.dumps(body)
        kind = {} if body is None else {"content-type": "application/json"}
        connection.request(method, path, data, {**SPOOFED, **kind, **dict(headers)})
        return connection.getresponse()

    def json(self, method, path, status, body=None, headers=()):
        response = self.send(method, path, headers, body)
        text = response.read()
        assert response.status == status, f"{method} {path}: {response.status} {text[:300]}"
        return json.loads(text)

    def logged(self, request_id):
        """The line of the access log about this request."""
        for _ in range(1200):
            for line in self.log.read_text().splitlines():
                if f'"request.id":"{request_id}"' in line:
                    return json.loads(line)
            time.sleep(0.05)
        raise AssertionError(f"the access log has no request {request_id}")


def read_until(stream, wanted):
    """The events up to the first of this type."""
    events, data = [], None
    while True:
        line = stream.readline()
        assert line, f"the stream ended before {wanted}: {[event['type'] for event in events]}"
        if line.startswith(b"data: "):
            data = json.loads(line[6:])
        elif line == b"\n" and data is not None:
            events.append(data)
            if data["type"] == wanted:
                return events
            data = None


def check_stream(client):
    started = time.monotonic()
    headers = {"accept": "text/event-stream", "accept-encoding": "gzip"}
    stream = client.send("POST", "/gw/agents/held/runs", headers, {"input": "go"})
    assert stream.status == 200, stream.read()
    assert stream.getheader("content-encoding") is None, "the stream is compressed"
    location = stream.getheader("location")
    assert re.fullmatch(r"/gw/runs/run_[0-9a-f-]+", location), location
    events = read_until(stream, "approval.requested")
    first = time.monotonic() - started

    run = client.json("GET", location, 200)
    assert run["status"] == "waiting", run["status"]
    assert run["links"]["events"] == f"{location}/events", run["links"]
    ticket = client.json("POST", f"{location}/events/ticket", 201)["ticket"]
    source = client.send("GET", f"{location}/events?ticket={ticket}", {"accept": "text/event-stream"})
    read_until(source, "approval.requested")
    call = events[-1]["tool_call_id"]
    client.json("POST", f"{location}/approvals/{call}", 202, {"decision": "approve"})
    for one in (stream, source):
        rest = read_until(one, "run.completed")
        assert one.read() == b"", "the stream continues after the run's end"
    assert rest[-1]["run_id"] == run["id"]
    return location, first


def check_responses(client, location):
    packed = client.send("GET", "/gw/openapi.json", {"accept-encoding": "gzip"})
    assert packed.getheader("content-encoding") == "gzip", packed.getheaders()
    document = json.loads(gzip.decompress(packed.read()))
    assert document["servers"][0]["url"] == "/gw", document["servers"]
    response = client.send("GET", location)
    response.read()
    again = client.send("GET", location, {"if-none-match": response.getheader("etag")})
    assert (again.status, again.read()) == (304, b""), again.status
    # Without the prefix; what the client sends is not believed.
    bare = location.removeprefix("/gw")
    assert client.json("GET", bare, 200)["links"]["self"] == bare
    assert client.json("GET", "/openapi.json", 200)["servers"][0]["url"] == "/"


def check_address(client, name):
    for path in ("/gw/agents", "/agents"):
        request_id = f"{name}{path.replace('/', '-')}"
        client.json("GET", path, 200, headers={"x-request-id": request_id})
        line = client.logged(request_id)
        assert line["client.address"] == CLIENT, line
        assert line["server.address"] == f"127.0.0.1:{client.port}", line
        assert line["url.scheme"] == "http", line


def check_http2(h2, location):
    command = ["curl", "--silent", "--show-error", "--max-time", "30", "--http2-prior-knowledge", "--interface", CLIENT]
    command += ["--header", "accept: text/event-stream", "--write-out", "\n%{http_version}"]
    done = subprocess.run([*command, f"http://127.0.0.1:{h2}{location}/events"], capture_output=True, text=True, check=True)
    assert "event: run.completed" in done.stdout, done.stdout
    assert done.stdout.endswith("\n2"), done.stdout[-20:]


def check(name, configure, home, daemon, log):
    port, h2 = free_port(), free_port()
    folder = home / name
    folder.mkdir()
    if name == "caddy":
        h2 = port
    environment = {**os.environ, "HOME": str(folder), "XDG_DATA_HOME": str(folder), "XDG_CONFIG_HOME": str(folder)}
    output = open(folder / "log", "wb")
    process = subprocess.Popen(configure(folder, daemon, port, h2), env=environment, stdout=output, stderr=output)
    try:
        wait_for_port(port, process, name)
        client = Client(port, log)
        location, first = check_stream(client)
        check_responses(client, location)
        check_address(client, name)
        check_http2(h2, location)
        print(f"proxies: {name}: ok (the first events after {first * 1000:.0f} ms)")
    except BaseException:
        sys.stderr.write((folder / "log").read_text())
        raise
    finally:
        process.terminate()
        process.wait()


def main(axed):
    os.environ["PATH"] += ":/usr/sbin"
    with tempfile.TemporaryDirectory(prefix="axed-proxies-") as directory:
        home = pathlib.Path(directory)
        # nginx's worker may be another user.
        home.chmod(0o755)
        for folder in ("agents", "scripts", "work"):
            (home / folder).mkdir()
        (home / "agents/held.toml").write_text(AGENT)
        (home / "scripts/held.toml").write_text(SCRIPT)
        (home / "axed.toml").write_text(CONFIG.format(home=home))
        log = home / "log"
        arguments = ["--config", "axed.toml", "--agents", "agents", "--data", "data", "--listen", "127.0.0.1:0"]
        environment = {"HOME": directory, "PATH": os.environ["PATH"]}
        daemon = subprocess.Popen(
            [os.path.abspath(axed), "serve", *arguments],
            cwd=home, env=environment, stdout=subprocess.PIPE, stderr=open(log, "wb"), text=True,
        )
        try:
            line = daemon.stdout.readline()
            if not line.startswith("axed listening on http://"):
                sys.exit(f"proxies: axed does not start:\n{log.read_text()}")
            address = line.strip().removeprefix("axed listening on http://")
            for configure in (nginx, caddy, haproxy):
                name = configure.__name__
                if shutil.which(name):
                    check(name, configure, home, address, log)
                else:
                    print(f"proxies: {name} is missing; skipped")
        except BaseException:
            sys.stderr.write(log.read_text()[-4000:])
            raise
        finally:
            daemon.send_signal(signal.SIGTERM)
            daemon.wait()


main(sys.argv[1])
