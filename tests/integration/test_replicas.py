"""Replicas that are measured as one: they start and stop together, and share the requests."""

from __future__ import annotations

import asyncio
from pathlib import Path

import powerband.bench as bench
from powerband import engines
from powerband.bench.profiles import Amount
from powerband.core.workload import Workload
from powerband.launchers import local

DEPLOYMENT = {
    "powerband": "deployment/1", "name": "golden", "variant": {"source": "golden"}, "engine": "fake",
    "placement": {"replicas": 2},
}  # fmt: skip
WORKLOAD = {
    "arrivals": {"process": "poisson", "rate_per_s": 40}, "prompt": {"shape": "fixed", "tokens": 20},
    "output": {"shape": "fixed", "tokens": 8},
}  # fmt: skip


def test_two_replicas_share_the_requests(tmp_path: Path) -> None:
    async def measure() -> None:
        prepared = local.prepare(engines.deployment_of(DEPLOYMENT))
        async with local.launch(prepared, directory=tmp_path) as replica:
            assert len({one.url for one in replica.members}) == 2
            spec = bench.BenchSpec(
                workload=Workload.model_validate(WORKLOAD), profile="level", amount=Amount(requests=60)
            )
            found = await bench.bench(replica, prepared, spec, directory=tmp_path)
            level = found.levels[-1]
            assert level.failed == 0 and 20 < level.achieved_per_s < 80
            own = [(await one._own_gauges()).output_tokens or 0 for one in replica.members]
            assert min(own) > 0.7 * max(own) > 0
            assert (await replica.gauges()).output_tokens == sum(own)
            assert (replica.memory_bytes() or 0) > max(
                one.process.memory_bytes() for one in replica.members if one.process
            )
            exited = replica.members[1].process
            assert exited is not None and replica.exited() is None
            await exited.stop(0.1)
            assert replica.exited() is exited

    asyncio.run(measure())
