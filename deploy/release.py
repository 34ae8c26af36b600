#!/usr/bin/env python3
"""Build and check the files of a release; the same commit gives the same bytes. Needs Python 3.11, git, a C compiler.

deploy/release.py build --output DIR [--ref REF]    the sdist, and the wheel of this platform built from it
deploy/release.py assemble TAG|HEAD --output DIR    all files of a release, checked: packages, SBOM, notes, SHA256SUMS;
                  [--from DIR]                      packages are those of DIR, else they are built here
deploy/release.py notes VERSION                     the section of CHANGELOG.md
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import io
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parent.parent
TOOLS = ROOT / "deploy" / "release-tools.txt"
PROGRAMS = ("powerband/core/_counting", "powerband/load/_wire", "powerband/serve/_relay")


def build(ref: str, *, output: Path) -> list[Path]:
    """Build the sdist of a commit, and from it the wheel of this platform; return both."""
    output.mkdir(parents=True, exist_ok=True)
    epoch = _git("log", "-1", "--format=%ct", ref)
    with tempfile.TemporaryDirectory() as folder:
        source = _export(ref, Path(folder) / "commit")
        _tool("build", "--no-isolation", "--sdist", "--outdir", folder, str(source), epoch=epoch)
        sdist = _normalise(next(Path(folder).glob("*.tar.gz")), output, epoch=int(epoch))
        with tarfile.open(sdist) as archive:
            archive.extractall(folder, filter="data")
        unpacked = Path(folder) / sdist.name.removesuffix(".tar.gz")
        raw = Path(folder) / "raw"
        _tool("build", "--no-isolation", "--wheel", "--outdir", str(raw), str(unpacked), epoch=epoch)
        built = next(raw.glob("*.whl"))
        if sys.platform == "linux":  # the lowest manylinux tag that its symbols allow
            _tool("auditwheel", "repair", "--wheel-dir", str(output), str(built), epoch=epoch)
            wheel = next(output.glob("*manylinux*.whl"))
        else:
            wheel = built.rename(output / built.name)
    return [wheel, sdist]


def assemble(tag: str, *, output: Path, packages: Path | None) -> None:
    """Write every file of a release to `output`: packages, SBOM, notes, SHA256SUMS."""
    source = re.search(r'__version__ = "(.+)"', _git("show", f"{tag}:src/powerband/__init__.py"))
    version = source[1] if source else ""
    if tag not in ("HEAD", f"v{version}"):
        _fail(f"tag {tag} is not the version of its sources, {version}", hint=f"the tag of this commit is v{version}")
    output.mkdir(parents=True, exist_ok=True)
    if any(output.iterdir()):
        _fail(f"{output} is not empty", hint="name a new directory")
    if packages:
        for file in sorted(packages.iterdir()):
            (output / file.name).write_bytes(file.read_bytes())
    else:
        build(tag, output=output)
    wheels, sdists = sorted(output.glob("*.whl")), sorted(output.glob("*.tar.gz"))
    if len(sdists) != 1 or not wheels or len(wheels) + 1 != len(list(output.iterdir())):
        _fail(f"expected one sdist and wheels: {[one.name for one in output.iterdir()]}", hint="see --from")
    check(wheels, sdists, version=version)
    sbom(_native(wheels), output=output / f"powerband-{version}.cdx.json", epoch=_git("log", "-1", "--format=%ct", tag))
    (output / "NOTES.md").write_text(notes(version, changelog=_git("show", f"{tag}:CHANGELOG.md")))
    (output / "SHA256SUMS").write_text(
        "".join(f"{_sha256(one)}  {one.name}\n" for one in sorted(output.iterdir()) if one.name != "SHA256SUMS")
    )


def check(wheels: Sequence[Path], sdists: Sequence[Path], *, version: str) -> None:
    """Fail unless names, metadata, contents and ABI of the packages are those of a release."""
    for one in (*wheels, *sdists):
        if not one.name.startswith(f"powerband-{version}{'-cp311-abi3-' if one.suffix == '.whl' else '.tar.gz'}"):
            _fail(f"{one.name} is not a package of {version} for every Python from 3.11", hint="see pyproject.toml")
    _tool("twine", "check", "--strict", *map(str, (*wheels, *sdists)))
    for wheel in wheels:
        _tool("check_wheel_contents", "--ignore", "W002", str(wheel))  # two models can have the same shape
        compiled = re.findall(rf"^({'|'.join(PROGRAMS)})\.abi3\.so", _listing(wheel), re.MULTILINE)
        if "linux" in wheel.name and sorted(compiled) != sorted(PROGRAMS):
            _fail(
                f"{wheel.name} has {compiled} of {PROGRAMS}", hint="an extension did not compile: read the build's log"
            )
        _tool("abi3audit", "--strict", "--assume-minimum-abi3", "3.11", str(wheel))


def sbom(wheel: Path, *, output: Path, epoch: str) -> None:
    """Write a CycloneDX document of what `pip install powerband[tune,serve]` installs from this wheel today."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        python = str(Path(folder) / "bin" / "python")
        _run([python, "-m", "pip", "install", "--quiet", f"{wheel}[tune,serve]"])
        _run([python, "-m", "pip", "uninstall", "--quiet", "--yes", "pip", "setuptools"])
        args = ["environment", "--output-reproducible", "--output-format", "JSON", "--output-file", str(output), python]
        _tool("cyclonedx_py", *args, epoch=epoch)
    found = json.loads(output.read_text())["components"]
    if not any(one["name"] == "powerband" for one in found):
        _fail(f"{output.name} does not name powerband among {len(found)} components", hint="read its log")


