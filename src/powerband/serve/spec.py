"""What `serve` was asked for, resolved: written once, read by the supervisor whenever it starts."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from powerband import engines
from powerband.core.deployment import Deployment
from powerband.core.fleet import Fleet, Routing, Served, Tenants
from powerband.core.recipe import Recipe
from powerband.errors import InputError
from powerband.launchers import local
from powerband.serve.control.autoscaler import ScalingPolicy
from powerband.serve.router.pool import RequestProfile
from powerband.store import documents, runs

_NAME = "order.json"
_PATIENCE_S = 30.0  # where no SLO says how long one may wait
_OF_THE_SLO = 0.5  # of its TTFT may be spent in the queue


@dataclass(frozen=True)
class ModelSpec:
    """One model of the fleet."""

    name: str
    data: dict[str, Any]  # the deployment
    recipe: str
    replicas: int
    in_flight: int
    queue_timeout_s: float
    prompt_tokens: float = 200.0  # of a usual request
    output_tokens: float = 100.0
    rate_per_s: float | None = None
    usd_per_h: float = 0.0  # of one replica
    usd_per_1m_tokens: float = 0.0
    aliases: tuple[str, ...] = ()
    adapters: tuple[str, ...] = ()
    routing: Routing = "prefix"
    fallback: str = ""
    max_replicas: int | None = None
    warm: int = 0  # replicas that are started and asked nothing
    start_s: float = 10.0
    ttft_s: float | None = None  # that is promised
    weights_bytes: int | None = None
    kv_bytes: int | None = None
    path: str = ""  # of the recipe

    @property
    def usual(self) -> RequestProfile:
        """Return a usual request."""
        return RequestProfile(self.prompt_tokens, self.output_tokens)

    @property
    def scales(self) -> bool:
        """Tell whether the number of replicas follows the traffic."""
        return self.max_replicas is not None

    def policy(self) -> ScalingPolicy:
        """Return how it scales."""
        assert self.max_replicas is not None
        rate = self.rate_per_s or self.in_flight / 2
        return ScalingPolicy(rate, self.in_flight, self.start_s, least=self.replicas, most=self.max_replicas)

    @classmethod
    def of(cls, data: dict[str, Any]) -> ModelSpec:
        """Read it back from plain data."""
        return cls(**{**data, "aliases": tuple(data["aliases"]), "adapters": tuple(data["adapters"])})

    def deployment(self) -> Deployment[Any]:
        """Return the deployment that each replica is, under the fleet's name for it."""
        return engines.deployment_of({**self.data, "name": self.name})


@dataclass(frozen=True)
class FleetSpec:
    """A whole fleet."""

    parts: dict[str, ModelSpec]
    host: str
    port: int
    admin_port: int
    tenants: str = ""
    threads: int = 1  # of Envoy
    cluster: str = ""  # of Ray, whose nodes hold the replicas; none: this machine does
    capture: bool = False  # note what the traffic looks like
    capture_text: bool = False  # and what was asked, with addresses, numbers and keys blotted out

    def write(self, folder: Path) -> None:
        """Keep it where the supervisor finds it."""
        runs.write_atomic(folder / _NAME, json.dumps(dataclasses.asdict(self)))

    @classmethod
    def read(cls, folder: Path) -> FleetSpec:
        """Read it back from a fleet's folder."""
        try:
            data = json.loads((folder / _NAME).read_text())
        except OSError:
            raise InputError(f"{folder} is no fleet's", hint="give the folder that 'powerband serve' named") from None
        parts = {name: ModelSpec.of(one) for name, one in data.pop("parts").items()}
        return cls(parts=parts, **data)

    def part(self, wanted: str | None) -> ModelSpec:
        """Return the model that is meant: the one with that name, or the only one."""
        if wanted is None and len(self.parts) == 1:
            return next(iter(self.parts.values()))
        if wanted not in self.parts:
            raise InputError(
                "the fleet serves several models" if wanted is None else f"the fleet serves no {wanted}",
                hint=f"name one with --model: {', '.join(self.parts)}",
            )
        return self.parts[wanted]

    def with_part(self, part: ModelSpec) -> FleetSpec:
        """Return the order with another recipe for one model."""
        return dataclasses.replace(self, parts={**self.parts, part.name: part})


def resolve(path: Path, *, replicas: int | None = None) -> tuple[dict[str, ModelSpec], str]:
    """Return the parts of a fleet's file, or of a single recipe or deployment; and the path of its tenants."""
    document = documents.read(str(path))
    if isinstance(document, Fleet):
        if document.tenants:
            documents.of(Tenants, path.parent / document.tenants)  # refuse a bad file before anything starts
        tenants = str((path.parent / document.tenants).resolve()) if document.tenants else ""
        parts = {name: _part(name, one, path.parent / one.recipe) for name, one in document.models.items()}
        return parts, tenants
    served = Served(recipe=str(path), replicas=replicas or 1)
    part = _part("", served, path)
    return {part.name: part}, ""


def _part(name: str, served: Served, path: Path) -> ModelSpec:
    document = documents.read(str(path))
    if isinstance(document, Recipe):
        deployment, proven = engines.deployment_of(document.deployment), _proven(document)
    elif isinstance(document, Deployment):
        deployment, proven = document, {}
    else:
        raise InputError(f"{path} is a {document.kind}", hint="give a recipe, a deployment or a fleet")
    prepared = local.prepare(deployment)
    if prepared.engine.attaches:
        raise InputError(f"{path} is a server that somebody else runs", hint="serve a deployment of vllm or llamacpp")
    at_once = prepared.engine.at_once(prepared.deployment, model=prepared.model, host=prepared.host)
    in_flight, queue_timeout_s = proven.pop("in_flight", None) or at_once, proven.pop("queue_timeout_s", _PATIENCE_S)
    return ModelSpec(
        name=name or prepared.deployment.served_name,
        data=prepared.deployment.to_data(),
        recipe=document.name or path.stem,
        path=str(path.resolve()),
        replicas=served.replicas,
        in_flight=served.in_flight or min(at_once, in_flight),
        queue_timeout_s=served.queue_timeout_s or queue_timeout_s,
        aliases=served.aliases,
        adapters=served.adapters,
        routing=served.routing,
        fallback=served.fallback,
        max_replicas=served.max_replicas,
        warm=served.warm,
        weights_bytes=prepared.footprint.weights_bytes,
        kv_bytes=prepared.footprint.kv_bytes,
        **proven,
    )


def _proven(recipe: Recipe) -> dict[str, Any]:
    """Return what a recipe's evidence says about how to serve it."""
    waits = [limit for metric, _, limit in recipe.promise.slo.bounds() if metric == "ttft"]
    found: dict[str, Any] = {
        "rate_per_s": recipe.promise.rate_per_s,
        "usd_per_h": recipe.usd_per_h,
        "usd_per_1m_tokens": recipe.usd_per_1m_tokens,
        "in_flight": recipe.promise.in_flight,
        "queue_timeout_s": _OF_THE_SLO * min(waits) if waits else _PATIENCE_S,
        "ttft_s": min(waits, default=None),
    }
    for name in ("prompt_tokens", "output_tokens"):
        if (seen := recipe.validity.get(name)) is not None:
            found[name] = math.sqrt(max(seen.low, 1.0) * max(seen.high, 1.0))
    return found
