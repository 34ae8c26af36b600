"""What an engine version calls its metrics and flags; an upgrade that renames one must fail here, loudly."""

import asyncio
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from powerband import engines
from powerband.engines import knobs, rules
from powerband.runtime import installations

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent.parent))

from support.engines import started

FOLDER = Path(__file__).with_name("goldens")


def flags_and_metrics(name: str, exposition: str, known: frozenset[str]) -> dict[str, Any]:
    """Return the engine's metric families, and those of our flags that it knows."""
    ours = knobs.flags(engines.get(name).config_type)
    return {
        "metrics": sorted(set(re.findall(r"^# TYPE (\S+)", exposition, re.MULTILINE))),
        "our_flags": sorted(ours & known),
        "our_flags_unknown_to_it": sorted(ours - known),
    }


async def read(name: str) -> dict[str, Any]:
    known = installations.find(name).flags
    assert known is not None
    async with started(name) as server:
        return flags_and_metrics(name, await server.page("/metrics"), known)


def golden(name: str) -> Path:
    return FOLDER / f"{name}-{installations.find(name).version}.json"


@pytest.mark.parametrize(
    "name", [pytest.param("llamacpp", marks=pytest.mark.llamacpp), pytest.param("vllm", marks=pytest.mark.vllm)]
)
async def test_names_are_the_golden_ones(name: str) -> None:
    found, wanted = await read(name), json.loads(golden(name).read_text())
    assert found == wanted
    assert found["our_flags_unknown_to_it"] == []
    families = {metric.removesuffix("_total") for metric in found["metrics"]}
    when_speculating = {"spec_drafted_tokens", "spec_accepted_tokens"} if name == "vllm" else set()
    for gauge, metric in rules.facts(name).gauges.items():
        family = re.sub("_(total|sum|count)$", "", metric)
        assert family in families or gauge in when_speculating, gauge


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for engine in ("llamacpp", "vllm"):
        golden(engine).write_text(json.dumps(asyncio.run(read(engine)), indent=1) + "\n")
