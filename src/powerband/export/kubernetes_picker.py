"""The objects of the endpoint picker on Kubernetes: its pods, their rights, and what they export."""

from __future__ import annotations

from typing import Any

from powerband.export.kubernetes_objects import metadata, pod_security, restricted, service_monitor

PORT, HEALTH_PORT, METRICS_PORT = 9002, 9003, 9090
METRIC = "powerband_replicas_wanted"
PROMETHEUS = {  # any namespace: it is not known where Prometheus runs
    "namespaceSelector": {},
    "podSelector": {"matchLabels": {"app.kubernetes.io/name": "prometheus"}},
}
# Values of the chart prometheus-adapter: Prometheus' series as the external metric that the autoscaler reads.
ADAPTER = {
    "rules": {
        "external": [
            {
                "seriesQuery": f'{METRIC}{{namespace!="",model!=""}}',
                "resources": {"overrides": {"namespace": {"resource": "namespace"}}},
                "metricsQuery": "max by (<<.GroupBy>>, model) (<<.Series>>{<<.LabelMatchers>>})",
            }
        ]
    }
}
_RECIPES = "/etc/powerband/recipes"
_STATE = "/var/lib/powerband"  # of the image


def objects(wanted: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the picker's objects.

    There is no PodDisruptionBudget. Only the leader is ready: a budget would keep every node from being drained, or
    allow everything. A follower takes over.
    """
    return [
        _recipes(wanted),
        _account(wanted),
        _role(wanted),
        _binding(wanted),
        _deployment(wanted),
        _service(wanted),
        _policy(wanted),
    ]


def _name(wanted: dict[str, Any]) -> str:
    return f"{wanted['name']}-picker"


def _labels(wanted: dict[str, Any]) -> dict[str, str]:
    return {"app.kubernetes.io/name": wanted["name"], "app.kubernetes.io/component": "picker"}


def _object(wanted: dict[str, Any], version: str, kind: str, name: str = "", **fields: Any) -> dict[str, Any]:
    head = metadata(wanted, name or _name(wanted), "picker")
    return {"apiVersion": version, "kind": kind, "metadata": head, **fields}


def _recipes(wanted: dict[str, Any]) -> dict[str, Any]:
    """Return the recipes that the picker knows, one for each key; the picker notices changes."""
    recipe = wanted["recipe"]
    return _object(
        wanted, "v1", "ConfigMap", f"{wanted['name']}-recipes", data={f"{recipe['name']}.yaml": recipe["file"]}
    )


def _account(wanted: dict[str, Any]) -> dict[str, Any]:
    return _object(wanted, "v1", "ServiceAccount", automountServiceAccountToken=False)


def _role(wanted: dict[str, Any]) -> dict[str, Any]:
    """Return the rights: to read the pods and one pool, and to hold one lease."""
    pool, leases = "inference.networking.k8s.io", "coordination.k8s.io"
    own = {"resourceNames": [_name(wanted)]}
    rules = [
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["list", "watch"]},
        {
            "apiGroups": [pool],
            "resources": ["inferencepools"],
            "resourceNames": [f"{wanted['name']}-pool"],
            "verbs": ["list", "watch"],
        },
        {"apiGroups": [leases], "resources": ["leases"], **own, "verbs": ["get", "list", "watch", "update"]},
        {"apiGroups": [leases], "resources": ["leases"], "verbs": ["create"]},  # this verb knows no name
    ]
    return _object(wanted, "rbac.authorization.k8s.io/v1", "Role", rules=rules)


def _binding(wanted: dict[str, Any]) -> dict[str, Any]:
    group, name = "rbac.authorization.k8s.io", _name(wanted)
    return _object(
        wanted,
        f"{group}/v1",
        "RoleBinding",
        roleRef={"apiGroup": group, "kind": "Role", "name": name},
        subjects=[{"kind": "ServiceAccount", "name": name}],
    )


def _deployment(wanted: dict[str, Any]) -> dict[str, Any]:
    picker, scaling = wanted["picker"], wanted["autoscaling"]
    options = {
        "--recipe": _RECIPES,
        "--pool": f"{wanted['name']}-pool",
        "--lease": _name(wanted),
        "--lease-duration": picker["leaseDuration"],
        "--identity": "$(POD_NAME)",
        "--min-replicas": str(scaling["minReplicas"]),
        "--max-replicas": str(scaling["maxReplicas"]),
    }
    page = {"port": "metrics"}
    box = {
        "name": "picker",
        "image": picker["image"],
        "args": ["picker", *(word for option in options.items() for word in option)],
        "env": [{"name": "POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}],
        "ports": [
            {"name": "ext-proc", "containerPort": PORT},
            {"name": "health", "containerPort": HEALTH_PORT},
            {"name": "metrics", "containerPort": METRICS_PORT},
        ],
        "livenessProbe": {"httpGet": {"path": "/livez", **page}, "periodSeconds": 10},
        "readinessProbe": {"httpGet": {"path": "/readyz", **page}, "periodSeconds": 1, "failureThreshold": 1},
        "resources": {"requests": {"cpu": "500m", "memory": "256Mi"}, "limits": {"memory": "1Gi"}},
        "securityContext": restricted(read_only=True),
        "volumeMounts": [
            {"name": "recipes", "mountPath": _RECIPES, "readOnly": True},
            {"name": "state", "mountPath": _STATE},
            {"name": "tmp", "mountPath": "/tmp"},
        ],
    }
    spec = {
        "serviceAccountName": _name(wanted),
        "automountServiceAccountToken": True,
        "securityContext": pod_security(),
        "terminationGracePeriodSeconds": 660,
        "containers": [box],
        "volumes": [
            {"name": "recipes", "configMap": {"name": f"{wanted['name']}-recipes"}},
            {"name": "state", "emptyDir": {}},
            {"name": "tmp", "emptyDir": {}},
        ],
    }
    return _object(
        wanted,
        "apps/v1",
        "Deployment",
        spec={
            "replicas": picker["replicas"],
            "selector": {"matchLabels": _labels(wanted)},
            # a follower is never ready: a rollout must not wait for it
            "strategy": {"rollingUpdate": {"maxUnavailable": "50%", "maxSurge": 1}},
            "template": {"metadata": {"labels": _labels(wanted)}, "spec": spec},
        },
    )


def _service(wanted: dict[str, Any]) -> dict[str, Any]:
    ports = [
        {"name": "ext-proc", "port": PORT, "targetPort": "ext-proc", "appProtocol": "kubernetes.io/h2c"},
        {"name": "metrics", "port": METRICS_PORT, "targetPort": "metrics"},
    ]
    return _object(wanted, "v1", "Service", spec={"selector": _labels(wanted), "ports": ports})


def _policy(wanted: dict[str, Any]) -> dict[str, Any]:
    """Allow the gateway to ask and Prometheus to scrape; let the picker reach engines, API server and DNS."""
    gateway = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": wanted["gateway"]["namespace"]}}}
    engines = {"matchLabels": {"app.kubernetes.io/name": wanted["name"], "app.kubernetes.io/component": "engine"}}
    dns = [{"port": 53, "protocol": "UDP"}, {"port": 53, "protocol": "TCP"}]
    spec = {
        "podSelector": {"matchLabels": _labels(wanted)},
        "policyTypes": ["Ingress", "Egress"],
        "ingress": [
            {"from": [gateway], "ports": [{"port": PORT}, {"port": HEALTH_PORT}]},
            {"from": [PROMETHEUS], "ports": [{"port": METRICS_PORT}]},
        ],
        "egress": [
            {"to": [{"podSelector": engines}], "ports": [{"port": 8000}]},
            {"ports": [*dns, {"port": 443}, {"port": 6443}]},  # the API server has no labels to select it by
        ],
    }
    return _object(wanted, "networking.k8s.io/v1", "NetworkPolicy", spec=spec)


def monitor(wanted: dict[str, Any]) -> dict[str, Any]:
    """Return the scrape job of the picker."""
    return service_monitor(metadata(wanted, _name(wanted), "picker"), _labels(wanted), port="metrics")
