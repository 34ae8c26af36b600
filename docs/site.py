"""Build the site into `build/site`: README, pages and the proofs' results. A broken link is an error."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "build" / "site-source"
SECTIONS = (".", "guides", "explanation", "reference", "adr")


def main() -> int:
    """Copy the pages with the layout of the repository, so that links work in both."""
    shutil.rmtree(SOURCE, ignore_errors=True)
    pages = shutil.ignore_patterns("*.py", "*.yaml", "__pycache__")
    shutil.copytree(ROOT / "docs", SOURCE / "docs", ignore=pages)
    shutil.copytree(ROOT / "examples", SOURCE / "examples")
    (SOURCE / "proofs").mkdir()
    for result in (ROOT / "proofs").glob("*.txt"):
        shutil.copy(result, SOURCE / "proofs")
    for page in ROOT.glob("*.md"):
        shutil.copy(page, SOURCE / ("index.md" if page.name == "README.md" else page.name))
    (SOURCE / "llms.txt").write_text(llms())
    argv = [sys.executable, "-m", "zensical", "build", "--strict", "--config-file", str(ROOT / "mkdocs.yml")]
    return subprocess.run(argv, check=False).returncode


def llms() -> str:
    """Return every page with its first sentence, for language models."""
    lines = ["# Powerband", "", f"> {_first((ROOT / 'README.md').read_text())}", "", "- [README](index.md)"]
    for section in SECTIONS:
        lines += ["", f"## {section if section != '.' else 'start'}", ""]
        for page in sorted((ROOT / "docs" / section).glob("*.md")):
            text = page.read_text()
            title = re.search(r"^# (.+)$", text, re.MULTILINE)
            path = page.relative_to(ROOT).as_posix()
            lines.append(f"- [{title[1] if title else page.stem}]({path}): {_first(text)}")
    return "\n".join(lines) + "\n"


def _first(text: str) -> str:
    """Return the first sentence of prose."""
    prose = re.sub(r"(?s:```.*?```|<!--.*?-->)|^#.*$|^Date:.*$|^\|.*$", "", text, flags=re.MULTILINE)
    found = re.search(r"\S.*?[.:](?=\s)", " ".join(prose.split()))
    return re.sub(r"\[([^]]+)\]\([^)]+\)|\*\*", lambda one: one[1] or "", found[0] if found else "").rstrip(":")


if __name__ == "__main__":
    sys.exit(main())
