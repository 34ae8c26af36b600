"""Read a running server several times: GET requests and local files only."""

from __future__ import annotations

import asyncio
import math
import re
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from powerband.diagnose import local_process
from powerband.diagnose.local_process import LocalProcess, ProcessSample
from powerband.engines import live
from powerband.errors import InputError
from powerband.runtime import gpu_state
from powerband.runtime.gpu_state import GpuSample

FIRST_READINGS = 3  # of the preliminary answer
_FIRST_INTERVAL_S = 0.7
_INTERVAL_S = 1.0
_MAX_INTERVAL_S = 5.0
_SERVER_SHARE = 0.01  # of one core, that answering the readings may take
_TIMEOUT_S = 2.0
_LOG_BYTES = 2_000_000  # of the log's beginning and of its end
_SLOT_FACTS = ("id", "n_ctx", "is_processing", "n_prompt_tokens", "id_task")  # nothing else of a slot is kept
_PROPS_FACTS = ("total_slots", "model_path", "build_info", "default_generation_settings", "is_sleeping")
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True)
class Target:
    """What to read: an address, and what was given about the process behind it."""

    url: str
    pid: int | None = None
    command: str | None = None
    log: Path | None = None
    model: str | None = None


@dataclass(frozen=True)
class Slot:
    """One slot of llama-server."""

    context: float
    used: float
    decoded: float
    task: int
    busy: bool


@dataclass(frozen=True)
class Reading:
    """One reading of everything that changes."""

    at_s: float
    page: live.Page
    slots: tuple[Slot, ...] = ()
    process: ProcessSample | None = None
    gpus: tuple[GpuSample, ...] = ()


@dataclass
class Readings:
    """All readings of a server, and the facts that do not change."""

    url: str
    engine: str = ""
    readings: list[Reading] = field(default_factory=list)
    log_gauges: list[dict[str, float]] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)  # of /version, /v1/models and /props
    argv: tuple[str, ...] = ()
    model: str | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    logged: dict[str, Any] = field(default_factory=dict)
    local: LocalProcess | None = None
    machine: dict[str, Any] = field(default_factory=dict)  # facts of a recorded server's machine
    read: list[str] = field(default_factory=list)
    unseen: list[str] = field(default_factory=list)

    @property
    def window_s(self) -> float:
        """Return the time between the first and the last reading."""
        return self.readings[-1].at_s - self.readings[0].at_s if self.readings else 0.0


async def collect(target: Target, *, window_s: float, on_first: Callable[[Readings], None]) -> Readings:
    """Read for a window; `on_first` gets the first readings after about two seconds."""
    found = Readings(url=target.url)
    timeout = httpx.Timeout(_TIMEOUT_S, read=max(_TIMEOUT_S, 5.0))
    async with httpx.AsyncClient(base_url=target.url, timeout=timeout, trust_env=False) as client:
        page = await _first_page(client, target.url)
        await _read_facts(client, found, page)
        _read_process(target, found)
        _read_log(target, found)
        await _read_slots(client, found)
        with gpu_state.session() as gpus:
            await _read_regularly(client, found, gpus, window_s=window_s, on_first=on_first)
    _note_what_is_missing(found)
    return found


async def _first_page(client: httpx.AsyncClient, url: str) -> httpx.Response:
    try:
        return await client.get("/metrics")
    except httpx.HTTPError as error:
        raise InputError(
            f"no server answers at {url}: {type(error).__name__}",
            hint=f"check the address with 'curl {url}/health'",
        ) from None


async def _read_facts(client: httpx.AsyncClient, found: Readings, page: httpx.Response) -> None:
    text = page.text if page.status_code == 200 else ""
    found.engine = live.engine_of(page=text) or ""
    if text:
        found.read.append("/metrics")
    for path in ("/v1/models", "/version", "/props"):
        if path == "/props" and found.engine == "vllm":
            continue
        data = await _json(client, path)
        if data is None:
            continue
        found.read.append(path)
        if path == "/v1/models":
            listed = data.get("data") or [{}]
            found.facts["models"] = [one.get("id") for one in listed]
            found.facts |= {key: listed[0][key] for key in ("root", "max_model_len", "owned_by") if key in listed[0]}
        elif path == "/version":
            found.facts["version"] = data.get("version")
        else:
            found.facts |= {key: data[key] for key in _PROPS_FACTS if key in data}
    if not found.engine:
        found.engine = "llamacpp" if "total_slots" in found.facts else "vllm" if "version" in found.facts else ""
    if not text:
        hint = "start it with --metrics" if found.engine == "llamacpp" else "do not start it with --disable-log-stats"
        found.unseen.append(f"/metrics (HTTP {page.status_code}): no rates, queue and batch; {hint}")


async def _json(client: httpx.AsyncClient, path: str) -> dict[str, Any] | None:
    try:
        answer = await client.get(path)
        data = answer.json() if answer.status_code == 200 else None
    except (httpx.HTTPError, ValueError):
        return None
    return data if isinstance(data, dict) else None


