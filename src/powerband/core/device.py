"""A device: one kind of accelerator or CPU host, by its datasheet; an inventory: the machines you have."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field

from powerband.core.document import Document, Value
from powerband.core.units import Bytes

Vendor = Literal["nvidia", "amd", "apple", "cpu"]


def _text(value: object) -> object:
    return str(value)  # YAML reads 2026-05-20 as a date


class Price(Value):
    """What an hour costs, as somebody asked for it on a day."""

    usd_per_h: float = Field(ge=0)
    as_of: Annotated[str, BeforeValidator(_text)]
    source: str


class Device(Document):
    """What one device can hold, move and compute, by its maker's word; of a CPU host, the whole socket or instance."""

    kind: ClassVar[str] = "device"
    renamed_keys = {"maker": "vendor", "reports_as": "driver_names"}

    vendor: Vendor
    memory: Bytes = Field(description="what its driver reports, not what the label says")
    bandwidth: Bytes = Field(description="of its memory, per second")
    tflops: dict[str, float] = Field(description="dense, by number format, in 1e12 operations per second")
    link: Bytes = Field(description="to the other devices of its node, per second and direction")
    node: int = Field(default=8, ge=1, description="devices that such links join")
    watts: float
    price: Price
    driver_names: tuple[str, ...] = Field(default=(), description="how its driver names it")
    sources: dict[str, str] = Field(default_factory=dict, description="where each fact was read")

    def flops(self, number_format: str) -> float:
        """Return operations per second in a format; one that it lacks is computed in bf16."""
        return 1e12 * (self.tflops.get(number_format) or self.tflops["bf16"])

    def part(self, share: float) -> Device:
        """Return a part of it, with as much less to compute with and to read by."""
        tflops = {name: share * speed for name, speed in self.tflops.items()}
        return self.model_copy(update={"bandwidth": round(share * self.bandwidth), "tflops": tflops})

    @property
    def engines(self) -> tuple[str, ...]:
        """Return the engines that run on it."""
        return ("llamacpp",) if self.vendor == "apple" else ("vllm", "llamacpp")


class Machines(Value):
    """So many devices of one kind, and what they really cost."""

    device: str
    count: int = Field(default=1, ge=1)
    usd_per_h: float | None = Field(default=None, ge=0, description="for one device; the catalogue's price if absent")


class Inventory(Document):
    """The machines you have."""

    kind: ClassVar[str] = "inventory"

    machines: tuple[Machines, ...] = Field(min_length=1)
