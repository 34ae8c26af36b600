"""The stage `diagnose`: read a server that runs, and say what limits it and what to change."""

from __future__ import annotations

import datetime
import shlex
from collections.abc import Callable
from dataclasses import dataclass

from powerband.core.diagnosis import Diagnosis, Finding, Observation
from powerband.core.host import Host
from powerband.core.slo import SLO
from powerband.diagnose import command_line, roofline, rules
from powerband.diagnose.collect import Readings, Target, collect
from powerband.diagnose.observation import observe
from powerband.diagnose.roofline import StepModel
from powerband.engines import live
from powerband.plan import device as device_named
from powerband.plan.options import host_of
from powerband.runtime import devices


@dataclass(frozen=True)
class DiagnoseSpec:
    """What to diagnose, and for how long."""

    target: Target
    window_s: float = 60.0
    slo: SLO | None = None
    device: str | None = None  # of a remote server, with its count: h100-sxm:8


async def diagnose(spec: DiagnoseSpec, *, on_first: Callable[[Diagnosis], None] = lambda _: None) -> Diagnosis:
    """Return the diagnosis; `on_first` gets a preliminary one within a few seconds. Only GET requests are sent."""

    def first(found: Readings) -> None:
        on_first(conclude(found, spec).model_copy(update={"preliminary": True}))

    return conclude(await collect(spec.target, window_s=spec.window_s, on_first=first), spec)


def conclude(found: Readings, spec: DiagnoseSpec) -> Diagnosis:
    """Return the diagnosis of readings."""
    observation = observe(found, spec.slo)
    model, host = roofline.read_model(spec.target.model or observation.model), _host(found, spec)
    step_model = roofline.step_model(observation, model, host)
    observation = observation.model_copy(update=roofline.shares(observation, step_model))
    findings = rules.evaluate(observation, model=model, found=step_model, argv=found.argv)
    resource, evidence = roofline.resource(observation)
    return Diagnosis(
        url=found.url,
        taken_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        observation=observation,
        resource=resource,
        resource_evidence=evidence,
        findings=findings,
        command=live.redacted(found.argv) if found.argv else None,
        changed_command=_all_changes(found, observation, findings, step_model),
        prove_command=_tune(observation, spec),
        read=tuple(found.read),
        unseen=tuple(found.unseen),
    )


def _host(found: Readings, spec: DiagnoseSpec) -> Host | None:
    """Return the server's machine: this one, or the device that was named."""
    if spec.device:
        name, _, count = spec.device.partition(":")
        return host_of(device_named(name), int(count) if count.isdigit() else 1)
    return devices.this_host() if found.local else None


def _all_changes(
    found: Readings, observation: Observation, findings: tuple[Finding, ...], step_model: StepModel | None
) -> str | None:
    """Return the command line with the flags of every problem and warning; the first finding wins a conflict."""
    if not found.argv:
        return None
    wanted, removed = rules.proposals(observation, findings, step_model)
    if not wanted and not removed:
        return None
    return command_line.changed(found.engine, found.argv, wanted, removed)


def _tune(observation: Observation, spec: DiagnoseSpec) -> str | None:
    """Return the command that searches better settings for this model with traffic of the observed lengths."""
    model = spec.target.model or observation.model
    if not model or observation.engine not in ("vllm", "llamacpp"):
        return None
    slo = (spec.slo.name if spec.slo else None) or "interactive"
    words = ["powerband", "tune", model, "--engine", observation.engine, "--slo", slo]
    return shlex.join([*words, "--workload", _workload(observation)])


def _workload(observation: Observation) -> str:
    """Return the catalogue's workload with the closest ratio of prompt to output."""
    prompt, output = observation.prompt_tokens or 0.0, observation.output_tokens or 0.0
    if (observation.cached_share or 0.0) > 0.6:
        return "agent"
    if prompt > 4 * output:
        return "rag" if prompt > 1500 else "classify"
    return "reasoning" if output > 1000 else "chat"
