"""Kubernetes: Deployment, Service, PodDisruptionBudget, HorizontalPodAutoscaler and InferencePool."""

from __future__ import annotations

import math
from typing import Any

from powerband.core.recipe import Recipe
from powerband.export import alerts
from powerband.export.container import PORT, Container, container, to_yaml

_PICKER = "powerband-picker"
_PROBE_S = 5  # between two health checks
_MEMORY_MARGIN = 1.25  # requested memory over measured memory


def files(recipe: Recipe) -> dict[str, str]:
    """Return the manifests."""
    one = container(recipe)
    manifests = to_yaml(_deployment(one), _service(one), _budget(one), _scaler(one, recipe), _pool(one))
    return {"kubernetes.yaml": manifests, **alerts.engine_files(recipe, one.name)}


def _meta(one: Container, suffix: str = "") -> dict[str, Any]:
    return {"name": f"{one.name}{suffix}", "labels": _labels(one)}


def _labels(one: Container) -> dict[str, str]:
    return {"app.kubernetes.io/name": one.name, "app.kubernetes.io/managed-by": "powerband"}


def _deployment(one: Container) -> dict[str, Any]:
    probe = {"httpGet": {"path": "/health", "port": "http"}, "periodSeconds": _PROBE_S}
    resources: dict[str, Any] = {}
    if one.memory_bytes:
        resources = {"requests": {"memory": f"{int(_MEMORY_MARGIN * one.memory_bytes) // 2**20}Mi"}}
    if one.gpus:
        resources["limits"] = {f"{one.vendor}.com/gpu": str(one.gpus)}  # the resource of the vendor's device plugin
    engine = {
        "name": "engine",
        "image": one.image,
        "args": list(one.args),
        "env": [{"name": key, "value": value} for key, value in one.env.items()],
        "ports": [{"name": "http", "containerPort": PORT}],
        "startupProbe": {**probe, "failureThreshold": math.ceil(one.start_timeout_s / _PROBE_S)},
        "readinessProbe": probe,
        "livenessProbe": {**probe, "failureThreshold": 6},
        "resources": resources,
    }
    pod: dict[str, Any] = {"terminationGracePeriodSeconds": 660, "containers": [engine]}
    if mounts := _mounts(one):
        engine["volumeMounts"] = [{"name": name, **mount} for name, (mount, _) in mounts.items()]
        pod["volumes"] = [{"name": name, **volume} for name, (_, volume) in mounts.items()]
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": _meta(one),
        "spec": {
            "replicas": 2,
            "selector": {"matchLabels": {"app.kubernetes.io/name": one.name}},
            "strategy": {"rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}},
            "template": {"metadata": {"labels": _labels(one)}, "spec": pod},
        },
    }


def _mounts(one: Container) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """Return mount and volume of the weights and of the shared memory, by name."""
    found: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {}
    if one.weights:
        found["weights"] = ({"mountPath": one.mount_path, "readOnly": True}, {"hostPath": {"path": one.weights}})
    if one.shared_memory_bytes:
        size = f"{one.shared_memory_bytes // 2**30}Gi"
        found["shared-memory"] = ({"mountPath": "/dev/shm"}, {"emptyDir": {"medium": "Memory", "sizeLimit": size}})
    return found


def _service(one: Container) -> dict[str, Any]:
    ports = [{"name": "http", "port": 80, "targetPort": "http"}]
    selector = {"app.kubernetes.io/name": one.name}
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _meta(one),
        "spec": {"selector": selector, "ports": ports},
    }


def _budget(one: Container) -> dict[str, Any]:
    selector = {"matchLabels": {"app.kubernetes.io/name": one.name}}
    spec = {"minAvailable": 1, "selector": selector}
    return {"apiVersion": "policy/v1", "kind": "PodDisruptionBudget", "metadata": _meta(one), "spec": spec}


def _scaler(one: Container, recipe: Recipe) -> dict[str, Any]:
    """Return an autoscaler whose target is the measured concurrency of one replica.

    The metric comes from Prometheus, through an adapter such as prometheus-adapter or KEDA.
    """
    metric = {
        "type": "Pods",
        "pods": {
            "metric": {"name": "powerband_running"},
            "target": {"type": "AverageValue", "averageValue": str(recipe.promise.in_flight or 1)},
        },
    }
    target = {"apiVersion": "apps/v1", "kind": "Deployment", "name": one.name}
    spec = {"scaleTargetRef": target, "minReplicas": 2, "maxReplicas": 10, "metrics": [metric]}
    return {"apiVersion": "autoscaling/v2", "kind": "HorizontalPodAutoscaler", "metadata": _meta(one), "spec": spec}


def _pool(one: Container) -> dict[str, Any]:
    """Return an InferencePool of the Gateway API Inference Extension, with our picker."""
    return {
        "apiVersion": "inference.networking.k8s.io/v1",
        "kind": "InferencePool",
        "metadata": _meta(one, "-pool"),
        "spec": {
            "selector": {"matchLabels": {"app.kubernetes.io/name": one.name}},
            "targetPorts": [{"number": PORT}],
            "endpointPickerRef": {"name": _PICKER, "port": {"number": 9002}},
        },
    }
