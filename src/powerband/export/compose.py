"""Docker Compose: the engine, Prometheus and Grafana."""

from __future__ import annotations

import math
from typing import Any

from powerband.core.recipe import Recipe
from powerband.export import alerts, grafana, recording
from powerband.export.container import PORT, Container, container, to_yaml

_DASHBOARDS = "/var/lib/grafana/dashboards"
_AMD_GROUPS = [  # as numbers of the host: the images do not define them
    f"${{{name.upper()}_GID:?set it to the number that 'getent group {name}' prints}}" for name in ("video", "render")
]
_DATASOURCE = {
    "name": "prometheus",
    "type": "prometheus",
    "access": "proxy",
    "url": "http://prometheus:9090",
    "isDefault": True,
}


def files(recipe: Recipe) -> dict[str, str]:
    """Return the Compose file and the files that it mounts."""
    one = container(recipe)
    scrape = {
        "global": {"scrape_interval": "5s"},
        "rule_files": ["/etc/prometheus/names.yaml", "/etc/prometheus/alerts.yaml"],
        "scrape_configs": [{"job_name": one.name, "static_configs": [{"targets": [f"{one.name}:{PORT}"]}]}],
    }
    services = {
        one.name: _engine(one),
        "prometheus": {
            "image": "prom/prometheus:v3.5.0",
            "volumes": [
                "./prometheus.yaml:/etc/prometheus/prometheus.yml:ro",
                "./names.yaml:/etc/prometheus/names.yaml:ro",
                "./alerts.yaml:/etc/prometheus/alerts.yaml:ro",
            ],
            "ports": ["127.0.0.1:9090:9090"],
        },
        "grafana": {
            "image": "grafana/grafana:12.3.0",
            "environment": {"GF_AUTH_ANONYMOUS_ENABLED": "true"},
            "volumes": [
                "./datasource.yaml:/etc/grafana/provisioning/datasources/powerband.yaml:ro",
                "./provider.yaml:/etc/grafana/provisioning/dashboards/powerband.yaml:ro",
                f"./dashboard.json:{_DASHBOARDS}/powerband.json:ro",
            ],
            "ports": ["127.0.0.1:3000:3000"],
        },
    }
    return {
        "compose.yaml": to_yaml({"name": f"powerband-{one.name}", "services": services}),
        "prometheus.yaml": to_yaml(scrape),
        "datasource.yaml": to_yaml({"apiVersion": 1, "datasources": [_DATASOURCE]}),
        "provider.yaml": to_yaml(
            {"apiVersion": 1, "providers": [{"name": "powerband", "options": {"path": _DASHBOARDS}}]}
        ),
        **alerts.engine_files(recipe, one.name),
        **grafana.files(recipe, recorded=recording.recorded(recipe, one.name)),
    }


def _engine(one: Container) -> dict[str, Any]:
    found: dict[str, Any] = {
        "image": one.image,
        "command": [arg.replace("$", "$$") for arg in one.args],
        "environment": one.env,
        "ports": [f"127.0.0.1:{PORT}:{PORT}"],
        "healthcheck": {
            "test": ["CMD", "curl", "-fs", f"http://127.0.0.1:{PORT}/health"],
            "interval": "5s",
            "start_period": f"{math.ceil(one.start_timeout_s)}s",
        },
        "restart": "unless-stopped",
    }
    if one.weights:
        found["volumes"] = [f"{one.weights}:{one.mount_path}:ro"]
    if one.shared_memory_bytes:
        found["shm_size"] = f"{one.shared_memory_bytes // 2**30}gb"
    return found | _devices(one)


def _devices(one: Container) -> dict[str, Any]:
    """Return the keys that give a service its GPUs."""
    if not one.gpus:
        return {}
    if one.vendor == "amd":
        indices = ",".join(map(str, range(one.gpus)))
        return {
            "devices": ["/dev/kfd", "/dev/dri"],
            "group_add": _AMD_GROUPS,
            "environment": {**one.env, "HIP_VISIBLE_DEVICES": indices},  # Compose cannot reserve a number of AMD GPUs
        }
    reserved = [{"driver": "nvidia", "count": one.gpus, "capabilities": ["gpu"]}]
    return {"deploy": {"resources": {"reservations": {"devices": reserved}}}}
