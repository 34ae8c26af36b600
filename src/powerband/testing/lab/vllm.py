"""A stand-in for `vllm` 0.32.0 on a host of the lab: it accepts, refuses, holds memory and prints as vLLM does.

Without devices it acts as vLLM's CPU build on this machine.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from powerband.testing.lab import (
    batching,
    flags,
    server,
    truth,
    vllm_files,
    vllm_kernels,
    vllm_memory,
    vllm_speculation,
    workers,
)
from powerband.testing.lab.ray_executor import RayExecutor
from powerband.testing.lab.vllm_config import VllmSettings, settings
from powerband.testing.lab.vllm_log import Refused, banner, log, print_refusal
from powerband.testing.lab.vllm_memory import CONTEXT_BYTES, Demand, gib
from powerband.testing.lab.world import LabDevice, LabHost, OutOfDeviceMemory

VERSION = "0.32.0"
_START_S, _PROFILE_S, _COMPILE_S = 6.0, 4.0, 12.0  # until the weights load, after them, and to compile
_CPU_SYSTEM = "xeon-8480"  # in the catalogue: its step times are those of a host without devices


def main() -> None:
    """Run `vllm ARGUMENTS`."""
    argv = sys.argv[1:]
    if argv[:1] in (["--version"], ["-v"]):
        print(VERSION)
        return
    if argv[:1] != ["serve"]:
        print("usage: vllm [-h] [-v] {serve} ...\nvllm: error: the lab's vllm can only serve", file=sys.stderr)
        sys.exit(2)
    recorded = flags.recorded("vllm", VERSION)
    host = LabHost.current()
    given = {"model": "Qwen/Qwen3-0.6B", **flags.vllm_arguments(argv[1:], recorded.options)}
    applied = {name: value for name, value in given.items() if name not in host.ignored_options}
    sys.exit(_Server(host, recorded, applied).run())


@dataclass(frozen=True)
class _Worker:
    """A process that holds memory of one device."""

    pid: int
    name: str
    index: int  # of its device, among the visible ones
    device: LabDevice | None  # None: on the CPU
    host: LabHost


class _Server:
    """One server from its start to its end."""

    def __init__(self, host: LabHost, recorded: flags.Recorded, given: dict[str, Any]) -> None:
        self.host, self.recorded, self.given = host, recorded, given
        self.on_gpu = bool(host.devices)
        self.address, self.port = given.get("host") or "0.0.0.0", given.get("port") or 8000
        self.workers: list[_Worker] = []
        self.executor: RayExecutor | None = None  # places the workers on the nodes of a cluster

    def run(self) -> int:
        """Run the server and return its exit code."""
        signal.signal(signal.SIGTERM, _terminated)
        try:
            self._check_server_options()
            with self._bind() as held:
                chosen = self._configure()
                blocks = self._start_engine(chosen)
                vllm_files.check_adapters(self.given)
                return asyncio.run(self._serve(chosen, blocks, held))
        except Refused as refused:
            print_refusal(refused, pid=self.workers[0].pid if self.workers else None)
            return 1
        except KeyboardInterrupt:
            return 1
        finally:
            if self.executor:
                self.executor.close()
            else:
                workers.end([one.pid for one in self.workers])

    def _check_server_options(self) -> None:
        given = self.given
        if given.get("enable_auto_tool_choice") and not given.get("tool_call_parser"):
            raise Refused("Error: --enable-auto-tool-choice requires --tool-call-parser", error="TypeError")
        if given.get("enable_log_outputs") and not given.get("enable_log_requests"):
            raise Refused("Error: --enable-log-outputs requires --enable-log-requests", error="TypeError")
        template = given.get("chat_template")
        if template and not Path(template).is_file() and not set(template) & set("{}\n"):
            raise Refused(f"The supplied chat template string ({template}) appears path-like, but doesn't exist!")

    def _bind(self) -> socket.socket:
        """Reserve the port as vLLM does, before it reads the model; nothing listens on it yet."""
        banner(VERSION, self.given["model"])
        log("api_utils.py:286", f"non-default args: {self.given}")
        held = socket.socket()
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            held.bind((self.address, self.port))
        except OSError as error:
            held.close()
            raise Refused(str(error), error="OSError") from None
        return held

    def _configure(self) -> VllmSettings:
        self._pause(_START_S / 2)
        chosen = settings(self.given, self.recorded, os.environ, devices=self.host.visible(), on_gpu=self.on_gpu)
        log("model.py:733", f"Resolved architecture: {chosen.model.architecture}")
        log("model.py:2152", f"Using max model len {chosen.max_model_len}")
        log("scheduler.py:307", "Chunked prefill is enabled with max_num_batched_tokens="
            f"{chosen.max_num_batched_tokens}.")  # fmt: skip
        self._pause(_START_S / 2)
        return chosen

    def _start_engine(self, chosen: VllmSettings) -> int:
        """Start the workers, give them their memory, and return the blocks of the KV cache."""
        began_s = time.monotonic()
        self._start_workers(chosen)
        first = self.workers[0]
        config = f"model={str(chosen.path)!r}, max_seq_len={chosen.max_model_len}"
        self._log("core.py:133", f"Initializing a V1 LLM engine (v{VERSION}) with config: {config}")
        vllm_kernels.check_threads(chosen, on_gpu=self.on_gpu)
        share_bytes = self._check_share(chosen)
        log("gpu_model_runner.py:5039" if self.on_gpu else "cpu_model_runner.py:68",
            f"Starting to load model {chosen.path}...", process=first.name, pid=first.pid)  # fmt: skip
        demand = self._load_weights(chosen)
        available_bytes = self._profile(chosen, demand, share_bytes)
        blocks = vllm_memory.blocks(chosen, demand, available_bytes)
        for one in self.workers:
            self._claim(one, blocks * demand.block_bytes, chosen)
        vllm_kernels.check_block_size(chosen, on_gpu=self.on_gpu, process=first.name)
        tokens = blocks * chosen.block_size
        self._log(
            "kv_cache_utils.py:2327",
            f"{'GPU' if self.on_gpu else 'CPU'} KV cache size: {tokens:,} tokens, Maximum concurrency for "
            f"{chosen.max_model_len:,} tokens per request: {tokens / chosen.max_model_len:.2f}x",
        )
        self._pause(0.0 if chosen.eager else _COMPILE_S)
        took_s = time.monotonic() - began_s
        self._log("core.py:402", f"init engine (profile, create kv cache, warmup model) took {took_s:.2f} s")
        return blocks

    def _start_workers(self, chosen: VllmSettings) -> None:
        world = chosen.tensor * chosen.pipeline
        if chosen.over_nodes:
            self.executor = RayExecutor(chosen.data * world)
            self.workers += [
                _Worker(one.pid, f"RayWorkerProc rank={rank}", rank, one.device, one.host)
                for rank, one in enumerate(self.executor.places)
            ]
            return
        devices: list[LabDevice | None] = [*self.host.visible()] if self.on_gpu else [None] * world
        for rank in range(chosen.data):
            if self.on_gpu and (rank + 1) * world > len(devices):
                raise Refused(
                    f"Error computing device indices for CUDA_VISIBLE_DEVICES: local range: [{rank * world}, "
                    f'{(rank + 1) * world}) base value: "{os.environ.get("CUDA_VISIBLE_DEVICES")}"',
                    error="Exception",
                )
        for index in range(chosen.data * world if self.on_gpu else world):
            name = f"Worker_TP{index % world}" if world > 1 else "EngineCore" if self.on_gpu else "Worker"
            self.workers.append(_Worker(workers.start(f"VLLM::{name}"), name, index, devices[index], self.host))

    def _check_share(self, chosen: VllmSettings) -> int:
        """Check that each device has vLLM's share free, and return the share."""
        share_bytes = 0
        for one in self.workers:
            if one.device is None:
                vllm_memory.check_cpu_start(chosen)
                continue
            self._claim(one, CONTEXT_BYTES, chosen)
            vllm_kernels.check_gpu(chosen, one.device, process=one.name)
            total_bytes, free_bytes = one.device.memory_bytes, one.host.free_bytes(one.device)
            share_bytes = int(-(-total_bytes * chosen.utilization // 1))
            if free_bytes < share_bytes:
                raise Refused(
                    f"Free memory on device cuda:{one.index} ({gib(free_bytes)}/{gib(total_bytes)} GiB) on startup is "
                    f"less than desired GPU memory utilization ({chosen.utilization}, {gib(share_bytes)} GiB). "
                    "Decrease GPU memory utilization or reduce GPU memory used by other processes.",
                    process=one.name,
                )
        return share_bytes

    def _load_weights(self, chosen: VllmSettings) -> Demand:
        first = self.workers[0]
        files_bytes = vllm_files.weight_file_bytes(chosen.path, process=first.name)
        vllm_kernels.check_cpu_quantization(chosen, on_gpu=self.on_gpu, process=first.name)
        vllm_speculation.check_weights(chosen.speculation, process=first.name)
        demand = vllm_memory.demand(chosen, files_bytes, on_gpu=self.on_gpu)
        for one in self.workers:
            self._claim(one, demand.weights_bytes, chosen)
        took_s = files_bytes / (chosen.tensor * chosen.pipeline) / self.host.load_bytes_per_s
        self._pause(took_s)
        log("default_loader.py:501", f"Loading weights took {took_s:.2f} seconds", process=first.name, pid=first.pid)
        return demand

    def _profile(self, chosen: VllmSettings, demand: Demand, share_bytes: int) -> int:
        """Take the memory of one step, and return what is left for the KV cache."""
        self._pause(_PROFILE_S)
        if not self.on_gpu:
            return vllm_memory.cpu_kv_bytes(chosen, demand)
        step_bytes = demand.activations_bytes + demand.graphs_bytes
        available_bytes = chosen.kv_bytes
        for one in self.workers:
            if available_bytes is not None or demand.weights_bytes + step_bytes < share_bytes:
                self._claim(one, step_bytes, chosen)
        if available_bytes is None:
            available_bytes = share_bytes - demand.weights_bytes - step_bytes
            log("gpu_worker.py:760", f"Available KV cache memory: {gib(available_bytes)} GiB",
                process=self.workers[0].name, pid=self.workers[0].pid)  # fmt: skip
        return available_bytes

    def _claim(self, worker: _Worker, size_bytes: int, chosen: VllmSettings) -> None:
        if worker.device is None:
            return
        try:
            worker.host.claim(worker.device, size_bytes, pid=worker.pid)
        except OutOfDeviceMemory as error:
            piece_bytes = min(size_bytes, vllm_memory.piece_bytes(chosen))
            raise Refused(
                f"CUDA out of memory. Tried to allocate {piece_bytes / 2**20:.2f} MiB. GPU {worker.index} has a total "
                f"capacity of {gib(worker.device.memory_bytes)} GiB of which "
                f"{error.free_bytes % piece_bytes / 2**20:.2f} MiB is free.",
                error="torch.OutOfMemoryError",
                process=worker.name,
            ) from None

    async def _serve(self, chosen: VllmSettings, blocks: int, held: socket.socket) -> int:
        """Serve until a signal or the end of a worker, and return the exit code."""
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, ended.set)
        dead: list[_Worker] = []

        def lost(worker: _Worker) -> None:
            dead.append(worker)
            ended.set()

        if self.executor:
            all_workers = tuple(self.workers)
            self.executor.on_loss(lambda rank: loop.call_soon_threadsafe(lost, all_workers[rank]))
        else:
            for one in self.workers:
                _when_ended(one, lost)
        names = self.given.get("served_model_name") or [self.given["model"]]

        def ready() -> None:
            held.close()
            log("entry.py:136", "Supported tasks: ['generate']")
            log("entry.py:140", f"Starting vLLM server on http://{self.address}:{self.port}")
            print(f"(APIServer pid={os.getpid()}) INFO:     Application startup complete.", flush=True)

        serving = asyncio.create_task(
            server.serve(
                self._batching(chosen, blocks), host=self.address, port=self.port, model=names[0], flavour="vllm",
                context_tokens=chosen.max_model_len, time_scale=self.host.time_scale, on_ready=ready,
                hidden_metrics=self.host.hidden_metrics,
            )
        )  # fmt: skip
        stopping = asyncio.create_task(ended.wait())
        await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
        serving.cancel()
        if dead:
            self._report_dead(dead[0])
        print(f"(APIServer pid={os.getpid()}) INFO:     Application shutdown complete.", flush=True)
        return 0

    def _report_dead(self, worker: _Worker) -> None:
        self.workers.remove(worker)
        code = f" (exit code: {workers.exit_code(worker.pid)})" if not self.executor else ""
        died = f"Worker proc Vllm{worker.name} died unexpectedly{code}"
        self._log("multiproc_executor.py:315", f"{died}, shutting down executor.", level="ERROR")
        what = "EngineCore encountered an issue. See stack trace (above) for the root cause."
        text = f"AsyncLLM output_handler failed.\nvllm.v1.engine.exceptions.EngineDeadError: {what}"
        log("async_llm.py:787", text, level="ERROR")

    def _batching(self, chosen: VllmSettings, blocks: int) -> batching.Batching:
        device = self.workers[0].device
        times = truth.step_times(
            system=device.device if device else _CPU_SYSTEM,
            active_bytes=vllm_memory.active_bytes(chosen, vllm_files.weight_file_bytes(chosen.path)),
            devices=chosen.tensor * chosen.pipeline,
            precision=vllm_memory.precision(chosen),
            seed=self.host.seed,
            model=chosen.path.name,
        )
        slowdown = max((one.device.slowdown for one in self.workers if one.device), default=1.0)
        times = times.scaled(decode=slowdown, prefill=slowdown) if slowdown > 1 else times
        ways = chosen.data if self.on_gpu else 1
        cache = batching.PagedCache(
            blocks=ways * blocks,
            block_tokens=chosen.block_size,
            prefix_caching=self.given.get("enable_prefix_caching", True),
        )
        return batching.Batching(
            ReplicatedTimes(**vars(times), replicas=ways),
            cache,
            max_batched_tokens=ways * chosen.max_num_batched_tokens,
            max_sequences=ways * chosen.max_num_seqs,
        )

    def _log(self, where: str, text: str, *, level: str = "INFO") -> None:
        log(where, text, process="EngineCore", pid=self.workers[0].pid if self.workers else None, level=level)

    def _pause(self, duration_s: float) -> None:
        time.sleep(duration_s * self.host.start_scale)


@dataclass(frozen=True)
class ReplicatedTimes(truth.StepTimes):
    """Step times of replicas that share the load equally, as with data parallelism."""

    replicas: int = 1

    def step_s(self, decode_sequences: int, prefill_tokens: int, context_tokens: float) -> float:
        """Return the duration of one step of all replicas."""
        decodes, prefill = -(-decode_sequences // self.replicas), -(-prefill_tokens // self.replicas)
        return super().step_s(decodes, prefill, context_tokens)


def _when_ended(worker: _Worker, call: Callable[[_Worker], None]) -> None:
    """Call a function when the process of a worker ends."""
    loop, file = asyncio.get_running_loop(), os.pidfd_open(worker.pid)

    def ended() -> None:
        loop.remove_reader(file)
        os.close(file)
        call(worker)

    loop.add_reader(file, ended)


def _terminated(*_: object) -> None:
    raise KeyboardInterrupt("terminated")


if __name__ == "__main__":
    main()
