"""Installation of engines: steps, progress, interruption, and concurrent installs."""

import asyncio
import contextlib
import functools
import hashlib
import http.server
import io
import json
import os
import stat
import sys
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from powerband import engines
from powerband.core.engine import Archive, InstallPlan, Step, StepProgress
from powerband.core.host import Host
from powerband.engines import rules
from powerband.errors import EngineMissing, InputError, InstallFailed
from powerband.runtime import devices, installations

SERVER = "#!/bin/sh\necho 'version: 7.7 (abc)'; echo '  --port N  --host H'\n"


def plan(*steps: Step) -> Any:
    write = f"from pathlib import Path; p = Path('{{home}}/server'); p.write_text({SERVER!r}); p.chmod(0o755)"
    last = Step(title="write the server", argv=("{python}", "-c", write))

    def install_plan(version: str, host: Host) -> InstallPlan:
        program = ("{home}/server",)
        return InstallPlan(engine="llamacpp", version=version, build="test", steps=(*steps, last), program=program)

    return install_plan


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POWERBAND_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("POWERBAND_LLAMACPP", raising=False)


async def test_an_installation_is_found_used_and_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines.get("llamacpp"), "install_plan", plan())
    host = devices.this_host()
    first, worked = await installations.install(engines.get("llamacpp"), host=host, version="1.0")
    again, worked_again = await installations.install(engines.get("llamacpp"), host=host, version="1.0")
    assert (worked, worked_again) == (True, False)
    assert again == first == installations.find("llamacpp") == installations.find("llamacpp", version="1.0")
    assert first.flags == frozenset({"--port", "--host"})
    with pytest.raises(EngineMissing, match=r"llamacpp 2.0 is not installed \(installed: 1.0\)"):
        installations.find("llamacpp", version="2.0")
    installations.remove("llamacpp")
    with pytest.raises(EngineMissing):
        installations.find("llamacpp")
    with pytest.raises(InputError, match="no managed installation of llamacpp"):
        installations.remove("llamacpp")


