"""Kubernetes: the engine's pods, an endpoint picker for them, the InferencePool and a route to it.

The objects are those of the chart `deploy/helm/powerband`, which gets the same `values`.
"""

from __future__ import annotations

import math
import re
from pathlib import PurePosixPath
from typing import Any

from powerband import __version__
from powerband.core import hub_id
from powerband.core.recipe import RECIPE_LABEL, Recipe, label_value
from powerband.export import alerts, kubernetes_picker
from powerband.export.container import PORT, Container, container, deployment, to_yaml
from powerband.export.kubernetes_objects import metadata, pod_security, restricted, service_monitor

_PROBE_S = 5  # between two health checks
_MEMORY_MARGIN = 1.25  # requested memory over measured memory
_WEIGHTS_MARGIN = 1.3  # size of the volume over the engine's measured memory, which includes its weights
_DEFAULT_WEIGHTS_BYTES = 100 * 2**30
_HUB = "/models/hub"  # the hub's cache, on the volume
_NOT_IN_NAMES = re.compile(r"[^a-z0-9-]+")
_MAX_NAME_CHARS = 52  # suffixes such as -picker follow
_USABLE_BY_ANY_USER = {"HOME": "/tmp", "USER": "engine"}  # the images expect root; a read-only home fails their caches


def files(recipe: Recipe) -> dict[str, str]:
    """Return the manifests, the chart's values, the adapter's configuration, recording rules and alerts."""
    one = container(recipe)
    wanted = values(recipe)
    return {
        "kubernetes.yaml": to_yaml(*objects(wanted)),
        "values.yaml": to_yaml(wanted),
        "prometheus-adapter.yaml": to_yaml(kubernetes_picker.ADAPTER),
        **alerts.engine_files(recipe, one.name),
    }


def values(recipe: Recipe) -> dict[str, Any]:
    """Return what differs between recipes: the chart's values."""
    one, own = container(recipe), deployment(recipe)
    label = recipe.label or label_value(one.name)
    named = recipe.model_copy(update={"name": label})
    requests = {"memory": f"{int(_MEMORY_MARGIN * one.memory_bytes) // 2**20}Mi"} if one.memory_bytes else {}
    limits = {f"{one.vendor}.com/gpu": str(one.gpus)} if one.gpus else {}  # the resource of the vendor's device plugin
    resources = {key: value for key, value in (("requests", requests), ("limits", limits)) if value}
    return {
        "name": one.name,
        "model": own.served_name,
        "recipe": {"name": label, "file": named.to_text()},
        "engine": {
            "name": _name(f"{one.name}-{label}"),
            "image": one.image,
            "args": list(one.args),
            "env": {**_USABLE_BY_ANY_USER, **one.env},
            "replicas": 2,
            "resources": resources,
            "sharedMemory": f"{one.shared_memory_bytes // 2**30}Gi" if one.shared_memory_bytes else "",
            "startupFailureThreshold": math.ceil(one.start_timeout_s / _PROBE_S),
        },
        "weights": _weights(one, own.variant.source, own.variant.revision),
        "picker": {"image": f"ghcr.io/powerband/powerband:{__version__}", "replicas": 2, "leaseDuration": "5s"},
        "gateway": {"name": "gateway", "namespace": "gateway-system"},
        "autoscaling": {"minReplicas": 2, "maxReplicas": 10},
        "serviceMonitors": True,
    }


def _weights(one: Container, source: str, revision: str | None) -> dict[str, Any]:
    """Return the volume of the weights: filled by a job from the hub, or by the user from a local path."""
    size_bytes = _WEIGHTS_MARGIN * one.memory_bytes if one.memory_bytes else _DEFAULT_WEIGHTS_BYTES
    found = {
        "size": f"{math.ceil(size_bytes / 2**30)}Gi",
        "accessMode": "ReadWriteMany",
        "storageClass": "",
        "repository": "",
        "revision": "",
        "path": str(PurePosixPath(one.mount_path).name) if one.weights else "",
    }
    if (hub := hub_id.parse(source)) and not one.weights:
        found |= {"repository": hub.repo, "revision": revision or hub.revision or ""}
    return found


def _name(text: str) -> str:
    return _NOT_IN_NAMES.sub("-", text.lower())[:_MAX_NAME_CHARS].strip("-")


