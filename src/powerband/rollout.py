"""The stage `rollout`: run a new recipe as a canary next to the current one, then promote it or roll it back."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from powerband.core.statistics import wilson
from powerband.errors import EngineFailed, InputError
from powerband.serve import FleetSpec, ModelSpec, envoy, resolve

_PROBES = (
    "The capital of France is", "Two plus two is", "Water boils at", "The opposite of hot is",
    "The first three months of the year are", "The sun rises in the", "A week has seven", "Once upon a",
    "The alphabet begins with the letters", "To be or not to", "The colours of a traffic light are red, yellow and",
    "The chemical formula of water is", "An apple a day keeps the", "The largest planet is", "Twelve months make a",
    "The author of Hamlet is William",
)  # fmt: skip
_MIN_SAME_ANSWERS = 0.5  # share of probe prompts whose first tokens must be equal
_MAX_REGRESSION = 0.05  # by which the shares of failed and of late requests may exceed those of the current recipe
_POLL_S = 0.5


@dataclass(frozen=True)
class RolloutResult:
    """Outcome of a rollout."""

    promoted: bool
    reason: str
    answered: int  # requests that the canary served


async def rollout(
    folder: Path,
    new: Path,
    *,
    model: str | None = None,
    canary_weight: float = 0.1,
    requests: int = 100,
    timeout_s: float = 600.0,
    report: Callable[[str], None] = lambda _: None,
) -> RolloutResult:
    """Send a share of the traffic to a new recipe; promote it if it does no worse than the current one."""
    current = FleetSpec.read(folder).model(model)
    name = current.name
    canary = dataclasses.replace(next(iter(resolve(new)[0].values())), name=name, replicas=current.replicas)
    if canary.recipe == current.recipe:
        canary = dataclasses.replace(canary, recipe=f"{canary.recipe} (new)")
    of_fleet = ("aliases", "adapters", "routing", "fallback", "max_replicas", "warm")
    kept = {name: getattr(current, name) for name in of_fleet}
    canary = dataclasses.replace(canary, **kept)
    report(f"starting canary {canary.recipe} next to {current.recipe}")
    before = _counts(folder)
    async with _lease(folder) as send:
        command = {"action": "start_canary", "model": name, "model_spec": dataclasses.asdict(canary)}
        await send({**command, "canary_weight": 0.0, "replicas": 1})

        async def set_weight() -> None:
            report(f"the canary's answers match: sending it {canary_weight:.0%} of the requests")
            await send({"action": "set_canary_weight", "model": name, "canary_weight": canary_weight})

        objection, answered = await _run_canary(
            folder, current, canary, before, set_weight=set_weight, requests=requests, timeout_s=timeout_s
        )
        report(f"{'rolling back' if objection else 'promoting'} {canary.recipe}")
        try:
            action = "rollback" if objection else "promote"
            await send({"action": action, "model": name, "timeout_s": timeout_s})
        except InputError as error:  # the new replicas did not start in time
            objection = error.message
    reason = objection or f"{canary.recipe} served {answered} requests no worse than {current.recipe}"
    return RolloutResult(not objection, reason, answered)


Send = Callable[[dict[str, Any]], Awaitable[None]]


@contextlib.asynccontextmanager
async def _lease(folder: Path) -> AsyncIterator[Send]:
    """Connect to the supervisor, which rolls back if the connection ends before the rollout; yield the sender."""
    try:
        reader, writer = await asyncio.open_unix_connection(folder / "supervisor.sock")
    except OSError:
        raise InputError(f"no fleet runs in {folder}", hint="give the folder that 'powerband serve' printed") from None

    async def send(command: dict[str, Any]) -> None:
        """Send a command, and raise the error that the supervisor answers."""
        line = b""
        with contextlib.suppress(OSError):
            writer.write(json.dumps(command).encode() + b"\n")
            line = await reader.readline()
        if not line:
            raise EngineFailed(
                "the supervisor ended during the rollout", hint="the fleet serves the old recipe", failure="crashed"
            )
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise InputError(answer["error"], hint=answer["hint"])

    try:
        yield send
    finally:
        writer.close()


def _counts(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the picker's counts by recipe; they go on from earlier rollouts."""
    try:
        recipes: dict[str, dict[str, Any]] = json.loads((folder / "status.json").read_text()).get("recipes", {})
    except (OSError, ValueError):
        return {}
    return recipes


