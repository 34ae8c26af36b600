"""`powerband scale simulate`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from powerband.cli.commands import Command
from powerband.cli.options import Json, Quiet, Verbose
from powerband.cli.output import duration, emit, out, stderr

if TYPE_CHECKING:
    from pathlib import Path

    from powerband.core.recipe import Recipe
    from powerband.serve.autoscaling.replay import Replay
    from powerband.serve.autoscaling.replica_model import Arrival

app = typer.Typer(help="Simulate autoscaling on recorded traffic.", no_args_is_help=True, rich_markup_mode=None)


@app.callback()
def _group() -> None:
    pass


@app.command(
    "simulate",
    cls=Command,
    epilog="powerband scale simulate --recipe recipe.yaml --trace week.jsonl --start 57s\n"
    "powerband scale simulate --recipe recipe.yaml --trace week.csv --output w.html",
)
def simulate(
    *,
    recipe: Annotated[str, typer.Option(metavar="RECIPE", help="The recipe.yaml to serve.")],
    trace: Annotated[
        str,
        typer.Option(
            metavar="FILE",
            help="Trace that 'powerband capture' wrote (JSONL), or a CSV with arrived_s,prompt_tokens,output_tokens.",
        ),
    ],
    start: Annotated[
        str | None,
        typer.Option(
            metavar="DURATION", help="Time that a replica needs to start.", show_default="typical of the engine"
        ),
    ] = None,
    least: Annotated[int, typer.Option("--min", min=1, metavar="N", help="Minimum number of replicas.")] = 1,
    most: Annotated[
        int | None,
        typer.Option(
            "--max", min=1, metavar="N", help="Replicas at the start and at most.", show_default="what the peak needs"
        ),
    ] = None,
    attainment: Annotated[
        float, typer.Option(min=0.5, max=0.999, metavar="SHARE", help="Share of the requests to serve within the SLO.")
    ] = 0.96,
    output: Annotated[str | None, typer.Option(metavar="FILE", help="HTML page with the plots to write.")] = None,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Replay recorded traffic: the cost of autoscaling, and its late requests.

    Beside it stand a fixed fleet, a threshold and a clairvoyant, each the cheapest one with the same attainment.
    """
    from dataclasses import asdict
    from pathlib import Path

    from powerband import engines, inputs
    from powerband.core.recipe import Recipe
    from powerband.store import documents

    document = documents.read_as(Recipe, Path(recipe))
    requests = _requests(Path(trace))
    stderr(json=json).print(f"simulating {len(requests)} requests of {duration(requests[-1].at_s)}")
    start_s = inputs.seconds(start) if start else engines.get(document.deployment["engine"]).typical_start_s
    found = _replay(document, requests, start_s=start_s, least=least, most=most, attainment=attainment)
    usd_per_h = document.usd_per_h / document.replicas
    if output:
        _write_page(Path(output), found, name=document.name or Path(recipe).stem, usd_per_h=usd_per_h)
    if json:
        emit({"usd_per_replica_hour": usd_per_h, **asdict(found)})
        return
    _print(found, usd_per_h=usd_per_h)


def _requests(path: Path) -> list[Arrival]:
    """Read a trace; times count from its first request."""
    from powerband.core.workload import Trace
    from powerband.errors import InputError
    from powerband.load import recorded
    from powerband.serve.autoscaling.replica_model import Arrival

    rows = sorted(row[:3] for row in recorded.request_rows(Trace(path=path.name), path.parent))
    if len(rows) < 2 or rows[-1][0] <= rows[0][0]:
        hint = "capture traffic: powerband serve RECIPE --capture, later powerband capture FLEET_DIR"
        raise InputError(f"{path} has {len(rows)} requests; a simulation needs at least two, over some time", hint=hint)
    return [Arrival(at_s - rows[0][0], max(1, prompt), max(1, output)) for at_s, prompt, output in rows]


def _replay(
    recipe: Recipe, requests: list[Arrival], *, start_s: float, least: int, most: int | None, attainment: float
) -> Replay:
    from powerband.serve.autoscaling import fitting
    from powerband.serve.autoscaling.policy import ScalingPolicy
    from powerband.serve.autoscaling.replay import replay
    from powerband.serve.spec import measured_fields

    measured = measured_fields(recipe)
    ttft_s = measured["ttft_s"] or 2 * measured["queue_timeout_s"]
    slots = measured["in_flight"] or max(1, round(10 * measured["rate_per_s"]))
    promised = min(0.995, max(0.9, recipe.promise.attainment.value))
    speed = fitting.fitted_speed(
        requests,
        rate_per_s=measured["rate_per_s"],
        slots=slots,
        attainment=promised,
        ttft_s=ttft_s,
        queue_timeout_s=measured["queue_timeout_s"],
    )
    policy = ScalingPolicy(
        rate_per_s=measured["rate_per_s"],
        slots=slots,
        start_s=start_s,
        min_replicas=least,
        attainment=attainment,
        queue_timeout_s=measured["queue_timeout_s"],
    )
    return replay(requests, speed, policy, max_replicas=most)


def _print(found: Replay, *, usd_per_h: float) -> None:
    from powerband.reports import scaling

    ours, fixed = found.rows[0], found.rows[1]
    out().print(scaling.table(found.rows, usd_per_h=usd_per_h))
    share = ours.replica_hours / fixed.replica_hours
    text = f"{ours.late} of {found.requests} requests would have been late; the cost is {share:.0%} of the best fixed"
    out().print(f"\n{text}\nfleet's, over {duration(found.span_s)} with starts of {found.policy.start_s:g} s")


def _write_page(path: Path, found: Replay, *, name: str, usd_per_h: float) -> None:
    from powerband.reports import scaling

    policy = found.policy
    summary = (
        f"{found.requests} requests of {duration(found.span_s)}; "
        f"{policy.min_replicas} to {policy.max_replicas} replicas, starts of {policy.start_s:g} s, "
        f"{policy.attainment:.0%} wanted"
    )
    path.write_text(scaling.page(f"Autoscaling {name}", summary, found.rows, found.spans, usd_per_h=usd_per_h))
    stderr().print(f"page: {path}")