def objects(wanted: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the objects for the chart's values."""
    monitors = [_monitor(wanted), kubernetes_picker.monitor(wanted)] if wanted["serviceMonitors"] else []
    jobs = [_download(wanted)] if wanted["weights"]["repository"] else []
    return [
        _deployment(wanted),
        _service(wanted),
        _budget(wanted),
        _scaler(wanted),
        _pool(wanted),
        _route(wanted),
        _policy(wanted),
        _claim(wanted),
        *jobs,
        *kubernetes_picker.objects(wanted),
        *monitors,
    ]


def _engine_labels(wanted: dict[str, Any]) -> dict[str, str]:
    return {"app.kubernetes.io/name": wanted["name"], "app.kubernetes.io/component": "engine"}


def _deployment(wanted: dict[str, Any]) -> dict[str, Any]:
    engine, weights = wanted["engine"], wanted["weights"]
    probe = {"httpGet": {"path": "/health", "port": "http"}, "periodSeconds": _PROBE_S}
    hub = {"HF_HOME": _HUB, "HF_HUB_OFFLINE": "1"} if weights["repository"] else {}
    mounts: list[dict[str, Any]] = [{"name": "tmp", "mountPath": "/tmp"}]
    volumes: list[dict[str, Any]] = [{"name": "tmp", "emptyDir": {}}]
    mounts.append({"name": "weights", "mountPath": "/models", "readOnly": True})
    volumes.append(
        {"name": "weights", "persistentVolumeClaim": {"claimName": f"{wanted['name']}-weights", "readOnly": True}}
    )
    if engine["sharedMemory"]:
        mounts.append({"name": "shared-memory", "mountPath": "/dev/shm"})
        volumes.append({"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": engine["sharedMemory"]}})
    box = {
        "name": "engine",
        "image": engine["image"],
        "args": engine["args"],
        "env": [{"name": key, "value": value} for key, value in (*sorted(engine["env"].items()), *hub.items())],
        "ports": [{"name": "http", "containerPort": PORT}],
        "startupProbe": {**probe, "failureThreshold": engine["startupFailureThreshold"]},
        "readinessProbe": probe,
        "livenessProbe": {**probe, "failureThreshold": 6},
        "resources": engine["resources"],
        "securityContext": restricted(read_only=False),
        "volumeMounts": mounts,
    }
    labels = {**_engine_labels(wanted), RECIPE_LABEL: wanted["recipe"]["name"]}
    head = metadata(wanted, engine["name"], "engine")
    head["labels"][RECIPE_LABEL] = wanted["recipe"]["name"]
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": head,
        "spec": {
            "replicas": engine["replicas"],
            "selector": {"matchLabels": labels},
            "strategy": {"rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}},
            "template": {
                "metadata": {"labels": labels},
                "spec": {
                    "automountServiceAccountToken": False,
                    "securityContext": pod_security(),
                    "terminationGracePeriodSeconds": 660,
                    "containers": [box],
                    "volumes": volumes,
                },
            },
        },
    }


def _service(wanted: dict[str, Any]) -> dict[str, Any]:
    ports = [{"name": "http", "port": 80, "targetPort": "http"}]
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(wanted, wanted["name"], "engine"),
        "spec": {"selector": _engine_labels(wanted), "ports": ports},
    }


def _budget(wanted: dict[str, Any]) -> dict[str, Any]:
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": metadata(wanted, wanted["name"], "engine"),
        "spec": {"minAvailable": 1, "selector": {"matchLabels": _engine_labels(wanted)}},
    }


def _scaler(wanted: dict[str, Any]) -> dict[str, Any]:
    """Return an autoscaler that follows the picker: a target of 1 makes its metric the number of replicas."""
    metric = {
        "type": "External",
        "external": {
            "metric": {"name": kubernetes_picker.METRIC, "selector": {"matchLabels": {"model": wanted["model"]}}},
            "target": {"type": "AverageValue", "averageValue": "1"},
        },
    }
    at_once = {"stabilizationWindowSeconds": 0}  # the picker's metric already waits before it falls
    return {
        "apiVersion": "autoscaling/v2",
        "kind": "HorizontalPodAutoscaler",
        "metadata": metadata(wanted, wanted["name"], "engine"),
        "spec": {
            "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": wanted["engine"]["name"]},
            **wanted["autoscaling"],
            "metrics": [metric],
            "behavior": {"scaleUp": at_once, "scaleDown": at_once},
        },
    }


