"""`powerband doctor`."""

from __future__ import annotations

from powerband.cli.options import Json
from powerband.cli.output import emit, out, warning


def doctor(*, json: Json = False) -> None:
    """Show this machine's hardware and engines, and what is missing."""
    from powerband import doctor as stage
    from powerband.core.host import Host
    from powerband.core.units import about_bytes

    report = stage.examine()
    if json:
        installations = [one.model_dump(mode="json", exclude={"flags"}) for one in report.engines]
        advices = [{"sentence": one.sentence, "fix": one.fix} for one in report.advice]
        emit({"host": report.host.model_dump(mode="json"), "engines": installations, "advice": advices})
        return

    from rich.table import Table

    def memory(host: Host) -> str:
        limit = f", limited to {about_bytes(host.memory_limit_bytes)} by a cgroup" if host.memory_limit_bytes else ""
        return f"{about_bytes(host.memory_bytes)}, {about_bytes(host.available_bytes)} free{limit}"

    host = report.host
    console, table = out(), Table.grid(padding=(0, 2))
    table.add_column()
    table.add_column(overflow="fold")
    quota = f", limited to {host.cpu_quota:g} by a cgroup" if host.cpu_quota else ""
    table.add_row(
        "[bold]CPU[/]", f"{host.cpu_name}, {len(host.cores)} cores{quota}, {max(1, len(host.numa_nodes))} NUMA node(s)"
    )
    table.add_row("[bold]instructions[/]", _instructions(host.instruction_sets, host.amx_usable))
    table.add_row("[bold]memory[/]", memory(host))
    table.add_row("[bold]compiler[/]", host.compiler or "none; builds use one from the package registry")
    for gpu in host.gpus:
        free = f"{about_bytes(gpu.memory_bytes)}, {about_bytes(gpu.free_bytes)} free"
        holder = f", held by process {report.held[gpu.id]}" if gpu.id in report.held else ""
        table.add_row(f"[bold]GPU {gpu.index}[/]", f"{gpu.name}, {free}, driver {gpu.driver}{holder}")
    if not host.gpus:
        table.add_row("[bold]GPU[/]", "none")
    for one in report.engines:
        table.add_row(f"[bold]{one.engine}[/]", f"{one.version}, {one.origin}: {one.home or one.program[0]}")
    console.print(table)
    for advice in report.advice:
        console.print(warning(advice.sentence, advice.fix))
    if not report.advice:
        console.print("[green]ok[/] nothing to fix")


def _instructions(flags: frozenset[str], amx_usable: bool) -> str:
    wanted = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "avx_vnni", "asimd", "sve")
    words = [flag for flag in wanted if flag in flags]
    if "amx_tile" in flags:
        words.append("amx" if amx_usable else "amx (listed, not usable)")
    return " ".join(words) or "no relevant vector extensions"
