#!/usr/bin/env python3
"""Writes what a binary consists of, from `cargo metadata` and Cargo.lock.

    inventory.py sbom TARGET FILE       a CycloneDX 1.6 document
    inventory.py licenses TARGET FILE   the texts of the libraries' licences
"""

import json
import os
import pathlib
import re
import subprocess
import sys
import tomllib
import uuid
from datetime import datetime, timezone

ROOT = pathlib.Path(__file__).resolve().parent.parent
NAMESPACE = uuid.UUID("6f9d1f0e-6a8e-5d0c-9a43-2f1b2a7a4c11")
LICENSE_FILE = re.compile(r"^(licen[cs]e|copying|notice|unlicense|copyright)", re.IGNORECASE)


def metadata(target):
    command = ["cargo", "metadata", "--locked", "--format-version", "1", "--filter-platform", target]
    return json.loads(subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout)


def in_the_binary(data):
    """The packages that are linked into the binary, and the dependencies of each; root first.

    Procedural macros and build scripts run at compile time, so that they and what they need are left out.
    """
    nodes = {node["id"]: node for node in data["resolve"]["nodes"]}
    packages = {package["id"]: package for package in data["packages"]}

    def linked(dependency):
        package = packages[dependency["pkg"]]
        is_macro = any("proc-macro" in target["kind"] for target in package["targets"])
        return not is_macro and any(kind["kind"] is None for kind in dependency["dep_kinds"])

    graph, waiting = {}, [data["resolve"]["root"]]
    while waiting:
        current = waiting.pop()
        if current not in graph:
            graph[current] = sorted(it["pkg"] for it in nodes[current]["deps"] if linked(it))
            waiting += graph[current]
    return packages, graph, data["resolve"]["root"]


def purl(package):
    return f"pkg:cargo/{package['name']}@{package['version']}"


def expression(package):
    """The licence as SPDX; older crates separate alternatives by a slash."""
    return re.sub(r"\s*/\s*", " OR ", package["license"] or "NOASSERTION")


def component(package, checksums, kind="library"):
    entry = {
        "type": kind,
        "bom-ref": purl(package),
        "name": package["name"],
        "version": package["version"],
        "purl": purl(package),
        "licenses": [{"expression": expression(package)}],
    }
    if package.get("description"):
        entry["description"] = " ".join(package["description"].split())
    checksum = checksums.get((package["name"], package["version"]))
    if checksum:
        entry["hashes"] = [{"alg": "SHA-256", "content": checksum}]
    if package.get("repository"):
        entry["externalReferences"] = [{"type": "vcs", "url": package["repository"]}]
    return entry


def sbom(target):
    packages, graph, root = in_the_binary(metadata(target))
    lock = tomllib.loads((ROOT / "Cargo.lock").read_text())
    checksums = {(it["name"], it["version"]): it.get("checksum") for it in lock["package"]}
    # The time of the commit, so that the same sources give the same bytes.
    seconds = int(os.environ.get("SOURCE_DATE_EPOCH", "0"))
    others = sorted((packages[id] for id in graph if id != root), key=purl)
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid5(NAMESPACE, f'{purl(packages[root])} {target} {seconds}')}",
        "version": 1,
        "metadata": {
            "timestamp": datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "component": component(packages[root], checksums, "application"),
            "properties": [{"name": "axed:target", "value": target}],
        },
        "components": [component(package, checksums) for package in others],
        "dependencies": [
            {"ref": purl(packages[id]), "dependsOn": [purl(packages[it]) for it in graph[id]]}
            for id in sorted(graph, key=lambda id: purl(packages[id]))
        ],
    }


def licenses(target):
    """Each text once, below the packages that carry it. A package without a file has its expression only."""
    packages, graph, root = in_the_binary(metadata(target))
    by_text, without = {}, []
    for package in sorted((packages[id] for id in graph if id != root), key=purl):
        name = f"{package['name']} {package['version']} ({expression(package)})"
        folder = pathlib.Path(package["manifest_path"]).parent
        files = sorted(it for it in folder.iterdir() if it.is_file() and LICENSE_FILE.match(it.name))
        texts = {it.read_text(errors="replace").strip() for it in files}
        for text in texts:
            by_text.setdefault(text, []).append(name)
        if not texts:
            without.append(name)
    parts = ["The axed binary contains these libraries. Their licences follow, each below the libraries that carry it."]
    if without:
        parts.append("Libraries that carry no text of their licence:\n" + "\n".join(without))
    parts += ["\n".join(names) + "\n\n" + text for text, names in sorted(by_text.items(), key=lambda it: it[1])]
    return ("\n\n" + "=" * 80 + "\n\n").join(parts) + "\n"


def main():
    match sys.argv[1:]:
        case ["sbom", target, file]:
            text = json.dumps(sbom(target), indent=2) + "\n"
        case ["licenses", target, file]:
            text = licenses(target)
        case _:
            sys.exit(__doc__)
    pathlib.Path(file).write_text(text)


main()
