"""Proofs start with python3 alone, and what they fetch is checked."""

import hashlib
import io
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

PROOFS = Path(__file__).parents[2] / "proofs"
UP_TO_PRELUDE = """
import ast, sys
from pathlib import Path

sys.path.insert(0, sys.argv[1])
for name in sys.argv[2:]:
    before = []
    for node in ast.parse(Path(name).read_text()).body:
        names = [one.name for one in node.names] if isinstance(node, ast.Import) else [getattr(node, "module", "")]
        if "prelude" in names:
            break
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            before.append(node)
    else:
        sys.exit(f"{name} does not import prelude")
    try:
        exec(compile(ast.Module(before, []), name, "exec"))
    except ImportError as error:
        sys.exit(f"{name} imports before prelude: {error}")
"""


def proofs() -> list[str]:
    files = sorted(one for one in PROOFS.iterdir() if one.is_file() and not one.suffix)
    return [str(one) for one in files if "python3" in one.read_text().partition("\n")[0]]


def isolated(*names: str) -> str:
    """Run the imports before prelude with the standard library only; return what fails."""
    argv = [sys.executable, "-I", "-S", "-c", UP_TO_PRELUDE, str(PROOFS), *names]
    return subprocess.run(argv, capture_output=True, text=True).stderr.strip()


def test_every_proof_starts_with_python_alone() -> None:
    assert len(proofs()) > 50
    assert isolated(*proofs()) == ""


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("import httpx\nfrom prelude import say\n", "imports before prelude: No module"),
        ("import os\n", "not import prelude"),
    ],
)
def test_a_proof_that_needs_more_is_named(text: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "wrong").write_text(text)
    assert reason in isolated(str(tmp_path / "wrong"))


def test_prelude_itself_starts_with_python_alone() -> None:
    code = "import sys; sys.path.insert(0, sys.argv[1]); import prelude"
    argv = [sys.executable, "-I", "-S", "-c", code, str(PROOFS)]
    env = {"POWERBAND_PROOF_PYTHON": "1"}  # it would install the package otherwise
    done = subprocess.run(argv, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.fixture
def fetching(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    monkeypatch.syspath_prepend(str(PROOFS))
    monkeypatch.setenv("POWERBAND_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("POWERBAND_DATA", raising=False)
    import fetch  # type: ignore[import-not-found]

    return fetch  # type: ignore[no-any-return]


def test_fetched_data_is_checked_and_kept(fetching: ModuleType, tmp_path: Path) -> None:
    packed, archive = io.BytesIO(), tmp_path / "archive.zip"
    with zipfile.ZipFile(packed, "w") as files:
        files.writestr("inside/text", "words")
    archive.write_bytes(packed.getvalue())
    source = fetching.Source(
        name="one/text",
        licence="MIT",
        url=archive.as_uri(),
        archive_sha256=hashlib.sha256(packed.getvalue()).hexdigest(),
        member="inside/text",
        sha256=hashlib.sha256(b"words").hexdigest(),
    )
    for wrong in (replace(source, archive_sha256="0" * 64), replace(source, sha256="0" * 64)):
        with pytest.raises(SystemExit, match="has SHA-256"):
            fetching.fetch(wrong)
    assert fetching.fetch(source).read_text() == "words"
    archive.unlink()
    assert fetching.fetch(source).read_text() == "words", "the second time it is in the cache"
    with pytest.raises(SystemExit, match="cannot be fetched"):
        fetching.fetch(replace(source, name="other"))


def test_data_of_the_user_is_used(fetching: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = tmp_path / "own" / fetching.WIKITEXT2.name
    own.parent.mkdir(parents=True)
    own.write_text("words")
    monkeypatch.setenv("POWERBAND_DATA", str(tmp_path / "own"))
    assert fetching.fetch(fetching.WIKITEXT2) == own
