"""A deployment: a model variant, an engine with a typed config, and a placement. It can be started."""

from __future__ import annotations

from typing import Any, ClassVar, Generic, TypeVar

from pydantic import Field, model_validator

from powerband.core.document import Document, Value
from powerband.core.model import Format


class EngineConfig(Value):
    """The knobs of one engine, by the engine's names; None: the engine's default."""

    extra_args: tuple[str, ...] = ()
    extra_env: dict[str, str] = Field(default_factory=dict)


C = TypeVar("C", bound=EngineConfig, covariant=True)


class Variant(Value):
    """A model in one quantization scheme: a file, a directory, or a hub id with its revision."""

    source: str = Field(min_length=1)
    revision: str | None = None
    format: Format | None = None
    scheme: str | None = None


class Placement(Value):
    """The address that a deployment listens on, and the GPUs that it may use."""

    host: str = "127.0.0.1"
    port: int | None = Field(default=None, ge=1, le=65535)
    gpus: tuple[int, ...] | None = None


class Deployment(Document, Generic[C]):
    """Weights, an engine, its config, and a placement."""

    kind: ClassVar[str] = "deployment"

    variant: Variant
    engine: str
    engine_version: str | None = None
    config: C
    placement: Placement = Placement()

    @model_validator(mode="before")
    @classmethod
    def _absent_config_is_empty(cls, data: Any) -> Any:
        return {**data, "config": data.get("config") or {}} if isinstance(data, dict) else data

    @property
    def served_name(self) -> str:
        """Return the model name for clients: from the config, else the document, else the last part of the source."""
        configured = getattr(self.config, "served_model_name", None) or getattr(self.config, "alias", None)
        last = self.variant.source.rstrip("/").rpartition("/")[2]
        return configured or self.name or last.removesuffix(".gguf") or self.variant.source
