"""A deployment: a model variant, an engine with a typed config, and a placement. It can be started."""

from __future__ import annotations

from typing import Any, ClassVar, Generic, TypeVar

from pydantic import Field, model_validator

from powerband.core import hub_id
from powerband.core.document import Document, Value
from powerband.core.model import Format
from powerband.core.units import Seconds


class EngineConfig(Value):
    """The knobs of one engine, by the engine's names; None: the engine's default."""

    extra_args: tuple[str, ...] = ()
    extra_env: dict[str, str] = Field(default_factory=dict)


C = TypeVar("C", bound=EngineConfig, covariant=True)


class Variant(Value):
    """A model in one quantization scheme: a file, a directory, or a hub id with its revision."""

    source: str = Field(min_length=1)
    revision: str | None = Field(default=None, description="branch, tag or commit of a hub id")
    format: Format | None = None
    scheme: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _revision_has_its_own_key(cls, data: Any) -> Any:
        """Read `source: owner/name@revision` as a source and a revision."""
        found = hub_id.parse(str(data.get("source"))) if isinstance(data, dict) else None
        if found is None or found.revision is None:
            return data
        if (other := data.get("revision")) not in (None, found.revision):
            raise ValueError(f"source has revision {found.revision}, and revision is {other}: give one of them")
        return {**data, "source": str(found.at(None)), "revision": found.revision}

    @property
    def full_source(self) -> str:
        """Return the source, with the revision of a hub id: `owner/name@revision`."""
        found = hub_id.parse(self.source) if self.revision else None
        return str(found.at(self.revision)) if found else self.source


class Placement(Value):
    """The address that a deployment listens on, and the GPUs and cores that it may use."""

    host: str = "127.0.0.1"
    port: int | None = Field(default=None, ge=1, le=65535)
    gpus: tuple[int, ...] | None = Field(default=None, description="indices of the GPUs to choose from; default: all")
    cores: int | None = Field(
        default=None, ge=1, description="cores of a replica without a GPU; default: all, and a fleet divides them"
    )
    replicas: int = Field(
        default=1, ge=1, description="replicas on one machine without GPUs that are measured as one, sharing the load"
    )


class Deployment(Document, Generic[C]):
    """Weights, an engine, its config, and a placement."""

    kind: ClassVar[str] = "deployment"

    variant: Variant
    engine: str
    engine_version: str | None = None
    config: C
    placement: Placement = Placement()
    start_timeout: Seconds | None = Field(default=None, description="default: by the size of the weights")

    @model_validator(mode="before")
    @classmethod
    def _absent_config_is_empty(cls, data: Any) -> Any:
        return {**data, "config": data.get("config") or {}} if isinstance(data, dict) else data

    @property
    def served_name(self) -> str:
        """Return the model name for clients: from the config, else the document, else the last part of the source."""
        configured = getattr(self.config, "served_model_name", None) or getattr(self.config, "alias", None)
        return configured or self.name or hub_id.model_name(self.variant.source) or self.variant.source
