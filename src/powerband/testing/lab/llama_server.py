"""A stand-in for `llama-server` (llama.cpp of llama-cpp-python 0.3.36) on a host of the lab.

It accepts, refuses, holds memory and prints as that server does. Without devices it acts as its CPU build on this
machine.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from powerband.testing.lab import batching, flags, gguf_files, llama_memory, server, truth
from powerband.testing.lab.gguf_files import GgufFile, NotLoaded
from powerband.testing.lab.llama_memory import CONTEXT_BYTES, Placement
from powerband.testing.lab.world import LabDevice, LabHost, OutOfDeviceMemory

VERSION = "0.3.36"
_VERSION_TEXT = "version: 0.5.0-dev (build 1, commit 0c1e570)\nbuilt with GNU 12.2.0 for Linux x86_64"
_START_S = 1.0  # beside reading the weights
_CPU_SYSTEM = "xeon-8480"  # in the catalogue: its step times are those of a host without devices
_HOST_SLOWDOWN = 30.0  # of a layer in the memory of the host, against one on a device
_BEGUN_S = time.monotonic()
_MAX_SLOTS = 256
_QUANTIZED = ("q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1")


class Failed(Exception):
    """The server ends because it cannot load the model; `what` it fails to do, after printing the lines."""

    def __init__(self, *lines: str, what: str = "create_context with") -> None:
        super().__init__(lines)
        self.lines, self.what = lines, what


def main() -> None:
    """Run `llama-server ARGUMENTS`."""
    recorded, host = flags.recorded("llamacpp", VERSION), LabHost.current()
    names = [f"CUDA{number}" for number, _ in enumerate(host.visible())]
    try:
        given = flags.llama_arguments(sys.argv[1:], recorded.options, os.environ, devices=names)
        given = {name: value for name, value in given.items() if name not in host.ignored_options}
    except flags.WrongArgument as error:
        sys.exit(str(error))
    if given.get("version"):
        print(_VERSION_TEXT, file=sys.stderr)
    elif given.get("help") or given.get("usage"):
        print("\n".join(_help_line(one) for one in recorded.options))
    else:
        code = asyncio.run(_Server(host, recorded, given).run())
        if code < 0:
            os.abort()
        sys.exit(code)


def _help_line(option: flags.Option) -> str:
    value = "" if option.values == "0" else " N"
    return ", ".join((*option.names, *option.off)) + value + (f"\n    (env: {option.env})" if option.env else "")


def log(level: str, who: str, text: str) -> None:
    """Print a line as llama.cpp's logger does."""
    micros = int((time.monotonic() - _BEGUN_S) * 1e6)
    stamp = f"{micros // 60_000_000}.{micros // 1_000_000 % 60:02d}.{micros // 1000 % 1000:03d}.{micros % 1000:03d}"
    print(f"{stamp} {level} {who}{text}", file=sys.stderr, flush=True)


