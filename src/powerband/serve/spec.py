"""The resolved spec of a fleet (its desired state): the supervisor and the picker read it when they start."""

from __future__ import annotations

import dataclasses
import json
import math
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from powerband import engines
from powerband.core.allocation import Need, NoRoom, allocate, share_of_cores
from powerband.core.deployment import Deployment
from powerband.core.fleet import Fleet, Routing, Served, Tenants
from powerband.core.recipe import Recipe
from powerband.errors import InputError
from powerband.launchers import local, recipe_devices
from powerband.runtime import devices, leases
from powerband.serve.autoscaling.policy import DEFAULT_ATTAINMENT, ScalingPolicy
from powerband.serve.router.pool import RequestProfile
from powerband.store import documents, runs

_FILE = "spec.json"
_QUEUE_TIMEOUT_S = 30.0  # if no SLO limits TTFT
_QUEUE_SHARE_OF_TTFT = 0.5  # the part of the TTFT limit that a request may spend in the queue


@dataclass(frozen=True)
class ModelSpec:
    """One model of the fleet: its deployment, capacity and routing."""

    name: str
    data: dict[str, Any]  # the deployment document
    recipe: str
    replicas: int
    in_flight: int
    queue_timeout_s: float
    prompt_tokens: float = 200.0  # of a typical request
    output_tokens: float = 100.0  # of a typical request
    rate_per_s: float | None = None  # of one replica, within the SLO
    usd_per_h: float = 0.0  # of one replica
    usd_per_1m_tokens: float = 0.0
    aliases: tuple[str, ...] = ()
    adapters: tuple[str, ...] = ()
    routing: Routing = "prefix"
    fallback: str = ""
    max_replicas: int | None = None
    initial_replicas: int | None = None  # default: `replicas`
    attainment: float = DEFAULT_ATTAINMENT  # share of the requests that the autoscaler serves within the SLO
    warm: int = 0  # standby replicas: started, without traffic
    start_s: float = 10.0
    start_timeout_s: float = 600.0
    devices: int = 0  # GPUs of one replica
    device_free_bytes: int = 0  # on each of them
    device_free_share: float = 0.0  # of the memory of each
    over_nodes: bool = False  # one replica spans several machines
    ttft_s: float | None = None  # the SLO's limit
    weights_bytes: int | None = None
    kv_bytes: int | None = None
    path: str = ""  # of the recipe file

    @property
    def typical_request(self) -> RequestProfile:
        """Return the profile of a typical request."""
        return RequestProfile(self.prompt_tokens, self.output_tokens)

    @property
    def scales(self) -> bool:
        """Tell whether the model autoscales."""
        return self.max_replicas is not None

    @property
    def first_replicas(self) -> int:
        """Return the number of replicas to begin with."""
        if self.max_replicas is None or self.initial_replicas is None:
            return self.replicas
        return max(self.replicas, min(self.max_replicas, self.initial_replicas))

    def scaling_policy(self) -> ScalingPolicy:
        """Return the autoscaling policy; only for a model that scales."""
        assert self.max_replicas is not None
        rate_per_s = self.rate_per_s or self.in_flight / 2
        return ScalingPolicy(
            rate_per_s,
            self.in_flight,
            self.start_s,
            min_replicas=self.replicas,
            max_replicas=self.max_replicas,
            attainment=self.attainment,
            queue_timeout_s=self.queue_timeout_s,
        )

    @classmethod
    def from_data(cls, data: dict[str, Any]) -> ModelSpec:
        """Build a spec from its JSON data."""
        return cls(**{**data, "aliases": tuple(data["aliases"]), "adapters": tuple(data["adapters"])})

    def deployment(self) -> Deployment[Any]:
        """Return the deployment of each replica, named as the fleet names the model."""
        return engines.deployment_of({**self.data, "name": self.name})


