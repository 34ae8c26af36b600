"""A fleet: which recipes are served under which names, by how many replicas, and to whom."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, model_validator

from powerband.core.document import Document, Value

Class = Literal["high", "normal", "low"]
Routing = Literal["prefix", "round-robin"]
CLASSES: tuple[Class, ...] = ("high", "normal", "low")


class Served(Value):
    """One recipe, or deployment, of a fleet."""

    renamed_keys = {"most_replicas": "max_replicas", "patience_s": "queue_timeout_s"}

    recipe: str = Field(description="path of a recipe.yaml or a deployment.yaml, from the fleet's file")
    replicas: int = Field(default=1, ge=0)
    max_replicas: int | None = Field(default=None, ge=1, description="scale up to so many; none: a fixed number")
    warm: int = Field(default=0, ge=0, description="beside these: started, asked nothing until one is missing")
    in_flight: int | None = Field(default=None, ge=1, description="per replica; none: what the recipe proved")
    queue_timeout_s: float | None = Field(
        default=None, gt=0, description="longest wait for a first token; none: the SLO's"
    )
    aliases: tuple[str, ...] = ()
    adapters: tuple[str, ...] = Field(default=(), description="LoRA adapters of the deployment, asked for by name")
    routing: Routing = Field(default="prefix", description="round-robin is there to compare with")
    fallback: str = Field(default="", description="the model that takes what this one cannot serve in time")


class Fleet(Document):
    """What `serve` runs behind one address."""

    kind: ClassVar[str] = "fleet"

    models: dict[str, Served] = Field(min_length=1)
    tenants: str = Field(default="", description="path of a tenants.yaml; none: everybody may ask")

    @model_validator(mode="after")
    def _names_are_known(self) -> Fleet:
        names = [*self.models, *(name for one in self.models.values() for name in (*one.aliases, *one.adapters))]
        if twice := {name for name in names if names.count(name) > 1}:
            raise ValueError(f"{min(twice)} is the name of two models")
        for name, one in self.models.items():
            if one.fallback and (one.fallback not in self.models or one.fallback == name):
                raise ValueError(f"the fallback of {name} must be another model of the fleet")
        return self


class Tenant(Value):
    """Somebody who may ask, and how much."""

    key_sha256: str = Field(pattern="^[0-9a-f]{64}$", description="of the API key; the key itself is kept nowhere")
    priority: Class = "normal"
    rate_per_s: float | None = Field(default=None, gt=0)
    burst: int = Field(default=10, ge=1, description="requests at once before the rate counts")
    in_flight: int | None = Field(default=None, ge=1)
    models: tuple[str, ...] = Field(default=(), description="that it may ask for; none: all")


class Tenants(Document):
    """Who may ask."""

    kind: ClassVar[str] = "tenants"

    tenants: dict[str, Tenant] = Field(min_length=1)
