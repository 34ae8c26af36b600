"""Which resource limits a server: the plan's step model against what was observed."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from powerband import catalog, engines
from powerband.core.deployment import Deployment
from powerband.core.diagnosis import Observation, Resource
from powerband.core.host import Host
from powerband.core.model import Model
from powerband.errors import PowerbandError
from powerband.plan import calibrate, expect, predict
from powerband.plan.closed_loop import SteadyState
from powerband.plan.options import Lengths
from powerband.plan.predict import Server
from powerband.plan.step_work import Batch
from powerband.runtime import model_files

# Not from a source: chosen so that the recorded cases and the planted faults are told apart.
MEMORY_BOUND, COMPUTE_BOUND = 0.6, 0.4  # shares of the device from which it limits
QUEUE_BOUND, PREFILL_BOUND = 0.3, 0.5
_IDLE_RUNNING = 0.05
_USABLE_MEMORY = 0.85  # of a GPU, beside activations and the CUDA context
_BUSY_THREAD = 0.9
_MAX_MISFIT = 20.0  # factor between model and observation beyond which the model is not used


@dataclass(frozen=True)
class StepModel:
    """The plan's model of a server, scaled so that it has the observed time between tokens."""

    server: Server
    deployment: Deployment[Any]
    model: Model
    host: Host
    scale: float

    def steady(self, concurrency: float, lengths: Lengths, *, changes: dict[str, Any] | None = None) -> SteadyState:
        """Return the steady state at a concurrency, with some knobs changed."""
        server = self.server
        if changes:
            changed = _deployment(self.deployment.engine, self.model, dict(self.deployment.config) | changes)
            other = _server(changed, self.model, self.host) if changed else None
            if other is not None:
                server = Server(other.times.scaled(prefill=self.scale, decode=self.scale), other.limits)
        return predict.closed_loop(server.times, max(1.0, concurrency), lengths)


def lengths(observation: Observation) -> Lengths | None:
    """Return the observed lengths; None: too little was read."""
    if not observation.prompt_tokens or not observation.output_tokens:
        return None
    total = observation.prompt_tokens + observation.output_tokens
    return Lengths(
        prompt=observation.prompt_tokens,
        output=max(1.0, observation.output_tokens),
        max_tokens=round(observation.context_limit or total),
        cached_share=min(0.99, observation.cached_share or 0.0),
    )


def read_model(source: str | None) -> Model | None:
    """Return the architecture of the served model from local files or the catalogue; nothing is downloaded."""
    if not source:
        return None
    try:
        found = model_files.inspect(source)
        if found.shape is None and source in catalog.names("model"):
            found = model_files.architecture(source)
    except (PowerbandError, OSError, ValueError):
        return None
    return found if found.shape is not None else None


def step_model(observation: Observation, model: Model | None, host: Host | None) -> StepModel | None:
    """Return the plan's model of the server; None where the plan cannot tell."""
    found_lengths = lengths(observation)
    if model is None or host is None or found_lengths is None or not observation.itl_s or not observation.running:
        return None
    deployment = _deployment(observation.engine, model, observation.settings)
    server = _server(deployment, model, host) if deployment else None
    if deployment is None or server is None:
        return None
    expected = predict.closed_loop(server.times, max(1.0, observation.running), found_lengths)
    scale = observation.itl_s / expected.tpot_s
    if not 1 / _MAX_MISFIT < scale < _MAX_MISFIT:
        return None
    scaled = Server(server.times.scaled(prefill=scale, decode=scale), server.limits)
    return StepModel(scaled, deployment, model, host, scale)


def _deployment(engine: str, model: Model, settings: dict[str, Any]) -> Deployment[Any] | None:
    """Return the deployment with these settings; knobs that it does not know are left out."""
    fields = engines.get(engine).config_type.model_fields
    config = {key: value for key, value in settings.items() if key in fields and value is not None}
    if config.get("flash_attn") not in ("on", "off", "auto"):
        config.pop("flash_attn", None)
    try:
        data = {"variant": {"source": model.source}, "engine": engine, "config": config}
        return engines.deployment_type(engine).model_validate(data)
    except ValidationError:
        return None


def _server(deployment: Deployment[Any], model: Model, host: Host) -> Server | None:
    try:
        return expect.server_for(deployment, model=model, host=host, known=calibrate.saved())
    except (PowerbandError, ValueError, ZeroDivisionError):
        return None


