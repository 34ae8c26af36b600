"""The glossary page, from one table; it fails if a word of the code has no entry."""

from __future__ import annotations

import typing
from pathlib import Path

import yaml

from powerband.core import quality, study
from powerband.metrics import LATENCIES
from powerband.store import documents
from powerband.verify import CheckResult

DOCS = Path(__file__).parent


def required() -> set[str]:
    """Return the words that the documents, the commands and the reports use, as the code defines them."""
    words = {*documents.KINDS, *LATENCIES, *typing.get_args(quality.Judgement), *typing.get_args(CheckResult)}
    words |= {*typing.get_args(study.Outcome), *(name for name in quality.FIDELITY if name == "diverged")}
    words |= {"met", "missed", "level", "sweep", "climb", "goodput", "attainment", "in region", "drifted", "broken"}
    return words


def page() -> str:
    """Return docs/glossary.md."""
    table: dict[str, dict[str, str]] = yaml.safe_load((DOCS / "glossary.yaml").read_text())
    terms = [term for entries in table.values() for term in entries]
    if twice := {term for term in terms if terms.count(term) > 1}:
        raise SystemExit(f"glossary.yaml: defined twice: {', '.join(sorted(twice))}")
    if missing := required() - set(terms):
        raise SystemExit(f"glossary.yaml: no entry for {', '.join(sorted(missing))}")
    lines = [
        "# Glossary",
        "",
        "The words of the command line, the documents and the reports. One term for one thing.",
        "",
    ]
    for topic, entries in table.items():
        lines += [f"## {topic}", "", "| term | meaning |", "|---|---|"]
        lines += [f"| **{_spelled(term)}** | {' '.join(text.split())} |" for term, text in entries.items()]
        lines.append("")
    return "\n".join(lines)


def _spelled(term: str) -> str:
    return term.upper() if term in ("slo", "ttft", "tpot", "itl", "e2e") else term
