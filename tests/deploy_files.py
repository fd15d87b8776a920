#!/usr/bin/env python3
"""Checks of tests/deploy.sh that compare files with each other.

    deploy_files.py kubernetes AXED FOLDER   the manifests fit together, and axed accepts their configuration
    deploy_files.py traefik                  routers name services and middlewares that exist
    deploy_files.py sbom FILE                the document lists each crate once, with licence and checksum
    deploy_files.py documents FOLDER         of the unpacked package: links lead somewhere, and what names documents names ones that exist
    deploy_files.py alerts                   each alert has texts, a test, and a section of the page for people on call
"""

import json
import os
import pathlib
import re
import subprocess
import sys
import tomllib
import urllib.parse

import yaml

DEPLOY = pathlib.Path(__file__).resolve().parent.parent / "deploy"


def require(condition, message):
    if not condition:
        sys.exit(f"deploy: {message}")


def kubernetes(axed, folder):
    folder = pathlib.Path(folder)
    manifests = DEPLOY / "kubernetes"
    listed = yaml.safe_load((manifests / "kustomization.yaml").read_text())["resources"]
    files = {it.name for it in manifests.glob("*.yaml")} - {"kustomization.yaml", "secret.yaml"}
    require(set(listed) == files, f"kustomization.yaml lists {sorted(listed)}, but there are {sorted(files)}")
    objects = {}
    for name in [*listed, "secret.yaml"]:
        document = yaml.safe_load((manifests / name).read_text())
        objects[document["kind"], document["metadata"]["name"]] = document

    stateful = objects["StatefulSet", "axed"]["spec"]
    pod = stateful["template"]["spec"]
    labels = stateful["template"]["metadata"]["labels"]
    require(stateful["selector"]["matchLabels"] == labels, "the StatefulSet does not select its pods")
    require(objects["Service", "axed"]["spec"]["selector"] == labels, "the Service does not select the pods")
    budget = objects["PodDisruptionBudget", "axed"]["spec"]["selector"]["matchLabels"]
    require(budget == labels, "the PodDisruptionBudget does not select the pods")
    require(("Service", stateful["serviceName"]) in objects, "the StatefulSet names a Service that does not exist")

    nodes = yaml.safe_load((manifests.parent / "cluster/kubernetes/statefulset.yaml").read_text())
    own = objects["StatefulSet", "axed"]
    require(nodes["metadata"]["name"] == own["metadata"]["name"], "cluster/kubernetes/statefulset.yaml changes no StatefulSet")
    patched = nodes["spec"]["template"]["spec"]["containers"][0]
    require(patched["name"] == pod["containers"][0]["name"], "cluster/kubernetes/statefulset.yaml changes no container")
    container = pod["containers"][0]
    mounts = {it["mountPath"]: it["name"] for it in container["volumeMounts"]}
    volumes = {it["name"]: it for it in pod["volumes"]}
    claims = {it["metadata"]["name"] for it in stateful["volumeClaimTemplates"]}
    require(set(mounts.values()) == set(volumes) | claims, "volumes and mounts do not match")

    config = objects["ConfigMap", volumes["config"]["configMap"]["name"]]["data"]
    agents = objects["ConfigMap", volumes["agents"]["configMap"]["name"]]["data"]
    drain = tomllib.loads(config["axed.toml"])["server"]["drain_timeout"]
    grace = pod["terminationGracePeriodSeconds"]
    require(grace >= drain + 10, f"terminationGracePeriodSeconds {grace} leaves no time after drain_timeout {drain}")

    # As in the container: configuration, agents, and a file for each secret.
    secrets = objects["Secret", volumes["secrets"]["secret"]["secretName"]]["stringData"]
    place = next(path for path, name in mounts.items() if name == "secrets")
    for name, entries in (("config", config), ("agents", agents)):
        (folder / name).mkdir()
        for file, text in entries.items():
            (folder / name / file).write_text(text)
    environment = {"PATH": os.environ["PATH"], "HOME": str(folder)}
    for variable in container["env"]:
        key = pathlib.PurePosixPath(variable["value"]).relative_to(place).name
        require(key in secrets, f"{variable['name']} names {key}, which secret.yaml lacks")
        (folder / key).write_text("ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad\n")
        environment[variable["name"]] = str(folder / key)
    require(len(container["env"]) == len(secrets), "secret.yaml has entries that no variable names")
    command = [axed, "openapi", "--config", folder / "config/axed.toml"]
    subprocess.run(command, env=environment, cwd=folder, check=True, stdout=subprocess.DEVNULL)
    command = [axed, "agents", "check", *sorted((folder / "agents").iterdir())]
    subprocess.run(command, env=environment, cwd=folder, check=True, stdout=subprocess.DEVNULL)


