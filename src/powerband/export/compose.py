"""Docker Compose: the engine, Prometheus and Grafana."""

from __future__ import annotations

from typing import Any

from powerband.core.recipe import Recipe
from powerband.export import alerts, grafana
from powerband.export.container import PORT, Container, container, to_yaml

_DASHBOARDS = "/var/lib/grafana/dashboards"
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
            "image": "prom/prometheus",
            "volumes": [
                "./prometheus.yaml:/etc/prometheus/prometheus.yml:ro",
                "./names.yaml:/etc/prometheus/names.yaml:ro",
                "./alerts.yaml:/etc/prometheus/alerts.yaml:ro",
            ],
            "ports": ["127.0.0.1:9090:9090"],
        },
        "grafana": {
            "image": "grafana/grafana",
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
        **alerts.recording_rules(recipe.deployment["engine"]),
        **alerts.files(recipe),
        **grafana.files(recipe),
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
            "start_period": "600s",
        },
        "restart": "unless-stopped",
    }
    if one.weights:
        found["volumes"] = [f"{one.weights}:{one.mount_path}:ro"]
    if one.gpus:
        devices = [{"driver": "nvidia", "count": one.gpus, "capabilities": ["gpu"]}]
        found["deploy"] = {"resources": {"reservations": {"devices": devices}}}
    return found
