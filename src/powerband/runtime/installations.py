"""Engines on this machine: found, installed into an environment of their own, removed."""

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
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from powerband import engines
from powerband.core.engine import Command, Installable, Installation, InstallPlan, Step
from powerband.core.host import Host
from powerband.engines.base import Engine
from powerband.errors import EngineMissing, InputError, InstallFailed
from powerband.runtime.devices import cpu_flags
from powerband.runtime.process import Process

MARKER = "installation.json"
_FLAG = re.compile(r"(?<![\w-])--[a-zA-Z0-9][a-zA-Z0-9-]*")


def cache_root() -> Path:
    """Return where engines live: $POWERBAND_CACHE, or powerband under the user's cache folder."""
    if given := os.environ.get("POWERBAND_CACHE"):
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "powerband"


def find(name: str, *, version: str | None = None, path: str | None = None) -> Installation:
    """Return the installation to use: the given one, else ours of that version, else the one on PATH."""
    engine = engines.get(name)
    given = path or os.environ.get(f"POWERBAND_{name.upper()}")
    found = [_adopt(engine, given, origin="given")] if given else list(found_here(name))
    fitting = [one for one in found if version is None or one.version == version]
    if fitting:
        return fitting[0]
    wanted = f"{name} {version}" if version else name
    other = f"; here is {', '.join(sorted({one.version for one in found}))}" if found else ""
    command = f"powerband engine install {name}" + (f" --version {version}" if version else "")
    raise EngineMissing(f"{wanted} is not on this machine{other}", hint=f"run '{command}'")


def found_here(name: str) -> Iterator[Installation]:
    """Yield every installation of one engine: ours, newest first, then those on PATH."""
    engine = engines.get(name)
    if engine.builtin:
        program = tuple(word.replace("{python}", sys.executable) for word in engine.builtin)
        yield Installation(engine=name, version="builtin", origin="builtin", program=program)
    yield from managed(name)
    for program_name in engine.programs:
        if on_path := shutil.which(program_name):
            with contextlib.suppress(InputError):
                yield _adopt(engine, on_path, origin="path")


def managed(name: str) -> Iterator[Installation]:
    """Yield what Powerband installed of an engine or a tool, newest first."""
    flags = cpu_flags()
    for marker in sorted((cache_root() / "engines" / name).glob(f"*/{MARKER}"), key=_age, reverse=True):
        with contextlib.suppress(ValidationError, OSError):
            installation = Installation.model_validate_json(marker.read_text())
            if installation.instruction_sets <= flags:  # a home folder may be shared by unlike machines
                yield installation


def _age(path: Path) -> float:
    return path.stat().st_mtime


def _adopt(engine: Engine[Any], path: str, *, origin: str) -> Installation:
    """Use an engine that somebody else installed, as it is."""
    where = shutil.which(str(Path(path).expanduser()))
    if where is None:
        raise InputError(
            f"{path} is not a program that can be run",
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
    """Return every flag that its own help names."""
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
    progress: Callable[[str, int, int], None] = lambda *_: None,
) -> tuple[Installation, bool]:
    """Install an engine or a tool unless it is there; return it, and whether work was done."""
    name = tool.name
    plan = tool.install_plan(version or tool.default_version or "", host)
    key = json.dumps([plan.build, host.machine, sys.version_info[:2]])
    home = cache_root() / "engines" / name / f"{plan.version}-{hashlib.sha256(key.encode()).hexdigest()[:8]}"
    home.parent.mkdir(parents=True, exist_ok=True)
    async with locked(
        _beside(home, ".lock"), waiting=lambda: progress("wait for another process that installs it", 0, 1)
    ):
        if (home / MARKER).is_file():
            return Installation.model_validate_json((home / MARKER).read_text()), False
        shutil.rmtree(home, ignore_errors=True)  # what an interrupted installation left
        home.mkdir()
        log = _beside(home, ".log")
        log.unlink(missing_ok=True)
        for number, step in enumerate(plan.steps):
            progress(step.title, number, len(plan.steps))
            await _run(step, plan, home=home, log=log, pip_args=pip_args)
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
            tools={tool: _fill(path, home) for tool, path in plan.tools.items()},
        )
        if installation.flags is None:
            raise InstallFailed(
                f"{name} {plan.version} was installed but '{program[0]} {tool.help_args[0]}' says nothing",
                hint=f"read {log}",
            )
        partial = home / (MARKER + ".partial")
        partial.write_text(installation.model_dump_json(indent=1))
        partial.replace(home / MARKER)
        return installation, True


async def _run(step: Step, plan: InstallPlan, *, home: Path, log: Path, pip_args: tuple[str, ...]) -> None:
    argv = tuple(_fill(word, home) for word in step.argv)
    if pip_args and argv[1:3] == ("-m", "pip") and argv[3] in ("install", "download"):
        argv = (*argv, *pip_args)
    env = {key: _fill(value, home) for key, value in step.env.items()}
    if last := await run_step(step.model_copy(update={"argv": argv, "env": env}), log=log):
        raise InstallFailed(
            f"{plan.engine} {plan.version} could not be installed: '{step.title}' failed: {last}", hint=f"read {log}"
        )


async def run_step(step: Step, *, log: Path) -> str | None:
    """Run one command to its end; return the last line of what it said where it failed."""
    with log.open("a") as stream:
        stream.write(f"\n== {step.title}\n$ {' '.join(step.argv)}\n")
    async with Process(Command(argv=step.argv, env=step.env), log=log) as process:
        await process.ended.wait()
    if process.exit_code == 0:
        return None
    words = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return words[-1][:300]


def _fill(text: str, home: Path) -> str:
    return text.replace("{home}", str(home)).replace("{python}", sys.executable).replace("{jobs}", str(cores()))


def cores() -> int:
    """Return how many cores we may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _beside(home: Path, suffix: str) -> Path:
    return home.with_name(home.name + suffix)


@contextlib.asynccontextmanager
async def locked(path: Path, *, waiting: Callable[[], None]) -> AsyncIterator[None]:
    """Hold the lock of one thing that is made; it is free again when its holder dies, however it dies."""
    with path.open("a") as stream:
        told = False
        while True:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                if not told:
                    waiting()
                told = True
                await asyncio.sleep(0.5)
        yield


def remove(name: str, *, version: str | None = None) -> list[Installation]:
    """Remove our installations of an engine; those that somebody else made are not ours to remove."""
    ours = [one for one in found_here(name) if one.origin == "managed" and version in (None, one.version)]
    if not ours:
        wanted = f"{name} {version}" if version else name
        raise InputError(f"Powerband has installed no {wanted}", hint="see 'powerband engine list'")
    for one in ours:
        home = Path(str(one.home))
        (home / MARKER).unlink()
        shutil.rmtree(home)
        for suffix in (".lock", ".log"):
            _beside(home, suffix).unlink(missing_ok=True)
    return ours