@dataclass(frozen=True)
class FleetSpec:
    """All models of a fleet, and the settings that they share."""

    models: dict[str, ModelSpec]
    host: str
    port: int
    admin_port: int
    redirector_port: int  # answers the requests that no picker has read
    tenants: str = ""  # path of tenants.yaml
    threads: int = 1  # Envoy's worker threads
    tls_cert: str = ""  # path of the certificate chain, in PEM; empty: plain HTTP
    tls_key: str = ""
    cluster: str = ""  # address of the Ray cluster that runs the replicas; empty: this machine
    relay_secret: str = ""  # that relays on other machines ask of Envoy
    capture: bool = False  # record lengths, times and block ids of requests
    capture_text: bool = False  # also record prompts, with addresses, numbers and keys redacted

    @property
    def url(self) -> str:
        """Return the address of the fleet."""
        return f"{'https' if self.tls_cert else 'http'}://{self.host}:{self.port}"

    def write(self, folder: Path) -> None:
        """Write the spec, which has the relays' secret, into the fleet's folder."""
        runs.write_atomic(folder / _FILE, json.dumps(dataclasses.asdict(self)), mode=0o600)

    @classmethod
    def read(cls, folder: Path) -> FleetSpec:
        """Read the spec from a fleet's folder."""
        try:
            data = json.loads((folder / _FILE).read_text())
        except OSError:
            raise InputError(
                f"{folder} is not a fleet's folder: it has no {_FILE}",
                hint="give the folder that 'powerband serve' printed",
            ) from None
        models = {name: ModelSpec.from_data(one) for name, one in data.pop("models").items()}
        return cls(models=models, **data)

    def model(self, name: str | None) -> ModelSpec:
        """Return the model with this name; None selects the only model of the fleet."""
        if name is None and len(self.models) == 1:
            return next(iter(self.models.values()))
        if name not in self.models:
            raise InputError(
                f"the fleet serves {len(self.models)} models" if name is None else f"the fleet serves no model {name}",
                hint=f"choose one with --model: {', '.join(self.models)}",
            )
        return self.models[name]

    def with_model(self, model: ModelSpec) -> FleetSpec:
        """Return a copy in which this spec replaces the model of the same name."""
        return dataclasses.replace(self, models={**self.models, model.name: model})


def check_certificate(cert: str, key: str) -> tuple[str, str]:
    """Return the absolute paths of a certificate and its key; raise InputError if they do not fit each other."""
    paths = [str(Path(one).expanduser().resolve()) for one in (cert, key)]
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(paths[0], paths[1])
    except (OSError, ssl.SSLError) as error:
        raise InputError(
            f"the certificate {cert} cannot be used with the key {key}: {error}",
            hint="give both files in PEM format, the key without a passphrase",
        ) from None
    return paths[0], paths[1]


def resolve(
    path: Path, *, replicas: int | None = None, report: Callable[[str], None] = lambda _: None
) -> tuple[dict[str, ModelSpec], str]:
    """Return the models of a fleet file, or of a single recipe or deployment, and the path of the tenants file."""
    document = documents.read(str(path))
    if isinstance(document, Fleet):
        if document.tenants:
            documents.read_as(Tenants, path.parent / document.tenants)  # report an invalid file before anything starts
        tenants = str((path.parent / document.tenants).resolve()) if document.tenants else ""
        models = {name: _model(name, one, path.parent / one.recipe, report) for name, one in document.models.items()}
        return models, tenants
    served = Served(recipe=str(path), replicas=replicas)
    model = _model("", served, path, report)
    return {model.name: model}, ""


def model_of_recipe(recipe: Recipe, path: Path) -> ModelSpec:
    """Return what a picker needs to know of a recipe whose replicas others start."""
    deployment, measured = engines.deployment_of(recipe.deployment), measured_fields(recipe)
    if measured["in_flight"] is None:
        raise InputError(
            f"{path} does not say how many requests a replica has in flight",
            hint="set 'in_flight' below its 'promise', or tune again",
        )
    return ModelSpec(
        name=deployment.served_name,
        data=_alone(deployment).to_data(),
        recipe=recipe.name or path.stem,
        path=str(path.resolve()),
        replicas=0,
        **measured,
    )


def placed(models: dict[str, ModelSpec]) -> dict[str, ModelSpec]:
    """Return the models with the cores of this machine divided among their replicas; raise if they do not fit.

    A replica that the autoscaler may start counts for its cores, but not for GPUs: it waits until they are free.
    """
    host = devices.this_host()
    taken = set(leases.held(host))
    for model in models.values():
        allowed = model.data.get("placement", {}).get("gpus")
        need = Need(
            devices=model.devices,
            free_bytes=model.device_free_bytes,
            free_share=model.device_free_share,
            allowed=allowed,
        )
        for number in range(model.replicas + model.warm if model.devices else 0):
            try:
                taken.update(allocate(host, need, taken=taken).units)
            except NoRoom as error:
                raise InputError(
                    f"{number} of {model.replicas + model.warm} replicas of {model.name} fit: {error.message}",
                    hint=f"serve {number} replicas, or free GPUs" if number else error.hint,
                ) from None
    on_cores = [one for one in models.values() if _computes_on_cores(one)]
    share = share_of_cores(host, sum(max(one.replicas, one.max_replicas or 0) + one.warm for one in on_cores))
    return {name: _with_cores(one, share) if one in on_cores else one for name, one in models.items()}


