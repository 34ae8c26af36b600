"""Two fuzzers for the fleet's door, in an environment of their own: Schemathesis for the API, Atheris for the parser.

Run by that environment's own interpreter, this file is Atheris' target.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

WANTED = ("schemathesis==4.32.5", "atheris==3.0.0")
CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
BODIES = (
    '{"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "stream": true}',
    '{"model": "m", "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]}',
    '{"model": "m", "prompt": ["a", "b"], "max_completion_tokens": 1}',
)


def home() -> Path:
    """Return the environment, made where it is missing."""
    from powerband.runtime import installations

    place = installations.cache_root() / "tools" / ("fuzzers-" + "-".join(one.split("==")[1] for one in WANTED))
    if not (place / "made").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(place)], check=True)
        pip = [str(place / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, *WANTED], check=True)
        (place / "made").touch()
    return place


def api(url: str, key: str, examples: int, certificate: str) -> tuple[int, str]:
    """Let Schemathesis loose on the fleet's own OpenAPI document; return how many requests, and what is wrong."""
    argv = [str(home() / "bin" / "schemathesis"), "run", f"{url}/openapi.json", "--checks", CHECKS, "--seed", "1"]
    argv += ["--max-examples", str(examples), "--header", f"Authorization: Bearer {key}", "--no-color"]
    argv += ["--tls-verify", certificate]
    done = subprocess.run(argv, capture_output=True, text=True, cwd=home())  # it leaves notes where it runs
    told = re.search(r"(\d+) generated", done.stdout)
    return int(told[1]) if told else 0, "" if done.returncode == 0 and told else (done.stdout + done.stderr)[-3000:]


def parser(folder: Path, runs: int) -> tuple[int, str]:
    """Let Atheris loose on what reads a body; return how many bodies, and what is wrong."""
    for number, body in enumerate(BODIES):
        (folder / f"{number}.json").write_text(body)
    argv = [str(home() / "bin" / "python"), __file__, f"-runs={runs}", "-max_len=4096", "-seed=1", str(folder)]
    paths = [str(Path(__file__).parent.parent / "src"), sysconfig.get_path("purelib")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(argv, capture_output=True, text=True, env=env, cwd=folder)
    told = re.search(r"Done (\d+) runs", done.stderr)
    return int(told[1]) if told else 0, "" if done.returncode == 0 and told else done.stderr[-3000:]


def _target() -> None:
    import atheris  # type: ignore[import-not-found]

    with atheris.instrument_imports():
        from powerband.serve.router import requests

    def read(body: bytes) -> None:
        with contextlib.suppress(requests.RequestRejected):
            requests.read(body)

    atheris.Setup(sys.argv, read)
    atheris.Fuzz()


if __name__ == "__main__":
    _target()