async def test_a_failed_step_raises_and_leaves_no_installation(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = Step(title="break", argv=("{python}", "-c", "raise SystemExit('the disk is on fire')"))
    monkeypatch.setattr(engines.get("llamacpp"), "install_plan", plan(broken))
    with pytest.raises(InstallFailed, match="'break' failed: the disk is on fire"):
        await installations.install(engines.get("llamacpp"), host=devices.this_host(), version="1.0")
    with pytest.raises(EngineMissing):
        installations.find("llamacpp")


async def test_build_progress_is_reported_with_an_estimate(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that prints ninja's '[2/8]', then make's '[ 75%]'; the next step prints none."""
    monkeypatch.setattr(installations, "_PROGRESS_INTERVAL_S", 0.02)
    script = (
        "import time; print('[2/8] a.o', flush=True); time.sleep(0.3); print('[ 75%] b.o', flush=True); time.sleep(0.3)"
    )
    compile_step = Step(title="compile", argv=("{python}", "-c", script))
    monkeypatch.setattr(engines.get("llamacpp"), "install_plan", plan(compile_step))
    reported: list[StepProgress] = []
    await installations.install(
        engines.get("llamacpp"), host=devices.this_host(), version="1.0", progress=reported.append
    )
    assert [(one.number, one.total, one.title) for one in reported if one.starts] == [
        (1, 2, "compile"),
        (2, 2, "write the server"),
    ]
    compiling = [one for one in reported if one.number == 1]
    assert list(dict.fromkeys(one.fraction for one in compiling)) == [None, 0.25, 0.75]
    assert compiling[-1].elapsed_s >= 0.6
    assert compiling[-1].remaining_s == pytest.approx(compiling[-1].elapsed_s / 3)
    assert {one.fraction for one in reported if one.number == 2} == {None}


async def test_an_interrupted_installation_starts_over(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = Step(title="sleep", argv=("{python}", "-c", "import time; time.sleep(60)"))
    monkeypatch.setattr(engines.get("llamacpp"), "install_plan", plan(slow))
    work = asyncio.create_task(installations.install(engines.get("llamacpp"), host=devices.this_host(), version="1.0"))
    await asyncio.sleep(0.5)
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await work
    with pytest.raises(EngineMissing):
        installations.find("llamacpp")
    monkeypatch.setattr(engines.get("llamacpp"), "install_plan", plan())
    assert (await installations.install(engines.get("llamacpp"), host=devices.this_host(), version="1.0"))[1]


async def test_concurrent_installs_install_once(monkeypatch: pytest.MonkeyPatch) -> None:
    pause = Step(title="pause", argv=("{python}", "-c", "import time; time.sleep(0.3)"))
    monkeypatch.setattr(engines.get("llamacpp"), "install_plan", plan(pause))
    host = devices.this_host()
    both = await asyncio.gather(
        *(installations.install(engines.get("llamacpp"), host=host, version="1.0") for _ in range(2))
    )
    assert sorted(worked for _, worked in both) == [False, True]


def test_an_engine_on_path_is_found(tmp_path: Path) -> None:
    server = tmp_path / "llama-server"
    server.write_text(SERVER)
    server.chmod(server.stat().st_mode | stat.S_IXUSR)
    found = installations.find("llamacpp")
    assert (found.origin, found.version, found.program) == ("path", "7.7", (str(server),))


def test_a_given_program_has_precedence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = tmp_path / "my-server"
    server.write_text(SERVER)
    server.chmod(0o755)
    monkeypatch.setenv("POWERBAND_LLAMACPP", str(server))
    assert installations.find("llamacpp").origin == "given"
    with pytest.raises(InputError, match="is not an executable program"):
        installations.find("llamacpp", path=str(tmp_path / "absent"))


def test_a_given_interpreter_runs_the_vllm_module(tmp_path: Path) -> None:
    """An interpreter without vLLM is accepted, with an unknown version."""
    python = tmp_path / "python3"
    os.symlink(sys.executable, python)
    found = installations.find("vllm", path=str(python))
    assert found.program[1:] == ("-m", "vllm.entrypoints.openai.api_server")


async def test_a_build_for_another_cpu_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines.get("llamacpp"), "install_plan", plan())
    await installations.install(engines.get("llamacpp"), host=devices.this_host(), version="1.0")
    marker = next((installations.cache_root() / "engines").glob("*/*/installation.json"))
    facts = json.loads(marker.read_text())
    marker.write_text(json.dumps({**facts, "instruction_sets": ["avx9000"]}))
    with pytest.raises(EngineMissing):
        installations.find("llamacpp")


def packed(folder: Path, *names: str) -> tuple[Path, str]:
    """Write an archive as a project publishes it; return it and its SHA-256."""
    archive = folder / "release.tar.gz"
    with tarfile.open(archive, "w:gz") as files:
        for name in names:
            content = SERVER.encode()
            member = tarfile.TarInfo(f"llama-b1/{name}")
            member.size, member.mode = len(content), 0o755
            files.addfile(member, io.BytesIO(content))
    return archive, hashlib.sha256(archive.read_bytes()).hexdigest()


@contextlib.contextmanager
def served(folder: Path) -> Iterator[str]:
    """Serve a directory on loopback, as the project's release page does."""
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(folder))
    handler.log_message = lambda *_: None  # type: ignore[attr-defined]
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def publish(monkeypatch: pytest.MonkeyPatch, source: str, sha256: str) -> None:
    """Make an archive the published one for this machine."""
    host = devices.this_host()
    one = Archive(version="b1", machine=host.machine, system=host.system, source=source, sha256=sha256, size_bytes=500)
    facts = rules.facts("llamacpp").model_copy(update={"archives": (one,)})
    monkeypatch.setattr(rules, "facts", lambda _: facts)
    monkeypatch.setattr(engines.get("llamacpp"), "install_plan", plan())


async def test_a_published_archive_is_preferred(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    archive, sha256 = packed(tmp_path, "llama-server", "llama-quantize")
    reported: list[StepProgress] = []
    with served(tmp_path) as url:
        publish(monkeypatch, f"{url}/{archive.name}", sha256)
        found, now = await installations.install_engine(
            engines.get("llamacpp"), host=devices.this_host(), progress=reported.append
        )
    assert now and (found.version, found.origin) == ("b1", "managed")
    assert set(found.tools) == {"llama-server", "llama-quantize"}, "what the archive has"
    assert found.flags == frozenset({"--port", "--host"})
    assert reported[0].number == 0 and "about a minute" in reported[0].title
    assert installations.find("llamacpp") == found


@pytest.mark.parametrize("reason", ["digest", "absent", "other"])
async def test_a_published_archive_that_does_not_work_is_compiled(
    reason: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    archive, sha256 = packed(tmp_path, "something" if reason == "other" else "llama-server")
    source = str(tmp_path / "absent.tar.gz") if reason == "absent" else str(archive)
    publish(monkeypatch, source, "0" * 64 if reason == "digest" else sha256)
    reported: list[StepProgress] = []
    found, now = await installations.install_engine(
        engines.get("llamacpp"), host=devices.this_host(), progress=reported.append
    )
    assert now and found.version == "0.3.36" and found.build == "test"
    told = {"digest": "has SHA-256", "absent": "cannot be read", "other": "contains no file llama-server"}[reason]
    assert any(told in one.title for one in reported if one.number == 0), [one.title for one in reported]
    assert not list((installations.cache_root() / "engines" / "llamacpp" / "b1").glob("*"))


async def test_an_archive_of_the_user_is_used_or_refused(tmp_path: Path) -> None:
    archive, sha256 = packed(tmp_path, "llama-server")
    given = Archive(version="mine", source=str(archive), sha256=sha256)
    engine, host = engines.get("llamacpp"), devices.this_host()
    with pytest.raises(InstallFailed, match="has SHA-256"):
        await installations.install_engine(engine, host=host, archive=given.model_copy(update={"sha256": "0" * 64}))
    assert (await installations.install_engine(engine, host=host, archive=given))[0].version == "mine"


async def test_what_was_compiled_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    publish(monkeypatch, str(tmp_path / "absent"), "0" * 64)
    engine, host = engines.get("llamacpp"), devices.this_host()
    await installations.install(engine, host=host)
    assert await installations.install_engine(engine, host=host) == (installations.find("llamacpp"), False)


async def test_a_member_outside_of_the_archive_is_refused(tmp_path: Path) -> None:
    archive = tmp_path / "hostile.tar"
    with tarfile.open(archive, "w") as files:
        member = tarfile.TarInfo("../../escaped/llama-server")
        files.addfile(member, io.BytesIO())
    given = Archive(version="x", source=str(archive), sha256=hashlib.sha256(archive.read_bytes()).hexdigest())
    with pytest.raises(InstallFailed, match="cannot be unpacked"):
        await installations.install_engine(engines.get("llamacpp"), host=devices.this_host(), archive=given)
    assert not list(tmp_path.rglob("escaped"))


def test_the_engines_found_are_listed_without_running_them(tmp_path: Path) -> None:
    server = tmp_path / "llama-server"
    server.write_text("#!/bin/sh\nsleep 60\n")
    server.chmod(0o755)
    assert list(installations.summaries()) == [f"llamacpp at {server}"]
