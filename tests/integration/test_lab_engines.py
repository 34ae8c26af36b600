"""The lab's stand-ins for vLLM and llama-server on a host with two simulated devices."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx
import pytest

from powerband import engines
from powerband.testing.lab.world import ENVIRONMENT, LabDevice, LabHost
from support.model_configs import LLAMA_8B

GB, GIB = 10**9, 2**30
MEMORY = 80 * GB


def device(index: int, memory_bytes: int = MEMORY, capability: str = "9.0") -> LabDevice:
    return LabDevice(
        index=index, uuid=f"GPU-{index}{index}", device="h100-sxm", name="NVIDIA H100 80GB HBM3",
        memory_bytes=memory_bytes, capability=capability, numa_node=0, island=0,
    )  # fmt: skip


def make_host(folder: Path, *devices: LabDevice, time_scale: float = 0.01) -> LabHost:
    (folder / "devices").mkdir(parents=True)
    data: dict[str, Any] = {"name": "lab", "seed": 1, "time_scale": time_scale, "load_bytes_per_s": 100 * GB}
    (folder / "host.json").write_text(json.dumps(data | {"devices": [asdict(one) for one in devices]}))
    return LabHost(folder)


def safetensors(folder: Path, size_bytes: int, **changes: Any) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA_8B | changes))
    header = json.dumps({"all": {"dtype": "U8", "shape": [size_bytes], "data_offsets": [0, size_bytes]}}).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + size_bytes)
    return folder


def gguf(path: Path) -> Path:
    """Write a sparse file with the shape of Llama 3.1 8B: 32 layers of one F16 matrix each, and an output."""

    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value)) + value.encode()

    numbers = {
        "block_count": 32, "embedding_length": 4096, "attention.head_count": 32, "attention.head_count_kv": 8,
        "feed_forward_length": 14336, "context_length": 8192, "vocab_size": 128256,
    }  # fmt: skip
    pairs = [text("general.architecture") + struct.pack("<I", 8) + text("llama")]
    pairs += [text(f"llama.{name}") + struct.pack("<II", 4, value) for name, value in numbers.items()]
    sizes = {f"blk.{layer}.ffn_up.weight": 218_000_000 for layer in range(32)}  # elements
    sizes |= {"token_embd.weight": 525_000_000, "output.weight": 525_000_000}
    tensors, offset = [], 0
    for name, elements in sizes.items():
        tensors.append(text(name) + struct.pack("<IQIQ", 1, elements, 1, offset))
        offset += 2 * elements
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(pairs)) + b"".join(pairs) + b"".join(tensors)
    with path.open("wb") as file:
        file.write(head)
        file.truncate(-(-len(head) // 32) * 32 + offset)
    return path


class Engine:
    """A started stand-in."""

    def __init__(self, name: str, host: LabHost, log: Path, *argv: str, **environment: str) -> None:
        self.name, self.log = name, log
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = int(free.getsockname()[1])
        if "--port" in argv:
            self.port = int(argv[argv.index("--port") + 1])
        else:
            argv = (*argv, "--port", str(self.port))
        module = {"vllm": "vllm", "llamacpp": "llama_server"}[name]
        with log.open("w") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", f"powerband.testing.lab.{module}", *argv, "--host", "127.0.0.1"],
                env=os.environ | {ENVIRONMENT: str(host.folder)} | environment, stdout=file, stderr=file,
            )  # fmt: skip

    def status(self) -> int:
        try:
            return httpx.get(f"http://127.0.0.1:{self.port}/health").status_code
        except httpx.HTTPError:
            return 0

    def wait_ready(self) -> None:
        until(lambda: self.status() == 200 or self.process.poll() is not None)
        assert self.process.poll() is None, self.log.read_text()

    def failure(self) -> tuple[int, str, str]:
        """Wait for the end; return the exit code, and the kind and the sentence of the failure."""
        code = self.process.wait(30)
        found = engines.get(self.name).diagnose(self.log.read_text())
        assert found is not None, self.log.read_text()
        return code, found.kind, found.sentence


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def held(host: LabHost) -> list[float]:
    """Return the used share of each device."""
    return [round(1 - host.free_bytes(one) / one.memory_bytes, 2) for one in host.devices]


Start = Callable[..., Engine]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[Engine] = []

    def begin(name: str, host: LabHost, *argv: str, **environment: str) -> Engine:
        started.append(Engine(name, host, tmp_path / f"log-{len(started)}", *argv, **environment))
        return started[-1]

    yield begin
    for one in started:
        one.process.kill()
        one.process.wait()


@pytest.fixture
def host(tmp_path: Path) -> LabHost:
    return make_host(tmp_path / "host", device(0), device(1))


@pytest.fixture
def model(tmp_path: Path) -> str:
    return str(safetensors(tmp_path / "Llama-3.1-8B", 16 * GB))


def test_vllm_serves_and_holds_its_share_of_one_device(host: LabHost, model: str, start: Start) -> None:
    engine = start("vllm", host, "serve", model, "--served-model-name", "m", "--max-model-len", "8192")
    engine.wait_ready()
    body = {"model": "m", "prompt": "Hello", "max_tokens": 4}
    answer = httpx.post(f"http://127.0.0.1:{engine.port}/v1/completions", json=body).json()
    assert answer["usage"]["completion_tokens"] == 4
    assert held(host) == [0.93, 0.0]  # 92%, and CUDA's own
    assert engine.process.pid not in host.holders(host.devices[0])  # a child holds it
    tokens = engines.get("vllm").readings(engine.log.read_text())["kv_tokens"]
    assert 0.6 < tokens * 131072 / (0.92 * MEMORY - 16 * GB) < 1  # the rest is for activations and CUDA graphs
    assert all(re.search(one.pattern, engine.log.read_text()) for one in engines.get("vllm").phases())
    engine.process.send_signal(signal.SIGTERM)
    assert engine.process.wait(5) == 0
    assert held(host) == [0.0, 0.0]


def test_vllm_refuses_a_device_that_another_engine_fills(host: LabHost, model: str, start: Start) -> None:
    start("vllm", host, "serve", model, "--max-model-len", "8192").wait_ready()
    second = start("vllm", host, "serve", model, "--max-model-len", "8192")
    code, kind, sentence = second.failure()
    assert (code, kind) == (1, "out_of_memory")
    assert sentence.startswith("vLLM requests 0.92 of cuda:0 (68.55 GiB)")
    start("vllm", host, "serve", model, "--max-model-len", "8192", CUDA_VISIBLE_DEVICES="1").wait_ready()
    assert held(host) == [0.93, 0.93]


def test_vllm_sees_only_the_visible_devices(host: LabHost, model: str, start: Start) -> None:
    start("vllm", host, "serve", model, "--max-model-len", "8192", CUDA_VISIBLE_DEVICES="GPU-11").wait_ready()
    assert held(host) == [0.0, 0.93]
    none = start("vllm", host, "serve", model, CUDA_VISIBLE_DEVICES="")
    assert none.failure()[2].startswith("RuntimeError: Failed to infer device type")
    too_many = start("vllm", host, "serve", model, "-tp", "2", CUDA_VISIBLE_DEVICES="0")
    assert "World size (2) is larger than the number of available GPUs (1)" in too_many.failure()[2]
    ranks = start("vllm", host, "serve", model, "-dp", "3")
    assert ranks.process.wait(30) == 1 and "local range: [2, 3)" in ranks.log.read_text()


def test_vllm_uses_a_worker_for_each_device_and_ends_with_any(host: LabHost, model: str, start: Start) -> None:
    engine = start("vllm", host, "serve", model, "-tp", "2", "--max-model-len", "8192")
    engine.wait_ready()
    assert held(host) == [0.93, 0.93]
    (one,), (other,) = (host.holders(device) for device in host.devices)
    assert len({one, other, engine.process.pid}) == 3
    os.kill(other, signal.SIGKILL)
    engine.process.wait(10)
    assert "died unexpectedly (exit code: -9), shutting down executor" in engine.log.read_text()
    assert held(host) == [0.0, 0.0]


def test_workers_end_with_a_killed_engine(host: LabHost, model: str, start: Start) -> None:
    engine = start("vllm", host, "serve", model, "-tp", "2", "--max-model-len", "8192")
    engine.wait_ready()
    engine.process.kill()
    until(lambda: held(host) == [0.0, 0.0])


@pytest.mark.parametrize(
    ("argv", "kind", "words"),
    [
        (["--max-model-len", "200000"], "context_too_long", "context length of 131072 tokens"),
        (["-tp", "3"], "wrong_value", "World size (3)"),
        (["--kv-cache-dtype", "nvfp4"], "crashed", "No valid attention backend found for cuda"),
        (["--block-size", "24"], "crashed", "No valid attention backend found for cuda"),
        (["--gpu-memory-utilization", "0.1"], "out_of_memory", "the weights leave no memory for the KV cache"),
        (["--gpu-memory-utilization", "0.3"], "out_of_memory", "one request of 131072 tokens needs 16.0 GiB of KV"),
        (["--kv-cache-memory-bytes", "64G"], "out_of_memory", "the GPU is out of memory"),
        (["--speculative-config", '{"method": "suffix"}'], "unsupported", "arctic-inference"),
        (["--enable-expert-parallel"], "wrong_value", "Number of experts"),
    ],
)
def test_vllm_refuses(host: LabHost, model: str, start: Start, argv: list[str], kind: str, words: str) -> None:
    code, found, sentence = start("vllm", host, "serve", model, *argv).failure()
    assert (code, found) == (1, kind) and words in sentence


def test_vllm_needs_memory_for_the_weights(host: LabHost, tmp_path: Path, start: Start) -> None:
    large = str(safetensors(tmp_path / "large", 140 * GB))
    _, kind, sentence = start("vllm", host, "serve", large, "--max-model-len", "4096").failure()
    assert (kind, sentence) == ("out_of_memory", "the GPU is out of memory: vLLM tried to allocate another 224.00 MiB")
    start("vllm", host, "serve", large, "-tp", "2", "--max-model-len", "4096").wait_ready()  # 70 GB fit
    assert held(host) == [0.93, 0.93]


def test_old_devices_lack_formats(tmp_path: Path, model: str, start: Start) -> None:
    host = make_host(tmp_path / "old", device(0, capability="7.0"))
    assert "Minimum capability: 75" in start("vllm", host, "serve", model, "--quantization", "fp8").failure()[2]
    assert "Bfloat16 is only supported" in start("vllm", host, "serve", model, "--dtype", "bfloat16").failure()[2]


@pytest.mark.parametrize("name", ["vllm", "llamacpp"])
def test_a_taken_port_is_refused(host: LabHost, model: str, tmp_path: Path, start: Start, name: str) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        where = ["serve", model] if name == "vllm" else ["-m", str(gguf(tmp_path / "m.gguf"))]
        engine = start(name, host, *where, "--port", str(holder.getsockname()[1]))
        assert engine.failure()[:2] == (1, "port_taken")


def test_llama_server_answers_503_while_it_loads_then_serves(tmp_path: Path, start: Start) -> None:
    host = make_host(tmp_path / "slow", device(0), device(1), time_scale=1.0)
    engine = start("llamacpp", host, "-m", str(gguf(tmp_path / "m.gguf")), "-c", "8192", "-np", "2", "--alias", "m")
    until(lambda: engine.status() > 0)
    body = httpx.get(f"http://127.0.0.1:{engine.port}/health")
    assert (body.status_code, body.json()["error"]["message"]) == (503, "Loading model")
    engine.wait_ready()
    asked = {"model": "m", "prompt": "Hello", "max_tokens": 4}
    answer = httpx.post(f"http://127.0.0.1:{engine.port}/v1/completions", json=asked).json()
    assert answer["usage"]["completion_tokens"] == 4
    used = [one.memory_bytes - host.free_bytes(one) for one in host.devices]
    assert all(7 * GB < one < 10 * GB for one in used)  # 16 GB by layers, and the KV cache
    assert [list(host.holders(one)) for one in host.devices] == [[engine.process.pid]] * 2
    found = engines.get("llamacpp").readings(engine.log.read_text())
    assert (found["slots"], found["context_per_slot"]) == (2, 4096)
    engine.process.send_signal(signal.SIGTERM)
    assert engine.process.wait(5) == 0


def test_llama_server_respects_visible_devices_and_layers(host: LabHost, tmp_path: Path, start: Start) -> None:
    path = str(gguf(tmp_path / "m.gguf"))
    start("llamacpp", host, "-m", path, "-c", "4096", CUDA_VISIBLE_DEVICES="1").wait_ready()
    assert held(host)[0] == 0 and held(host)[1] > 0.19
    start("llamacpp", host, "-m", path, "-c", "4096", "-ngl", "0").wait_ready()
    assert held(host)[0] == 0


def test_llama_server_is_out_of_device_memory(tmp_path: Path, start: Start) -> None:
    host = make_host(tmp_path / "small", device(0, 12 * GIB))
    path = str(gguf(tmp_path / "m.gguf"))
    engine = start("llamacpp", host, "-m", path, "-c", "4096", "-ngl", "all")
    assert engine.failure()[:2] == (1, "out_of_memory")
    log = engine.log.read_text()
    weights_mib = 2 * (32 * 218 + 525) * 1e6 / 2**20
    assert f"allocating {weights_mib:.2f} MiB on device 0: cudaMalloc failed: out of memory" in log
    assert "n_gpu_layers already set by user to -2, abort" in log
    start("llamacpp", host, "-m", path, "-c", "4096").wait_ready()  # --fit leaves layers on the host
    assert 0.5 < held(host)[0] < 0.95
