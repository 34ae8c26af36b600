"""The evidence page and the README's evidence table: every figure is read from a proof's result file."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

DOCS = Path(__file__).parent
PROOFS = DOCS.parent / "proofs"
BEGIN, END = "<!-- evidence: written by docs/generate.py -->", "<!-- /evidence -->"
_NOTE = """
A proof is a script in `proofs/`: it exits 0 where its claim holds and keeps its last result, with date and machine,
beside it. Every figure on this page is read from that file. **Measured**: real engines on the machine that the proof
names. **Recorded**: published measurements of others. **Rehearsed**: the real code on simulated hosts, with stand-ins
for the engines. **Simulated**: replayed traces or virtual time.
**Checked**: no measurement involved. No figure comes from a GPU of our own.
"""


def entries() -> dict[str, list[dict[str, Any]]]:
    """Return the claims by topic, each with its figure, date and verdict from the proof's result file."""
    found: dict[str, list[dict[str, Any]]] = yaml.safe_load((DOCS / "evidence.yaml").read_text())
    for rows in found.values():
        for row in rows:
            text = (PROOFS / f"{row['proof']}.txt").read_text()
            match = re.search(row["find"], text)
            if match is None:
                raise SystemExit(f"evidence.yaml: {row['find']!r} does not match proofs/{row['proof']}.txt")
            row["figure"] = re.sub(r"\{(\d)\}", lambda group, match=match: match[int(group[1])], row["figure"])
            row["date"] = _field(text, "date")[:10]
            row["holds"] = _field(text, "verdict") == "holds"
    return found


def page() -> str:
    """Return docs/evidence.md."""
    lines = ["# Evidence", _NOTE]
    for topic, rows in entries().items():
        lines += [
            f"## {topic}",
            "",
            "| claim | figure | conditions | data | date | proof |",
            "|---|---|---|---|---|---|",
        ]
        lines += [_row(row, "../proofs", with_date=True) for row in rows]
        lines.append("")
    return "\n".join(lines)


def with_table(readme: str) -> str:
    """Return the README with its evidence table rewritten."""
    rows = [row for rows in entries().values() for row in rows if row.get("readme")]
    table = ["| claim | figure | conditions | data | proof |", "|---|---|---|---|---|"]
    table += [_row(row, "proofs", with_date=False) for row in rows]
    before, _, rest = readme.partition(BEGIN)
    _, _, after = rest.partition(END)
    return "\n".join([before + BEGIN, *table, END + after])


def _row(row: dict[str, Any], folder: str, *, with_date: bool) -> str:
    claim = row["claim"] if row["holds"] else f"{row['claim']} (**target missed**)"
    cells = [claim, row["figure"], row["conditions"], row["data"]]
    cells += [row["date"]] if with_date else []
    return f"| {' | '.join(cells)} | [{row['proof']}]({folder}/{row['proof']}.txt) |"


def _field(text: str, name: str) -> str:
    match = re.search(rf"^{name}:\s*(.+)$", text, re.MULTILINE)
    assert match is not None, name
    return match[1].strip()
