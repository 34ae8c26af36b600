"""`powerband show`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from powerband.cli import options
from powerband.cli.output import emit, out

if TYPE_CHECKING:
    from powerband.core.document import Document


def show(
    file: Annotated[str, typer.Argument(metavar="FILE|NAME", help="A document, or a workload, SLO or floor by name.")],
    *,
    tokenizer: options.Tokenizer = None,
    json: options.Json = False,
) -> None:
    """Print a document; draw a workload; render a measurement.

    With --json in base units (seconds, bytes).
    """
    from pathlib import Path

    from powerband import catalog
    from powerband.core.measurement import Measurement
    from powerband.core.workload import Workload
    from powerband.store import documents

    document: Document
    kinds = [kind for kind in ("workload", "slo", "quality") if file in catalog.names(kind) and not Path(file).exists()]
    document = documents.find(kinds[0], file) if kinds else documents.read(file)
    if json:
        emit({"digest": document.digest(), **document.to_data()})
        return
    console = out()
    if isinstance(document, Measurement):
        from powerband.reports import console as report

        for part in report.measurement(document):
            console.print(part)
        return
    from rich.syntax import Syntax

    console.print(f"# {document.digest()}", style="dim")
    if console.is_terminal:
        console.print(Syntax(document.to_text(), "yaml", background_color="default"))
    else:
        print(document.to_text(), end="")
    if isinstance(document, Workload):
        from powerband.load import prompts, tokens
        from powerband.reports import workload

        base = Path(file).parent
        count = prompts.preview_count(document, base=base)
        traffic = prompts.prepare(document, count, vocabulary=tokens.vocabulary(tokenizer), base=base)
        outputs = list(traffic.output_tokens)
        for part in workload.workload(
            document, list(traffic.due_s), list(traffic.prompt_tokens), outputs, traffic.prefix_share
        ):
            console.print(part)
