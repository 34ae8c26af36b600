"""Run a replica on this machine: find the engine, check the deployment, start it."""

from __future__ import annotations

import contextlib
import shlex
import shutil
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

from powerband import engines
from powerband.core import hub_id
from powerband.core.allocation import Allocation, Need, NoRoom, allocate, share_of_cores
from powerband.core.deployment import Deployment, Variant
from powerband.core.engine import Command, Footprint, Installation, Problem
from powerband.core.host import Host
from powerband.core.model import Model
from powerband.core.units import about_bytes
from powerband.errors import DeploymentRefused, EngineFailed, InputError
from powerband.launchers import support
from powerband.runtime import devices, gpus, hub, installations, leases, model_files, ports
from powerband.runtime.process import Process
from powerband.runtime.replica import Replica
from powerband.store import runs

_PORT_ATTEMPTS = 3
_MIN_START_TIMEOUT_S, _SLOW_LOAD_BYTES_PER_S = 600.0, 100e6  # a network file system under load


class Prepared:
    """A checked deployment, with its installation, model, host and problems."""

    def __init__(self, deployment: Deployment[Any], *, installation: Installation, model: Model, host: Host) -> None:
        self.deployment, self.installation, self.model, self.host = deployment, installation, model, host
        self.engine = engines.get(deployment.engine)
        self.footprint: Footprint = self.engine.footprint(deployment, model=model, host=host)
        self.problems: list[Problem] = [
            *self.engine.check(deployment, model=model, host=host, installation=installation),
            *support.problems(self.engine, deployment, model=model, host=host, version=installation.version),
            *_memory_problems(self.footprint, deployment, host),
        ]

    @property
    def need(self) -> Need:
        """Return what a replica occupies."""
        placement, on_gpus = self.deployment.placement, self.footprint.devices
        cores = placement.cores or share_of_cores(self.host, placement.replicas)
        return Need(
            devices=on_gpus,
            free_bytes=self.footprint.gpu_free_bytes,
            free_share=self.footprint.gpu_free_share,
            allowed=placement.gpus,
            cores=None if on_gpus or not self.engine.reads_weights else cores,
        )

    @property
    def devices(self) -> int:
        """Return the number of devices that are paid for: GPUs, or the machine itself."""
        return max(1, self.footprint.gpu_ways * self.footprint.copies)

    @property
    def start_timeout_s(self) -> float:
        """Return the time limit of a start: the deployment's, else by the size of the weights."""
        return self.deployment.start_timeout or start_timeout_s(self.footprint.weights_bytes)

    def command(self, port: int, allocation: Allocation | None = None) -> Command | None:
        """Return the command that starts the engine on its devices and cores; None: attach to a running server."""
        if self.engine.attaches:
            return None
        deployment, allocation = self._on_disk(), allocation or Allocation()
        threads = allocation.cores
        if threads and not allocation.gpus:
            cores = sum(bool(set(one) & set(threads)) for one in self.host.core_threads) or len(threads)
            config = self.deployment.config
            pinned = self.engine.pinned(config, threads=threads, cores=cores)
            deployment = deployment.model_copy(update={"config": config.model_copy(update=pinned)})
        command = self.engine.command(deployment, installation=self.installation, port=port)
        prefix = ("taskset", "--cpu-list", _ranges(threads)) if threads and shutil.which("taskset") else ()
        return Command(argv=(*prefix, *command.argv), env=gpus.selection(allocation.gpus) | command.env)

    def _on_disk(self) -> Deployment[Any]:
        """Return the deployment as the engine gets it: a downloaded hub id is the folder or file in the cache.

        The other nodes of a replica over several nodes do not have this machine's cache, so it gets the hub id.
        """
        source = self.deployment.variant.full_source
        if self.footprint.over_nodes or self.model.format is None or hub_id.parse(source) is None:
            return self.deployment
        path = model_files.location(source)
        return self.deployment if path is None else _with_source(self.deployment, str(path))


def start_timeout_s(weights_bytes: int | None) -> float:
    """Return the time limit of a start that reads weights of this size from slow storage."""
    return _MIN_START_TIMEOUT_S + (weights_bytes or 0) / _SLOW_LOAD_BYTES_PER_S