class _Server:
    """One server from its start to its end."""

    def __init__(self, host: LabHost, recorded: flags.Recorded, given: Mapping[str, bool | str]) -> None:
        self.host, self.recorded, self.given = host, recorded, given
        self.address, self.port = str(given.get("host", "127.0.0.1")), int(given.get("port", 8080))
        self.path = Path(str(given.get("model", "")))
        self.devices = self._devices()
        self.free_bytes = [max(0, host.free_bytes(one) - CONTEXT_BYTES) for one in self.devices]

    async def run(self) -> int:
        """Run the server and return its exit code."""
        log("I", "srv  ", "llama_server: initializing ...")
        log("I", "cmn  ", "common_param: common_params_print_info: verbosity = 3 (adjust with the `-lv N` CLI arg)")
        ended = asyncio.Event()
        for one in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(one, ended.set)
        try:
            loading = await asyncio.get_running_loop().create_server(_Loading, self.address, self.port)
        except OSError:
            where = f"hostname: {self.address}, port: {self.port}"
            log("E", "srv  ", f"       start: couldn't bind HTTP server socket, {where}")
            self._clean_up()
            log("E", "srv  ", "llama_server: exiting due to HTTP server error")
            return 1
        if int(self.given.get("ctx_size", 0)) < 0:
            print("llama-context.cpp:2526: GGML_ASSERT(n_outputs >= 1) failed", file=sys.stderr, flush=True)
            return -signal.SIGABRT
        try:
            ready = await self._load(ended)
        except Failed as failed:
            for line in failed.lines:
                log("E", "", line)
            if failed.what:
                log("E", "cmn  ", f"common_init_: failed to {failed.what.removeprefix('create_')} model '{self.path}'")
                log("E", "srv  ", f"  load_model: failed to {failed.what} model '{self.path}'")
            self._clean_up()
            log("E", "srv  ", "llama_server: exiting due to model loading error")
            return 1
        finally:
            loading.close()
        if ready is None:
            self._clean_up()
            return 0
        slots, context_per_slot, times = ready
        cache = batching.SlotCache(
            slots=slots, context_per_slot=context_per_slot, prefix_caching=self.given.get("cache_prompt") is not False
        )
        batch = batching.Batching(
            times, cache, max_batched_tokens=int(self.given.get("batch_size", 2048)), max_sequences=slots
        )
        name = str(self.given.get("alias") or self.path)
        serving = asyncio.create_task(
            server.serve(
                batch, host=self.address, port=self.port, model=name.split(",")[0], flavour="llamacpp",
                context_tokens=context_per_slot, time_scale=self.host.time_scale, on_ready=self._say_ready,
                hidden_metrics=self.host.hidden_metrics,
            )
        )  # fmt: skip
        stopping = asyncio.create_task(ended.wait())
        await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
        serving.cancel()
        self._clean_up()
        return 0

    async def _load(self, ended: asyncio.Event) -> tuple[int, int, truth.StepTimes] | None:
        """Load the model and return the slots, the context of each and the step times; None: stopped meanwhile."""
        log("I", "srv  ", f"  load_model: loading model '{self.path}'")
        file = self._read(self.path)
        placement, slots = self._placement(file), self._slots()
        if self.given.get("fit", "on") == "on":
            placement, failure = llama_memory.fitted(file, placement, self.free_bytes, llama_memory.host_bytes())
            if failure:
                log("W", "", f"common_fit_params: failed to fit params to free device memory: {failure}")
        found = llama_memory.layout(file, placement)
        self._claim_weights(found)
        if await self._pause(ended, file.model.weight_bytes or 0):
            return None
        self._check_context(file, placement, slots)
        self._claim_context(found)
        self._check_adapters()
        threads = self.given.get("threads", os.cpu_count())
        log("I", "cmn  ", f"        init: llama threadpool init, n_threads = {threads}")
        self._speculate()
        if await self._pause(ended, 0):
            return None
        unified = bool(self.given.get("kv_unified", "parallel" not in self.given))
        per_slot = placement.context_tokens if unified else -(-placement.context_tokens // slots // 256) * 256
        limit = file.model.context_tokens or per_slot
        if per_slot > limit:
            log("W", "srv  ", f"  load_model: the slot context ({per_slot}) exceeds the training context of the model "
                f"({limit}) - capping")  # fmt: skip
        per_slot = min(per_slot, limit)
        log("I", "srv  ", f"  load_model: initializing, n_slots = {slots}, n_ctx_slot = {per_slot}, "
            f"kv_unified = '{str(unified).lower()}'")  # fmt: skip
        return slots, per_slot, self._times(file, found)

    def _read(self, path: Path) -> GgufFile:
        try:
            file = gguf_files.read(path)
            gguf_files.check_model(file, self.recorded.architectures)
        except NotLoaded as error:
            raise Failed(*error.lines, "llama_model_load_from_file_impl: failed to load model", what="load") from None
        return file

    def _devices(self) -> tuple[LabDevice, ...]:
        found = self.host.visible()
        if "device" in self.given:
            names = str(self.given["device"]).split(",")
            found = [found[int(name.removeprefix("CUDA"))] for name in names if name != "none"]
        if self.given.get("split_mode") == "none" and found:
            found = [found[int(self.given.get("main_gpu", 0))]]
        return tuple(found)

    def _slots(self) -> int:
        asked = int(self.given.get("parallel", -1))
        return 4 if asked < 0 else asked

    def _placement(self, file: GgufFile) -> Placement:
        given, model = self.given, file.model
        asked = int(given.get("ctx_size", 0))
        layers = str(given.get("n_gpu_layers", "auto"))
        named = {"auto": llama_memory.AUTO_LAYERS, "all": llama_memory.ALL_LAYERS}
        split = [float(one) for one in str(given.get("tensor_split", "0")).split(",")]
        return Placement(
            context_tokens=-(-(asked or model.context_tokens or 4096) // 256) * 256,
            context_given=asked > 0,
            gpu_layers=named[layers] if layers in named else int(layers),
            devices=self.devices,
            shares=llama_memory.shares(split, self.free_bytes),
            kv_types=(str(given.get("cache_type_k", "f16")), str(given.get("cache_type_v", "f16"))),
            kv_offload=given.get("kv_offload") is not False,
            ubatch=int(given.get("ubatch_size", 512)),
            experts_on_host=llama_memory.experts_on_host(given, model.layers or 0),
            fixed=self._fixed(any(split)),
        )

    def _fixed(self, is_split: bool) -> str:
        """Return why --fit must not move layers."""
        mode = self.given.get("split_mode")
        if mode == "tensor":
            return "llama_params_fit is not implemented for SPLIT_MODE_TENSOR"
        if len(self.devices) > 1 and is_split:
            return "model_params::tensor_split already set by user"
        if len(self.devices) > 1 and mode == "row":
            return "changing weight allocation for LLAMA_SPLIT_MODE_ROW not implemented"
        moved = any(self.given.get(one) for one in ("cpu_moe", "n_cpu_moe", "n_cpu_ffn", "override_tensor"))
        return "model_params::tensor_buft_overrides already set by user" if moved else ""

    def _claim_weights(self, found: llama_memory.Layout) -> None:
        for number, device in enumerate(self.devices):
            if found.weights_bytes[number]:
                self._claim(device, number, CONTEXT_BYTES, "load")
                self._claim(device, number, found.weights_bytes[number], "load")

    def _claim_context(self, found: llama_memory.Layout) -> None:
        if found.host_kv_bytes > llama_memory.host_bytes():  # Linux promises more memory than is free
            size = found.host_kv_bytes
            raise Failed(
                f"ggml_aligned_malloc: insufficient memory (attempted to allocate {size / 2**20:.2f} MB)",
                f"ggml_backend_cpu_buffer_type_alloc_buffer: failed to allocate buffer of size {size}",
                f"alloc_tensor_range: failed to allocate CPU buffer of size {size}",
                "llama_init_from_model: failed to initialize the context: failed to allocate buffer for kv cache",
            )
        for number, device in enumerate(self.devices):
            self._claim(device, number, found.kv_bytes[number], "kv")
            self._claim(device, number, found.compute_bytes[number], "compute")

    def _claim(self, device: LabDevice, number: int, size: int, what: str) -> None:
        if not size:
            return
        try:
            self.host.claim(device, size)
        except OutOfDeviceMemory:
            context = "llama_init_from_model: failed to initialize the context: failed to allocate "
            ends = {
                "load": f"llama_model_load: error loading model: unable to allocate CUDA{number} buffer",
                "kv": f"{context}buffer for kv cache",
                "compute": f"{context}compute pp buffers",
            }
            raise Failed(
                f"ggml_backend_cuda_buffer_type_alloc_buffer: allocating {size / 2**20:.2f} MiB on device {number}: "
                "cudaMalloc failed: out of memory",
                f"alloc_tensor_range: failed to allocate CUDA{number} buffer of size {size}",
                ends[what],
            ) from None

    def _check_context(self, file: GgufFile, placement: Placement, slots: int) -> None:
        if slots > _MAX_SLOTS:
            raise Failed(f"llama_init_from_model: failed to initialize the context: n_seq_max must be <= {_MAX_SLOTS}")
        limit = file.model.context_tokens or placement.context_tokens
        if placement.context_tokens > limit:
            log("W", "", f"llama_context: n_ctx_seq ({placement.context_tokens}) > n_ctx_train ({limit}) -- possible "
                "training context overflow")  # fmt: skip
        if placement.kv_types[1] in _QUANTIZED and self.given.get("flash_attn") == "off":
            raise Failed("llama_init_from_model: quantized V cache requires flash_attn to be enabled")

    def _check_adapters(self) -> None:
        paths = [one for one in str(self.given.get("lora", "")).split(",") if one]
        paths += [one.rpartition(":")[0] for one in str(self.given.get("lora_scaled", "")).split(",") if one]
        for path in map(Path, paths):
            applying = "llama_adapter_lora_init_from_file_ptr: failed to apply lora adapter: "
            lines: tuple[str, ...] = ()
            try:
                kind = gguf_files.read(path).header.get("general.type")
                if kind != "adapter":
                    lines = (f"{applying}expect general.type to be 'adapter', but got: {kind}",)
            except NotLoaded as error:
                lines = (error.lines[0], f"{applying}failed to load lora adapter from file")
            if lines:
                raise Failed(*lines, f"cmn  common_init_: failed to load lora adapter '{path}'")

    def _speculate(self) -> None:
        """Say which speculation llama-server silently leaves out, and refuse what it refuses."""
        kinds = str(self.given.get("spec_type", "none")).split(",")
        draft, failure = self.given.get("spec_draft_model"), ""
        if "draft-mtp" in kinds:
            raise Failed(
                "llama_init_from_model: context type MTP requested but model doesn't contain MTP layers",
                "common_speculative_init_result: failed to create MTP context",
                "srv    load_model: failed to create MTP context",
                what="",
            )
        if draft is not None and any(one.startswith("draft-") for one in kinds):
            log("I", "", f"common_speculative_init_result: loading draft model '{draft}'")
            self._read(Path(str(draft)))
        if "draft-simple" in kinds and draft is None:
            failure = "draft-simple requires a draft context"
        elif "draft-eagle3" in kinds:
            failure = "draft model is not eagle3 (expected 3 extract layers, got 0)"
        if failure:
            log("E", "srv  ", f"  load_model: failed to initialize speculative decoding context: {failure}")

    def _times(self, file: GgufFile, found: llama_memory.Layout) -> truth.StepTimes:
        shape, total = file.model.shape, file.model.weight_bytes or 0
        active = total * (shape.active_parameters / shape.parameters if shape and shape.experts else 1.0)
        together = self.given.get("split_mode") in ("row", "tensor")
        times = truth.step_times(
            system=self.devices[0].device if self.devices else _CPU_SYSTEM,
            active_bytes=active,
            devices=len(self.devices) if together and self.devices else 1,
            precision="int4",
            seed=self.host.seed,
            model=self.path.stem,
        )
        if not self.devices:
            return times
        on_host = found.host_weights_bytes / max(1, found.host_weights_bytes + sum(found.weights_bytes))
        slowdown = 1 + on_host * _HOST_SLOWDOWN if on_host > 0.15 else 1.0  # the input embedding is always there
        slowdown *= max(one.slowdown for one in self.devices)
        return times.scaled(decode=slowdown, prefill=slowdown)

    async def _pause(self, ended: asyncio.Event, size_bytes: int) -> bool:
        """Wait as long as this many bytes take to read; return whether a signal ended the server meanwhile."""
        duration_s = (size_bytes / self.host.load_bytes_per_s + _START_S / 2) * self.host.start_scale
        try:
            await asyncio.wait_for(ended.wait(), duration_s)
        except TimeoutError:
            return False
        return True

    def _say_ready(self) -> None:
        log("I", "srv  ", "llama_server: model loaded")
        log("I", "srv  ", f"llama_server: listening on http://{self.address}:{self.port}")

    def _clean_up(self) -> None:
        log("I", "srv  ", "  operator(): operator(): cleaning up before exit...")


class _Loading(asyncio.Protocol):
    """Answers every request while the model loads."""

    _BODY = b'{"error":{"message":"Loading model","type":"unavailable_error","code":503}}'

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Remember the connection."""
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        """Answer and close."""
        head = b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json; charset=utf-8\r\n"
        self.transport.write(head + b"content-length: %d\r\nconnection: close\r\n\r\n" % len(self._BODY) + self._BODY)
        self.transport.close()


if __name__ == "__main__":
    main()
