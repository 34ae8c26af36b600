"""Find, install and remove engines; each managed installation has a separate environment in the cache."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from powerband import engines
from powerband.core.engine import Archive, Command, Installable, Installation, InstallPlan, Step, StepProgress
from powerband.core.host import Host
from powerband.engines.base import Engine
from powerband.errors import EngineMissing, InputError, InstallFailed
from powerband.runtime.devices import cpu_flags
from powerband.runtime.process import Process

MARKER = "installation.json"
OnProgress = Callable[[StepProgress], None]
_PROGRESS_INTERVAL_S = 1.0
_TAIL_BYTES = 65536
_BUILD_PROGRESS = re.compile(rb"^\[\s*(?:(\d+)%|(\d+)\s*/\s*(\d+))\]", re.MULTILINE)
_FLAG = re.compile(r"(?<![\w-])--[a-zA-Z0-9][a-zA-Z0-9-]*")


def cache_root() -> Path:
    """Return the cache directory: $POWERBAND_CACHE, or `powerband` in the user's cache directory."""
    if path := os.environ.get("POWERBAND_CACHE"):
        return Path(path)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "powerband"


def find(name: str, *, version: str | None = None, path: str | None = None) -> Installation:
    """Return the installation to use: the one at `path`, else a managed one, else one on PATH."""
    engine = engines.get(name)
    program = path or os.environ.get(f"POWERBAND_{name.upper()}")
    found = [_inspect_program(engine, program, origin="given")] if program else list(discover(name))
    matching = [one for one in found if version is None or one.version == version]
    if matching:
        return matching[0]
    wanted = f"{name} {version}" if version else name
    other = f" (installed: {', '.join(sorted({one.version for one in found}))})" if found else ""
    raise EngineMissing(f"{wanted} is not installed{other}", hint=engine.install_hint(version))


def discover(name: str) -> Iterator[Installation]:
    """Yield every installation of an engine: managed ones, newest first, then those on PATH."""
    engine = engines.get(name)
    if engine.builtin:
        program = tuple(word.replace("{python}", sys.executable) for word in engine.builtin)
        yield Installation(engine=name, version="builtin", origin="builtin", program=program)
    yield from managed(name)
    for program_name in engine.programs:
        if on_path := shutil.which(program_name):
            with contextlib.suppress(InputError):
                yield _inspect_program(engine, on_path, origin="path")


def managed(name: str) -> Iterator[Installation]:
    """Yield the managed installations of an engine or a tool, newest first."""
    flags = cpu_flags()
    for marker in sorted((cache_root() / "engines" / name).glob(f"*/{MARKER}"), key=_modified_s, reverse=True):
        with contextlib.suppress(ValidationError, OSError):
            installation = Installation.model_validate_json(marker.read_text())
            if installation.instruction_sets <= flags:  # a home directory can be shared by different machines
                yield installation


def summaries() -> Iterator[str]:
    """Yield one line for each engine found, without running any: managed ones have a version, others a path."""
    for name in engines.names():
        if engines.get(name).builtin:
            continue
        yield from (f"{name} {one.version}" for one in managed(name))
        given = os.environ.get(f"POWERBAND_{name.upper()}")
        programs = [given] if given else [shutil.which(one) for one in engines.get(name).programs]
        yield from (f"{name} at {one}" for one in programs if one)


def _modified_s(path: Path) -> float:
    return path.stat().st_mtime


def _inspect_program(engine: Engine[Any], path: str, *, origin: str) -> Installation:
    """Describe an engine that Powerband did not install: run it for its version and flags."""
    where = shutil.which(str(Path(path).expanduser()))
    if where is None:
        raise InputError(
            f"{path} is not an executable program",
            hint=f"give the path of {' or '.join(engine.programs)}",
        )
    program = engine.program(where)
    version = "unknown"
    for argv in engine.version_commands(where):
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            done = subprocess.run(argv, capture_output=True, text=True, timeout=60)
            if done.returncode == 0 and (read := engine.read_version(done.stdout + done.stderr)):
                version = read
                break
    flags = _flags(program, engine.help_args) if engine.help_is_quick else None
    return Installation.model_validate(
        {"engine": engine.name, "version": version, "origin": origin, "program": program, "flags": flags}
    )


