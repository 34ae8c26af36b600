"""`powerband plan`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from powerband.cli import inputs
from powerband.cli.output import Json, emit, out, stderr

if TYPE_CHECKING:
    from pathlib import Path

    from powerband.core.plan import Plan
    from powerband.plan.options import Offer
    from powerband.plan.step_time import Drafting


def plan(
    model: Annotated[str, typer.Argument(help="A hub id, a model folder, a config.json or a GGUF file.")],
    *,
    on: Annotated[
        list[str] | None,
        typer.Option(metavar="DEVICE[:COUNT]", help="What it may run on; may stand again; 'all' for every device."),
    ] = None,
    inventory: Annotated[str | None, typer.Option(help="An inventory.yaml: the machines you have.")] = None,
    workload: Annotated[str, typer.Option(help="A workload.yaml, or a name of the catalogue.")] = "chat",
    slo: Annotated[str, typer.Option(help="An slo.yaml, or a name of the catalogue.")] = "interactive",
    load: Annotated[float | None, typer.Option(help="Requests per second that must be carried in all.")] = None,
    engine: Annotated[str | None, typer.Option(help="Only this engine.")] = None,
    scheme: Annotated[list[str] | None, typer.Option(help="Only this number format; may stand again.")] = None,
    speculate: Annotated[
        str | None,
        typer.Option(metavar="TOKENS:CHANCE", help="Also try n-gram drafts, each accepted with this chance: 4:0.6."),
    ] = None,
    price: Annotated[
        list[str] | None, typer.Option(metavar="DEVICE=USD", help="What a device costs per hour; may stand again.")
    ] = None,
    why: Annotated[
        bool, typer.Option("--why", help="What each figure rests on, and why the rest was ruled out.")
    ] = False,
    calibrate: Annotated[
        bool, typer.Option("--calibrate", help="First run short probes of the model on a real engine here.")
    ] = False,
    output: Annotated[str | None, typer.Option(help="Write plan.json, plan.html and deployment.yaml there.")] = None,
    json: Json = False,
) -> None:
    """Say what fits, how fast it is and what it costs, before an accelerator is touched.

    Exit code 4: nothing that was offered keeps the SLO.
    """

    from powerband import plan as stage
    from powerband.errors import PromiseBroken
    from powerband.plan import calibrate as calibration
    from powerband.reports import plan
    from powerband.runtime import model_files

    if calibrate:
        _calibrate(model, engine)
    found = stage.plan(
        stage.PlanSpec(
            model=model_files.facts(model),
            workload=inputs.traffic(workload, rate=None, users=None),
            slo=inputs.promise(slo),
            offers=tuple(_offers(on or [], inventory, prices=_prices(price or []))),
            engine=engine,
            schemes=tuple(scheme or ()),
            load_per_s=load,
            drafting=_drafting(speculate),
            base=inputs.base(workload),
            calibrated=calibration.kept(),
        )
    )
    folder = inputs.folder(output) if output else None
    if folder:
        _write(found, folder)
    if json:
        emit(found.to_data())
    else:
        for part in plan.tables(found, why=why):
            out().print(part)
        if folder:
            stderr().print(f"report: {folder / 'plan.html'}\n  data: {folder / 'plan.json'}")
    if not found.candidates:
        raise PromiseBroken("nothing that was offered keeps the SLO", hint="--why tells what would")


def _calibrate(model: str, engine: str | None) -> None:
    """Start the model's engine here, probe it, and keep the coefficients."""
    import asyncio

    from powerband import plan as stage
    from powerband.errors import InputError
    from powerband.launchers import local
    from powerband.plan import calibrate as calibration
    from powerband.plan import local_device
    from powerband.plan.probe import ConcurrentProbe, ProbeResult, probe
    from powerband.plan.step_work import Split, Steps
    from powerband.runtime import devices

    console = stderr()
    deployment = inputs.deployment(model, engine=engine, settings=[], host=None, port=None)
    prepared = local.prepare(calibration.with_probe_capacity(deployment, on_cpu=not devices.this_host().gpus))
    shape = prepared.model.shape
    if shape is None:
        raise InputError(f"{model} does not tell its shape", hint="give its config.json or a GGUF file")
    device, _ = stage.this_machine(prepared.host)
    steps = Steps(shape, stage.scheme_of(prepared.model), Split())
    choice = prepared.engine.choice_of(prepared.deployment, model=prepared.model, host=prepared.host)

    async def measure() -> tuple[list[ProbeResult], list[ConcurrentProbe]]:
        with inputs.start_progress(False) as on_change:
            async with local.launch(prepared, on_change=on_change) as replica:
                return await probe(replica, choice, say=show)

    def show(turn: int, seen: ProbeResult) -> None:
        one = seen.probe
        told = f"round {turn}: {one.users} at once, {one.prompt} + {one.output} tokens"
        console.print(f"{told:>40}: first token {seen.ttft_s * 1e3:.0f} ms, step {seen.step_s * 1e3:.1f} ms")

    seen, crowds = asyncio.run(measure())
    found = calibration.fit(
        steps,
        device,
        prepared.engine.name,
        seen,
        crowds,
        name=f"{local_device.NAME}-{prepared.engine.name}",
        source=f"{len(seen)} probes of {deployment.served_name} on this machine",
    )
    console.print(f"steps of traffic take {found.traffic:.2f} of that; kept: {calibration.keep(found)}")