def _since(now: dict[str, Any] | None, before: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return the counts of a recipe since the rollout began; a picker that was restarted counts from zero."""
    if now is None or before is None or now["done"] < before["done"]:
        return now
    added = {name: now[name] - before[name] for name in ("done", "failed", "first_tokens")}
    return {**added, "ttft_s": now["ttft_s"][-added["first_tokens"] :] if added["first_tokens"] else []}


async def _run_canary(
    folder: Path,
    current: ModelSpec,
    canary: ModelSpec,
    before: dict[str, dict[str, Any]],
    *,
    set_weight: Callable[[], Awaitable[None]],
    requests: int,
    timeout_s: float,
) -> tuple[str, int]:
    """Return the reason to roll the canary back, or "", and how many requests it served."""
    name, secret = current.name, FleetSpec.read(folder).relay_secret
    until = time.monotonic() + timeout_s
    probed = False
    answered = 0
    while time.monotonic() < until:
        await asyncio.sleep(_POLL_S)
        status = json.loads((folder / "status.json").read_text())
        replicas = [one for one in status["replicas"] if one["model"] == name]
        canaries = [one for one in replicas if one["recipe"] == canary.recipe]
        waiting = any(one["state"] == "no room" for one in canaries)
        if waiting and len(replicas) - len(canaries) <= 1:
            return f"no device is free for the canary, and {name} has no replica that could give way to it", 0
        failed = next((one["problem"] for one in canaries if one["problem"] and one["starts"] > 1), "")
        if failed and not waiting:
            return f"the canary does not start: {failed}", 0
        ready = [one["address"] for one in canaries if one["address"]]
        if not ready:
            continue
        if not probed:
            stable = [one["address"] for one in replicas if one["recipe"] == current.recipe and one["address"]]
            if objection := await _compare_answers(stable[0] if stable else ready[0], ready[0], name, secret):
                return objection, 0
            probed = True
            await set_weight()
        counts = status.get("recipes", {})
        old, new = (_since(counts.get(one), before.get(one)) for one in (current.recipe, canary.recipe))
        answered = new["done"] if new else 0
        if objection := _regression(old, new, canary.ttft_s or current.ttft_s):
            return objection, answered
        if answered >= requests:
            return "", answered
    return f"the canary served {answered} of {requests} requests before the timeout of {timeout_s:g} s", answered


async def _compare_answers(current: str, canary: str, model: str, secret: str) -> str:
    """Send the probe prompts to both addresses; return the objection if too few answers begin with the same tokens."""
    same = 0
    headers = {envoy.SECRET: secret} if secret else {}
    async with httpx.AsyncClient(trust_env=False, timeout=60, headers=headers) as http:

        async def first_tokens(address: str, prompt: str) -> str:
            body = {"model": model, "prompt": prompt, "max_tokens": 2, "temperature": 0}
            answer = await http.post(f"http://{address}/v1/completions", json=body)
            return str(answer.json()["choices"][0]["text"]) if answer.status_code == 200 else f"{answer.status_code}"

        for prompt in _PROBES:
            try:
                same += await first_tokens(current, prompt) == await first_tokens(canary, prompt)
            except (httpx.HTTPError, KeyError, ValueError):
                return "the canary or the current recipe did not answer a probe prompt"
    if wilson(same, len(_PROBES)).high < _MIN_SAME_ANSWERS:
        return (
            f"the canary's answers differ: {same} of {len(_PROBES)} probe prompts give the same first tokens"
            f" (expected: at least {_MIN_SAME_ANSWERS:.0%})"
        )
    return ""


def _regression(current: dict[str, Any] | None, canary: dict[str, Any] | None, ttft_s: float | None) -> str:
    """Return in what the canary is significantly worse than the current recipe, or ""."""
    if not canary or not canary["done"]:
        return ""
    failed = wilson(canary["failed"], canary["done"])
    failed_before = current["failed"] / current["done"] if current and current["done"] else 0.0
    if failed.low > failed_before + _MAX_REGRESSION:
        return (
            f"{canary['failed']} of the canary's {canary['done']} requests failed (current recipe: {failed_before:.0%})"
        )
    if ttft_s is None or not canary["ttft_s"]:
        return ""
    late = sum(one > ttft_s for one in canary["ttft_s"])
    late_before = (
        sum(one > ttft_s for one in current["ttft_s"]) / len(current["ttft_s"])
        if current and current["ttft_s"]
        else 0.0
    )
    if wilson(late, len(canary["ttft_s"])).low > late_before + _MAX_REGRESSION:
        return (
            f"{late} of the canary's {len(canary['ttft_s'])} requests had a TTFT above {ttft_s:g} s"
            f" (current recipe: {late_before:.0%})"
        )
    return ""