def _computes_on_cores(model: ModelSpec) -> bool:
    return not model.devices and not model.over_nodes and engines.get(model.data["engine"]).reads_weights


def _with_cores(model: ModelSpec, share: int | None) -> ModelSpec:
    placement = {"cores": share} | model.data.get("placement", {}) if share else model.data.get("placement", {})
    return dataclasses.replace(model, data={**model.data, "placement": placement})


def _model(name: str, served: Served, path: Path, report: Callable[[str], None]) -> ModelSpec:
    document = documents.read(str(path))
    if isinstance(document, Recipe):
        deployment, measured = engines.deployment_of(document.deployment), measured_fields(document)
        recipe_devices.require(document, deployment, devices.this_host())
    elif isinstance(document, Deployment):
        deployment, measured = document, {}
    else:
        raise InputError(
            f"{path} is a {document.kind} and cannot be served", hint="give a recipe, a deployment or a fleet"
        )
    prepared = local.prepare(deployment, now=False, report=report)
    if prepared.engine.attaches:
        raise InputError(
            f"{path} attaches to a server that is already running; 'powerband serve' starts its own replicas",
            hint="give a deployment of vllm or llamacpp",
        )
    max_concurrency = prepared.engine.max_concurrency(prepared.deployment, model=prepared.model, host=prepared.host)
    in_flight = measured.pop("in_flight", None) or max_concurrency
    queue_timeout_s = measured.pop("queue_timeout_s", _QUEUE_TIMEOUT_S)
    return ModelSpec(
        name=name or prepared.deployment.served_name,
        data=_alone(prepared.deployment).to_data(),
        recipe=document.name or path.stem,
        path=str(path.resolve()),
        replicas=prepared.deployment.placement.replicas if served.replicas is None else served.replicas,
        in_flight=served.in_flight or min(max_concurrency, in_flight),
        queue_timeout_s=served.queue_timeout_s or queue_timeout_s,
        aliases=served.aliases,
        adapters=served.adapters,
        routing=served.routing,
        fallback=served.fallback,
        max_replicas=served.max_replicas,
        initial_replicas=served.initial_replicas,
        attainment=served.attainment or DEFAULT_ATTAINMENT,
        warm=served.warm,
        start_s=prepared.engine.typical_start_s,
        start_timeout_s=prepared.start_timeout_s,
        devices=prepared.footprint.devices,
        device_free_bytes=prepared.footprint.gpu_free_bytes,
        device_free_share=prepared.footprint.gpu_free_share,
        over_nodes=prepared.footprint.over_nodes,
        weights_bytes=prepared.footprint.weights_bytes,
        kv_bytes=prepared.footprint.kv_bytes,
        **measured,
    )


def _alone(deployment: Deployment[Any]) -> Deployment[Any]:
    """Return the deployment of one replica of those that were measured as one."""
    return deployment.model_copy(update={"placement": deployment.placement.model_copy(update={"replicas": 1})})


def measured_fields(recipe: Recipe) -> dict[str, Any]:
    """Return the ModelSpec fields of one replica that follow from a recipe's SLO and measurements."""
    replicas, in_flight = recipe.replicas, recipe.promise.in_flight
    ttft_limits_s = [limit for metric, _, limit in recipe.promise.slo.bounds() if metric == "ttft"]
    found: dict[str, Any] = {
        "rate_per_s": recipe.promise.rate_per_s / replicas,
        "usd_per_h": recipe.usd_per_h / replicas,
        "usd_per_1m_tokens": recipe.usd_per_1m_tokens,
        "in_flight": in_flight and math.ceil(in_flight / replicas),
        "queue_timeout_s": _QUEUE_SHARE_OF_TTFT * min(ttft_limits_s) if ttft_limits_s else _QUEUE_TIMEOUT_S,
        "ttft_s": min(ttft_limits_s, default=None),
    }
    for name in ("prompt_tokens", "output_tokens"):
        if (valid := recipe.validity.get(name)) is not None:
            found[name] = math.sqrt(max(valid.low, 1.0) * max(valid.high, 1.0))
    return found
