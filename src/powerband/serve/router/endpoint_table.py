"""The endpoints of a picker of its own: what discovery finds, with what the recipes and the scrapes know of each."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from powerband.core.recipe import Recipe, label_value
from powerband.errors import InputError, PowerbandError
from powerband.serve.autoscaling.autoscaler import Autoscaler, Decision
from powerband.serve.autoscaling.snapshot import FleetSnapshot
from powerband.serve.discovery import Discovered
from powerband.serve.discovery.scrape import Scraper
from powerband.serve.router.scheduler import RequestScheduler
from powerband.serve.spec import ModelSpec, model_of_recipe
from powerband.store import documents


@dataclass(frozen=True)
class KnownRecipes:
    """The recipes that a picker was given. The first recipe of a model has its SLO and prices; all may serve it."""

    by_name: dict[str, ModelSpec]  # by recipe name, as a label value

    @classmethod
    def read(cls, paths: Sequence[Path]) -> KnownRecipes:
        """Read recipe files, and all *.yaml files of folders, in the order given."""
        found: dict[str, ModelSpec] = {}
        for path in recipe_files(paths):
            model = model_of_recipe(documents.read_as(Recipe, path), path)
            if found.setdefault(name := label_value(model.recipe), model) is not model:
                raise InputError(
                    f"two recipes have the name {name}: {found[name].path} and {path}",
                    hint="give each recipe a 'name' of its own",
                )
        return cls(found)

    @property
    def models(self) -> dict[str, ModelSpec]:
        """Return the first recipe of each model, by the name that requests use."""
        return {one.name: one for one in reversed(self.by_name.values())}

    def of(self, endpoint: Discovered) -> ModelSpec | None:
        """Return the recipe that an endpoint serves; None if it names one that is not known."""
        return self.by_name.get(endpoint.recipe) if endpoint.recipe else next(iter(self.by_name.values()))


def recipe_files(paths: Sequence[Path]) -> list[Path]:
    """Return the files that the paths name; a folder has those of a mounted ConfigMap."""
    found = [file for path in paths for file in (sorted(path.glob("*.yaml")) if path.is_dir() else [path])]
    if not found:
        raise InputError(f"there is no recipe in {', '.join(map(str, paths))}", hint="a recipe's file ends in .yaml")
    return found


class EndpointTable:
    """Keeps the scheduler's endpoints equal to the discovered ones."""

    def __init__(
        self,
        scheduler: RequestScheduler,
        recipes: KnownRecipes,
        *,
        canary_weight: float | None,
        scrape_interval_s: float,
        replicas: tuple[int, int],
    ) -> None:
        self.scheduler, self.recipes, self.canary_weight = scheduler, recipes, canary_weight
        self.scraper = Scraper(scrape_interval_s, self._on_reading)
        self.informed = False  # the source has reported
        self._found: Sequence[Discovered] = ()
        self._min_replicas, self._max_replicas = replicas
        self._autoscalers: dict[str, Autoscaler] = {}
        self._excess: dict[str, int] = {}  # requests of the last reading that this picker has not sent

    @property
    def has_ready(self) -> bool:
        """Tell whether any endpoint is ready."""
        return any(one.ready for pool in self.scheduler.pools.values() for one in pool.endpoints.values())

    def update(self, found: Sequence[Discovered]) -> None:
        """Replace the discovered endpoints."""
        self.informed, self._found = True, found
        known = {one.address: model for one in found if (model := self.recipes.of(one))}
        for one in found:
            if one.address not in known:
                print(f"warning: {one.name} has the unknown recipe {one.recipe}", file=sys.stderr, flush=True)
        self.scraper.update(
            {address: str(model.data["engine"]) for address, model in known.items()},
            probed={one.address for one in found if one.ready is None},
        )
        self._apply()

    def reload(self, paths: Sequence[Path]) -> None:
        """Read the recipes again; an invalid one changes nothing."""
        try:
            self.recipes = KnownRecipes.read(paths)
        except (PowerbandError, OSError) as error:
            print(f"error: recipes not loaded: {error}", file=sys.stderr, flush=True)
            return
        self.scheduler.update_models(self.recipes.models)
        self._autoscalers.clear()
        self.update(self._found)

    def _apply(self) -> None:
        models = self.recipes.models
        endpoints: dict[str, list[dict[str, Any]]] = {name: [] for name in self.scheduler.pools}
        for one in self._found:
            if (model := self.recipes.of(one)) is None:
                continue
            endpoints[model.name].append(
                {
                    "name": one.name,
                    "address": one.address,
                    "max_in_flight": model.in_flight,
                    "ready": self.scraper.readings[one.address].answers if one.ready is None else one.ready,
                    "recipe": model.recipe,
                    "canary": self.canary_weight is not None and model is not models[model.name],
                }
            )
        self.scheduler.update_endpoints(endpoints, dict.fromkeys(endpoints, self.canary_weight or 0.0))

    def _on_reading(self, address: str) -> None:
        """Apply what an endpoint answered: whether it is ready, and the requests that it has from elsewhere."""
        if any(one.address == address and one.ready is None for one in self._found):
            self._apply()
        requests = self.scraper.readings[address].requests
        for pool in self.scheduler.pools.values():
            for one in pool.subset((address,)):
                excess = max(0, requests - one.running) if requests is not None else 0
                one.others = min(
                    excess, self._excess.get(address, 0)
                )  # one reading may count a request that just ended
                self._excess[address] = excess

    def replica_status(self, *, leads: bool, late: Mapping[str, int]) -> dict[str, Any]:
        """Return the endpoints' gauges for the exported metrics, and how many replicas a leader wants.

        `late` has the requests of each model whose first token came after the limit of the SLO.
        """
        rows = []
        for one in self._found:
            if (model := self.recipes.of(one)) and (reading := self.scraper.readings.get(one.address)):
                gauges = reading.gauges.model_dump(exclude_none=True)
                rows.append({"model": model.name, "name": one.name, "gauges": gauges, "start_s": one.start_s})
        decisions = self._decisions(late) if leads else {}
        return {
            "replicas": rows,
            "wanted": {name: one.replicas for name, one in decisions.items()},
            "scaling": {name: asdict(one) for name, one in decisions.items()},
        }

    def _decisions(self, late: Mapping[str, int]) -> dict[str, Decision]:
        """Return the replicas that each model's load needs, by the promise of its recipe."""
        found = {}
        for name, model in self.recipes.models.items():
            pool = self.scheduler.pools[name]
            starts_s = [one.start_s for one in self._found if one.start_s is not None]
            if name not in self._autoscalers:
                scaled = replace(
                    model,
                    replicas=self._min_replicas,
                    max_replicas=self._max_replicas,
                    start_s=max(starts_s, default=model.start_s),
                )
                self._autoscalers[name] = Autoscaler(scaled.scaling_policy())
            ready = [one for one in pool.endpoints.values() if one.ready]
            snapshot = FleetSnapshot(
                at_s=time.monotonic(),
                ready=len(ready),
                starting=len(pool.endpoints) - len(ready),
                waiting=pool.depth,
                running=pool.running,
                arrived=pool.arrived + pool.turned_away,
                rejected=pool.turned_away + pool.expired,
                late=late.get(name, 0),
            )
            found[name] = self._autoscalers[name].decide(snapshot)
        return found
