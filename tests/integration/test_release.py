"""The files of a release: notes, equal bytes, and the image's pinned packages."""

import re
import tarfile
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement

import powerband

ROOT = Path(__file__).parents[2]


@pytest.fixture
def release(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "deploy"))
    import release  # type: ignore[import-not-found]

    return release  # type: ignore[no-any-return]


def test_the_version_has_notes(release: ModuleType) -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text()
    assert release.notes(powerband.__version__, changelog=changelog).startswith("### ")
    text = "# Changelog\n\n## 0.2.0 (unreleased)\n\n### Added\n\n- a\n\n## 0.1.0\n\n- b\n"
    assert release.notes("0.2.0", changelog=text) == "### Added\n\n- a\n"
    assert release.notes("0.1.0", changelog=text) == "- b\n"
    with pytest.raises(SystemExit, match="has no section"):
        release.notes("0.2", changelog=text)


def test_an_sdist_has_the_same_bytes_from_other_files(release: ModuleType, tmp_path: Path) -> None:
    found = []
    for number, names in enumerate((["a", "b"], ["b", "a"])):
        folder = tmp_path / str(number)
        folder.mkdir()
        with tarfile.open(folder / "old.tar.gz", "w:gz") as files:
            for name in names:
                (folder / name).write_text(name)
                (folder / name).chmod(0o644 if number else 0o600)
                files.add(folder / name, arcname=name)
        output = tmp_path / f"new-{number}"
        output.mkdir()
        found.append(release._normalise(folder / "old.tar.gz", output, epoch=1_700_000_000).read_bytes())
    assert found[0] == found[1]


def test_the_image_pins_what_the_package_needs() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    needed = [Requirement(one) for one in (*project["dependencies"], *extras["tune"], *extras["serve"])]
    lines = (ROOT / "deploy" / "requirements.txt").read_text().splitlines()
    pinned = dict(line.split(" ")[0].split("==") for line in lines if re.match(r"[a-z0-9_.-]+==", line))
    for one in needed:
        assert one.specifier.contains(pinned[one.name], prereleases=True), (
            f"{one}: see the head of deploy/requirements.txt"
        )