def shares(observation: Observation, found: StepModel | None) -> dict[str, float]:
    """Return which share of the device's bandwidth and FLOPS the observed steps use."""
    if found is None or not observation.itl_s or not observation.running:
        return {}
    times, running = found.server.times, max(1.0, observation.running)
    context = (observation.prompt_tokens or 0.0) + (observation.output_tokens or 0.0) / 2
    step_s = observation.itl_s * (observation.tokens_per_step or 1.0)
    computed = (observation.computed_tokens_per_s or 0.0) * step_s
    decode = times.steps(Batch(decodes=running, decode_context=context))
    both = times.steps(
        Batch(
            prefill_tokens=computed,
            prefill_context=(observation.prompt_tokens or 0.0) / 2,
            decodes=running,
            decode_context=context,
            tokens_per_decode=1.0 + (observation.drafted_per_step or 0.0),
        )
    )
    device = times.device
    dtype = times.steps.scheme.compute_dtype(device.tflops)
    flops = device.flops(dtype)
    one_token = times.steps(Batch(decodes=1.0, decode_context=1.0)).flops
    return {
        "memory_share": min(1.0, (decode.weight_bytes + decode.kv_bytes) / device.bandwidth / step_s),
        "compute_share": min(1.0, (both.flops + both.attention_flops) / flops / step_s),
        "ridge_batch": flops * decode.weight_bytes / device.bandwidth / one_token,
        "active_weights_bytes": decode.weight_bytes,
        **_fewest_devices(observation, found),
    }


def _fewest_devices(observation: Observation, found: StepModel) -> dict[str, float]:
    """Return the fewest GPUs that hold the weights and the KV cache of twice the running requests."""
    steps = found.server.times.steps
    if not found.host.gpus or not observation.prompt_tokens or not observation.output_tokens:
        return {}
    usable = _USABLE_MEMORY * min(gpu.memory_bytes for gpu in found.host.gpus)
    context = observation.prompt_tokens + observation.output_tokens
    tensor = steps.split.tensor
    kv = 2 * max(1.0, observation.running_max or 1.0) * steps.kv_of(context) * tensor
    needed = (steps.weight_bytes * tensor + kv) / usable
    return {"fits_devices": float(2 ** max(0, math.ceil(math.log2(max(needed, 1e-9)))))}


def resource(observation: Observation) -> tuple[Resource, str]:
    """Return what limits the server, and the evidence for it."""
    one = observation
    if not one.running_max or (one.running or 0.0) < _IDLE_RUNNING:
        return "idle", "no request was running" if not one.running_max else f"{one.running:.2f} requests run on average"
    if one.preemptions and (one.kv_use_max or 0.0) >= 0.9:
        return "KV cache", f"{one.kv_use_max:.0%} in use at its peak, {one.preemptions:.0f} preemptions"
    if (one.queue_share or 0.0) >= QUEUE_BOUND or (one.waiting_share or 0.0) >= 0.5:
        share = f"{one.queue_share:.0%} of the latency is queueing" if one.queue_share else ""
        waits = f"{one.waiting or 0:.1f} requests wait on average"
        return "queue", ", ".join(filter(None, (waits, share)))
    if (one.throttled_share or 0.0) >= 0.1:
        return "server CPU", f"the CPU limit cut {one.throttled_share:.0%} of the periods short"
    if (one.compute_share or 0.0) >= COMPUTE_BOUND:
        mostly_prefill = (one.computed_tokens_per_s or 0.0) >= 4 * (one.output_tokens_per_s or 0.0)
        kind: Resource = "prefill compute" if mostly_prefill else "compute"
        return kind, f"steps use {one.compute_share:.0%} of the device's FLOPS"
    if (one.memory_share or 0.0) >= MEMORY_BOUND:
        return "decode bandwidth", f"decoding uses {one.memory_share:.0%} of the device's memory bandwidth"
    if (one.prefill_share or 0.0) >= PREFILL_BOUND:
        return "prefill compute", f"{one.prefill_share:.0%} of the time in execution is prefill"
    if (one.memory_share or 1.0) < 0.4 and (one.busiest_thread or 0.0) >= _BUSY_THREAD and (one.gpus or 0):
        return "server CPU", f"one thread of the server is busy {one.busiest_thread:.0%} of the time"
    if one.memory_share is not None:
        return "unknown", f"{one.memory_share:.0%} of the bandwidth and {one.compute_share:.0%} of the FLOPS are used"
    return "unknown", "model or device unknown: give --model, and --on for a remote server"