def _flags(program: tuple[str, ...], help_args: tuple[str, ...]) -> frozenset[str] | None:
    """Return every flag in the program's help; None: it printed none."""
    try:
        done = subprocess.run([*program, *help_args], capture_output=True, text=True, timeout=120)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return frozenset(_FLAG.findall(done.stdout + done.stderr)) or None


async def install(
    tool: Installable,
    *,
    host: Host,
    version: str | None = None,
    pip_args: tuple[str, ...] = (),
    progress: OnProgress = lambda _: None,
) -> tuple[Installation, bool]:
    """Install an engine or a tool unless it is installed; return it, and whether it was installed now."""
    plan = tool.install_plan(version or tool.default_version or "", host)
    return await _follow(plan, tool, host=host, pip_args=pip_args, progress=progress)


async def install_engine(
    engine: Engine[Any],
    *,
    host: Host,
    version: str | None = None,
    archive: Archive | None = None,
    compile_here: bool = False,
    pip_args: tuple[str, ...] = (),
    progress: OnProgress = lambda _: None,
) -> tuple[Installation, bool]:
    """Install an engine: `archive` if given; else the published programs for this host; else as `install` does.

    A version that `install` made earlier is kept.
    """
    built = engine.install_plan(version or engine.default_version or "", host)
    plan = engine.prebuilt_plan(host, archive) if archive or not (version or compile_here) else None
    if plan and (archive or not (_home(built, host) / MARKER).is_file()):
        try:
            return await _follow(plan, engine, host=host, progress=progress)
        except InstallFailed as error:
            if archive:
                raise
            reason_given = error.message.partition("failed: ")[2] or error.message
            reason = f"{plan.version} is not used ({reason_given}); {built.version} is built instead"
            progress(StepProgress(title=reason, number=0, total=1))
    return await _follow(built, engine, host=host, pip_args=pip_args, progress=progress)


def _home(plan: InstallPlan, host: Host) -> Path:
    key = json.dumps([plan.build, host.machine, sys.version_info[:2]])
    folder = f"{plan.version}-{hashlib.sha256(key.encode()).hexdigest()[:8]}"
    return cache_root() / "engines" / plan.engine / folder


async def _follow(
    plan: InstallPlan,
    tool: Installable,
    *,
    host: Host,
    pip_args: tuple[str, ...] = (),
    progress: OnProgress,
) -> tuple[Installation, bool]:
    """Run a plan's steps unless its result is installed."""
    name, home = tool.name, _home(plan, host)
    home.parent.mkdir(parents=True, exist_ok=True)
    waiting = StepProgress(title="wait for another process that installs it", number=1, total=1)
    async with locked(_sibling(home, ".lock"), on_wait=lambda: progress(waiting)):
        if (home / MARKER).is_file():
            return Installation.model_validate_json((home / MARKER).read_text()), False
        shutil.rmtree(home, ignore_errors=True)  # files of an interrupted installation
        home.mkdir()
        log = _sibling(home, ".log")
        log.unlink(missing_ok=True)
        if plan.expects:
            progress(StepProgress(title=f"{name} {plan.version}: {plan.expects}", number=0, total=len(plan.steps)))
        for number, step in enumerate(plan.steps, start=1):
            filled = _filled(step, home=home, pip_args=pip_args)
            error = await run_step(filled, log=log, number=number, total=len(plan.steps), progress=progress)
            if error:
                raise InstallFailed(
                    f"{name} {plan.version} could not be installed: '{step.title}' failed: {error}", hint=f"read {log}"
                )
        program = tuple(_fill(word, home) for word in plan.program)
        installation = Installation(
            engine=name,
            version=plan.version,
            origin="managed",
            program=program,
            home=str(home),
            build=plan.build,
            flags=_flags(program, tool.help_args),
            instruction_sets=plan.instruction_sets,
            tools={tool: path for tool, word in plan.tools.items() if Path(path := _fill(word, home)).exists()},
        )
        if installation.flags is None:
            raise InstallFailed(
                f"{name} {plan.version} was installed, but '{program[0]} {tool.help_args[0]}' prints no flags",
                hint=f"read {log}",
            )
        partial = home / (MARKER + ".partial")
        partial.write_text(installation.model_dump_json(indent=1))
        partial.replace(home / MARKER)
        return installation, True


