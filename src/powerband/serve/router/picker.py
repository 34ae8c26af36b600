"""The picker process: Envoy calls it once per request (ext_proc) and reports the end of each request (access log).

    python -m powerband.serve.router.picker FOLDER

FOLDER contains `spec.json`, `picker.sock` for Envoy and `control.sock` for the supervisor. Of several pickers of a
folder the one that holds the lock of `picker.lock` serves; the others wait for it, with everything loaded.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import gc
import json
import secrets
import sys
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import grpc
from envoy.service.accesslog.v3 import als_pb2, als_pb2_grpc
from envoy.service.ext_proc.v3 import external_processor_pb2 as wire
from envoy.service.ext_proc.v3 import external_processor_pb2_grpc

from powerband import __version__
from powerband.serve import control_channel, envoy, openapi
from powerband.serve.router import ext_proc, tracing
from powerband.serve.router.admission import load_tenants
from powerband.serve.router.requests import RequestRejected
from powerband.serve.router.retries import DIED, UNAVAILABLE, FailedAttempts
from powerband.serve.router.scheduler import RequestContext, RequestOutcome, RequestScheduler, RoutingDecision
from powerband.serve.router.telemetry import Telemetry
from powerband.serve.router.tracing import Tracer
from powerband.serve.spec import FleetSpec, ModelSpec

_OBJECTS_PER_COLLECTION = 20_000
_EXPIRE_INTERVAL_S, _SUMMARY_INTERVAL_S = 0.02, 0.25
_INFORMED_WITHIN_S = 1.0


class Picker(external_processor_pb2_grpc.ExternalProcessorServicer, als_pb2_grpc.AccessLogServiceServicer):  # type: ignore[misc]
    """Envoy's external processor and access-log service."""

    def __init__(self, scheduler: RequestScheduler, telemetry: Telemetry) -> None:
        self.scheduler, self.telemetry = scheduler, telemetry
        self._logs = 0  # open access-log streams, one for each of Envoy's threads

    async def Process(self, _: AsyncIterator[Any], context: Any) -> None:  # noqa: N802
        """Handle one request: authenticate its headers, read its body, and route or reject it."""
        request_id, delivered = secrets.token_hex(8), True
        try:
            if (message := await context.read()) is grpc.aio.EOF:
                return
            headers, earlier = ext_proc.headers_of(message.request_headers), None
            path = headers.get(":path", "").partition("?")[0]
            if redirected := path in (DIED, UNAVAILABLE):
                earlier = self._failed_attempts(path, headers)
                path = earlier.path if earlier else headers.get(envoy.ORIGINAL_PATH, "").partition("?")[0]
                headers[":path"] = path
            if earlier:
                tenant = earlier.tenant
            elif answer := self._serve_locally(path, headers):
                await context.write(answer)
                return
            else:
                tenant = self.scheduler.admission.authenticate(headers.get("authorization", ""))
                ext_proc.expect_completion(path, headers)
            await context.write(_accept_headers(request_id, path=path if redirected else ""))
            if (message := await context.read()) is grpc.aio.EOF:
                return  # the client is gone
            decision = await self.scheduler.pick(
                message.request_body.body, request_id=request_id, tenant=tenant, headers=headers, earlier=earlier
            )
            delivered = False
            await context.write(_route_to(decision))
            delivered = True
        except RequestRejected as error:
            self.telemetry.count_rejection(error)
            await context.write(ext_proc.reject(error))
        finally:
            if not delivered:  # Envoy closed the stream before it read the decision
                self.scheduler.finish(request_id, RequestOutcome(status=0))

    def _failed_attempts(self, path: str, headers: Mapping[str, str]) -> FailedAttempts | None:
        """Return what is known of a request that Envoy sends again; None if this picker did not choose its replica."""
        if found := self.scheduler.retry(headers.get(envoy.REQUEST_ID, ""), path):
            self.telemetry.count_retry(found.recipe, path.strip("/"))
        return found

    def _serve_locally(self, path: str, headers: Mapping[str, str]) -> Any:
        """Respond to the paths that the picker serves itself; None for all others."""
        if path == "/health":
            if not self.scheduler.healthy():
                return ext_proc.respond(503, b"not every model has a ready replica", content_type="text/plain")
            return ext_proc.respond(200, b'{"status": "ok"}')
        if path == "/metrics":
            self.scheduler.admission.allow_metrics(headers.get("authorization", ""))
            return ext_proc.respond(
                200, self.telemetry.exposition(self.scheduler), content_type="text/plain; version=0.0.4"
            )
        if path == "/openapi.json":
            return ext_proc.respond(200, json.dumps(openapi.document(version=__version__)).encode())
        if path == "/v1/models":
            tenant = self.scheduler.admission.authenticate(headers.get("authorization", ""))
            return ext_proc.models(self.scheduler.model_names(tenant))
        return None

    async def StreamAccessLogs(self, stream: AsyncIterator[Any], context: Any) -> Any:  # noqa: N802
        """Finish each request that Envoy logs; when Envoy exits, all requests in flight have failed."""
        self._logs += 1
        try:
            async for message in stream:
                for entry in message.http_logs.log_entry:
                    if request_id := entry.request.request_headers.get(envoy.REQUEST_ID):
                        self.scheduler.finish(request_id, _outcome(entry))
        finally:
            self._logs -= 1
            if not self._logs:
                self.scheduler.fail_in_flight()
        return als_pb2.StreamAccessLogsResponse()


