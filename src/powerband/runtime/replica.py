"""A replica: one running engine, from start to stop, as a state machine."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, TypeVar

import httpx

from powerband.core.allocation import Allocation
from powerband.core.deployment import Deployment
from powerband.core.engine import Command, Failure, FailureKind, Gauges, combined
from powerband.engines.base import Engine
from powerband.errors import EngineFailed
from powerband.runtime import installations, local_page
from powerband.runtime.process import Process

State = Literal["created", "starting", "answering", "ready", "stopping", "stopped", "failed"]
_TRANSITIONS: dict[State, frozenset[State]] = {
    "created": frozenset({"starting", "answering", "stopping", "failed"}),
    "starting": frozenset({"answering", "stopping", "failed"}),
    "answering": frozenset({"ready", "stopping", "failed"}),
    "ready": frozenset({"stopping", "failed"}),
    "stopping": frozenset({"stopped", "failed"}),
    "stopped": frozenset(),
    "failed": frozenset({"stopped"}),
}
_COMPILE_CACHE_ENV = "TORCHINDUCTOR_CACHE_DIR"  # by default below TMPDIR, which the keeper removes
T = TypeVar("T")


@dataclass(frozen=True)
class Timing:
    """Duration of one phase of a start."""

    phase: str
    seconds: float


@dataclass
class Replica:
    """One running engine; inside `async with` it is ready, and afterwards it has stopped."""

    deployment: Deployment[Any]
    engine: Engine[Any]
    command: Command | None  # None: attached to a server that Powerband did not start
    url: str
    port: int | None
    directory: Path
    ready_timeout_s: float = 600.0
    stop_grace_s: float = 3.0
    on_change: Callable[[Replica, str], None] = lambda *_: None
    allocation: Allocation = field(default_factory=Allocation)
    inherited: tuple[int, ...] = ()  # descriptors that hold its devices and cores
    adopted: Process | None = None  # a ready engine that another supervisor started
    beside: tuple[Replica, ...] = ()  # other replicas of the deployment, which share the load with this one

    state: State = "created"
    timings: list[Timing] = field(default_factory=list)
    process: Process | None = None

    @property
    def log_path(self) -> Path:
        """Return the path of the engine's log."""
        return self.directory / "engine.log"

    async def __aenter__(self) -> Replica:
        self._phase_began = time.monotonic()
        self._scanned = 0
        self._remaining_phases = list(self.engine.phases())
        limits = httpx.Limits(max_keepalive_connections=0)  # the server may close an idle connection at any time
        self._http = httpx.AsyncClient(
            base_url=self.url,
            trust_env=False,
            limits=limits,
            headers=self.request_headers,
            verify=self.url.startswith("https:"),  # loading the CA certificates takes 80 ms
        )
        if self.adopted:
            self.process, self.state = self.adopted, "ready"
            return self
        try:
            if self.command is not None:
                self._enter("starting")
                if self.log_path.exists():  # do not read phases and failures of an earlier run
                    self.log_path.replace(self.log_path.with_suffix(".log.previous"))
                self.process = Process(
                    _with_compile_cache(self.command),
                    log=self.log_path,
                    grace_s=self.stop_grace_s,
                    inherited=self.inherited,
                )
                await self.process.__aenter__()
            await self._while_running(self._become_ready(), timeout_s=self.ready_timeout_s)
        except BaseException as error:
            failed = isinstance(error, EngineFailed)
            await self._finish("failed" if failed else "stopping")
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.state == "ready":
            self._enter("stopping")
        await self._finish(self.state)

    async def watch(self) -> None:
        """Wait until the engine exits, then raise EngineFailed with the cause."""
        if self.process is None:
            await asyncio.Event().wait()
        else:
            await self.process.exited.wait()
            self._enter("failed")
            raise self._failure("crashed", "exited while it was serving")

    @property
    def members(self) -> tuple[Replica, ...]:
        """Return this replica and those that share the load with it."""
        return (self, *self.beside)

    def memory_bytes(self) -> int | None:
        """Return the peak memory of the engines; None if they are not ours."""
        return sum(one.process.memory_bytes() for one in self.members if one.process) if self.process else None

    def exited(self) -> Process | None:
        """Return the process of an engine that has exited."""
        processes = [one.process for one in self.members if one.process]
        return next((one for one in processes if one.exited.is_set()), None)

    async def gauges(self) -> Gauges:
        """Read the engine's metrics; those of replicas that share the load are combined."""
        return combined(await asyncio.gather(*(one._own_gauges() for one in self.members)))

    async def probe(self) -> Gauges:
        """Return the engines' metrics once they have answered, however late; raise OSError if they refuse it."""
        return combined(await asyncio.gather(*(one._own_probe() for one in self.members)))

    async def _own_probe(self) -> Gauges:
        host, port = httpx.URL(self.url).host, self.port
        assert port is not None, "a server that Powerband started"
        return self.engine.gauges({path: await local_page.read(host, port, path) for path in self.engine.gauge_pages})

    async def _own_gauges(self) -> Gauges:
        pages = {}
        for path in self.engine.gauge_pages:
            with contextlib.suppress(httpx.HTTPError):
                pages[path] = await self._page(path)
        return self.engine.gauges(pages)

    async def _page(self, path: str) -> str:
        """Return the text of a page of metrics; nothing of one over the limit or with another status than 200."""
        data = bytearray()
        async with self._http.stream("GET", path, timeout=10) as answer:
            async for part in answer.aiter_bytes():
                data += part
                if len(data) > local_page.MAX_BYTES:
                    return ""
            return data.decode(errors="replace") if answer.status_code == 200 else ""

    async def server_name(self) -> str:
        """Return the server's `server` header; empty if it sends none."""
        with contextlib.suppress(httpx.HTTPError):
            return str((await self._http.get("/v1/models", timeout=10)).headers.get("server", ""))
        return ""

    def readings(self) -> dict[str, float]:
        """Return the numbers in the engine's log, such as the size of its KV cache."""
        return self.engine.readings(self._log())

    async def _become_ready(self) -> None:
        following = asyncio.create_task(self._follow_log())
        try:
            await self._wait_until_healthy()
        finally:
            following.cancel()
        self._scan_log()
        self._end_phase("listening")
        self._enter("answering")
        await self._check_first_answer()
        if self.process is not None and self.port is not None and not self.process.owns_port(self.port):
            raise EngineFailed(
                f"another process listens on port {self.port}",
                hint="give another --port, or omit --port to get a free one",
                failure="port_taken",
            )
        if ignored := self.engine.diagnose(self._log(), ready=True):
            raise EngineFailed(ignored.sentence, hint=ignored.hint, failure=ignored.kind, evidence=ignored.evidence)
        self._end_phase("first answer")
        self._enter("ready")

    async def _wait_until_healthy(self) -> None:
        pause_s = 0.02
        while True:
            with contextlib.suppress(httpx.HTTPError):
                path = "/v1/models" if self.engine.attaches else "/health"
                answer = await self._http.get(path, timeout=5)
                if answer.status_code == 200:
                    return
                if self.engine.attaches and answer.status_code in (401, 403):
                    raise EngineFailed(
                        f"{self.url} rejects the API key (HTTP {answer.status_code})",
                        hint="give the environment variable that contains it: --set api_key_env=NAME",
                        failure="no_answer",
                    )
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 1.5, 0.25)

    async def _check_first_answer(self) -> None:
        """Send one completion request: a server can report healthy and still fail every request."""
        body: dict[str, Any] = {"prompt": "Hello", "max_tokens": 2, "temperature": 0}
        while True:
            try:
                body["model"] = await self.model_name()
                answer = await self._http.post("/v1/completions", json=body, timeout=None)
                if answer.status_code == 200 and answer.json()["choices"]:
                    return
            except (httpx.HTTPError, ValueError, KeyError, TypeError):
                await self._wait_for_exit()
                raise self._failure(
                    "died_on_first_request", "became healthy, then failed during its first answer"
                ) from None
            if answer.status_code not in (429, 503):
                await self._wait_for_exit()
                body_text = " ".join(answer.text.split())[:300]
                raise self._failure(
                    "no_answer",
                    f"became healthy, then answered its first request with HTTP {answer.status_code}: {body_text}",
                )
            await asyncio.sleep(0.2)

    async def model_name(self) -> str:
        """Return the model name for requests."""
        if not self.engine.attaches:
            return self.deployment.served_name
        names = [model["id"] for model in (await self._http.get("/v1/models", timeout=10)).json()["data"]]
        wanted = self.deployment.variant.source
        return wanted if wanted in names or not names else str(names[0])

    async def _wait_for_exit(self) -> None:
        """Wait up to 3 s for a failing engine to exit, so that its log is complete."""
        if self.process is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.process.exited.wait(), 3.0)

    async def _while_running(self, work: Awaitable[T], *, timeout_s: float) -> T:
        """Await the work; raise EngineFailed if the engine exits or the timeout expires first."""
        task = asyncio.ensure_future(work)
        exited = asyncio.create_task(self.process.exited.wait()) if self.process else None
        waiting = {task, exited} if exited else {task}
        try:
            done, _ = await asyncio.wait(waiting, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if task in done:
                return task.result()
            if exited in done:
                answering = self.state == "answering"
                kind: FailureKind = "died_on_first_request" if answering else "crashed"
                raise self._failure(
                    kind, "became healthy, then crashed on its first request" if answering else "crashed during startup"
                )
            if self.engine.attaches:
                raise EngineFailed(
                    f"no server answers at {self.url}",
                    hint="check the URL, and that the server is running",
                    failure="never_ready",
                )
            raise self._failure("never_ready", f"was not ready after {timeout_s:.0f} s")
        finally:
            for one in (task, exited):
                if one is not None and not one.done():
                    one.cancel()
                    with contextlib.suppress(asyncio.CancelledError, EngineFailed):
                        await one

    def _failure(self, kind: FailureKind, sentence: str) -> EngineFailed:
        """Return an error with the cause from the log or the exit signal, else with `kind` and `sentence`."""
        found = self.engine.diagnose(self._log()) or self._failure_by_signal()
        if found is None or found.kind == "crashed":
            longer = "; for a slow start raise --ready-timeout" if kind == "never_ready" else ""
            found = Failure(
                kind=kind,
                sentence=f"{self.engine.name} {sentence}" + (f": {found.sentence}" if found else ""),
                hint=f"read the engine's log: {self.log_path}{longer}",
                evidence=found.evidence if found else "",
            )
        return EngineFailed(
            found.sentence, hint=found.hint, failure=found.kind, evidence=found.evidence or self._last_log_line()
        )

    def _failure_by_signal(self) -> Failure | None:
        code = self.process.exit_code if self.process else None
        if code == -signal.SIGILL:
            return Failure(
                kind="unsupported",
                sentence=f"{self.engine.name} used an instruction that this CPU does not support",
                hint=f"rebuild it for this CPU: run 'powerband engine remove {self.engine.name}', "
                f"then 'powerband engine install {self.engine.name}'",
            )
        if code == -signal.SIGKILL and self.state not in ("stopping",):
            return Failure(
                kind="out_of_memory",
                sentence=f"{self.engine.name} was killed with SIGKILL; the kernel does this when memory runs out",
                hint="reduce its memory use, or look for the cause in 'dmesg'",
            )
        return None

    def _log(self) -> str:
        try:
            return self.log_path.read_text(errors="replace")
        except OSError:
            return ""

    def _last_log_line(self) -> str:
        lines = [line for line in self._log().splitlines() if line.strip()]
        return lines[-1].strip()[:500] if lines else ""

    async def _follow_log(self) -> None:
        """Scan the log for phases while the health check waits: a server can accept a connection and answer late."""
        while True:
            self._scan_log()
            await asyncio.sleep(0.1)

    def _scan_log(self) -> None:
        """End the phases whose pattern matches the log; a later phase ends those before it."""
        log = self._log()
        if len(log) == self._scanned:
            return
        self._scanned = len(log)
        for number in range(len(self._remaining_phases) - 1, -1, -1):
            if re.search(self._remaining_phases[number].pattern, log, re.MULTILINE):
                self._end_phase(self._remaining_phases[number].name)
                del self._remaining_phases[: number + 1]
                return

    def _end_phase(self, name: str) -> None:
        now = time.monotonic()
        self.timings.append(Timing(name, now - self._phase_began))
        self._phase_began = now
        self.on_change(self, name)

    def _enter(self, state: State) -> None:
        if state not in _TRANSITIONS[self.state]:
            raise RuntimeError(f"invalid replica transition: {self.state} to {state}")
        self.state = state
        with contextlib.suppress(OSError), (self.directory / "events.jsonl").open("a") as stream:
            stream.write(json.dumps({"time": time.time(), "state": state}) + "\n")
        self.on_change(self, state)

    async def _finish(self, state: State) -> None:
        if state != self.state:
            self._enter(state)
        try:
            if self.process is not None and self.process.pid is not None:
                await self.process.stop(self.stop_grace_s)
        finally:
            await self._http.aclose()
            self._enter("stopped")

    @property
    def request_headers(self) -> dict[str, str]:
        """Return the headers of every request."""
        key = os.environ.get(getattr(self.deployment.config, "api_key_env", None) or "")
        return {"authorization": f"Bearer {key}"} if key else {}


def _with_compile_cache(command: Command) -> Command:
    """Set a persistent cache for compiled kernels, so that the next start is faster."""
    folder = os.environ.get(_COMPILE_CACHE_ENV) or str(installations.cache_root() / "compiled")
    return command.model_copy(update={"env": {_COMPILE_CACHE_ENV: folder} | command.env})