def _drafting(text: str | None) -> Drafting:
    """Read 4:0.6."""
    from powerband.errors import InputError
    from powerband.plan.step_time import NO_DRAFTS, Drafting

    if text is None:
        return NO_DRAFTS
    tokens, _, chance = text.partition(":")
    try:
        found = Drafting(int(tokens), float(chance))
    except ValueError:
        found = NO_DRAFTS
    if found.tokens < 1 or not 0 <= found.acceptance <= 1:
        raise InputError(f"--speculate {text} is not a number of tokens and a chance", hint="write it like 4:0.6")
    return found


def _prices(given_prices: list[str]) -> dict[str, float]:
    from powerband.errors import InputError

    found = {}
    for text in given_prices:
        name, _, value = text.partition("=")
        try:
            found[name] = float(value)
        except ValueError:
            raise InputError(f"--price {text} is not a price", hint="write it like h100-sxm=2.50") from None
    return found


def _offers(on: list[str], inventory: str | None, *, prices: dict[str, float]) -> list[Offer]:
    """Return the devices that may be used; a node of each where no count is given."""
    from powerband import catalog
    from powerband import plan as stage
    from powerband.core.device import Inventory
    from powerband.errors import InputError
    from powerband.plan import local_device
    from powerband.plan.options import Offer
    from powerband.runtime import devices
    from powerband.store import documents

    wanted: list[tuple[str, int | None, float | None]] = []
    if inventory:
        document = documents.read(inventory)
        if not isinstance(document, Inventory):
            raise InputError(f"{inventory} is a {document.kind}, not an inventory", hint="give an inventory")
        wanted += [(one.device, one.count, one.usd_per_h) for one in document.machines]
    for text in on or ([] if inventory else ["all"]):
        name, _, number = text.partition(":")
        if number and not number.isdigit():
            raise InputError(f"--on {text}: '{number}' is not a number of devices", hint="write it like h100-sxm:8")
        names = catalog.names("device") if name == "all" else (name,)
        wanted += [(one, int(number) if number else None, None) for one in names]
    offers = []
    for name, count, usd in wanted:
        if name == local_device.NAME:
            device, here = stage.this_machine(devices.this_host())
            count = count or here
        else:
            device = stage.device(name)
        price = prices.get(name, usd if usd is not None else device.price.usd_per_h)
        offers.append(Offer(device, count or min(8, device.node), price))
    return offers


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
