"""The stage `rollout`: another recipe beside the one that is served; the better one stays, and nobody is refused."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from powerband.core.statistics import wilson
from powerband.errors import InputError
from powerband.serve import FleetSpec, ModelSpec, resolve

_PROBES = (
    "The capital of France is", "Two plus two is", "Water boils at", "The opposite of hot is",
    "The first three months of the year are", "The sun rises in the", "A week has seven", "Once upon a",
    "The alphabet begins with the letters", "To be or not to", "The colours of a traffic light are red, yellow and",
    "The chemical formula of water is", "An apple a day keeps the", "The largest planet is", "Twelve months make a",
    "The author of Hamlet is William",
)  # fmt: skip
_SAME = 0.5  # of the probes must be answered with the same first words, whatever chance does
_WORSE = 0.05  # of the requests may be late or lost more often
_SAY = 0.5


@dataclass(frozen=True)
class Verdict:
    """What became of it."""

    promoted: bool
    reason: str
    answered: int  # by the recipe on trial


async def rollout(
    folder: Path,
    new: Path,
    *,
    model: str | None = None,
    share: float = 0.1,
    requests: int = 100,
    timeout_s: float = 600.0,
    say: Callable[[str], None] = lambda _: None,
) -> Verdict:
    """Try a recipe with a share of the traffic; put it in the place of the old one, or give it up."""
    old = FleetSpec.read(folder).part(model)
    name = old.name
    part = dataclasses.replace(next(iter(resolve(new)[0].values())), name=name, replicas=old.replicas)
    if part.recipe == old.recipe:
        part = dataclasses.replace(part, recipe=f"{part.recipe} (new)")
    kept = {name: getattr(old, name) for name in ("aliases", "fallback", "max_replicas", "warm")}
    part = dataclasses.replace(part, **kept)
    told = {"do": "try", "model": name, "part": dataclasses.asdict(part), "share": 0.0, "replicas": 1}
    say(f"start {part.recipe} beside {old.recipe}")
    await _order(folder, told)
    reason, answered = await _trial(
        folder, name, old, part, share=share, requests=requests, timeout_s=timeout_s, say=say
    )
    say(f"{'promote' if not reason else 'roll back'} {part.recipe}")
    await _order(folder, {"do": "abandon" if reason else "promote", "model": name})
    return Verdict(
        not reason, reason or f"{part.recipe} answered {answered} requests no worse than {old.recipe}", answered
    )


async def _order(folder: Path, told: dict[str, Any]) -> dict[str, Any]:
    try:
        reader, writer = await asyncio.open_unix_connection(folder / "supervisor.sock")
    except OSError:
        raise InputError(f"no fleet runs in {folder}", hint="give the folder that 'powerband serve' named") from None
    writer.write(json.dumps(told).encode() + b"\n")
    answer: dict[str, Any] = json.loads(await reader.readline())
    writer.close()
    if "error" in answer:
        raise InputError(answer["error"], hint=answer["hint"])
    return answer


async def _trial(
    folder: Path,
    name: str,
    old: ModelSpec,
    new: ModelSpec,
    *,
    share: float,
    requests: int,
    timeout_s: float,
    say: Callable[[str], None],
) -> tuple[str, int]:
    """Return why the new recipe is given up, or nothing; and how many requests it answered."""
    until = time.monotonic() + timeout_s
    probed = False
    seen = 0
    while time.monotonic() < until:
        await asyncio.sleep(_SAY)
        status = json.loads((folder / "status.json").read_text())
        seats = [one for one in status["replicas"] if one["model"] == name]
        fresh = [one for one in seats if one["recipe"] == new.recipe]
        if failed := next((one["problem"] for one in fresh if one["problem"] and one["starts"] > 1), ""):
            return f"it does not start: {failed}", 0
        ready = [one["address"] for one in fresh if one["address"]]
        if not ready:
            continue
        if not probed:
            steady = [one["address"] for one in seats if one["recipe"] == old.recipe and one["address"]]
            if objection := await _unlike(steady[0] if steady else ready[0], ready[0], name):
                return objection, 0
            probed = True
            say(f"its answers are like the old ones: it gets {share:.0%} of the requests")
            await _order(folder, {"do": "share", "model": name, "share": share})
        held = status.get("recipes", {})
        if objection := _worse(held.get(old.recipe), held.get(new.recipe), new.ttft_s or old.ttft_s):
            return objection, held[new.recipe]["done"]
        seen = held.get(new.recipe, {}).get("done", 0)
        if seen >= requests:
            return "", seen
    return f"only {seen} of {requests} requests came in time to judge it", seen


async def _unlike(old: str, new: str, model: str) -> str:
    """Ask both the same; return what is wrong where the answers begin otherwise."""
    same = 0
    async with httpx.AsyncClient(trust_env=False, timeout=60) as http:

        async def begin(address: str, text: str) -> str:
            body = {"model": model, "prompt": text, "max_tokens": 2, "temperature": 0}
            answer = await http.post(f"http://{address}/v1/completions", json=body)
            return str(answer.json()["choices"][0]["text"]) if answer.status_code == 200 else f"{answer.status_code}"

        for text in _PROBES:
            try:
                same += await begin(old, text) == await begin(new, text)
            except (httpx.HTTPError, KeyError, ValueError):
                return "it does not answer"
    if wilson(same, len(_PROBES)).high < _SAME:
        return f"its answers are not the old ones: {same} of {len(_PROBES)} begin alike"
    return ""


def _worse(old: dict[str, Any] | None, new: dict[str, Any] | None, ttft_s: float | None) -> str:
    """Return in what the new recipe is worse, beyond doubt."""
    if not new or not new["done"]:
        return ""
    lost = wilson(new["failed"], new["done"])
    before = old["failed"] / old["done"] if old and old["done"] else 0.0
    if lost.low > before + _WORSE:
        return f"{new['failed']} of its {new['done']} requests failed"
    if ttft_s is None or not new["ttft_s"]:
        return ""
    late = sum(one > ttft_s for one in new["ttft_s"])
    usual = sum(one > ttft_s for one in old["ttft_s"]) / len(old["ttft_s"]) if old and old["ttft_s"] else 0.0
    if wilson(late, len(new["ttft_s"])).low > usual + _WORSE:
        return f"{late} of its {len(new['ttft_s'])} answers began late, {usual:.0%} of the old ones"
    return ""
