"""`powerband quantize`."""

from __future__ import annotations

from typing import Annotated

import typer

from powerband.cli import inputs
from powerband.cli.output import Json, emit, out, stderr, warning


def quantize(
    model: Annotated[str, typer.Argument(help="A model folder, or an f16 or bf16 GGUF file.")],
    *,
    scheme: Annotated[list[str], typer.Option(help="The number format to make; may stand again.")],
    calibrate: Annotated[
        str | None,
        typer.Option(
            metavar="WORKLOAD", help="Whose requests tell which weights matter; the catalogue's texts without."
        ),
    ] = None,
    samples: Annotated[int, typer.Option(min=16, max=4096, help="How many requests of it.")] = 256,
    served: Annotated[
        str | None,
        typer.Option(
            metavar="WORKLOAD", help="What will be served, where that is not what calibrates: are they alike?"
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Make variants of a model in other number formats, once, with their lineage beside them."""
    import asyncio
    import time

    from powerband import quantize as stage
    from powerband.core.units import about_bytes

    workload = inputs.traffic(calibrate, rate=None, users=None) if calibrate else None
    base = inputs.base(calibrate) if calibrate else None
    found, console = [], stderr()
    if served:
        other = stage.QuantizeSpec(
            model, "", workload=inputs.traffic(served, rate=None, users=None), base=inputs.base(served)
        )
        likeness = stage.likeness(stage.QuantizeSpec(model, "", workload=workload, base=base, samples=samples), other)
        if likeness < stage.ALIKE:
            console.print(warning(f"the calibration text knows {likeness:.0%} of the words that it should know",
                                  "calibrate with what will be served"))  # fmt: skip
    for name in scheme:
        began = time.monotonic()

        def progress(title: str, number: int, total: int, *, began: float = began, name: str = name) -> None:
            console.print(f"[dim]{time.monotonic() - began:6.1f} s[/]  {name}: {number + 1}/{total}  {title}")

        order = stage.QuantizeSpec(model, name, workload=workload, base=base, samples=samples)
        made = asyncio.run(stage.quantize(order, progress=progress))
        found.append(made)
        calibration = made.lineage.calibration
        if calibration and not calibration.natural and made.made_now:
            console.print(warning("the workload's prompts are words drawn by lot, not text that your users write",
                                  "calibrate with a workload whose dataset is your own traffic"))  # fmt: skip
        if not json:
            verb = f"made in {made.lineage.seconds:.0f} s" if made.made_now else "was here already"
            out().print(f"[green]ok[/] {name}, {about_bytes(made.lineage.bytes)}, {verb}: {made.path}")
    if json:
        emit([{**one.lineage.to_data(), "path": str(one.path), "made_now": one.made_now} for one in found])