def notes(version: str, *, changelog: str) -> str:
    """Return the section of a version in a changelog."""
    section = re.search(rf"^## {re.escape(version)}(?: [^\n]*)?\n(.*?)(?=^## |\Z)", changelog, re.DOTALL | re.MULTILINE)
    if section is None:
        _fail(f"CHANGELOG.md has no section '## {version}'", hint="write it before the tag")
    return section[1].strip() + "\n"


def _export(ref: str, folder: Path) -> Path:
    """Write the files of a commit, and nothing else, into a folder."""
    archive = subprocess.run(["git", "archive", ref], cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        files.extractall(folder, filter="data")
    return folder


def _normalise(sdist: Path, output: Path, *, epoch: int) -> Path:
    """Copy an sdist with sorted members, one time stamp and no owners; return the copy."""
    copy = output / sdist.name
    with (
        tarfile.open(sdist) as old,
        copy.open("wb") as file,
        gzip.GzipFile("", "wb", fileobj=file, mtime=epoch) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as new,
    ):
        for member in sorted(old.getmembers(), key=lambda one: one.name):
            member.mtime, member.uid, member.gid, member.uname, member.gname = epoch, 0, 0, "", ""
            member.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
            member.pax_headers = {}
            new.addfile(member, old.extractfile(member) if member.isfile() else None)
    return copy


def _native(wheels: Sequence[Path]) -> Path:
    """Return the wheel that runs on this machine."""
    here = os.uname().machine
    native = [one for one in wheels if here in one.name and ("linux" in one.name) == (sys.platform == "linux")]
    if not native:
        _fail(f"no wheel for {sys.platform} on {here} among {[one.name for one in wheels]}", hint="see --from")
    return native[0]


def _listing(wheel: Path) -> str:
    return subprocess.run(
        [sys.executable, "-m", "zipfile", "-l", str(wheel)], check=True, capture_output=True, text=True
    ).stdout


def _sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def tools() -> Path:
    """Return the directory with the pinned programs of release-tools.txt; they have an environment of their own."""
    cache = Path(os.environ.get("POWERBAND_CACHE") or Path.home() / ".cache" / "powerband")
    key = hashlib.sha256(TOOLS.read_bytes() + sys.version.encode()).hexdigest()[:12]
    home = cache / "release" / key
    if not (home / "complete").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(home)], check=True)
        _run([str(home / "bin" / "python"), "-m", "pip", "install", "--quiet", "-r", str(TOOLS)])
        (home / "complete").touch()
    return home / "bin"


def _tool(module: str, *args: str, epoch: str = "") -> None:
    programs = tools()
    stable = {"SOURCE_DATE_EPOCH": epoch, "PYTHONHASHSEED": "0"} if epoch else {}
    path = {"PATH": f"{programs}:{os.environ['PATH']}"}
    _run([str(programs / "python"), "-m", module, *args], env={**os.environ, **stable, **path})


def _run(argv: Sequence[str], env: dict[str, str] | None = None) -> None:
    done = subprocess.run(argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        print(done.stdout, file=sys.stderr)
        _fail(f"exit {done.returncode}: {' '.join(argv)}", hint="read its output above")


def _git(*args: str) -> str:
    return subprocess.run(["git", *args], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


def _fail(message: str, *, hint: str) -> NoReturn:
    sys.exit(f"error: {message}\nhint: {hint}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    building = commands.add_parser("build")
    building.add_argument("--ref", default="HEAD")
    assembling = commands.add_parser("assemble")
    assembling.add_argument("tag")
    assembling.add_argument("--from", dest="packages", type=Path)
    for one in (building, assembling):
        one.add_argument("--output", type=Path, required=True)
    commands.add_parser("notes").add_argument("version")
    args = parser.parse_args()
    os.umask(0o022)  # file modes are part of a wheel
    if args.command == "build":
        print(*build(args.ref, output=args.output), sep="\n")
    elif args.command == "assemble":
        assemble(args.tag, output=args.output, packages=args.packages)
        print((args.output / "SHA256SUMS").read_text(), end="")
    else:
        print(notes(args.version, changelog=(ROOT / "CHANGELOG.md").read_text()), end="")


if __name__ == "__main__":
    main()