def prepare(
    deployment: Deployment[Any],
    *,
    engine_path: str | None = None,
    force: bool = False,
    download: bool = True,
    now: bool = True,
    report: Callable[[str], None] = lambda _: None,
) -> Prepared:
    """Check a deployment against engine, model files and this machine; raise if it cannot work, unless `force`.

    A hub id is downloaded and pinned to its commit, unless `download` is off. Without `now` others may use its devices.
    """
    engine = engines.get(deployment.engine)
    host = devices.this_host()
    model = Model(source=deployment.variant.source)
    if engine.reads_weights:
        if download:
            deployment = _with_source(deployment, hub.local(deployment.variant.full_source, report=report))
        model = model_files.inspect(deployment.variant.full_source)
        deployment = _with_source(deployment, model_files.absolute_source(deployment.variant.full_source))
    for knob, path in engine.files(deployment).items():
        if not Path(path).expanduser().exists():
            raise InputError(f"{knob}: file {path} not found", hint="check the path")
    installation = installations.find(deployment.engine, version=deployment.engine_version, path=engine_path)
    prepared = Prepared(deployment, installation=installation, model=model, host=host)
    refusals = [one for one in prepared.problems if one.severity == "refuse" and (now or one.rule != "devices")]
    if refusals and not force:
        refused = NoRoom if {problem.rule for problem in refusals} == {"devices"} else DeploymentRefused
        raise refused("\n".join(problem.sentence for problem in refusals), hint=refusals[0].hint)
    return prepared


async def fetched(deployment: Deployment[Any], *, report: Callable[[str], None]) -> Deployment[Any]:
    """Return the deployment with its hub id pinned and downloaded; `prepare` does the same, but cannot be cancelled."""
    if not engines.get(deployment.engine).reads_weights:
        return deployment
    return _with_source(deployment, await hub.fetch(deployment.variant.full_source, report=report))


def _with_source(deployment: Deployment[Any], source: str) -> Deployment[Any]:
    """Return the deployment with another path or hub id of the same weights, under its name."""
    variant = deployment.variant
    if source == variant.full_source:
        return deployment
    data = variant.model_dump() | {"source": source, "revision": None}
    name = deployment.name or deployment.served_name
    return deployment.model_copy(update={"variant": Variant.model_validate(data), "name": name})


def _memory_problems(footprint: Footprint, deployment: Deployment[Any], host: Host) -> list[Problem]:
    if footprint.gpu_ways:
        return _gpu_memory_problems(footprint, deployment, host)
    need, free = deployment.placement.replicas * footprint.start_bytes(), host.available_bytes
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
    """Check that enough GPUs have the free memory for their share of the weights and the KV cache."""
    allowed = deployment.placement.gpus
    able = [gpu for gpu in host.gpus if allowed is None or gpu.index in allowed]
    need = footprint.gpu_free_bytes
    most = max(able, key=lambda gpu: gpu.free_bytes, default=None)
    if most and need > (footprint.gpu_free_share or 1.0) * most.memory_bytes:
        sentence = f"each GPU needs about {about_bytes(need)}; GPU {most.index} ({most.name}) has "
        sentence += f"{about_bytes(most.free_bytes)} free"
        return [Problem(rule="memory", sentence=sentence, hint=f"{_SPREAD[deployment.engine]}, or use a smaller "
                        "quantization scheme or context")]  # fmt: skip
    try:
        share = footprint.gpu_free_share
        allocate(host, Need(devices=footprint.devices, free_bytes=need, free_share=share, allowed=allowed))
    except NoRoom as error:
        return [Problem(rule="devices", sentence=error.message, hint=error.hint)]
    return []


_SPREAD = {"vllm": "raise tensor_parallel_size", "llamacpp": "lower ctx_size or n_gpu_layers"}


