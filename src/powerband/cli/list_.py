"""`powerband list`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Annotated, Any

import typer

from powerband.cli.options import Json, choice
from powerband.cli.output import emit, out

KINDS = ("devices", "models", "schemes", "workloads", "slos", "floors", "engines", "exit-codes")
Rows = Iterable[dict[str, Any]]


def list_(
    kind: Annotated[
        str, typer.Argument(**choice("list", KINDS) | {"metavar": "KIND"}, help=f"One of: {', '.join(KINDS)}.")
    ],
    *,
    json: Json = False,
) -> None:
    """List devices, models, schemes, workloads, SLOs, floors or engines."""
    tables: dict[str, Callable[[], Rows]] = {
        "devices": _devices,
        "models": _models,
        "schemes": _schemes,
        "workloads": lambda: _described("workload"),
        "slos": _slos,
        "floors": _floors,
        "engines": _engines,
        "exit-codes": _exit_codes,
    }
    rows = list(tables[kind]())
    if json:
        emit(rows)
        return
    from rich.table import Table

    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    for name in rows[0]:
        table.add_column(name, overflow="fold", no_wrap=name != "description" and name != "meaning")
    for row in rows:
        table.add_row(*("" if value is None else str(value) for value in row.values()))
    out().print(table)


def _documents(kind: str) -> Iterable[Any]:
    from powerband import catalog
    from powerband.store import documents

    return ((name, documents.find(kind, name)) for name in catalog.names(kind))


def _described(kind: str) -> Rows:
    return ({"name": name, "description": found.description} for name, found in _documents(kind))


def _devices() -> Rows:
    from powerband.core.units import about_bytes

    for name, found in _documents("device"):
        yield {
            "name": name,
            "memory": about_bytes(found.memory),
            "GB/s": f"{found.bandwidth / 1e9:.0f}",
            "$/h": f"{found.price.usd_per_h:.2f}",
            "description": found.description,
        }


def _models() -> Rows:
    from powerband import catalog
    from powerband.runtime import model_files

    for name in catalog.names("model"):
        found = model_files.architecture(name)
        shape = found.shape
        parameters = f"{shape.parameters / 1e9:.1f} B" if shape else ""
        architecture = re.sub("For(CausalLM|ConditionalGeneration)$", "", found.architecture or "")
        yield {"name": name, "parameters": parameters, "context": found.context_tokens, "description": architecture}


def _schemes() -> Rows:
    for name, found in _documents("scheme"):
        yield {
            "name": name,
            "format": found.format,
            "weight bits": f"{found.linear_bits:.3g}",
            "description": found.description,
        }


def _slos() -> Rows:
    for name, found in _documents("slo"):
        bounds = ", ".join(f"{metric} p{100 * share:g} <= {limit:g} s" for metric, share, limit in found.bounds())
        yield {"name": name, "bounds": bounds, "description": found.description}


def _floors() -> Rows:
    return _described("quality")


def _engines() -> Rows:
    from powerband import engines
    from powerband.runtime import installations

    for name in engines.names():
        engine = engines.get(name)
        installed = ", ".join(one.version for one in installations.discover(name)) if not engine.builtin else "built in"
        yield {
            "name": name,
            "installed": installed or "no",
            "tested version": f"never run (from {engine.recorded})" if engine.recorded else engine.default_version,
            "description": (type(engine).__doc__ or "").strip().split("\n")[0],
        }


def _exit_codes() -> Rows:
    from powerband.errors import EXIT_CODES

    return ({"code": code, "meaning": meaning} for code, meaning in EXIT_CODES.items())
