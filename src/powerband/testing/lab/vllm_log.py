"""What vLLM prints: log lines with the process that wrote them, and the errors with which it ends."""

from __future__ import annotations

import os
import sys
import time

_BANNER = ("      █     █     █▄   ▄█", "▄▄ ▄█ █     █     █ ▀▄▀ █  version {version}",
           " █▄█▀ █     █     █     █  model   {model}", "  ▀▀  ▀▀▀▀▀ ▀▀▀▀▀ ▀     ▀")  # fmt: skip


class Refused(Exception):
    """vLLM ends with this error, which one of its processes raises; `config` is the class that validates it."""

    def __init__(self, text: str, *, error: str = "ValueError", config: str = "", process: str = "APIServer") -> None:
        super().__init__(text)
        self.error, self.config, self.process = error, config, process


def log(where: str, text: str, *, process: str = "APIServer", pid: int | None = None, level: str = "INFO") -> None:
    """Print a line as vLLM's logger does; `where` is the source file and line."""
    for line in text.splitlines() or [""]:
        print(f"({process} pid={pid or os.getpid()}) {level} {time.strftime('%m-%d %H:%M:%S')} [{where}] {line}")
    sys.stdout.flush()


def banner(version: str, model: str) -> None:
    """Print the lines with which the server begins."""
    for line in ("", *_BANNER, ""):
        log("api_utils.py:347", line.format(version=version, model=model))


def print_refusal(refused: Refused, *, pid: int | None = None) -> None:
    """Print an error as the process does that raises it, and what the processes above it make of it."""
    text = f"{refused.error}: {refused}"
    if refused.process == "APIServer":
        if refused.config:
            text = f"pydantic_core._pydantic_core.ValidationError: 1 validation error for {refused.config}\n"
            text += str(refused) if refused.error == "ValidationError" else _value_error(str(refused))
        print(f"Traceback (most recent call last):\n{text}", file=sys.stderr, flush=True)
        return
    if refused.process.startswith("Worker"):
        _logged("multiproc_executor.py:953", "WorkerProc failed to start.", text, refused.process, pid)
        text = (
            "Exception: WorkerProc initialization failed due to an exception in a background process. "
            "See stack trace for root cause."
        )
    _logged("core.py:1510", "EngineCore failed to start.", text, "EngineCore", pid)
    print(f"Process EngineCore:\nTraceback (most recent call last):\n{text}", file=sys.stderr, flush=True)
    root = "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}"
    print(f"Traceback (most recent call last):\n{root}", file=sys.stderr, flush=True)


def _value_error(text: str) -> str:
    return (
        f"  Value error, {text} [type=value_error, input_value=ArgsKwargs((), {{...}}), input_type=ArgsKwargs]\n"
        "    For further information visit https://errors.pydantic.dev/2.14/v/value_error"
    )


def _logged(where: str, headline: str, text: str, process: str, pid: int | None) -> None:
    log(where, f"{headline}\nTraceback (most recent call last):\n{text}", process=process, pid=pid, level="ERROR")