def _accept_headers(request_id: str, *, path: str = "") -> Any:
    """Ask for the body. The request id is set now, so that the access log reports the end of every request.

    `path` replaces the path of a redirect. The key stays until the decision: another picker may have to read it.
    """
    response = wire.ProcessingResponse()
    added = response.request_headers.response.header_mutation.set_headers
    added.append(ext_proc.header(envoy.REQUEST_ID, request_id))
    if path:
        added.append(ext_proc.header(":path", path))
    return response


def _route_to(decision: RoutingDecision) -> Any:
    """Send the request to the chosen replica; the other addresses are for Envoy's retries."""
    values = {
        envoy.DESTINATION: ",".join(decision.addresses),
        envoy.RECIPE: decision.recipe,
        envoy.REPLICA: decision.replica,
    }
    headers = [ext_proc.header(key, value) for key, value in values.items()]
    removed = (envoy.ORIGINAL_PATH, "authorization")
    common = wire.CommonResponse(header_mutation=wire.HeaderMutation(set_headers=headers, remove_headers=removed))
    if decision.body is not None:
        common.body_mutation.body = decision.body
        common.header_mutation.set_headers.append(ext_proc.header("content-length", str(len(decision.body))))
    return wire.ProcessingResponse(request_body=wire.BodyResponse(response=common))


def _outcome(entry: Any) -> RequestOutcome:
    """Parse an access-log entry, with what the relay counted. The relay sends the headers with the first token."""
    common, response = entry.common_properties, entry.response
    text = response.response_trailers.get(envoy.USAGE) or response.response_headers.get(envoy.USAGE, "")
    usage = {name: int(value) for name, _, value in (one.partition("=") for one in text.split()) if value.isdigit()}
    flags = common.response_flags
    return RequestOutcome(
        status=response.response_code.value,
        output_tokens=usage.get("output") or usage.get("pieces", 0),
        prompt_tokens=usage.get("prompt", 0),
        ttft_s=_seconds(common, "time_to_first_upstream_rx_byte"),
        last_token_s=_seconds(common, "time_to_last_upstream_rx_byte"),
        e2e_s=_seconds(common, "time_to_last_downstream_tx_byte"),
        broken=bool(usage.get("broken")) or flags.upstream_connection_termination or flags.upstream_remote_reset,
        retried=response.response_code_details == envoy.INTERNAL_REDIRECT,
    )


def _seconds(common: Any, name: str) -> float | None:
    """Return a duration of an access-log entry; None if it was not measured."""
    duration = getattr(common, name)
    return float(duration.seconds + duration.nanos / 1e9) if common.HasField(name) else None


async def _serve_control(
    scheduler: RequestScheduler,
    telemetry: Telemetry,
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    informed: asyncio.Event,
) -> None:
    """Apply the supervisor's updates of models, endpoints and tenants; send it a summary periodically.

    `informed` is set once the endpoints are known.
    """

    async def send_summaries() -> None:
        while True:
            control_channel.send(writer, telemetry.summary(scheduler))
            await writer.drain()
            await asyncio.sleep(_SUMMARY_INTERVAL_S)

    sender = asyncio.create_task(send_summaries())
    try:
        while (update := await control_channel.receive(reader)) is not None:
            if "endpoints" in update:
                scheduler.update_models({name: ModelSpec.from_data(one) for name, one in update["models"].items()})
                scheduler.update_endpoints(update["endpoints"], update["canary_weights"])
                informed.set()
            if "replicas" in update:
                telemetry.replica_status = update
            if "tenants" in update:
                load_tenants(scheduler.admission, Path(update["tenants"]))
    finally:
        sender.cancel()
        writer.close()


async def _main(folder: Path) -> None:
    with (folder / "picker.lock").open("w") as lock:
        await asyncio.to_thread(fcntl.flock, lock, fcntl.LOCK_EX)  # the kernel frees it when the process ends
        await _serve(folder)


async def _serve(folder: Path) -> None:
    spec = FleetSpec.read(folder)
    telemetry = Telemetry(folder / "traffic.jsonl" if spec.capture else None)
    tracer = Tracer(url) if (url := tracing.collector_url()) else None

    def on_end(context: RequestContext, outcome: RequestOutcome) -> None:
        telemetry.observe(context, outcome)
        if tracer:
            tracer.record(context, outcome)

    scheduler = RequestScheduler(spec.models, on_end=on_end, capture=spec.capture, capture_text=spec.capture_text)
    if spec.tenants:
        scheduler.admission.close()
        load_tenants(scheduler.admission, Path(spec.tenants))
    for name in ("picker.sock", "control.sock"):
        (folder / name).unlink(missing_ok=True)
    informed = asyncio.Event()
    control = await asyncio.start_unix_server(
        lambda reader, writer: _serve_control(scheduler, telemetry, reader, writer, informed), folder / "control.sock"
    )
    with contextlib.suppress(TimeoutError):  # without a supervisor, requests wait
        await asyncio.wait_for(informed.wait(), _INFORMED_WITHIN_S)
    server = grpc.aio.server(options=[("grpc.max_receive_message_length", 16 * 2**20)])
    picker = Picker(scheduler, telemetry)
    external_processor_pb2_grpc.add_ExternalProcessorServicer_to_server(picker, server)
    als_pb2_grpc.add_AccessLogServiceServicer_to_server(picker, server)
    server.add_insecure_port(f"unix:{folder / 'picker.sock'}")
    await server.start()
    gc.collect()
    gc.freeze()  # what exists now stays
    gc.set_threshold(_OBJECTS_PER_COLLECTION)  # the default of 700 is reached by a few requests
    async with control, asyncio.TaskGroup() as group:
        if tracer:
            group.create_task(tracer.send())
        while True:
            scheduler.expire()
            await asyncio.sleep(_EXPIRE_INTERVAL_S)


if __name__ == "__main__":
    asyncio.run(_main(Path(sys.argv[1])))
