"""Run a replica on this machine: find the engine, check the deployment, start it."""

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

_PORT_ATTEMPTS = 3


class Prepared:
    """A checked deployment, with its installation, model, host and problems."""

    def __init__(self, deployment: Deployment[Any], *, installation: Installation, model: Model, host: Host) -> None:
        self.deployment, self.installation, self.model, self.host = deployment, installation, model, host
        self.engine = engines.get(deployment.engine)
        self.footprint: Footprint = self.engine.footprint(deployment, model=model, host=host)
        self.problems: list[Problem] = [
            *self.engine.check(deployment, model=model, host=host, installation=installation),
            *_memory_problems(self.footprint, deployment, host),
        ]

    def command(self, port: int) -> Command | None:
        """Return the command that starts the engine; None: attach to a running server."""
        if self.engine.attaches:
            return None
        return self.engine.command(self.deployment, installation=self.installation, port=port)


def prepare(deployment: Deployment[Any], *, engine_path: str | None = None, force: bool = False) -> Prepared:
    """Check a deployment against engine, model files and this machine; raise if it cannot work, unless `force`."""
    engine = engines.get(deployment.engine)
    host = devices.this_host()
    model = Model(source=deployment.variant.source)
    if engine.reads_weights:
        model = model_files.inspect(deployment.variant.source)
        deployment = _with_absolute_source(deployment)
    for knob, path in engine.files(deployment).items():
        if not Path(path).expanduser().exists():
            raise InputError(f"{knob}: file {path} not found", hint="check the path")
    installation = installations.find(deployment.engine, version=deployment.engine_version, path=engine_path)
    prepared = Prepared(deployment, installation=installation, model=model, host=host)
    refusals = [problem for problem in prepared.problems if problem.severity == "refuse"]
    if refusals and not force:
        raise DeploymentRefused("\n".join(problem.sentence for problem in refusals), hint=refusals[0].hint)
    return prepared


def _with_absolute_source(deployment: Deployment[Any]) -> Deployment[Any]:
    """Make the model path absolute, so that the printed command works in every directory."""
    source = model_files.absolute_source(deployment.variant.source)
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
    sizes = {
        "weights": footprint.weights_bytes,
        "KV cache": footprint.kv_bytes,
        "activations": footprint.activations_bytes,
        "server overhead": footprint.overhead_bytes,
    }
    listed = ", ".join(f"{name} {about_bytes(size)}" for name, size in sizes.items() if size)
    lower = f"lower {', or '.join(footprint.lower)}" if footprint.lower else "free some memory"
    if need > free:
        sentence = f"the deployment needs about {about_bytes(need)} of memory ({listed}); {about_bytes(free)} is free"
        return [Problem(rule="memory", sentence=sentence, hint=lower)]
    if need + footprint.growth_bytes > free:
        grown = about_bytes(footprint.growth_bytes)
        sentence = f"memory use can grow by {grown} while serving; {about_bytes(free - need)} is free after the start"
        return [
            Problem(rule="memory-growth", sentence=sentence, hint="set cache_ram (in MiB) to limit it", severity="warn")
        ]
    return []


def _gpu_memory_problems(footprint: Footprint, deployment: Deployment[Any], host: Host) -> list[Problem]:
    """Check that each GPU has enough free memory for its share of the weights and the KV cache."""
    ways, allowed = footprint.gpu_ways, deployment.placement.gpus
    gpus = [gpu for gpu in host.gpus if allowed is None or gpu.index in allowed][:ways]
    need = ((footprint.weights_bytes or 0) + (footprint.kv_bytes or 0)) // ways + footprint.activations_bytes
    for gpu in gpus:
        if need > gpu.free_bytes:
            sentence = f"each GPU needs about {about_bytes(need)}; GPU {gpu.index} ({gpu.name}) has "
            sentence += f"{about_bytes(gpu.free_bytes)} free"
            hint = "raise tensor_parallel_size, use a smaller quantization scheme, or free the GPU"
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
    """Start a prepared deployment and yield the ready replica; retry with another port if the port was taken."""
    deployment = prepared.deployment
    directory = directory or runs.new_run(deployment.served_name)
    for attempts_left in range(_PORT_ATTEMPTS - 1, -1, -1):
        with _port(prepared) as port:
            command = prepared.command(port.number if port else 0)
            _write_run_files(directory, deployment, command)
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
                if error.failure != "port_taken" or deployment.placement.port is not None or not attempts_left:
                    raise
                continue
            try:
                yield replica
            finally:
                await replica.__aexit__(None, None, None)
            return


def attach(prepared: Prepared, url: str, *, directory: Path) -> Replica:
    """Return a replica of a running server, which is not stopped afterwards."""
    engine, deployment = prepared.engine, prepared.deployment
    return Replica(deployment=deployment, engine=engine, command=None, url=url, port=None, directory=directory)


def _port(prepared: Prepared) -> contextlib.AbstractContextManager[ports.Port | None]:
    if prepared.engine.attaches:
        return contextlib.nullcontext()
    placement = prepared.deployment.placement
    return ports.reserve(placement.host, placement.port)


def _write_run_files(directory: Path, deployment: Deployment[Any], command: Command | None) -> None:
    (directory / "deployment.yaml").write_text(deployment.to_text())
    if command is not None:
        (directory / "command.sh").write_text(f"#!/bin/sh\n{shell_line(command)}\n")


def shell_line(command: Command) -> str:
    """Return the command as one line for a shell."""
    env = [f"{key}={shlex.quote(value)}" for key, value in command.env.items()]
    return " ".join([*env, shlex.join(command.argv)])
