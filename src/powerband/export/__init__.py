"""The stage `export`: a recipe as Compose, Kubernetes, Ray Serve, systemd, Grafana or Prometheus files.

Each module is one target, with a function `files` that returns the files by name. `_PARTS` are what
they are made of.
"""

from __future__ import annotations

import importlib
import pkgutil

from powerband.core.recipe import Recipe
from powerband.errors import InputError, did_you_mean

_ONE_ENGINE = ("command", "compose", "kubernetes", "ray-serve")
_PARTS = ("container", "images", "kubernetes_objects", "kubernetes_picker", "recording")
TARGETS = tuple(
    sorted(found.name.replace("_", "-") for found in pkgutil.iter_modules(__path__) if found.name not in _PARTS)
)


def export(recipe: Recipe, to: str, *, image: str | None = None) -> dict[str, str]:
    """Return the files of a target, by name; `image` replaces the published container image of the engine's build."""
    if to not in TARGETS:
        raise InputError(
            f"unknown export target '{to}'.{did_you_mean(to, TARGETS)}", hint=f"targets: {', '.join(TARGETS)}"
        )
    if recipe.replicas > 1 and to in _ONE_ENGINE:
        raise InputError(
            f"the recipe divides the cores of a machine among {recipe.replicas} replicas; {to} files start one engine",
            hint="use --to systemd, which runs 'powerband serve', or tune with engines that have all cores",
        )
    if image:
        recipe = recipe.model_copy(update={"image": image})
    found: dict[str, str] = importlib.import_module(f"powerband.export.{to.replace('-', '_')}").files(recipe)
    return found
