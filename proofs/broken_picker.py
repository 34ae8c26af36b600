"""`powerband` with one part of the endpoint picker protocol broken: broken_picker.py DEFECT ARGS..."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from powerband.cli import main
from powerband.serve.discovery import kubernetes
from powerband.serve.discovery.lease import Lease
from powerband.serve.router import endpoint_protocol, grpc_health
from powerband.serve.router.endpoint_protocol import EndpointPicker
from powerband.serve.router.pool import EndpointPool
from powerband.serve.router.scheduler import RequestScheduler


def without_body() -> None:
    endpoint_protocol._body_chunks = lambda body, *, last: iter(())


def without_end_of_stream() -> None:
    whole = endpoint_protocol._body_chunks
    endpoint_protocol._body_chunks = lambda body, *, last: whole(body, last=False)


def without_subset() -> None:
    endpoint_protocol._subset_of = lambda message: None


def subset_without_strings() -> None:
    def read(message: Any) -> frozenset[str] | None:
        fields = message.metadata_context.filter_metadata["envoy.lb.subset_hint"].fields
        hint = fields["x-gateway-destination-endpoint-subset"] if fields else None
        return (
            frozenset(one.string_value for one in hint.list_value.values) if hint and hint.list_value.values else None
        )

    endpoint_protocol._subset_of = read


def without_header() -> None:
    whole = endpoint_protocol._route_to

    def route(decision: Any, **more: Any) -> Any:
        response = whole(decision, **more)
        del response.request_headers.response.header_mutation.set_headers[:]
        return response

    endpoint_protocol._route_to = route


def without_metadata() -> None:
    whole = endpoint_protocol._route_to

    def route(decision: Any, **more: Any) -> Any:
        response = whole(decision, **more)
        response.ClearField("dynamic_metadata")
        return response

    endpoint_protocol._route_to = route


def without_fallbacks() -> None:
    whole = endpoint_protocol._route_to
    endpoint_protocol._route_to = lambda decision, **more: whole(
        replace(decision, addresses=decision.addresses[:1]), **more
    )


def without_503() -> None:
    whole = RequestScheduler.__init__

    def begin(self: Any, *args: Any, **more: Any) -> None:
        whole(self, *args, **{**more, "waits_for_replicas": True})

    RequestScheduler.__init__ = begin  # type: ignore[method-assign]


def without_429() -> None:
    EndpointPool.predicted_wait_s = lambda self, priority, now_s: 0.0  # type: ignore[method-assign]
    EndpointPool.pop_expired = lambda self, now_s: iter(())  # type: ignore[method-assign]


def without_served() -> None:
    EndpointPicker._served = lambda self, request_id, message, decision: decision  # type: ignore[method-assign]


def always_serving() -> None:
    grpc_health.HealthService._status = lambda self, service: 1  # type: ignore[method-assign]


def without_conformance() -> None:
    EndpointPicker._chosen_by_test = (  # type: ignore[method-assign]
        lambda self, wanted, subset: self.scheduler.any_endpoint(subset)
    )


def first_port_only() -> None:
    whole = kubernetes.endpoints
    kubernetes.endpoints = lambda pods, ports: whole(pods, ports[:1])


def terminating_is_ready() -> None:
    whole = kubernetes.endpoints

    def found(pods: Any, ports: Any) -> Any:
        return whole(
            [
                {**one, "metadata": {k: v for k, v in one["metadata"].items() if k != "deletionTimestamp"}}
                for one in pods
            ],
            ports,
        )

    kubernetes.endpoints = found


def unready_is_ready() -> None:
    whole = kubernetes.endpoints
    kubernetes.endpoints = lambda pods, ports: [replace(one, ready=True) for one in whole(pods, ports)]


def everybody_leads() -> None:
    Lease.held = lambda self: True  # type: ignore[method-assign]


DEFECTS: dict[str, Callable[[], None]] = {
    one.__name__: one
    for one in (
        without_body, without_end_of_stream, without_subset, subset_without_strings, without_header, without_metadata,
        without_fallbacks, without_503, without_429, without_served, always_serving, without_conformance,
        first_port_only, terminating_is_ready, unready_is_ready, everybody_leads,
    )
}  # fmt: skip

if __name__ == "__main__":
    DEFECTS[sys.argv.pop(1)]()
    main.main()
