"""Leave out combinations of levers that cannot run on this machine, before anything is built or started."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from powerband import engines
from powerband.core.engine import Installation, Lever
from powerband.core.host import Host
from powerband.core.model import Model
from powerband.core.study import ENGINE, Settings
from powerband.errors import DeploymentRefused
from powerband.launchers import local
from powerband.runtime import installations
from powerband.store import schemes
from powerband.store.schemes import published_scheme
from powerband.tune.search_space import WEIGHTS, SearchSpace, key


def model_in(model: Model, scheme: str | None) -> Model:
    """Return the facts of the model's variant in a scheme, which need not exist yet."""
    if not scheme or model.shape is None or scheme == published_scheme(model).name:
        return model
    made = schemes.scheme(scheme)
    return model.model_copy(update={"format": made.format, "weight_bytes": int(made.weight_bytes(model.shape))})


def devices(space: SearchSpace, model: Model, host: Host, settings: Settings) -> int:
    """Return how many devices of a host settings occupy; a CPU machine counts as one."""
    if not host.gpus or not (engine := engines.get(settings[ENGINE])).reads_weights:
        return 1
    served = model_in(model, settings.get(WEIGHTS))
    deployment = engines.deployment_of(space.document(settings, model.source))
    footprint = engine.footprint(deployment, model=served, host=host)
    return max(1, footprint.gpu_ways * footprint.copies)


def narrowed(
    space: SearchSpace, model: Model, host: Host, *, find: Callable[[str], Installation] = installations.find
) -> SearchSpace:
    """Return the space without combinations that the engine's rules or the free memory rule out.

    Where an engine's defaults cannot run, the runnable combination nearest to them takes their place.
    """
    cannot_run, by_engine = {}, {}
    for engine, levers in space.by_engine.items():
        if not engines.get(engine).reads_weights:
            by_engine[engine] = levers
            continue
        why = _checker(space, engine, model, host, find(engine))
        default = space.defaults(engine)
        able = []
        for settings in space.of(engine):
            if reason := why(settings):
                cannot_run[key(settings)] = reason
            else:
                able.append(settings)
        if able:
            by_engine[engine] = _with_default(levers, min(able, key=lambda one: _distance(space, default, one)))
    if not by_engine:
        raise DeploymentRefused(
            f"no combination of levers fits on this machine: {next(iter(cannot_run.values()))}",
            hint="use a machine with more memory, a smaller model, or requests with a shorter context",
        )
    return replace(space, by_engine=by_engine, cannot_run=cannot_run)


def _checker(
    space: SearchSpace, engine: str, model: Model, host: Host, installation: Installation
) -> Callable[[Settings], str]:
    """Return a function that tells why settings of an engine cannot run here; empty: nothing is known against them."""

    def why(settings: Settings) -> str:
        served = model_in(model, settings.get(WEIGHTS))
        deployment = engines.deployment_of(space.document(settings, model.source))
        one = local.Prepared(deployment, installation=installation, model=served, host=host)
        refusals = [problem.sentence for problem in one.problems if problem.severity == "refuse"]
        return refusals[0] if refusals else ""

    return why


def _distance(space: SearchSpace, default: Settings, settings: Settings) -> tuple[int, int, int]:
    """Return how far settings are from the defaults: first by levers that can change answers, then by all levers."""
    changed = [name for name in settings if settings[name] != default[name]]
    levers = {one.name: one for one in space.by_engine[settings[ENGINE]]}
    order = sum(list(levers[name].settings).index(settings[name]) for name in changed)
    return sum(levers[name].affects_quality for name in changed), len(changed), order


def _with_default(levers: tuple[Lever, ...], default: Settings) -> tuple[Lever, ...]:
    """Return the levers with the settings of `default` first."""
    return tuple(
        one.model_copy(update={"settings": {default[one.name]: one.settings[default[one.name]], **one.settings}})
        for one in levers
    )
