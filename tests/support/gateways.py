"""Envoy configured as gateways of the Gateway API Inference Extension are, in front of an endpoint picker."""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from powerband.serve import envoy
from support.golden import free_port, wait_for

SUBSET_LIST, SUBSET_TEXT = "x-test-subset-list", "x-test-subset-text"  # request headers that become the subset hint
_SERVED = "x-gateway-destination-endpoint-served"
_NETWORK = "type.googleapis.com/envoy.extensions.filters.network"
_FILTERS = "type.googleapis.com/envoy.extensions.filters.http"


@contextlib.contextmanager
def gateway(
    folder: Path,
    picker: str,
    addresses: Iterable[str],
    *,
    from_metadata: bool = False,
    picker_health: str = "",
) -> Iterator[str]:
    """Run Envoy as a gateway for these addresses; yield its URL.

    `from_metadata`: take the destination from the metadata alone. `picker_health`: several pickers, comma-separated in
    `picker`, of which the gateway uses one that is ready by its health service.
    """
    port = free_port()
    settings = _bootstrap(port, picker, addresses, from_metadata=from_metadata, health=picker_health)
    path = folder / f"gateway-{port}.json"
    path.write_text(json.dumps(settings))
    argv = [envoy.program(), "-c", str(path), "--disable-hot-restart", "--log-level", "error", "--concurrency", "1"]
    process = subprocess.Popen(argv)
    try:
        wait_for(port)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def _bootstrap(port: int, picker: str, addresses: Iterable[str], *, from_metadata: bool, health: str) -> dict[str, Any]:
    picker_cluster: dict[str, Any] = {
        "name": "picker",
        "type": "STATIC",
        "connect_timeout": "1s",
        "typed_extension_protocol_options": {
            "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": {
                "@type": "type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions",
                "explicit_http_config": {"http2_protocol_options": {}},
            }
        },
        "circuit_breakers": {"thresholds": [dict.fromkeys(_LIMITS, 1_000_000)]},
        "load_assignment": _assignment("picker", picker.split(","), health_ports=health.split(",") if health else []),
    }
    if health:
        picker_cluster["health_checks"] = [
            {
                "timeout": "1s",
                "interval": "0.2s",
                "unhealthy_threshold": 1,
                "healthy_threshold": 1,
                "grpc_health_check": {"service_name": "envoy.service.ext_proc.v3.ExternalProcessor"},
            }
        ]
        picker_cluster["common_lb_config"] = {"healthy_panic_threshold": {"value": 0}}
    return {
        "admin": {"address": _address("127.0.0.1", free_port())},
        "node": {"id": "gateway", "cluster": "gateway"},
        "static_resources": {
            "listeners": [
                {
                    "name": "gateway",
                    "address": _address("127.0.0.1", port),
                    "filter_chains": [{"filters": [_connection_manager()]}],
                }
            ],
            "clusters": [picker_cluster, _pool(addresses, from_metadata=from_metadata)],
        },
    }


_LIMITS = ("max_connections", "max_pending_requests", "max_requests", "max_retries")


def _connection_manager() -> dict[str, Any]:
    return {
        "name": "envoy.filters.network.http_connection_manager",
        "typed_config": {
            "@type": f"{_NETWORK}.http_connection_manager.v3.HttpConnectionManager",
            "stat_prefix": "gateway",
            "generate_request_id": False,
            "http_filters": [
                _filter("header_to_metadata", "header_to_metadata.v3.Config", request_rules=_HINTS),
                _ext_proc(),
                # nearer to the router, so it reads the answer before ext_proc does
                _filter("served", "header_to_metadata.v3.Config", response_rules=_SERVED_RULES),
                _filter("envoy.filters.http.router", "router.v3.Router", suppress_envoy_headers=True),
            ],
            "route_config": {
                "virtual_hosts": [
                    {
                        "name": "all",
                        "domains": ["*"],
                        "response_headers_to_add": [
                            {
                                "header": {"key": _SERVED, "value": "%UPSTREAM_REMOTE_ADDRESS%"},
                                "append_action": _OVERWRITE,
                            }
                        ],
                        "routes": [
                            {
                                "match": {"prefix": "/"},
                                "route": {
                                    "cluster": "pool",
                                    "timeout": "0s",
                                    "retry_policy": {
                                        "retry_on": "connect-failure,refused-stream,reset",
                                        "num_retries": 3,
                                        "retry_back_off": {"base_interval": "0.005s", "max_interval": "0.01s"},
                                    },
                                },
                            }
                        ],
                    }
                ]
            },
        },
    }


