"""`powerband quantize`."""

from __future__ import annotations

from typing import Annotated

import typer

from powerband.cli import options
from powerband.cli.engine import show_steps
from powerband.cli.output import emit, out, stderr, warning


def quantize(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Model directory, or a GGUF file in f16 or bf16.")],
    *,
    scheme: Annotated[
        list[str],
        typer.Option(
            **options.catalogue("scheme", "SCHEME"),
            help="Quantization scheme: see 'powerband list schemes'; repeatable.",
        ),
    ],
    calibrate: Annotated[
        str | None,
        typer.Option(
            **options.catalogue("workload", "WORKLOAD"),
            help="Calibrate with the requests of this workload; default: the texts of the catalogue.",
        ),
    ] = None,
    samples: Annotated[int, typer.Option(min=16, max=4096, metavar="N", help="Number of calibration samples.")] = 256,
    target_workload: Annotated[
        str | None,
        typer.Option(
            **options.catalogue("workload", "WORKLOAD"),
            help="Workload to be served; warn if the calibration text does not cover its vocabulary.",
        ),
    ] = None,
    json: options.Json = False,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
) -> None:
    """Build quantized variants of a model; each is built once.

    The lineage of a variant (model digest, scheme, calibration, tools) is stored beside its weights.
    """
    import asyncio

    from powerband import inputs
    from powerband import quantize as stage
    from powerband.core.units import about_bytes

    workload = inputs.workload(calibrate) if calibrate else None
    base = inputs.base(calibrate) if calibrate else None
    found, console = [], stderr(json=json)
    if target_workload:
        target = stage.QuantizeSpec(
            model, "", workload=inputs.workload(target_workload), base=inputs.base(target_workload)
        )
        coverage = stage.calibration_coverage(
            stage.QuantizeSpec(model, "", workload=workload, base=base, samples=samples), target
        )
        if coverage < stage.MIN_COVERAGE:
            sentence = f"the calibration text covers {coverage:.0%} of the words of {target_workload}"
            console.print(
                warning(f"{sentence} (minimum {stage.MIN_COVERAGE:.0%})", f"use --calibrate {target_workload}")
            )
    for name in scheme:
        spec = stage.QuantizeSpec(model, name, workload=workload, base=base, samples=samples)
        with show_steps(f"{name}: ", json=json) as progress:
            made = asyncio.run(stage.quantize(spec, progress=progress))
        found.append(made)
        calibration = made.lineage.calibration
        if calibration and not calibration.natural and made.made_now:
            sentence = "the calibration workload is synthetic: its prompts are random words, not your users' text"
            console.print(warning(sentence, "calibrate with a workload whose dataset is your own traffic"))
        if not json:
            verb = f"built in {made.lineage.seconds:.0f} s" if made.made_now else "already built"
            out().print(f"[green]ok[/] {name}, {about_bytes(made.lineage.bytes)}, {verb}: {made.path}")
    if json:
        emit([{**one.lineage.to_data(), "path": str(one.path), "made_now": one.made_now} for one in found])
