"""A device: one kind of accelerator or CPU host with its datasheet facts; an inventory: the machines you have."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator

from powerband.core.document import Document, Value
from powerband.core.family import Family, of_compute_capability
from powerband.core.units import Bytes

Vendor = Literal["nvidia", "amd", "apple", "cpu"]


def _text(value: object) -> object:
    return str(value)  # YAML reads 2026-05-20 as a date


class Price(Value):
    """The price of one hour, with its date and source."""

    usd_per_h: float = Field(ge=0)
    as_of: Annotated[str, BeforeValidator(_text)]
    source: str
    estimated: bool = Field(default=False, description="an estimate of Powerband, from similar devices")


class Device(Document):
    """Memory, bandwidth and compute of one device by its datasheet; for a CPU host, the whole socket or instance."""

    kind: ClassVar[str] = "device"
    renamed_keys = {"maker": "vendor", "reports_as": "driver_names"}

    aliases: tuple[str, ...] = Field(
        default=(), description="other names for it; case, dashes and the vendor's name do not matter"
    )
    vendor: Vendor
    family: Family | None = Field(default=None, description="devices that engines support alike; None: unknown")
    memory: Bytes = Field(description="as the driver reports it, which is less than the label says")
    bandwidth: Bytes = Field(description="memory bandwidth, per second")
    tflops: dict[str, float] = Field(description="peak dense rate by data type, in 1e12 operations per second")
    link: Bytes = Field(description="bandwidth to other devices of its node, per second and direction")
    node: int = Field(default=8, ge=1, description="devices connected by such links")
    watts: float
    price: Price
    driver_names: tuple[str, ...] = Field(default=(), description="names that the driver reports")
    compute_capability: str | None = Field(default=None, description="of an NVIDIA GPU, from NVIDIA's list")
    sources: dict[str, str] = Field(default_factory=dict, description="where each fact was read")

    @model_validator(mode="before")
    @classmethod
    def _fill_family(cls, data: Any) -> Any:
        """Fill the family of a file that names only the compute capability."""
        if isinstance(data, dict) and "family" not in data and data.get("compute_capability"):
            return {**data, "family": of_compute_capability(str(data["compute_capability"]))}
        return data

    def flops(self, dtype: str) -> float:
        """Return the peak operations per second in a data type, or in bf16 if the device does not support it."""
        return 1e12 * (self.tflops.get(dtype) or self.tflops["bf16"])

    def scaled(self, share: float) -> Device:
        """Return the device with this share of its bandwidth and compute."""
        tflops = {dtype: share * speed for dtype, speed in self.tflops.items()}
        return self.model_copy(update={"bandwidth": round(share * self.bandwidth), "tflops": tflops})

    @property
    def engines(self) -> tuple[str, ...]:
        """Return the engines that are offered on it."""
        return ("llamacpp",) if self.vendor == "apple" else ("vllm", "llamacpp")

    @property
    def engines_on_request(self) -> tuple[str, ...]:
        """Return the engines that may run on it, but have never been run: they are offered only by name."""
        return ("sglang",) if self.vendor in ("nvidia", "amd") else ()


class Machines(Value):
    """Devices of one kind that you have, and their price."""

    device: str
    count: int = Field(default=1, ge=1)
    usd_per_h: float | None = Field(default=None, ge=0, description="for one device; default: the catalogue's price")


class Inventory(Document):
    """The machines you have."""

    kind: ClassVar[str] = "inventory"

    machines: tuple[Machines, ...] = Field(min_length=1)