_OVERWRITE = "OVERWRITE_IF_EXISTS_OR_ADD"
_HINTS = [
    {
        "header": header,
        "on_header_present": {
            "metadata_namespace": "envoy.lb.subset_hint",
            "key": "x-gateway-destination-endpoint-subset",
            **kind,
        },
        "remove": True,
    }
    for header, kind in (
        (SUBSET_LIST, {"type": "PROTOBUF_VALUE", "encode": "BASE64"}),
        (SUBSET_TEXT, {"type": "STRING"}),
    )
]
_SERVED_RULES = [
    {
        "header": _SERVED,
        "on_header_present": {"metadata_namespace": "envoy.lb", "key": _SERVED, "type": "STRING"},
        "remove": True,
    }
]


def _ext_proc() -> dict[str, Any]:
    return _filter(
        "envoy.filters.http.ext_proc",
        "ext_proc.v3.ExternalProcessor",
        grpc_service={"envoy_grpc": {"cluster_name": "picker"}},
        processing_mode={
            "request_header_mode": "SEND",
            "request_body_mode": "FULL_DUPLEX_STREAMED",
            "request_trailer_mode": "SEND",
            "response_header_mode": "SEND",
            "response_body_mode": "FULL_DUPLEX_STREAMED",
            "response_trailer_mode": "SEND",
        },
        message_timeout="1000s",
        metadata_options={
            "forwarding_namespaces": {"untyped": ["envoy.lb", "envoy.lb.subset_hint"]},
            "receiving_namespaces": {"untyped": ["envoy.lb"]},
        },
        mutation_rules={"allow_all_routing": True},
    )


def _filter(name: str, kind: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "typed_config": {"@type": f"{_FILTERS}.{kind}", **more}}


def _pool(addresses: Iterable[str], *, from_metadata: bool) -> dict[str, Any]:
    metadata = {"metadata": {"key": "envoy.lb", "path": [{"key": envoy.DESTINATION}]}}
    policies = "type.googleapis.com/envoy.extensions.load_balancing_policies"
    fallback = {
        "typed_extension_config": {
            "name": "envoy.load_balancing_policies.round_robin",
            "typed_config": {"@type": f"{policies}.round_robin.v3.RoundRobin"},
        }
    }
    chosen = {
        "name": "envoy.load_balancing_policies.override_host",
        "typed_config": {
            "@type": f"{policies}.override_host.v3.OverrideHost",
            "override_host_sources": [metadata if from_metadata else {"header": envoy.DESTINATION}],
            "fallback_policy": {"policies": [fallback]},
        },
    }
    return {
        "name": "pool",
        "type": "STATIC",
        "connect_timeout": "1s",
        "circuit_breakers": {"thresholds": [dict.fromkeys(_LIMITS, 1_000_000)]},
        "load_assignment": _assignment("pool", addresses),
        "load_balancing_policy": {"policies": [{"typed_extension_config": chosen}]},
    }


def _assignment(name: str, addresses: Iterable[str], *, health_ports: Iterable[str] = ()) -> dict[str, Any]:
    ports = list(health_ports)
    rows = []
    for number, address in enumerate(addresses):
        host, _, port = address.rpartition(":")
        endpoint: dict[str, Any] = {"address": _address(host, int(port))}
        if ports:
            endpoint["health_check_config"] = {"port_value": int(ports[number])}
        rows.append({"endpoint": endpoint})
    return {"cluster_name": name, "endpoints": [{"lb_endpoints": rows}]}


def _address(host: str, port: int) -> dict[str, Any]:
    return {"socket_address": {"address": host, "port_value": port}}
