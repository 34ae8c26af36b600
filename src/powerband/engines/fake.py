"""Adapter of the golden server: an OpenAI server without a model, with known latencies and injectable faults."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from powerband.core.deployment import Deployment, EngineConfig
from powerband.core.engine import Command, Footprint, Installation, Lever, Space
from powerband.core.host import Host
from powerband.core.model import Model
from powerband.core.units import Seconds
from powerband.engines import knobs
from powerband.engines.base import Engine
from powerband.engines.knobs import Knob

Fault = Literal[
    "never_ready",
    "dies_on_first_request",
    "dies_on_word",
    "out_of_memory",
    "crashes",
    "ignores_term",
    "leaves_child",
    "answers_wrongly",
]


class FakeConfig(EngineConfig):
    """Latencies, concurrency and fault of the golden server."""

    ttft_s: Annotated[Seconds | None, Knob("pacing")] = None
    itl_s: Annotated[Seconds | None, Knob("pacing")] = None
    startup_s: Annotated[Seconds | None, Knob("pacing")] = None
    max_num_seqs: Annotated[Annotated[int, Field(ge=1)] | None, Knob("batching")] = None
    max_num_queued_reqs: Annotated[Annotated[int, Field(ge=1)] | None, Knob("queue bound")] = None
    fault: Annotated[Fault | None, Knob("fault")] = None


class Fake(Engine[FakeConfig]):
    """The golden server: no model, known latencies; for tests and demonstrations."""

    name: ClassVar[str] = "fake"
    typical_start_s: ClassVar[float] = 0.5
    builtin: ClassVar[tuple[str, ...] | None] = ("{python}", "-m", "powerband.testing.golden")
    reads_weights: ClassVar[bool] = False
    config_type = FakeConfig

    def footprint(self, deployment: Deployment[FakeConfig], *, model: Model, host: Host) -> Footprint:
        """Return the size of a small Python process."""
        return Footprint(overhead_bytes=64 * 2**20)

    def max_concurrency(self, deployment: Deployment[FakeConfig], *, model: Model, host: Host) -> int:
        """Return its number of slots."""
        return deployment.config.max_num_seqs or 256

    def space(self, *, model: Model, host: Host, context: int) -> Space:
        """Return levers for tests of a search: slots, speed, and a fault."""
        slots = Lever(name="slots", settings={"4": {}} | {str(n): {"max_num_seqs": n} for n in (1, 2, 8, 16)})
        itl = Lever(name="itl", settings={"20ms": {}, "10ms": {"itl_s": 0.01}, "40ms": {"itl_s": 0.04}})
        fault = Lever(name="fault", settings={"none": {}, "crashes": {"fault": "crashes"}})
        return Space(always={"max_num_seqs": 4}, levers=(slots, itl, fault))

    def command(self, deployment: Deployment[FakeConfig], *, installation: Installation, port: int) -> Command:
        """Run `powerband.testing.golden`."""
        argv = [*installation.program, "--host", deployment.placement.host, "--port", str(port)]
        argv += ["--model", deployment.served_name, *knobs.arguments(deployment.config)]
        return Command(argv=tuple(argv), env={"PYTHONUNBUFFERED": "1", **knobs.environment(deployment.config)})


ENGINE = Fake()