def _pool(wanted: dict[str, Any]) -> dict[str, Any]:
    return {
        "apiVersion": "inference.networking.k8s.io/v1",
        "kind": "InferencePool",
        "metadata": metadata(wanted, f"{wanted['name']}-pool", "engine"),
        "spec": {
            "selector": {"matchLabels": _engine_labels(wanted)},
            "targetPorts": [{"number": PORT}],
            "endpointPickerRef": {
                "name": f"{wanted['name']}-picker",
                "port": {"number": kubernetes_picker.PORT},
                "failureMode": "FailClose",
            },
        },
    }


def _route(wanted: dict[str, Any]) -> dict[str, Any]:
    """Return the route of the gateway: the paths of the API, without the engine's other ones."""
    paths = ("/v1/chat/completions", "/v1/completions", "/v1/models")
    pool = {"group": "inference.networking.k8s.io", "kind": "InferencePool", "name": f"{wanted['name']}-pool"}
    return {
        "apiVersion": "gateway.networking.k8s.io/v1",
        "kind": "HTTPRoute",
        "metadata": metadata(wanted, wanted["name"], "engine"),
        "spec": {
            "parentRefs": [wanted["gateway"]],
            "rules": [
                {
                    "matches": [{"path": {"type": "Exact", "value": path}} for path in paths],
                    "timeouts": {"request": "0s"},
                    "backendRefs": [pool],
                }
            ],
        },
    }


def _policy(wanted: dict[str, Any]) -> dict[str, Any]:
    """Allow the gateway, the picker's scrapes and Prometheus to reach the engines, and nobody else."""
    picker = {"matchLabels": {"app.kubernetes.io/name": wanted["name"], "app.kubernetes.io/component": "picker"}}
    sources = [
        {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": wanted["gateway"]["namespace"]}}},
        {"podSelector": picker},
        kubernetes_picker.PROMETHEUS,
    ]
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": metadata(wanted, wanted["name"], "engine"),
        "spec": {
            "podSelector": {"matchLabels": _engine_labels(wanted)},
            "policyTypes": ["Ingress"],
            "ingress": [{"from": sources, "ports": [{"port": PORT}]}],
        },
    }


def _claim(wanted: dict[str, Any]) -> dict[str, Any]:
    weights = wanted["weights"]
    named = {"storageClassName": weights["storageClass"]} if weights["storageClass"] else {}
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": metadata(wanted, f"{wanted['name']}-weights", "engine"),
        "spec": {
            "accessModes": [weights["accessMode"]],
            **named,
            "resources": {"requests": {"storage": weights["size"]}},
        },
    }


def _download(wanted: dict[str, Any]) -> dict[str, Any]:
    """Return the job that downloads the weights at the recipe's revision; the engine's image has the hub's client."""
    weights = wanted["weights"]
    revision = ["--revision", weights["revision"]] if weights["revision"] else []
    name = f"{wanted['name']}-download"
    box = {
        "name": "download",
        "image": wanted["engine"]["image"],
        "command": ["hf", "download", weights["repository"], *revision],
        "env": [{"name": "HOME", "value": "/tmp"}, {"name": "HF_HOME", "value": _HUB}],
        "securityContext": restricted(read_only=False),
        "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}, {"name": "weights", "mountPath": "/models"}],
    }
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": metadata(wanted, name, "download"),
        "spec": {
            "backoffLimit": 6,
            "template": {
                "metadata": {"labels": metadata(wanted, name, "download")["labels"]},
                "spec": {
                    "automountServiceAccountToken": False,
                    "restartPolicy": "OnFailure",
                    "securityContext": pod_security(),
                    "containers": [box],
                    "volumes": [
                        {"name": "tmp", "emptyDir": {}},
                        {"name": "weights", "persistentVolumeClaim": {"claimName": f"{wanted['name']}-weights"}},
                    ],
                },
            },
        },
    }


def _monitor(wanted: dict[str, Any]) -> dict[str, Any]:
    return service_monitor(metadata(wanted, wanted["name"], "engine"), _engine_labels(wanted), port="http")
