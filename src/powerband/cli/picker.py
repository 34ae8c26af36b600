"""`powerband picker`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from powerband.cli import options
from powerband.cli.output import emit, stderr

if TYPE_CHECKING:
    from powerband.serve.discovery import Source
    from powerband.serve.discovery.api_server import Credentials


def picker(
    *,
    recipe: Annotated[
        list[str], typer.Option(metavar="FILE", help="A recipe.yaml that endpoints serve; repeatable; reloaded.")
    ],
    pool: Annotated[str | None, typer.Option(metavar="NAME", help="Endpoints: the pods of this InferencePool.")] = None,
    selector: Annotated[
        str | None, typer.Option(metavar="KEY=VALUE,...", help="Endpoints: pods with these labels; with --target-port.")
    ] = None,
    target_port: Annotated[
        list[int] | None, typer.Option(min=1, max=65535, metavar="PORT", help="Port of the pods; repeatable.")
    ] = None,
    dns: Annotated[
        str | None, typer.Option(metavar="NAME:PORT", help="Endpoints: every address of this DNS name.")
    ] = None,
    endpoints: Annotated[
        str | None, typer.Option(metavar="FILE", help="Endpoints: a YAML list of IP:PORT; reloaded on change.")
    ] = None,
    namespace: Annotated[
        str | None, typer.Option(metavar="NAME", help="Namespace of pool, pods and lease.", show_default="the pod's")
    ] = None,
    kubeconfig: Annotated[
        str | None, typer.Option(metavar="FILE", help="Access to Kubernetes.", show_default="the pod's service account")
    ] = None,
    lease: Annotated[
        str | None, typer.Option(metavar="NAME", help="Elect one of several pickers by this Lease.")
    ] = None,
    identity: Annotated[
        str | None, typer.Option(metavar="NAME", help="Name of this picker in the lease.", show_default="host name")
    ] = None,
    lease_duration: Annotated[
        str, typer.Option(metavar="DURATION", help="Another picker takes over after this time.")
    ] = "5s",
    tenants: Annotated[
        str | None, typer.Option(metavar="FILE", help="A tenants.yaml with API keys and limits; reloaded on change.")
    ] = None,
    canary_weight: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=1,
            metavar="SHARE",
            help="Share of requests for endpoints with another than the first recipe.",
            show_default="by load",
        ),
    ] = None,
    min_replicas: Annotated[
        int, typer.Option(min=0, metavar="N", help="Lower limit of the metric powerband_replicas_wanted.")
    ] = 1,
    max_replicas: Annotated[
        int, typer.Option(min=1, metavar="N", help="Upper limit of the metric powerband_replicas_wanted.")
    ] = 100,
    host: Annotated[str, typer.Option(metavar="ADDRESS", help="Address to listen on.")] = "0.0.0.0",
    port: Annotated[int, typer.Option(metavar="PORT", help="Port for gateways (ext_proc).")] = 9002,
    health_port: Annotated[int, typer.Option(metavar="PORT", help="Port for health checks (gRPC).")] = 9003,
    metrics_port: Annotated[int, typer.Option(metavar="PORT", help="Port for Prometheus (HTTP).")] = 9090,
    scrape_interval: Annotated[
        str, typer.Option(metavar="DURATION", help="Time between two readings of an endpoint's metrics.")
    ] = "5s",
    notice: Annotated[
        str, typer.Option(metavar="DURATION", help="At the end: accept requests for so long while not ready.")
    ] = "5s",
    drain_timeout: Annotated[
        str, typer.Option(metavar="DURATION", help="At the end: maximum time for the requests in progress.")
    ] = "10min",
    conformance_header: Annotated[
        bool,
        typer.Option(
            "--conformance-header",
            help="Obey the header test-epp-endpoint-selection of the conformance tests. Not for production.",
        ),
    ] = False,
    json: options.Json = False,
) -> None:
    """Choose endpoints for a gateway, on Kubernetes or elsewhere.

    Endpoints come from one of --pool, --selector, --dns and --endpoints.
    """
    import asyncio
    import socket
    from pathlib import Path

    from powerband import inputs
    from powerband.errors import EngineMissing
    from powerband.serve.discovery.lease import Lease

    try:
        from powerband.serve.router.standalone import PickerSpec, run
    except ModuleNotFoundError as error:
        raise EngineMissing(f"{error.name} is not installed", hint="run: pip install 'powerband[serve]'") from None

    in_cluster = pool or selector or lease
    credentials = _credentials(kubeconfig) if in_cluster else None
    where = namespace or (credentials.namespace if credentials else "")
    election = None
    if lease and credentials:
        election = Lease(
            credentials, where, lease, identity or socket.gethostname(), duration_s=inputs.seconds(lease_duration)
        )
    spec = PickerSpec(
        recipes=tuple(map(Path, recipe)),
        source=_source(pool, selector, tuple(target_port or ()), dns, endpoints, credentials, where),
        lease=election,
        tenants=Path(tenants) if tenants else None,
        host=host,
        port=port,
        health_port=health_port,
        metrics_port=metrics_port,
        scrape_interval_s=inputs.seconds(scrape_interval),
        min_replicas=min_replicas,
        max_replicas=max_replicas,
        canary_weight=canary_weight,
        notice_s=inputs.seconds(notice),
        drain_timeout_s=inputs.seconds(drain_timeout),
        conformance=conformance_header,
    )

    def report(message: str) -> None:
        if json:
            emit({"event": message.partition(" ")[0].rstrip(":"), "message": message})
        else:
            stderr().print(message, soft_wrap=True)

    asyncio.run(run(spec, report=report))


def _credentials(kubeconfig: str | None) -> Credentials:
    from pathlib import Path

    from powerband.serve.discovery.api_server import Credentials

    return Credentials.from_kubeconfig(Path(kubeconfig)) if kubeconfig else Credentials.in_cluster()


def _source(
    pool: str | None,
    selector: str | None,
    ports: tuple[int, ...],
    dns: str | None,
    endpoints: str | None,
    credentials: Credentials | None,
    namespace: str,
) -> Source:
    """Return the source of endpoints that the options name."""
    from pathlib import Path

    from powerband.errors import InputError
    from powerband.serve.discovery.dns import HeadlessName
    from powerband.serve.discovery.file import EndpointsFile, is_address
    from powerband.serve.discovery.kubernetes import PoolPods

    given = [one for one in (pool, selector, dns, endpoints) if one]
    if len(given) != 1:
        raise InputError(
            f"{len(given)} sources of endpoints are given; a picker has one",
            hint="give one of --pool, --selector, --dns and --endpoints",
        )
    if bool(selector) != bool(ports):
        raise InputError("--selector and --target-port belong together", hint="an InferencePool (--pool) has both")
    if endpoints:
        return EndpointsFile(Path(endpoints))
    if dns:
        if not is_address(dns):
            raise InputError(f"'{dns}' is not NAME:PORT", hint="give the port of the endpoints: --dns engines:8000")
        name, _, port = dns.rpartition(":")
        return HeadlessName(name, int(port))
    assert credentials is not None
    return PoolPods(credentials, namespace, pool=pool or "", selector=selector or "", ports=ports)
