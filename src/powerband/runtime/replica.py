"""A replica: one engine from its first breath to its last, as one state machine."""

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

from powerband.core.deployment import Deployment
from powerband.core.engine import Command, Failure, FailureKind, Gauges
from powerband.engines.base import Engine
from powerband.errors import EngineFailed
from powerband.runtime import installations
from powerband.runtime.process import Process

State = Literal["created", "starting", "answering", "ready", "stopping", "stopped", "failed"]
_NEXT: dict[State, frozenset[State]] = {
    "created": frozenset({"starting", "answering", "stopping", "failed"}),
    "starting": frozenset({"answering", "stopping", "failed"}),
    "answering": frozenset({"ready", "stopping", "failed"}),
    "ready": frozenset({"stopping", "failed"}),
    "stopping": frozenset({"stopped", "failed"}),
    "stopped": frozenset(),
    "failed": frozenset({"stopped"}),
}
_COMPILED = "TORCHINDUCTOR_CACHE_DIR"  # by itself among the temporary files, which are gone with the process
T = TypeVar("T")


@dataclass(frozen=True)
class Timing:
    """One phase of a start and how long it took."""

    phase: str
    seconds: float


@dataclass
class Replica:
    """One running engine; use it as `async with`, and it is ready inside and gone after."""

    deployment: Deployment[Any]
    engine: Engine[Any]
    command: Command | None  # None: attached to a server that somebody else runs
    url: str
    port: int | None
    directory: Path
    ready_timeout_s: float = 600.0
    stop_grace_s: float = 3.0
    on_change: Callable[[Replica, str], None] = lambda *_: None

    state: State = "created"
    timings: list[Timing] = field(default_factory=list)
    process: Process | None = None

    @property
    def log_path(self) -> Path:
        """Return the engine's log."""
        return self.directory / "engine.log"

    async def __aenter__(self) -> Replica:
        self._began = self._phase_began = time.monotonic()
        self._scanned = 0
        self._ahead = list(self.engine.phases())
        limits = httpx.Limits(max_keepalive_connections=0)  # a reused idle connection may be closed under us
        self._http = httpx.AsyncClient(
            base_url=self.url,
            trust_env=False,
            limits=limits,
            headers=self.request_headers,
            verify=self.url.startswith("https:"),  # reading the machine's certificates takes 80 ms
        )
        try:
            if self.command is not None:
                self._enter("starting")
                if self.log_path.exists():  # what an earlier run said must not be taken for this one's words
                    self.log_path.replace(self.log_path.with_suffix(".log.previous"))
                self.process = Process(_keeping(self.command), log=self.log_path, grace_s=self.stop_grace_s)
                await self.process.__aenter__()
            await self._alive(self._become_ready(), within_s=self.ready_timeout_s)
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
        """Return never while the engine lives; raise what killed it."""
        if self.process is None:
            await asyncio.Event().wait()
        else:
            await self.process.ended.wait()
            self._enter("failed")
            raise self._autopsy("crashed", "died while it was serving")

    async def gauges(self) -> Gauges:
        """Read the engine's own counters under our names."""
        pages = {}
        for path in self.engine.gauge_pages:
            with contextlib.suppress(httpx.HTTPError):
                answer = await self._http.get(path, timeout=10)
                pages[path] = answer.text if answer.status_code == 200 else ""
        return self.engine.gauges(pages)

    async def server_name(self) -> str:
        """Return what the server calls itself in its answers; empty where it does not."""
        with contextlib.suppress(httpx.HTTPError):
            return str((await self._http.get("/v1/models", timeout=10)).headers.get("server", ""))
        return ""

    def readings(self) -> dict[str, float]:
        """Return what the engine's log says in numbers, such as the size of its KV cache."""
        return self.engine.readings(self._log())

    async def _become_ready(self) -> None:
        following = asyncio.create_task(self._follow_log())
        try:
            await self._until_healthy()
        finally:
            following.cancel()
        self._scan_log()
        self._end_phase("listening")
        self._enter("answering")
        await self._first_answer()
        if self.process is not None and self.port is not None and not self.process.owns_port(self.port):
            raise EngineFailed(
                f"port {self.port} is answered by a process that is not ours",
                hint="give another --port, or none to have one picked",
                failure="port_taken",
            )
        if ignored := self.engine.diagnose(self._log(), ready=True):
            raise EngineFailed(ignored.sentence, hint=ignored.hint, failure=ignored.kind, evidence=ignored.evidence)
        self._end_phase("first answer")
        self._enter("ready")

    async def _until_healthy(self) -> None:
        pause = 0.02
        while True:
            with contextlib.suppress(httpx.HTTPError):
                path = "/v1/models" if self.engine.attaches else "/health"
                answer = await self._http.get(path, timeout=5)
                if answer.status_code == 200:
                    return
                if self.engine.attaches and answer.status_code in (401, 403):
                    raise EngineFailed(
                        f"{self.url} refuses the key ({answer.status_code})",
                        hint="name the environment variable that holds it: --set api_key_env=NAME",
                        failure="no_answer",
                    )
            await asyncio.sleep(pause)
            pause = min(pause * 1.5, 0.25)

    async def _first_answer(self) -> None:
        """Send one real request: a server can be healthy and unable to answer."""
        body: dict[str, Any] = {"prompt": "Hello", "max_tokens": 2, "temperature": 0}
        while True:
            try:
                body["model"] = await self.model_name()
                answer = await self._http.post("/v1/completions", json=body, timeout=None)
                if answer.status_code == 200 and answer.json()["choices"]:
                    return
            except (httpx.HTTPError, ValueError, KeyError, TypeError):
                await self._let_it_die()
                raise self._autopsy("died_on_first_request", "was healthy and broke off its first answer") from None
            if answer.status_code not in (429, 503):
                await self._let_it_die()
                said = " ".join(answer.text.split())[:300]
                raise self._autopsy(
                    "no_answer",
                    f"was healthy and answered its first request with {answer.status_code}: {said}",
                )
            await asyncio.sleep(0.2)

    async def model_name(self) -> str:
        """Return the name by which requests ask for the model."""
        if not self.engine.attaches:
            return self.deployment.served_name
        names = [model["id"] for model in (await self._http.get("/v1/models", timeout=10)).json()["data"]]
        wanted = self.deployment.variant.source
        return wanted if wanted in names or not names else str(names[0])

    async def _let_it_die(self) -> None:
        """Give a broken engine the time to write its last words."""
        if self.process is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.process.ended.wait(), 3.0)

    async def _alive(self, work: Awaitable[T], *, within_s: float) -> T:
        """Do the work while the engine lives and the time lasts; otherwise say why not."""
        task = asyncio.ensure_future(work)
        death = asyncio.create_task(self.process.ended.wait()) if self.process else None
        waiting = {task, death} if death else {task}
        try:
            done, _ = await asyncio.wait(waiting, timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
            if task in done:
                return task.result()
            if death in done:
                answering = self.state == "answering"
                kind: FailureKind = "died_on_first_request" if answering else "crashed"
                raise self._autopsy(
                    kind, "was healthy and died of its first request" if answering else "died at its start"
                )
            if self.engine.attaches:
                raise EngineFailed(
                    f"nothing answers at {self.url}",
                    hint="check the URL and that the server is up",
                    failure="never_ready",
                )
            raise self._autopsy("never_ready", f"was not ready after {within_s:.0f} s")
        finally:
            for one in (task, death):
                if one is not None and not one.done():
                    one.cancel()
                    with contextlib.suppress(asyncio.CancelledError, EngineFailed):
                        await one

    def _autopsy(self, kind: FailureKind, sentence: str) -> EngineFailed:
        """Turn what the log and the exit say into one error; a typed failure says more than when it happened."""
        found = self.engine.diagnose(self._log()) or self._by_signal()
        if found is None or found.kind == "crashed":
            longer = "; a slow start wants a longer --ready-timeout" if kind == "never_ready" else ""
            found = Failure(
                kind=kind,
                sentence=f"{self.engine.name} {sentence}" + (f": {found.sentence}" if found else ""),
                hint=f"read its log: {self.log_path}{longer}",
                evidence=found.evidence if found else "",
            )
        return EngineFailed(
            found.sentence, hint=found.hint, failure=found.kind, evidence=found.evidence or self._last_words()
        )

    def _by_signal(self) -> Failure | None:
        code = self.process.exit_code if self.process else None
        if code == -signal.SIGILL:
            return Failure(
                kind="unsupported",
                sentence=f"{self.engine.name} used an instruction that this CPU does not run",
                hint=f"reinstall it for this CPU: 'powerband engine remove {self.engine.name}' and install again",
            )
        if code == -signal.SIGKILL and self.state not in ("stopping",):
            return Failure(
                kind="out_of_memory",
                sentence=f"{self.engine.name} was killed from outside; the kernel does that when memory runs out",
                hint="lower its memory, or look for the killer in 'dmesg'",
            )
        return None

    def _log(self) -> str:
        try:
            return self.log_path.read_text(errors="replace")
        except OSError:
            return ""

    def _last_words(self) -> str:
        lines = [line for line in self._log().splitlines() if line.strip()]
        return lines[-1].strip()[:500] if lines else ""

    async def _follow_log(self) -> None:
        """A server may take a connection long before it answers it, so the log is read meanwhile."""
        while True:
            self._scan_log()
            await asyncio.sleep(0.1)

    def _scan_log(self) -> None:
        """End the phases whose line has appeared; a later line ends the ones before it."""
        log = self._log()
        if len(log) == self._scanned:
            return
        self._scanned = len(log)
        for number in range(len(self._ahead) - 1, -1, -1):
            if re.search(self._ahead[number].pattern, log, re.MULTILINE):
                self._end_phase(self._ahead[number].name)
                del self._ahead[: number + 1]
                return

    def _end_phase(self, name: str) -> None:
        now = time.monotonic()
        self.timings.append(Timing(name, now - self._phase_began))
        self._phase_began = now
        self.on_change(self, name)

    def _enter(self, state: State) -> None:
        if state not in _NEXT[self.state]:
            raise RuntimeError(f"a replica cannot go from {self.state} to {state}")
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
        """Return what every request must carry."""
        key = os.environ.get(getattr(self.deployment.config, "api_key_env", None) or "")
        return {"authorization": f"Bearer {key}"} if key else {}


def _keeping(command: Command) -> Command:
    """Let what an engine compiles outlive it, so that it starts sooner the next time."""
    kept = os.environ.get(_COMPILED) or str(installations.cache_root() / "compiled")
    return command.model_copy(update={"env": {_COMPILED: kept} | command.env})
