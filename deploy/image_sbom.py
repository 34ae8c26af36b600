"""Print a CycloneDX document of the packages of an image, run inside it: Debian's and Python's."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from typing import Any
from urllib.parse import quote

_FORMAT = "${db:Status-Status}\t${Package}\t${Version}\t${Architecture}\n"


def debian() -> list[dict[str, Any]]:
    """Return the installed Debian packages."""
    listed = subprocess.run(["dpkg-query", "-W", "-f", _FORMAT], check=True, capture_output=True, text=True).stdout
    rows = [line.split("\t") for line in listed.splitlines()]
    return [
        _component(name, version, f"pkg:deb/debian/{quote(name)}@{quote(version)}?arch={architecture}&distro=debian-13")
        for status, name, version, architecture in rows
        if status == "installed"
    ]


def python(folder: str) -> list[dict[str, Any]]:
    """Return the Python packages in a directory."""
    found = []
    for one in importlib.metadata.distributions(path=[folder]):
        purl = f"pkg:pypi/{one.name.lower().replace('_', '-')}@{one.version}"
        licence = one.metadata.get("License-Expression")
        found.append(
            _component(one.name, one.version, purl) | ({"licenses": [{"expression": licence}]} if licence else {})
        )
    return found


def _component(name: str, version: str, purl: str) -> dict[str, Any]:
    return {"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl}


components = sorted(debian() + python(sys.argv[1]), key=lambda one: one["purl"])
document = {"bomFormat": "CycloneDX", "specVersion": "1.6", "version": 1, "components": components}
print(json.dumps(document, indent=1))
