"""What several Kubernetes objects share: names, labels, and the rules of the Pod Security Standard `restricted`."""

from __future__ import annotations

from typing import Any

_USER = 10001


def metadata(wanted: dict[str, Any], name: str, component: str) -> dict[str, Any]:
    """Return the name and labels of an object."""
    return {
        "name": name,
        "labels": {
            "app.kubernetes.io/name": wanted["name"],
            "app.kubernetes.io/component": component,
            "app.kubernetes.io/managed-by": "powerband",
        },
    }


def restricted(*, read_only: bool) -> dict[str, Any]:
    """Return a container's security context as the Pod Security Standard `restricted` demands it."""
    return {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": read_only,
        "capabilities": {"drop": ["ALL"]},
    }


def pod_security() -> dict[str, Any]:
    """Return a pod's security context as the Pod Security Standard `restricted` demands it."""
    return {
        "runAsNonRoot": True,
        "runAsUser": _USER,
        "runAsGroup": _USER,
        "fsGroup": _USER,
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def service_monitor(head: dict[str, Any], labels: dict[str, str], *, port: str) -> dict[str, Any]:
    """Return a scrape job of the Prometheus operator for a Service with these labels."""
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "ServiceMonitor",
        "metadata": head,
        "spec": {
            "jobLabel": "app.kubernetes.io/name",
            "selector": {"matchLabels": labels},
            "endpoints": [{"port": port, "interval": "5s"}],
        },
    }
