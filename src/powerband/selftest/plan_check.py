"""The check of the plan: probe the running engine, compare with the prediction, and fit the planner to the machine."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import powerband.plan as plan
from powerband.core.selftest import ProbeRow
from powerband.errors import InputError
from powerband.plan.probe import Probe, ProbeResult, probe
from powerband.plan.step_time import StepTimes
from powerband.plan.step_work import Split, Steps
from powerband.selftest import fitting
from powerband.selftest.bundle import published_scheme
from powerband.selftest.check import Check, Outcome, failed, not_possible, not_run, passed
from powerband.selftest.engine_run import EngineRun

_MAX_ERROR = 0.5  # of the duration of closed loops, with the catalogue's coefficients for this device
_MAX_FITTED_ERROR = 0.25  # with coefficients that are fitted to this machine
_BUDGET_SHARE = 1 / 3


async def _plan(run: EngineRun) -> Outcome:
    if run.replica is None or run.prepared is None:
        return not_run("no engine start")
    prepared, model = run.prepared, run.model
    try:
        device, _ = plan.this_machine(run.host)
    except InputError:
        return not_possible("device unknown")
    if model.shape is None or (scheme := published_scheme(model)) is None:
        return not_possible("no shape")
    settings = prepared.engine.settings_of(prepared.deployment, model=model, host=run.host)
    max_s = min(run.probe_s, _BUDGET_SHARE * run.deadline.remaining_s)
    results, loops = await probe(run.replica, settings, max_s=max_s)
    run.probes = _rows(run.engine, results)
    if not loops:
        return not_run("out of time", probes=len(results))
    known = plan.coefficients_for(plan.coefficients(), run.engine, device, scheme.name)
    steps, tokens = Steps(model.shape, scheme, Split()), settings.batched_tokens
    held_out = max(1, len(loops) // 3)
    found = fitting.fit(steps, device, known, results, loops[:-held_out], batched_tokens=tokens)
    found = found.model_copy(update={"engine_version": prepared.installation.version})
    planned, fitted = StepTimes(steps, device, known), StepTimes(steps, device, found)
    before, after = (fitting.error(one, loops[-held_out:], tokens) for one in (planned, fitted))
    inside = fitting.inside_interval(planned, loops, tokens)
    figures = {"error_before": before, "error_after": after, "probes": len(results), "closed_loops": len(loops)}
    figures |= {"held_out": held_out, "inside_interval": inside}
    if after > _MAX_FITTED_ERROR:
        return failed("prediction error", figures)
    run.calibration = found
    claims = bool(device.name) and device.name in known.devices
    return failed("prediction error", figures) if claims and before > _MAX_ERROR else passed(figures)


def _rows(engine: str, results: Sequence[ProbeResult]) -> tuple[ProbeRow, ...]:
    """Return the medians of each kind of burst."""
    bursts: dict[Probe, list[ProbeResult]] = {}
    for one in results:
        bursts.setdefault(one.probe, []).append(one)
    return tuple(
        ProbeRow(
            engine=engine,
            concurrency=burst.concurrency,
            prompt_tokens=burst.prompt,
            output_tokens=burst.output,
            ttft_s=round(statistics.median(one.ttft_s for one in same), 6),
            step_s=round(statistics.median(one.step_s for one in same), 6),
        )
        for burst, same in bursts.items()
    )


CHECK = Check("plan", "the plan predicts a short bench, and can be fitted to this machine", _plan)
