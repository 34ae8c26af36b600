"""A fuzzer for the fleet's API, in the environment of the fuzzers: Schemathesis."""

from __future__ import annotations

import re
import subprocess

from support import fuzzing

CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"


def api(url: str, key: str, examples: int, certificate: str) -> tuple[int, str]:
    """Let Schemathesis loose on the fleet's own OpenAPI document; return how many requests, and what is wrong."""
    home = fuzzing.home()
    argv = [str(home / "bin" / "schemathesis"), "run", f"{url}/openapi.json", "--checks", CHECKS, "--seed", "1"]
    argv += ["--max-examples", str(examples), "--header", f"Authorization: Bearer {key}", "--no-color"]
    argv += ["--tls-verify", certificate]
    done = subprocess.run(argv, capture_output=True, text=True, cwd=home)  # it leaves notes where it runs
    told = re.search(r"(\d+) generated", done.stdout)
    return int(told[1]) if told else 0, "" if done.returncode == 0 and told else (done.stdout + done.stderr)[-3000:]
