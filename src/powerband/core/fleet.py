"""The documents of `serve`: a fleet (its models, replicas and routing) and its tenants."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, model_validator

from powerband.core.document import Document, Value

Priority = Literal["high", "normal", "low"]
Routing = Literal["prefix", "round-robin"]
PRIORITIES: tuple[Priority, ...] = ("high", "normal", "low")


class Served(Value):
    """One model of a fleet: a recipe or deployment, and how it is served."""

    renamed_keys = {"most_replicas": "max_replicas", "patience_s": "queue_timeout_s"}

    recipe: str = Field(description="path of a recipe.yaml or deployment.yaml, relative to the fleet's file")
    replicas: int | None = Field(
        default=None, ge=0, description="number of replicas, with max_replicas the minimum; default: as measured, or 1"
    )
    max_replicas: int | None = Field(
        default=None, ge=1, description="autoscale up to this number; if omitted, the number is fixed"
    )
    initial_replicas: int | None = Field(
        default=None, ge=0, description="replicas to begin with, if it autoscales; default: the minimum"
    )
    attainment: float | None = Field(
        default=None, gt=0, lt=1, description="share of the requests to serve within the SLO when autoscaling"
    )
    warm: int = Field(default=0, ge=0, description="standby replicas: started, but without traffic until needed")
    in_flight: int | None = Field(
        default=None, ge=1, description="maximum concurrent requests per replica; if omitted, as measured by the recipe"
    )
    queue_timeout_s: float | None = Field(
        default=None, gt=0, description="maximum time in the queue; if omitted, derived from the TTFT limit of the SLO"
    )
    aliases: tuple[str, ...] = Field(default=(), description="other names that requests may use for this model")
    adapters: tuple[str, ...] = Field(
        default=(), description="LoRA adapters of the deployment; requests select one by name"
    )
    routing: Routing = Field(
        default="prefix", description="prefix: by load and prefix-cache hits; round-robin: for comparison"
    )
    fallback: str = Field(
        default="", description="model that serves a request if this one has no capacity before its deadline"
    )


class Fleet(Document):
    """The models that `serve` runs behind one address."""

    kind: ClassVar[str] = "fleet"

    models: dict[str, Served] = Field(min_length=1, description="by the name that requests use")
    tenants: str = Field(default="", description="path of a tenants.yaml; if omitted, requests need no API key")

    @model_validator(mode="after")
    def _check_names(self) -> Fleet:
        names = [*self.models, *(name for one in self.models.values() for name in (*one.aliases, *one.adapters))]
        if duplicates := {name for name in names if names.count(name) > 1}:
            raise ValueError(f"the name {min(duplicates)} is used more than once")
        for name, one in self.models.items():
            if one.fallback and (one.fallback not in self.models or one.fallback == name):
                raise ValueError(f"the fallback of {name} must be another model of the fleet")
        return self


class Tenant(Value):
    """A client of the fleet: its API key, priority and limits."""

    key_sha256: str = Field(
        pattern="^[0-9a-f]{64}$", description="SHA-256 of the API key; the key itself is not stored"
    )
    priority: Priority = "normal"
    rate_per_s: float | None = Field(default=None, gt=0, description="maximum requests per second, on average")
    burst: int = Field(default=10, ge=1, description="requests allowed in a burst above the rate")
    in_flight: int | None = Field(default=None, ge=1, description="maximum concurrent requests")
    models: tuple[str, ...] = Field(default=(), description="models that the tenant may use; if omitted, all")
    metrics: bool = Field(
        default=False, description="the tenant may read /metrics, which has the names and costs of all tenants"
    )


class Tenants(Document):
    """The tenants of a fleet."""

    kind: ClassVar[str] = "tenants"

    tenants: dict[str, Tenant] = Field(min_length=1, description="by name")
