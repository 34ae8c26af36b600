"""The pages: links, figures, the questions of a new reader, and the Python examples."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support import pages

ROOT = Path(__file__).parent.parent.parent


def test_every_link_leads_somewhere() -> None:
    for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.relative_to(ROOT)}: {target}"


def test_a_figure_that_links_a_proof_is_generated() -> None:
    """Outside the generated tables, no link to a proof carries a number: it could go stale."""
    for page in [ROOT / "README.md", *ROOT.glob("docs/**/*.md")]:
        if page.name == "evidence.md" or page.parent.name == "adr":  # generated; dated records
            continue
        text = re.sub(r"<!-- evidence.*?/evidence -->", "", page.read_text(), flags=re.DOTALL)
        for words in re.findall(r"\[([^]]*)\]\([^)]*proofs/[^)]*\.txt\)", text):
            assert not re.search(r"\d", words), f"{page.relative_to(ROOT)}: '{words}' belongs in docs/evidence.yaml"


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of the pages and of the proofs' results, to change."""
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    (tmp_path / "proofs").mkdir()
    for result in ROOT.glob("proofs/*.txt"):
        shutil.copy(result, tmp_path / "proofs")
    shutil.copy(ROOT / "README.md", tmp_path)
    return tmp_path


def outdated(folder: Path) -> str:
    argv = [sys.executable, str(folder / "docs" / "generate.py"), "--check"]
    return subprocess.run(argv, capture_output=True, text=True, check=False).stderr


@pytest.mark.parametrize(
    ("file", "old", "new", "stale"),
    [
        ("README.md", "3.16 [2.94, 3.40]", "4.16 [2.94, 3.40]", "README.md"),
        ("proofs/tune-wins.txt", "3.16 [2.94, 3.40] times llamacpp", "2.16 [2.94, 3.40] times llamacpp", "evidence.md"),
        ("proofs/bench-guards.txt", "12 of 12", "11 of 12", "README.md"),
        ("proofs/plan-silicon.txt", "verdict: holds", "verdict: DOES NOT HOLD", "README.md"),
        ("docs/glossary.yaml", "  goodput: Requests", "  good-put: Requests", "no entry for goodput"),
    ],
)
def test_a_figure_cannot_differ_from_its_proof(copy: Path, file: str, old: str, new: str, stale: str) -> None:
    assert outdated(copy) == ""
    text = (copy / file).read_text()
    assert old in text
    (copy / file).write_text(text.replace(old, new))
    assert stale in outdated(copy)


def test_every_proof_is_in_the_evidence() -> None:
    listed = set(re.findall(r"^  - proof: (\S+)$", (ROOT / "docs" / "evidence.yaml").read_text(), re.MULTILINE))
    assert listed == {path.stem for path in ROOT.glob("proofs/*.txt")}


def test_the_readme_has_at_most_1000_words() -> None:
    text = re.sub(r"```.*?```|<!--.*?-->|\]\([^)]*\)", " ", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    assert len(re.findall(r"[\w'./-]*\w[\w'./-]*", text)) <= 1000


def test_the_questions_of_a_new_reader_have_answers() -> None:
    found = pages.questions()
    assert len(found) >= 10
    assert [problem for question in found for problem in question.problems()] == []


def test_the_python_examples_run_as_written(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "python-api.md").read_text(), re.DOTALL)
    assert len(blocks) >= 3
    script = tmp_path / "examples.py"
    script.write_text("\n".join(blocks))
    done = subprocess.run([sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
