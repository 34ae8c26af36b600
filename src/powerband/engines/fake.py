"""The golden server: an OpenAI server with no model, known pacing, and faults on demand."""

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
    "out_of_memory",
    "crashes",
    "ignores_term",
    "leaves_child",
    "answers_wrongly",
]


class FakeConfig(EngineConfig):
    """How fast the golden server answers, how many at once, and which fault it has."""

    ttft_s: Annotated[Seconds | None, Knob("pacing")] = None
    itl_s: Annotated[Seconds | None, Knob("pacing")] = None
    startup_s: Annotated[Seconds | None, Knob("pacing")] = None
    max_num_seqs: Annotated[Annotated[int, Field(ge=1)] | None, Knob("batching")] = None
    max_num_queued_reqs: Annotated[Annotated[int, Field(ge=1)] | None, Knob("queue bound")] = None
    fault: Annotated[Fault | None, Knob("fault")] = None


class Fake(Engine[FakeConfig]):
    """A server whose truth is known: what measures it is measured by it."""

    name: ClassVar[str] = "fake"
    builtin: ClassVar[tuple[str, ...] | None] = ("{python}", "-m", "powerband.testing.golden")
    reads_weights: ClassVar[bool] = False
    config_type = FakeConfig

    def footprint(self, deployment: Deployment[FakeConfig], *, model: Model, host: Host) -> Footprint:
        """A small Python process."""
        return Footprint(overhead_bytes=64 * 2**20)

    def at_once(self, deployment: Deployment[FakeConfig], *, model: Model, host: Host) -> int:
        """As many as it has places."""
        return deployment.config.max_num_seqs or 256

    def space(self, *, model: Model, host: Host, context: int) -> Space:
        """Places, a pace, and a lever that breaks it: enough to see a search work."""
        places = Lever(name="places", settings={"4": {}} | {str(n): {"max_num_seqs": n} for n in (1, 2, 8, 16)})
        pace = Lever(name="pace", settings={"20ms": {}, "10ms": {"itl_s": 0.01}, "40ms": {"itl_s": 0.04}})
        fault = Lever(name="fault", settings={"none": {}, "crashes": {"fault": "crashes"}})
        return Space(always={"max_num_seqs": 4}, levers=(places, pace, fault))

    def command(self, deployment: Deployment[FakeConfig], *, installation: Installation, port: int) -> Command:
        """Run the server that `powerband.testing` ships."""
        argv = [*installation.program, "--host", deployment.placement.host, "--port", str(port)]
        argv += ["--model", deployment.served_name, *knobs.arguments(deployment.config)]
        return Command(argv=tuple(argv), env={"PYTHONUNBUFFERED": "1", **knobs.environment(deployment.config)})


ENGINE = Fake()