def _filled(step: Step, *, home: Path, pip_args: tuple[str, ...]) -> Step:
    argv = tuple(_fill(word, home) for word in step.argv)
    if pip_args and argv[1:3] == ("-m", "pip") and argv[3] in ("install", "download"):
        argv = (*argv, *pip_args)
    env = {key: _fill(value, home) for key, value in step.env.items()}
    return step.model_copy(update={"argv": argv, "env": env})


async def run_step(
    step: Step, *, log: Path, number: int = 1, total: int = 1, progress: OnProgress = lambda _: None
) -> str | None:
    """Run one command to its end and report its progress; return the last line of its output if it failed."""
    with log.open("a") as stream:
        stream.write(f"\n== {step.title}\n$ {' '.join(step.argv)}\n")
    output_start, begin_s = log.stat().st_size, time.monotonic()
    state = StepProgress(title=step.title, number=number, total=total)
    progress(state)
    async with Process(Command(argv=step.argv, env=step.env), log=log) as process:
        while not process.exited.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.exited.wait(), _PROGRESS_INTERVAL_S)
            fraction = _build_fraction(log, output_start)
            changes = {"elapsed_s": time.monotonic() - begin_s} | ({} if fraction is None else {"fraction": fraction})
            state = state.model_copy(update=changes)
            progress(state)
    if process.exit_code == 0:
        return None
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][:300]


def _build_fraction(log: Path, start: int) -> float | None:
    """Return the last progress that make ('[ 37%]') or ninja ('[12/345]') printed after `start`; None: none."""
    with contextlib.suppress(OSError), log.open("rb") as stream:
        size = stream.seek(0, os.SEEK_END)
        start = start if start <= size else 0  # the log was rotated
        stream.seek(max(start, size - _TAIL_BYTES))
        found = _BUILD_PROGRESS.findall(stream.read())
        if found:
            percent, done, of = found[-1]
            return min(1.0, int(percent) / 100 if percent else int(done) / max(1, int(of)))
    return None


def _fill(text: str, home: Path) -> str:
    return text.replace("{home}", str(home)).replace("{python}", sys.executable).replace("{jobs}", str(cores()))


def cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _sibling(home: Path, suffix: str) -> Path:
    return home.with_name(home.name + suffix)


@contextlib.asynccontextmanager
async def locked(path: Path, *, on_wait: Callable[[], None]) -> AsyncIterator[None]:
    """Hold an exclusive file lock; call `on_wait` once if it must wait. The kernel releases it if the process dies."""
    with path.open("a") as stream:
        reported = False
        while True:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                if not reported:
                    on_wait()
                reported = True
                await asyncio.sleep(0.5)
        yield


def remove(name: str, *, version: str | None = None) -> list[Installation]:
    """Remove the managed installations of an engine; others are left alone."""
    installed = [one for one in discover(name) if one.origin == "managed" and version in (None, one.version)]
    if not installed:
        wanted = f"{name} {version}" if version else name
        raise InputError(f"no managed installation of {wanted} was found", hint="see 'powerband engine list'")
    for one in installed:
        home = Path(str(one.home))
        (home / MARKER).unlink()
        shutil.rmtree(home)
        for suffix in (".lock", ".log"):
            _sibling(home, suffix).unlink(missing_ok=True)
    return installed
