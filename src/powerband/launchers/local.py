"""Run a replica on this machine: find the engine, refuse what cannot work, start it."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from powerband import engines
from powerband.core.deployment import Deployment
from powerband.core.engine import Command, Footprint, Installation, Problem
from powerband.core.host import Host
from powerband.core.model import Model
from powerband.core.units import about_bytes
from powerband.errors import DeploymentRefused, EngineFailed, InputError
from powerband.runtime import devices, installations, model_files, ports
from powerband.runtime.replica import Replica
from powerband.store import runs

_TRIES_FOR_A_PORT = 3


class Prepared:
    """A deployment that passed every check, with all that is needed to start it."""

    def __init__(self, deployment: Deployment[Any], *, installation: Installation, model: Model, host: Host) -> None:
        self.deployment, self.installation, self.model, self.host = deployment, installation, model, host
        self.engine = engines.get(deployment.engine)
        self.footprint: Footprint = self.engine.footprint(deployment, model=model, host=host)
        self.problems: list[Problem] = [
            *self.engine.check(deployment, model=model, host=host, installation=installation),
            *_memory_problems(self.footprint, deployment, host),
        ]

    def command(self, port: int) -> Command | None:
        """Return what to run; None for a server that is running already."""
        if self.engine.attaches:
            return None
        return self.engine.command(self.deployment, installation=self.installation, port=port)


def prepare(deployment: Deployment[Any], *, engine_path: str | None = None, force: bool = False) -> Prepared:
    """Check a deployment against the engine, the model's files and this machine; raise on the first refusal."""
    engine = engines.get(deployment.engine)
    host = devices.this_host()
    model = Model(source=deployment.variant.source)
    if engine.reads_weights:
        model = model_files.inspect(deployment.variant.source)
        deployment = _with_absolute_source(deployment)
    for knob, path in engine.files(deployment).items():
        if not Path(path).expanduser().exists():
            raise InputError(f"{knob}: there is no file {path}", hint="check the path")
    installation = installations.find(deployment.engine, version=deployment.engine_version, path=engine_path)
    prepared = Prepared(deployment, installation=installation, model=model, host=host)
    refusals = [problem for problem in prepared.problems if problem.severity == "refuse"]
    if refusals and not force:
        raise DeploymentRefused("\n".join(problem.sentence for problem in refusals), hint=refusals[0].hint)
    return prepared


def _with_absolute_source(deployment: Deployment[Any]) -> Deployment[Any]:
    """A command that is printed and kept must mean the same wherever it is pasted."""
    source = model_files.anywhere(deployment.variant.source)
    if source == deployment.variant.source:
        return deployment
    variant = deployment.variant.model_copy(update={"source": source})
    name = deployment.name or deployment.served_name
    return deployment.model_copy(update={"variant": variant, "name": name})


def _memory_problems(footprint: Footprint, deployment: Deployment[Any], host: Host) -> list[Problem]:
    if footprint.gpu_ways:
        return _gpu_memory_problems(footprint, deployment, host)
    need, free = footprint.start_bytes(), host.available_bytes
    if footprint.one_node and host.numa_nodes:
        free = min(free, host.numa_nodes[0].available_bytes)
    parts = {
        "weights": footprint.weights_bytes,
        "KV cache": footprint.kv_bytes,
        "activations": footprint.activations_bytes,
        "the server itself": footprint.overhead_bytes,
    }
    listed = ", ".join(f"{name} {about_bytes(size)}" for name, size in parts.items() if size)
    lower = f"lower {', or '.join(footprint.lower)}" if footprint.lower else "free some memory"
    if need > free:
        sentence = f"it needs about {about_bytes(need)} ({listed}) and {about_bytes(free)} is free"
        return [Problem(rule="memory", sentence=sentence, hint=lower)]
    if need + footprint.growth_bytes > free:
        grown = about_bytes(footprint.growth_bytes)
        sentence = f"it fits now, but may grow by {grown} while it serves and {about_bytes(free - need)} would be left"
        return [Problem(rule="memory-growth", sentence=sentence, hint="set cache_ram (MiB)", severity="warn")]
    return []


def _gpu_memory_problems(footprint: Footprint, deployment: Deployment[Any], host: Host) -> list[Problem]:
    """Each GPU's part of the weights and the KV cache must fit into what is free of it."""
    ways, allowed = footprint.gpu_ways, deployment.placement.gpus
    gpus = [gpu for gpu in host.gpus if allowed is None or gpu.index in allowed][:ways]
    need = ((footprint.weights_bytes or 0) + (footprint.kv_bytes or 0)) // ways + footprint.activations_bytes
    for gpu in gpus:
        if need > gpu.free_bytes:
            sentence = f"each GPU would hold about {about_bytes(need)} and GPU {gpu.index} ({gpu.name}) has "
            sentence += f"{about_bytes(gpu.free_bytes)} free"
            hint = "raise tensor_parallel_size, use a smaller scheme, or free the GPU"
            return [Problem(rule="memory", sentence=sentence, hint=hint)]
    return []


@contextlib.asynccontextmanager
async def launch(
    prepared: Prepared,
    *,
    directory: Path | None = None,
    ready_timeout_s: float = 600.0,
    stop_grace_s: float = 3.0,
    on_change: Callable[[Replica, str], None] = lambda *_: None,
) -> AsyncIterator[Replica]:
    """Start a prepared deployment and yield it ready; a port that was lost to a stranger is picked anew."""
    deployment = prepared.deployment
    directory = directory or runs.new_run(deployment.served_name)
    for left in range(_TRIES_FOR_A_PORT - 1, -1, -1):
        with _port(prepared) as port:
            command = prepared.command(port.number if port else 0)
            _note(directory, deployment, command)
            replica = Replica(
                deployment=deployment,
                engine=prepared.engine,
                command=command,
                url=prepared.engine.base_url(deployment, port=port.number if port else 0),
                port=port.number if port else None,
                directory=directory,
                ready_timeout_s=ready_timeout_s,
                stop_grace_s=stop_grace_s,
                on_change=on_change,
            )
            try:
                await replica.__aenter__()
            except EngineFailed as error:
                if error.failure != "port_taken" or deployment.placement.port is not None or not left:
                    raise
                continue
            try:
                yield replica
            finally:
                await replica.__aexit__(None, None, None)
            return


def attach(prepared: Prepared, url: str, *, directory: Path) -> Replica:
    """Return a replica that somebody else runs; it goes on running afterwards."""
    engine, deployment = prepared.engine, prepared.deployment
    return Replica(deployment=deployment, engine=engine, command=None, url=url, port=None, directory=directory)


def _port(prepared: Prepared) -> contextlib.AbstractContextManager[ports.Port | None]:
    if prepared.engine.attaches:
        return contextlib.nullcontext()
    placement = prepared.deployment.placement
    return ports.reserve(placement.host, placement.port)


def _note(directory: Path, deployment: Deployment[Any], command: Command | None) -> None:
    (directory / "deployment.yaml").write_text(deployment.to_text())
    if command is not None:
        (directory / "command.sh").write_text(f"#!/bin/sh\n{paste(command)}\n")


def paste(command: Command) -> str:
    """Return the command as one line that anyone can paste into a shell."""
    env = [f"{key}={shlex.quote(value)}" for key, value in command.env.items()]
    return " ".join([*env, shlex.join(command.argv)])