def traefik():
    http = yaml.safe_load((DEPLOY / "traefik.yml").read_text())["http"]
    for name, router in http["routers"].items():
        require(router["service"] in http["services"], f"router {name} names a service that does not exist")
        for middleware in router["middlewares"]:
            require(middleware in http["middlewares"], f"router {name} names a middleware that does not exist")
    for name, service in http["services"].items():
        balancer = service["loadBalancer"]
        transport = balancer["serversTransport"]
        require(transport in http["serversTransports"], f"service {name} names a transport that does not exist")
        require(balancer["servers"] == [{"url": "http://axed:8080"}], f"service {name} has another address")


def sbom(file):
    document = json.loads(pathlib.Path(file).read_text())
    names = [it["bom-ref"] for it in document["components"]]
    require(len(names) > 200 and len(set(names)) == len(names), f"{len(names)} components, or one twice")
    for component in document["components"]:
        require(component["licenses"][0]["expression"] != "NOASSERTION", f"{component['name']} has no licence")
        require(component.get("hashes"), f"{component['name']} has no checksum")
    known = {*names, document["metadata"]["component"]["bom-ref"]}
    require({it["ref"] for it in document["dependencies"]} == known, "the graph has other components than the list")


def documents(folder):
    folder = pathlib.Path(folder)
    docs = folder / "usr/share/doc/axed"
    pages = sorted(docs.rglob("*.md"))
    sources = {it.relative_to(DEPLOY.parent) for it in (DEPLOY.parent / "docs").rglob("*") if it.is_file()}
    packed = {it.relative_to(docs) for it in docs.rglob("*")}
    require(sources <= packed, f"the package lacks {sorted(map(str, sources - packed))}")
    missing = []
    for page in pages:
        text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
        for target in re.findall(r"\]\(<?([^)#\s>]+)", text) + re.findall(r'(?:src|href)="([^"#]+)', text):
            if not re.match(r"[a-z]+:", target):
                if not (page.parent / urllib.parse.unquote(target)).exists():
                    missing.append(f"{page.relative_to(docs)}: {target}")
    require(not missing, f"links of the package's documents lead nowhere: {missing}")

    unit = (folder / "usr/lib/systemd/system/axed.service").read_text()
    names = re.search(r"^Documentation=(.*)$", unit, re.MULTILINE)[1].split()
    config = (folder / "etc/axed/axed.toml").read_text()
    names += [f"file://{it}" for it in re.findall(r"/usr/share/doc/[\w/.-]*[\w]", config)]
    require(len(names) > 2, "neither the unit nor the configuration names a document")
    for name in names:
        kind, _, path = name.partition(":")
        if kind == "man":
            page, section = re.fullmatch(r"([\w-]+)\((\d)\)", path).groups()
            path = f"/usr/share/man/man{section}/{page}.{section}.gz"
        require((folder / path.lstrip("/")).is_file(), f"{name} is not in the package")
    require("docs/" not in config.replace("/usr/share/doc/axed/docs/", ""), "the configuration names documents of the sources")


def alerts():
    groups = yaml.safe_load((DEPLOY / "alerts.yml").read_text())["groups"]
    rules = {rule["alert"]: rule for group in groups for rule in group["rules"]}
    tests = yaml.safe_load((DEPLOY.parent / "tests/alerts.yml").read_text())["tests"]
    tested = {rule["alertname"] for test in tests for rule in test["alert_rule_test"] if rule["exp_alerts"]}
    require(tested == set(rules), f"tests/alerts.yml has {sorted(tested ^ set(rules))} too many or too few")
    for name, rule in rules.items():
        texts = rule["annotations"]
        require(texts["summary"] and texts["description"], f"{name} has no texts")
        page, _, section = texts["runbook_url"].partition("#")
        require(section == name.lower(), f"{name} names another section: {section}")
        page = DEPLOY.parent / page
        require(page.is_file(), f"{name} names {page}, which does not exist")
        require(f"# {name}\n" in page.read_text(), f"{page} has no section {name}")


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["kubernetes", axed, folder]:
            kubernetes(axed, folder)
        case ["traefik"]:
            traefik()
        case ["sbom", file]:
            sbom(file)
        case ["documents", folder]:
            documents(folder)
        case ["alerts"]:
            alerts()
        case _:
            sys.exit(__doc__)
