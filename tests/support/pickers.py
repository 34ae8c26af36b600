"""Processes of `powerband picker`."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx
import yaml
from google.protobuf.wrappers_pb2 import StringValue, UInt32Value

from powerband.core.recipe import Recipe
from powerband.store import documents
from support.golden import free_port, wait_for
from support.recipes import recipe

SERVING, NOT_SERVING = 1, 2
PROGRAM = "POWERBAND_TEST_PICKER"  # runs another program than this checkout's `powerband`


@dataclass
class PickerProcess:
    """A running picker and its ports."""

    process: subprocess.Popen[bytes]
    port: int
    health_port: int
    metrics_port: int

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def health(self, service: str = "", *, timeout_s: float = 2.0) -> int:
        """Return the status that the health service gives for a service."""
        with grpc.insecure_channel(f"127.0.0.1:{self.health_port}") as channel:
            check = channel.unary_unary(
                "/grpc.health.v1.Health/Check",
                request_serializer=StringValue.SerializeToString,
                response_deserializer=UInt32Value.FromString,
            )
            return int(check(StringValue(value=service), timeout=timeout_s).value)

    def wait_ready(self, timeout_s: float = 20.0) -> None:
        until = time.monotonic() + timeout_s
        while time.monotonic() < until:
            with contextlib.suppress(grpc.RpcError):
                if self.health() == SERVING:
                    return
            time.sleep(0.05)
        raise AssertionError("the picker is not ready")

    def metrics(self) -> str:
        return httpx.get(f"http://127.0.0.1:{self.metrics_port}/metrics", trust_env=False).text

    def metric(self, series: str) -> float | None:
        """Return the value of one series, such as `name{label="value"}`."""
        for line in self.metrics().splitlines():
            if line.rpartition(" ")[0] == series:
                return float(line.rpartition(" ")[2])
        return None

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)


@contextlib.contextmanager
def picker(*args: str, recipes: list[Path], ready: bool = True) -> Iterator[PickerProcess]:
    """Run a picker on free ports of 127.0.0.1, until it is ready."""
    ports = [free_port() for _ in range(3)]
    program = os.environ.get(PROGRAM, "").split() or [sys.executable, "-m", "powerband"]
    argv = [*program, "picker", "--host", "127.0.0.1", *args]
    for path in recipes:
        argv += ["--recipe", str(path)]
    for option, port in zip(("--port", "--health-port", "--metrics-port"), ports, strict=True):
        argv += [option, str(port)]
    process = PickerProcess(subprocess.Popen(argv), *ports)
    try:
        wait_for(ports[0])
        if ready:
            process.wait_ready()
        yield process
    finally:
        process.process.kill()
        process.process.wait()


def read_recipe(path: Path) -> Recipe:
    """Return a written recipe."""
    return documents.read_as(Recipe, path)


def write_recipe(folder: Path, name: str = "golden", *, in_flight: int = 8, **promise: Any) -> Path:
    """Write a recipe of the model `golden`; return its path."""
    data = recipe("vllm").to_data()
    data["name"] = name
    data["deployment"]["name"] = "golden"
    data["promise"] |= {"in_flight": in_flight, "rate_per_s": 20.0, **promise}
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump({"powerband": "recipe/1", **data}))
    return path
