"""What validators say about our Kubernetes objects, and the chart rendered with Go's template engine."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from powerband.core.recipe import Recipe
from support.recipes import recipe

ROOT = Path(__file__).parents[2]
TEMPLATES = ROOT / "deploy" / "helm" / "powerband" / "templates"
SCHEMAS = "1.33"
OTHERS = ("InferencePool", "HTTPRoute", "ServiceMonitor")  # of other projects: the API server has their resources
_OLD_VERSIONS = {"policy/v1": "policy/v1beta1", "autoscaling/v2": "autoscaling/v2beta2"}  # that server 1.20 knows

Object = dict[str, Any]


def recipes() -> dict[str, Recipe]:
    """Return a recipe for a CPU with a local file, and one for 8 GPUs with weights from the hub."""
    gpus = recipe("vllm", tensor_parallel_size=8, max_num_seqs=64)
    source = {"source": "meta-llama/Llama-3.3-70B-Instruct", "revision": "6f6073b423013f6a7d4d9f39144961bfbfbc386b"}
    on_gpus = {"gpus": 8, "device_vendor": "nvidia", "device_name": "NVIDIA H100 80GB HBM3", "name": "llama-70b-chat"}
    deployment = {**gpus.deployment, "name": "Llama-3.3-70B", "variant": source}
    return {
        "cpu": recipe(parallel=8, ctx_size=8192),
        "8 gpus": gpus.model_copy(update={**on_gpus, "deployment": deployment}),
    }


def render_chart(values: Object) -> list[Object]:
    """Return the objects that the chart has for these values."""
    argv = ["go", "run", str(Path(__file__).with_name("helm.go")), str(TEMPLATES)]
    done = subprocess.run(argv, input=json.dumps(values), text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    return [one for one in yaml.safe_load_all(done.stdout) if one]


def by_name(objects: Iterable[Object]) -> dict[tuple[str, str], Object]:
    """Return objects by kind and name."""
    return {(one["kind"], one["metadata"]["name"]): one for one in objects}


def schema_objections(one: Object) -> str:
    """Return what the published schema of Kubernetes objects to; strict about unknown fields."""
    import kubernetes_validate

    try:
        kubernetes_validate.validate(one, SCHEMAS, strict=True)
    except Exception as error:  # of several unrelated classes
        return f"{one['kind']} {one['metadata']['name']}: {error}"
    return ""


def for_old_server(one: Object) -> Object:
    """Return the object in the version that Kubernetes 1.20 serves; the fields that we use are the same."""
    return {**one, "apiVersion": _OLD_VERSIONS.get(one["apiVersion"], one["apiVersion"])}


def pod_templates(objects: Iterable[Object]) -> list[Object]:
    """Return the pod specs of Deployments and Jobs."""
    return [one["spec"]["template"]["spec"] for one in objects if one["kind"] in ("Deployment", "Job")]


def restricted_objections(pod: Object) -> list[str]:
    """Return what the Pod Security Standard `restricted` forbids in a pod; written from its published text."""
    found, security = [], pod.get("securityContext", {})
    allowed = {
        "configMap",
        "csi",
        "downwardAPI",
        "emptyDir",
        "ephemeral",
        "persistentVolumeClaim",
        "projected",
        "secret",
    }
    for volume in pod.get("volumes", ()):
        if forbidden := set(volume) - {"name"} - allowed:
            found.append(f"volume {volume['name']}: {forbidden}")
    if any(pod.get(name) for name in ("hostNetwork", "hostPID", "hostIPC")):
        found.append("namespaces of the host")
    if security.get("seccompProfile", {}).get("type") not in ("RuntimeDefault", "Localhost"):
        found.append("seccompProfile")
    if security.get("runAsNonRoot") is not True or security.get("runAsUser") == 0:
        found.append("runAsNonRoot")
    for box in [*pod.get("initContainers", ()), *pod["containers"]]:
        own = box.get("securityContext", {})
        if own.get("privileged") or own.get("allowPrivilegeEscalation") is not False:
            found.append(f"{box['name']}: allowPrivilegeEscalation")
        if own.get("capabilities", {}).get("drop") != ["ALL"] or own["capabilities"].get("add"):
            found.append(f"{box['name']}: capabilities")
        if any(port.get("hostPort") for port in box.get("ports", ())):
            found.append(f"{box['name']}: hostPort")
    return found
