"""What validators say about exported files: the real schema of whoever reads them."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import prometheus
import yaml

from powerband.core.recipe import Recipe
from powerband.store import documents

KUBERNETES = "1.33"
_NAME = re.compile(r"\b[a-zA-Z_:][\w:]*")
_NOT_SERIES = {"sum", "rate", "increase", "changes", "count", "by", "le", "histogram_quantile", "model", "max", "min"}


def run(*argv: str) -> str:
    """Run a validator; return what it objects to."""
    done = subprocess.run(argv, capture_output=True, text=True)
    return "" if done.returncode == 0 else (done.stdout + done.stderr)[-1500:]


def objections(path: Path) -> str:
    """Return what is wrong with an exported file; empty if nothing is."""
    name, promtool = path.name, prometheus.programs()[1]
    if name == "compose.yaml":
        wrong = run(sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", str(path))
        has_compose = not run("docker", "compose", "version") if shutil.which("docker") else False
        return wrong or (run("docker", "compose", "-f", str(path), "config", "-q") if has_compose else "")
    if name == "kubernetes.yaml":
        return _kubernetes(path)
    if name == "serve.yaml":
        return _ray_serve(path)
    if name == "prometheus.yaml":
        return run(promtool, "check", "config", "--syntax-only", str(path))
    if name in ("alerts.yaml", "names.yaml"):
        return run(promtool, "check", "rules", str(path))
    if name.endswith(".service"):
        return run(str(shutil.which("systemd-analyze")), "verify", "--man=no", str(path))
    if name == "serve.sh":
        return run("sh", "-n", str(path))
    if name == "recipe.yaml":
        documents.read_as(Recipe, path)
        return ""
    text = path.read_text()
    data: dict[str, Any] = json.loads(text) if name.endswith(".json") else yaml.safe_load(text)
    return "" if data else "it is empty"


def unknown_series(folder: Path, exposed: set[str]) -> set[str]:
    """Return the series that alerts and recording rules read, and that neither an engine nor a rule has."""
    rules = [one for name in ("names.yaml", "alerts.yaml") if (folder / name).exists() for one in _rules(folder / name)]
    known = exposed | {"up"} | {one["record"] for one in rules if "record" in one}
    return {name for one in rules for name in _series(one["expr"])} - known


def _rules(path: Path) -> Iterator[dict[str, Any]]:
    for group in yaml.safe_load(path.read_text())["groups"]:
        yield from group["rules"]


def _series(expression: str) -> set[str]:
    bare = re.sub(r"\{[^}]*\}|\[[^\]]*\]|'[^']*'|\"[^\"]*\"", " ", expression)
    return {one for one in _NAME.findall(bare) if one not in _NOT_SERIES and not re.fullmatch(r"[0-9.e]+", one)}


def _kubernetes(path: Path) -> str:
    """Return what is wrong with the manifests; some kinds are of other projects."""
    import kubernetes_validate

    wrong = []
    for one in yaml.safe_load_all(path.read_text()):
        if one["kind"] in ("InferencePool", "HTTPRoute", "ServiceMonitor"):
            continue
        try:
            kubernetes_validate.validate(one, KUBERNETES, strict=True)
        except Exception as error:
            wrong.append(f"{one['kind']}: {error}")
    return "; ".join(wrong)


def _ray_serve(path: Path) -> str:
    try:
        from ray.serve.schema import ServeDeploySchema
    except ImportError:
        subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "ray[serve]"], check=True)
        from ray.serve.schema import ServeDeploySchema
    ServeDeploySchema.model_validate(yaml.safe_load(path.read_text()))
    return ""