def _read_process(target: Target, found: Readings) -> None:
    """Find the server's process, and read its command line."""
    parts = urlsplit(target.url)
    environment: Mapping[str, str] = {}
    if target.pid is not None or parts.hostname in _LOOPBACK:
        found.local = local_process.find(pid=target.pid, port=parts.port or 80)
    if found.local is not None:
        found.argv, environment = found.local.argv, found.local.environment
        found.read.append(f"process {found.local.pid}: command line, threads, limits, memory")
    elif parts.hostname in _LOOPBACK:
        found.unseen.append("the process: not visible to this user, or behind a proxy; run as its user, or give --pid")
    else:
        found.unseen.append("the process: on another machine; run this there, or give --command and --log")
    if target.command:
        found.argv, environment = command_words(target.command)
        found.read.append("--command")
    found.engine = found.engine or live.engine_of(argv=found.argv) or ""
    if not found.engine:
        raise InputError(
            f"the server at {target.url} is neither vLLM nor llama.cpp, or does not show its metrics",
            hint="start llama-server with --metrics; or give the server's command line with --command",
        )
    parsed = live.read_command(found.engine, found.argv, environment)
    found.settings |= parsed.settings
    found.model = target.model or parsed.model or found.facts.get("model_path") or found.facts.get("root")


def command_words(text: str) -> tuple[tuple[str, ...], dict[str, str]]:
    """Return the words of a command line, and the environment variables that are set before the program."""
    try:
        words = shlex.split(text, comments=False)
    except ValueError as error:
        raise InputError(f"--command cannot be parsed: {error}", hint="quote it as the shell does") from None
    environment: dict[str, str] = {}
    while words and re.fullmatch(r"[A-Z_][A-Z0-9_]*=.*", words[0]):
        name, _, value = words.pop(0).partition("=")
        environment[name] = value
    return tuple(words), environment


def _read_log(target: Target, found: Readings) -> None:
    path = target.log or (found.local.log if found.local else None)
    text = None
    if path is not None:
        try:
            text = log_text(path)
        except OSError as error:
            if target.log:
                raise InputError(f"{path} cannot be read: {error.strerror}", hint="check --log") from None
    if text is None:
        found.unseen.append("the log: start-up facts such as kernels and the KV cache's size; give --log FILE")
        return
    add_log(found, text)
    found.read.append(f"log {path}: known lines only")


def add_log(found: Readings, text: str) -> None:
    """Add what a log says; what the command line sets is not changed."""
    settings, found.logged = live.read_log(found.engine, text)
    found.model = found.model or settings.pop("model", None) or settings.get("model_tag")
    known = live.setting_names(found.engine)
    found.settings = {key: value for key, value in settings.items() if key in known} | found.settings
    found.log_gauges = live.read_log_gauges(found.engine, text)


def log_text(path: Path) -> str:
    """Return the beginning and the end of a log."""
    with path.open("rb") as stream:
        head = stream.read(_LOG_BYTES)
        size = stream.seek(0, 2)
        stream.seek(max(len(head), size - _LOG_BYTES))
        return (head + stream.read()).decode("utf-8", "replace")


async def _read_slots(client: httpx.AsyncClient, found: Readings) -> None:
    if found.engine != "llamacpp":
        return
    if await _slots(client) is None:
        found.unseen.append("/slots: lengths in progress and KV use; start it without --no-slots")
        found.facts["no_slots"] = True
    else:
        found.read.append("/slots (lengths only)")


async def _slots(client: httpx.AsyncClient) -> tuple[Slot, ...] | None:
    try:
        answer = await client.get("/slots")
        return parse_slots(answer.json()) if answer.status_code == 200 else None
    except (httpx.HTTPError, ValueError, TypeError, KeyError):
        return None


def parse_slots(data: Sequence[Mapping[str, Any]]) -> tuple[Slot, ...]:
    """Return the lengths of each slot; a prompt that a debugging server shows is dropped here."""
    slots = []
    for one in data:
        following = one.get("next_token") or [{}]
        decoded = following[0].get("n_decoded", 0) if isinstance(following, list) else following.get("n_decoded", 0)
        slots.append(
            Slot(
                context=float(one["n_ctx"]),
                used=float(one.get("n_prompt_tokens", 0)),
                decoded=float(decoded),
                task=int(one.get("id_task", -1)),
                busy=bool(one.get("is_processing")),
            )
        )
    return tuple(slots)


async def _read_regularly(
    client: httpx.AsyncClient,
    found: Readings,
    gpus: gpu_state.Session,
    *,
    window_s: float,
    on_first: Callable[[Readings], None],
) -> None:
    began_s = time.monotonic()
    due_s = began_s
    quickest_s = math.inf  # about the CPU time of an answer; a busy server takes longer
    while True:
        reading, took_s = await _reading(client, found, gpus)
        found.readings.append(reading)
        if len(found.readings) == FIRST_READINGS:
            on_first(found)
        if reading.at_s - began_s >= window_s:
            return
        first = len(found.readings) < FIRST_READINGS
        quickest_s = min(quickest_s, took_s)
        interval_s = _FIRST_INTERVAL_S if first else max(_INTERVAL_S, min(_MAX_INTERVAL_S, quickest_s / _SERVER_SHARE))
        due_s = min(max(due_s + interval_s, time.monotonic()), began_s + window_s)
        await asyncio.sleep(max(0.0, due_s - time.monotonic()))


async def _reading(client: httpx.AsyncClient, found: Readings, gpus: gpu_state.Session) -> tuple[Reading, float]:
    """Return a reading, and how long the server took for its metrics."""
    began_s = time.monotonic()
    try:
        answer = await client.get("/metrics")
        text = answer.text if answer.status_code == 200 else ""
    except httpx.HTTPError:
        text = ""
    took_s = time.monotonic() - began_s
    page = live.read_page(found.engine, text)
    slots = () if found.engine != "llamacpp" or found.facts.get("no_slots") else await _slots(client) or ()
    process = found.local.sample() if found.local else None
    return Reading((began_s + time.monotonic()) / 2, page, slots, process, gpus.sample()), took_s


def _note_what_is_missing(found: Readings) -> None:
    if not found.argv:
        found.unseen.append("the command line: settings come from the log and the metrics only; give --command")
