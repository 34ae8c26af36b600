"""The table of questions in docs/architecture.md: each answer names a file, a symbol or a heading that must exist."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
PAGE = ROOT / "docs" / "architecture.md"


@dataclass(frozen=True)
class Question:
    """A question of a new reader, and its answer in Markdown."""

    text: str
    answer: str

    def problems(self) -> list[str]:
        """Return what the answer names and what does not exist."""
        found = []
        quoted = re.findall(r"`([^`]+)`", self.answer)
        paths = [ROOT / one for one in quoted if one.startswith("src/")]
        found += [f"{self.text}: {path} does not exist" for path in paths if not path.exists()]
        source = "".join(path.read_text() for path in paths if path.is_file())
        for one in quoted:
            symbol = re.fullmatch(r"[A-Za-z_.]+", one) and not one.endswith(".py")
            if symbol and not re.search(rf"\b{one.rpartition('.')[2]}\b", source):
                found.append(f"{self.text}: {one} is not in {', '.join(str(path) for path in paths)}")
        for target, anchor in re.findall(r"\]\(([^)#]+)(?:#([^)]+))?\)", self.answer):
            page = PAGE.parent / target
            if not page.exists():
                found.append(f"{self.text}: {target} does not exist")
            elif anchor and anchor not in _anchors(page):
                found.append(f"{self.text}: {target} has no heading #{anchor}")
        if not paths and "](" not in self.answer:
            found.append(f"{self.text}: names no file and no page")
        return found


def questions() -> list[Question]:
    """Return the rows of the table 'Where to look'."""
    section = PAGE.read_text().partition("## Where to look")[2].partition("\n## ")[0]
    rows = [line.strip("|").split(" | ") for line in section.splitlines() if line.startswith("| ") and "?" in line]
    return [Question(row[0].strip(), row[1].strip(" |")) for row in rows]


def _anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