@contextlib.asynccontextmanager
async def launch(
    prepared: Prepared,
    *,
    directory: Path | None = None,
    ready_timeout_s: float | None = None,
    stop_grace_s: float = 3.0,
    on_change: Callable[[Replica, str], None] = lambda *_: None,
) -> AsyncIterator[Replica]:
    """Start a prepared deployment on devices that no other replica holds, and yield the ready replica.

    Replicas that share the load are started one after the other, and belong to the first. Retry with another port if
    the port was taken. Raise NoRoom if too few devices are free.
    """
    directory = directory or runs.new_run(prepared.deployment.served_name)
    async with contextlib.AsyncExitStack() as stack:
        members = []
        for number in range(prepared.deployment.placement.replicas):
            own = directory / f"replica-{number + 1}" if number else directory
            own.mkdir(parents=True, exist_ok=True)
            one = _launch(prepared, own, ready_timeout_s, stop_grace_s, on_change)
            members.append(await stack.enter_async_context(one))
        members[0].beside = tuple(members[1:])
        yield members[0]


@contextlib.asynccontextmanager
async def _launch(
    prepared: Prepared,
    directory: Path,
    ready_timeout_s: float | None,
    stop_grace_s: float,
    on_change: Callable[[Replica, str], None],
) -> AsyncIterator[Replica]:
    """Start one replica."""
    deployment = prepared.deployment
    for attempts_left in range(_PORT_ATTEMPTS - 1, -1, -1):
        with _port(prepared) as port, reserve(prepared) as lease:
            command = prepared.command(port.number if port else 0, lease.allocation)
            _write_run_files(directory, deployment, command)
            replica = Replica(
                deployment=deployment,
                engine=prepared.engine,
                command=command,
                url=prepared.engine.base_url(deployment, port=port.number if port else 0),
                port=port.number if port else None,
                directory=directory,
                ready_timeout_s=ready_timeout_s or prepared.start_timeout_s,
                stop_grace_s=stop_grace_s,
                on_change=on_change,
                allocation=lease.allocation,
                inherited=lease.descriptors,
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


def adopt(deployment: Deployment[Any], record: Mapping[str, Any], process: Process, *, directory: Path) -> Replica:
    """Return the replica of a ready engine that an earlier supervisor started; `record` is an `adoption_record`."""
    return Replica(
        deployment=deployment,
        engine=engines.get(deployment.engine),
        command=process.command,
        url=record["url"],
        port=record["port"],
        directory=directory,
        allocation=Allocation.model_validate(record["allocation"]),
        adopted=process,
    )


def adoption_record(replica: Replica) -> dict[str, Any]:
    """Return what `adopt` needs besides the process."""
    return {"url": replica.url, "port": replica.port, "allocation": replica.allocation.model_dump(mode="json")}


def _port(prepared: Prepared) -> contextlib.AbstractContextManager[ports.Port | None]:
    if prepared.engine.attaches:
        return contextlib.nullcontext()
    placement = prepared.deployment.placement
    return ports.reserve(placement.host, placement.port)


def reserve(prepared: Prepared) -> leases.Lease:
    """Hold the devices and cores of a replica; their free memory is read again."""
    need, host = prepared.need, prepared.host
    if prepared.engine.attaches or not (need.devices or need.cores):
        return leases.Lease(Allocation(), [])
    if need.devices:
        host = host.model_copy(update={"gpus": gpus.visible(devices.system_root())[0]})
    return leases.acquire(host, need, name=prepared.deployment.served_name)


def _ranges(cores: tuple[int, ...]) -> str:
    """Return cores as a list of ranges: 0-3,8."""
    parts: list[list[int]] = []
    for core in sorted(cores):
        if parts and core == parts[-1][-1] + 1:
            parts[-1].append(core)
        else:
            parts.append([core])
    return ",".join(f"{part[0]}-{part[-1]}" if len(part) > 1 else str(part[0]) for part in parts)


def _write_run_files(directory: Path, deployment: Deployment[Any], command: Command | None) -> None:
    (directory / "deployment.yaml").write_text(deployment.to_text())
    if command is not None:
        (directory / "command.sh").write_text(f"#!/bin/sh\n{shell_line(command)}\n")


def shell_line(command: Command) -> str:
    """Return the command as one line for a shell."""
    env = [f"{key}={shlex.quote(value)}" for key, value in command.env.items()]
    return " ".join([*env, shlex.join(command.argv)])
