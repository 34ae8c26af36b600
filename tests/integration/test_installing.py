"""Installation of engines: steps, progress, interruption, and concurrent installs."""

import asyncio
import json
import os
import stat
import sys
from pathlib import Path
from typing import Any

import pytest

from powerband import engines
from powerband.core.engine import InstallPlan, Step, StepProgress
from powerband.core.host import Host
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
