"""Checks that share one start of an engine: start time, memory, plan, gauges, and a kill at the end."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time

from powerband.engines import rules
from powerband.errors import EngineFailed
from powerband.runtime.replica import Replica
from powerband.selftest.check import Check, Outcome, engine_failed, failed, not_run, passed
from powerband.selftest.engine_run import EngineRun, free_bytes, refusals
from powerband.selftest.plan_check import CHECK as PLAN

_MAX_ABOVE = 1.10  # used memory over predicted memory
_KV_RANGE = (0.75, 1.33)  # KV cache over the predicted one
_NOTICE_S, _FREED_S = 30.0, 30.0
_FREED_SHARE = 0.02  # of a GPU's memory: what a driver may keep
_POLL_S = 0.1


async def _start(run: EngineRun) -> Outcome:
    prepared = run.prepared = run.prepare(run.probe_deployment())
    if reasons := refusals(prepared):
        return failed("cannot start", detail="; ".join(reasons))
    run.free_before = free_bytes()
    began_s = time.monotonic()
    try:
        run.replica = await run.stack.enter_async_context(run.launch(prepared, "start"))
    except EngineFailed as error:
        return engine_failed(error, after_s=time.monotonic() - began_s)
    run.start_s = time.monotonic() - began_s
    phases = {f"{_slug(one.phase)}_s": one.seconds for one in run.replica.timings}
    return passed({"ready_s": run.start_s, "limit_s": prepared.start_timeout_s, **phases})


def _slug(text: str) -> str:
    return re.sub(r"\W+", "_", text)


async def _memory(run: EngineRun) -> Outcome:
    replica, prepared = run.replica, run.prepared
    if replica is None or prepared is None:
        return not_run("no engine start")
    footprint = prepared.footprint
    if gpus := replica.allocation.gpus:
        now = free_bytes()
        used = max(run.free_before[gpu.id] - now[gpu.id] for gpu in gpus)
        predicted = max(footprint.gpu_free_bytes, int(footprint.gpu_free_share * gpus[0].memory_bytes))
    else:
        used = replica.process.memory_bytes() if replica.process else 0
        predicted = footprint.start_bytes()
    figures = {"used_bytes": used, "predicted_bytes": predicted, "ratio": used / max(1, predicted)}
    kv = _kv_ratio(run, replica)
    figures |= {"kv_ratio": kv} if kv is not None else {}
    if figures["ratio"] > _MAX_ABOVE:
        return failed("memory above prediction", figures)
    if kv is not None and not _KV_RANGE[0] <= kv <= _KV_RANGE[1]:
        return failed("KV cache differs", figures)
    return passed(figures)


def _kv_ratio(run: EngineRun, replica: Replica) -> float | None:
    """Return the tokens in the engine's KV cache over the predicted ones; None: the engine does not report them."""
    assert run.prepared is not None
    footprint, found = run.prepared.footprint, replica.readings().get("kv_tokens")
    if found is None or not footprint.kv_bytes or not footprint.kv_bytes_per_token:
        return None
    return found / (footprint.kv_bytes / footprint.kv_bytes_per_token)


async def _gauges(run: EngineRun) -> Outcome:
    """Check the gauges by name; those of speculation exist only with a draft."""
    if run.replica is None:
        return not_run("no engine start")
    gauges = await run.replica.gauges()
    expected = [name for name in rules.facts(run.engine).gauges if not name.startswith("spec_")]
    missing = [name for name in expected if getattr(gauges, name) is None]
    if missing:
        return failed("gauge missing", dict.fromkeys(missing, "missing"), gauges=len(expected))
    still = [name for name in ("prompt_tokens", "output_tokens") if not getattr(gauges, name)]
    if still:
        return failed("counter not increasing", dict.fromkeys(still, "still"), gauges=len(expected))
    return passed(gauges=len(expected))


async def _kill(run: EngineRun) -> Outcome:
    """Kill the engine's main process: the replica must notice, and the memory of its GPUs must be free again."""
    replica = run.replica
    if replica is None or replica.process is None or replica.process.pid is None:
        return not_run("no engine start")
    began_s, run.replica = time.monotonic(), None
    watching = asyncio.create_task(replica.watch())
    try:
        if replica.process.exited.is_set():  # another process may have its id by now
            return failed("engine exited", detail=f"read the engine's log: {replica.log_path}")
        os.kill(replica.process.pid, signal.SIGKILL)
        await asyncio.wait_for(watching, _NOTICE_S)
    except EngineFailed:
        noticed_s = time.monotonic() - began_s
    except ProcessLookupError:
        return failed("engine exited", detail=f"read the engine's log: {replica.log_path}")
    except TimeoutError:
        return failed("death not noticed", limit_s=_NOTICE_S)
    finally:
        watching.cancel()
        await run.stack.aclose()
    while held := _held_bytes(run, replica):
        if time.monotonic() - began_s > _FREED_S:
            return failed("memory not freed", held_bytes=held, limit_s=_FREED_S)
        await asyncio.sleep(_POLL_S)
    return passed(noticed_s=noticed_s, freed_s=time.monotonic() - began_s)


def _held_bytes(run: EngineRun, replica: Replica) -> int:
    """Return the memory of a replica's GPUs that is used now and was free before it started."""
    now = free_bytes() if replica.allocation.gpus else {}
    lost = {gpu: run.free_before[gpu.id] - now.get(gpu.id, 0) for gpu in replica.allocation.gpus}
    return sum(size for gpu, size in lost.items() if size > _FREED_SHARE * gpu.memory_bytes)


CHECKS = (
    Check("start", "the engine starts and answers", _start),
    Check("memory", "the engine uses the predicted memory", _memory),
    PLAN,
    Check("gauges", "the engine exports every metric that Powerband reads, by its name", _gauges),
    Check("kill", "a killed engine is noticed and frees its memory", _kill),
)
