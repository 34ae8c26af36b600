"""The process of `powerband picker`: an endpoint picker for a gateway, without a supervisor."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc
from envoy.service.ext_proc.v3 import external_processor_pb2_grpc

from powerband.core.fleet import Tenants
from powerband.errors import InputError
from powerband.serve.discovery import Source
from powerband.serve.discovery.lease import Lease
from powerband.serve.router import tracing
from powerband.serve.router.admission import load_tenants
from powerband.serve.router.endpoint_protocol import EndpointPicker
from powerband.serve.router.endpoint_table import EndpointTable, KnownRecipes, recipe_files
from powerband.serve.router.grpc_health import HealthService
from powerband.serve.router.pages import serve_pages
from powerband.serve.router.scheduler import RequestContext, RequestOutcome, RequestScheduler
from powerband.serve.router.telemetry import Telemetry
from powerband.serve.router.tracing import Tracer
from powerband.store import documents

_OBJECTS_PER_COLLECTION = 20_000
_EXPIRE_INTERVAL_S, _RELOAD_INTERVAL_S, _SCALE_INTERVAL_S = 0.02, 0.5, 1.0
_OPTIONS = [("grpc.max_receive_message_length", 16 * 2**20), ("grpc.so_reuseport", 0)]


@dataclass(frozen=True)
class PickerSpec:
    """What a picker was asked for."""

    recipes: tuple[Path, ...]
    source: Source
    lease: Lease | None = None  # None: it is the only one
    tenants: Path | None = None
    host: str = "0.0.0.0"
    port: int = 9002
    health_port: int = 9003
    metrics_port: int = 9090
    scrape_interval_s: float = 5.0
    min_replicas: int = 1
    max_replicas: int = 100
    canary_weight: float | None = None  # None: all recipes of a model are equal
    notice_s: float = 5.0  # at the end: until gateways have noticed that this picker is not ready
    drain_timeout_s: float = 600.0
    conformance: bool = False


async def run(spec: PickerSpec, *, report: Callable[[str], None]) -> None:
    """Serve until SIGTERM or SIGINT, then let the requests in progress end; `report` gets what happens."""
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    if spec.tenants:
        documents.read_as(Tenants, spec.tenants)  # report an invalid file before anything starts
    telemetry = Telemetry()
    tracer = Tracer(url) if (url := tracing.collector_url()) else None

    def on_end(context: RequestContext, outcome: RequestOutcome) -> None:
        telemetry.observe(context, outcome)
        if tracer:
            tracer.record(context, outcome)

    recipes = KnownRecipes.read(spec.recipes)
    scheduler = RequestScheduler(recipes.models, on_end=on_end, waits_for_replicas=False)
    table = EndpointTable(
        scheduler,
        recipes,
        canary_weight=spec.canary_weight,
        scrape_interval_s=spec.scrape_interval_s,
        replicas=(spec.min_replicas, spec.max_replicas),
    )

    def leads() -> bool:
        return spec.lease is None or spec.lease.held()

    def serves() -> bool:
        return not stopping.is_set() and table.has_ready and leads()

    picker = EndpointPicker(scheduler, telemetry, conformance=spec.conformance)

    async with (
        _grpc_server(spec.host, spec.health_port, HealthService(serves)),
        serve_pages(spec.host, spec.metrics_port, lambda: telemetry.exposition(scheduler), ready=serves),
        asyncio.TaskGroup() as group,
    ):
        tasks = [
            group.create_task(spec.source.watch(table.update)),
            group.create_task(table.scraper.run()),
            group.create_task(_expire(scheduler)),
            group.create_task(_reload(spec, scheduler, table)),
            group.create_task(_scale(table, telemetry, leads)),
            *([group.create_task(tracer.send())] if tracer else []),
            *([group.create_task(spec.lease.run(lambda: table.has_ready))] if spec.lease else []),
        ]
        server = grpc.aio.server(options=_OPTIONS)
        external_processor_pb2_grpc.add_ExternalProcessorServicer_to_server(picker, server)
        HealthService(serves).add_to(server)
        server.add_insecure_port(f"{spec.host}:{spec.port}")
        await server.start()
        report(f"listening on {spec.host}:{spec.port}, health on {spec.health_port}, metrics on {spec.metrics_port}")
        gc.collect()
        gc.freeze()  # what exists now stays
        gc.set_threshold(_OBJECTS_PER_COLLECTION)  # the default of 700 is reached by a few requests
        await stopping.wait()
        report(f"stopping: {picker.open_streams} requests in progress")
        if spec.lease:
            await spec.lease.release()
        await asyncio.sleep(spec.notice_s)
        await server.stop(spec.drain_timeout_s)
        report("stopped")
        for task in tasks:
            task.cancel()


@contextlib.asynccontextmanager
async def _grpc_server(host: str, port: int, health: HealthService) -> AsyncIterator[None]:
    server = grpc.aio.server(options=_OPTIONS)
    health.add_to(server)
    server.add_insecure_port(f"{host}:{port}")
    await server.start()
    try:
        yield
    finally:
        await server.stop(None)


async def _expire(scheduler: RequestScheduler) -> None:
    while True:
        scheduler.expire()
        await asyncio.sleep(_EXPIRE_INTERVAL_S)


async def _reload(spec: PickerSpec, scheduler: RequestScheduler, table: EndpointTable) -> None:
    """Read recipes and tenants again when their files change: Kubernetes replaces the files of a ConfigMap."""
    tenants = (spec.tenants,) if spec.tenants else ()
    if spec.tenants:
        scheduler.admission.close()
        load_tenants(scheduler.admission, spec.tenants)
    recipes_are, tenants_are = _state(spec.recipes), _state(tenants)
    while True:
        await asyncio.sleep(_RELOAD_INTERVAL_S)
        if (state := _state(spec.recipes)) != recipes_are:
            recipes_are = state
            table.reload(spec.recipes)
        if (state := _state(tenants)) != tenants_are and spec.tenants:
            tenants_are = state
            load_tenants(scheduler.admission, spec.tenants)


def _state(paths: Sequence[Path]) -> list[tuple[str, int]]:
    """Return when the files were changed last."""
    try:
        return [(str(one), one.stat().st_mtime_ns) for one in recipe_files(paths)]
    except (InputError, OSError):
        return []


async def _scale(table: EndpointTable, telemetry: Telemetry, leads: Callable[[], bool]) -> None:
    """Compute how many replicas are wanted: the exported metric that an autoscaler of the cluster reads."""
    while True:
        telemetry.replica_status = table.replica_status(leads=leads(), late=telemetry.late)
        await asyncio.sleep(_SCALE_INTERVAL_S)
