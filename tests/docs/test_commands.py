"""The commands in README and quick start run as written."""

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from support import models

pytestmark = pytest.mark.quiet  # some of them tune

ROOT = Path(__file__).parent.parent.parent
PAGES = [ROOT / "README.md", ROOT / "docs" / "quickstart.md"]


def commands(page: Path) -> list[str]:
    blocks = re.findall(r"```console\n(.*?)```", page.read_text(), re.DOTALL)
    return [line[2:] for block in blocks for line in block.splitlines() if line.startswith("$ powerband")]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, Path]:
    """A folder for each page with what it supposes: the model in both formats, and the README's deployment."""
    model = models.make_all()
    yaml = re.search(r"```yaml\n(.*?)```", PAGES[0].read_text(), re.DOTALL)
    assert yaml is not None
    found = {page: tmp_path_factory.mktemp(page.stem) for page in PAGES}
    for folder in found.values():
        for shape in (model.gguf, model.safetensors):
            (folder / shape.name).symlink_to(shape)
        (folder / "deployment.yaml").write_text(yaml[1])
    return found


@pytest.mark.vllm
@pytest.mark.llamacpp
@pytest.mark.parametrize(("page", "command"), [(page, c) for page in PAGES for c in commands(page)])
def test_a_shown_command_works(page: Path, command: str, folders: dict[Path, Path]) -> None:
    """In order: the files that a command writes are there for the next ones."""
    words, folder = shlex.split(command), folders[page]
    if words[2:] and words[2].startswith("study/") and not (folder / words[2]).exists():
        pytest.skip("there is no study: the command that makes it was skipped or failed")
    argv = [sys.executable, "-m", "powerband", *words[1:]]
    env = {**os.environ, "POWERBAND_STATE": str(folder / "state")}
    serves = words[1] == "run" and "--dry-run" not in words
    output = folder / "output"
    with output.open("w") as stream:
        process = subprocess.Popen(argv, cwd=folder, env=env, stdout=stream, stderr=subprocess.STDOUT)
        deadline = time.monotonic() + 600  # a busy machine takes several times as long
        while process.poll() is None and time.monotonic() < deadline:
            if serves and "ready " in output.read_text():
                process.send_signal(signal.SIGINT)
                break
            time.sleep(0.1)
        try:
            code = process.wait(timeout=15)
        finally:
            process.terminate()
    text = output.read_text()
    rejected = words[1] in ("bench", "verify") and code in (5, 6)
    busy = rejected and re.search("background CPU load|the client sent|steady", text)
    assert code == 0 or busy, text  # on a busy machine the guards are right to reject
    assert "Traceback" not in text
    if words[1] == "tune":
        assert (folder / "study" / "recipe.yaml").exists()
