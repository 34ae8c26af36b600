"""`powerband plan`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from powerband.cli import options
from powerband.cli.output import emit, out, stderr
from powerband.cli.progress import start_progress

if TYPE_CHECKING:
    from pathlib import Path

    from powerband.core.plan import Plan


def plan(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Hub id, model directory, config.json or GGUF file.")],
    *,
    on: Annotated[
        list[str] | None,
        typer.Option(
            **options.catalogue("device", "DEVICE[:COUNT]", ("this-machine", "all")),
            help="Devices to use: see 'powerband list devices'; 'all' for every device; repeatable.",
        ),
    ] = None,
    inventory: Annotated[str | None, typer.Option(metavar="FILE", help="An inventory.yaml: your machines.")] = None,
    workload: options.Workload = "chat",
    slo: options.Slo = "interactive",
    quality: options.Quality = "balanced",
    load: Annotated[
        float | None, typer.Option(metavar="PER_S", help="Requests per second to serve; default: what fits.")
    ] = None,
    engine: options.PlannedEngine = None,
    scheme: options.Schemes = None,
    speculate: Annotated[
        str | None,
        typer.Option(
            metavar="TOKENS:ACCEPTANCE", help="Also consider n-gram speculation with this acceptance rate: 4:0.6."
        ),
    ] = None,
    price: options.Prices = None,
    why: Annotated[
        bool, typer.Option("--why", help="Show the basis of each prediction and the reason of each rejection.")
    ] = False,
    calibrate: Annotated[
        bool, typer.Option("--calibrate", help="First run short probes of the model on a local engine.")
    ] = False,
    output: Annotated[
        str | None, typer.Option(metavar="DIR", help="Write plan.json, plan.html and deployment.yaml there.")
    ] = None,
    json: options.Json = False,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
) -> None:
    """Predict what fits, how fast it is and what it costs. No GPU needed.

    Exit code 4: no candidate meets the SLO.
    """
    from powerband import api, inputs
    from powerband.errors import RequirementNotMet
    from powerband.plan import calibrate as calibration
    from powerband.reports import plan as report

    options.print_never_run([engine], json=json)
    if calibrate:
        _calibrate(model, engine)
    for sentence in calibration.expired():
        stderr().print(f"[yellow]{sentence}[/]")
    found = api.plan(
        model,
        on=on or (),
        inventory=inventory,
        workload=workload,
        slo=slo,
        quality=quality,
        load=load,
        engine=engine,
        scheme=scheme or (),
        speculate=speculate,
        price=price or (),
    )
    folder = inputs.folder(output) if output else None
    if folder:
        _write(found, folder)
    if json:
        emit(found.to_data())
    else:
        for part in report.tables(found, why=why):
            out().print(part)
        if folder:
            stderr().print(f"report: {folder / 'plan.html'}\n  data: {folder / 'plan.json'}")
    if not found.candidates:
        raise RequirementNotMet(
            "no candidate meets the SLO on the offered devices", hint="see the reasons and remedies with --why"
        )


def _calibrate(model: str, engine: str | None) -> None:
    """Run probes of the model on a local engine, fit the coefficients and save them."""
    import asyncio

    import powerband.plan as stage
    from powerband import inputs
    from powerband.errors import InputError
    from powerband.launchers import local
    from powerband.plan import calibrate as calibration
    from powerband.plan import local_device
    from powerband.plan.probe import ConcurrentProbe, ProbeResult, probe
    from powerband.plan.step_work import Split, Steps
    from powerband.runtime import devices
    from powerband.store.schemes import published_scheme

    console = stderr()
    deployment = inputs.deployment(model, engine=engine, settings=[], host=None, port=None)
    probed = calibration.with_probe_capacity(deployment, on_cpu=not devices.this_host().gpus)
    prepared = local.prepare(probed, report=console.print)
    shape = prepared.model.shape
    if shape is None:
        raise InputError(
            f"cannot read the model's architecture from {model}", hint="give its config.json or a GGUF file"
        )
    device, _ = stage.this_machine(prepared.host)
    steps = Steps(shape, published_scheme(prepared.model), Split())
    choice = prepared.engine.settings_of(prepared.deployment, model=prepared.model, host=prepared.host)

    async def measure() -> tuple[list[ProbeResult], list[ConcurrentProbe]]:
        with start_progress(False) as on_change:
            async with local.launch(prepared, on_change=on_change) as replica:
                return await probe(replica, choice, report=show)

    def show(turn: int, seen: ProbeResult) -> None:
        one = seen.probe
        probe_text = f"round {turn}: concurrency {one.concurrency}, {one.prompt} + {one.output} tokens"
        console.print(f"{probe_text:>43}: TTFT {seen.ttft_s * 1e3:.0f} ms, decode step {seen.step_s * 1e3:.1f} ms")

    seen, crowds = asyncio.run(measure())
    found = calibration.fit(
        steps,
        device,
        prepared.engine.name,
        seen,
        crowds,
        name=f"{local_device.NAME}-{prepared.engine.name}",
        source=f"{len(seen)} probes of {deployment.served_name} on this machine",
        engine_version=prepared.installation.version,
    )
    factors = f"mixed-load factor {found.mixed_load_factor:.2f}, TPOT tail {found.tpot_tail:.2f}"
    console.print(f"{factors}; saved to {calibration.save(found)}")


def _write(found: Plan, folder: Path) -> None:
    from powerband.core.document import HEADER
    from powerband.reports import plan

    (folder / "plan.json").write_text(found.to_json())
    (folder / "plan.html").write_text(plan.page(found))
    if found.candidates:
        import yaml

        data = found.candidates[0].deployment
        assert HEADER in data
        (folder / "deployment.yaml").write_text(yaml.safe_dump(data, sort_keys=False))
