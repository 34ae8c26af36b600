"""The stage `export`: a recipe as Compose, Kubernetes, Ray Serve, systemd, Grafana or Prometheus files.

Each module but `container` is one target, with a function `files` that returns the files by name.
"""

from __future__ import annotations

import importlib
import pkgutil

from powerband.core.recipe import Recipe
from powerband.errors import InputError, did_you_mean

TARGETS = tuple(
    sorted(found.name.replace("_", "-") for found in pkgutil.iter_modules(__path__) if found.name != "container")
)


def export(recipe: Recipe, to: str) -> dict[str, str]:
    """Return the files of a target, by name."""
    if to not in TARGETS:
        raise InputError(
            f"unknown export target '{to}'.{did_you_mean(to, TARGETS)}", hint=f"targets: {', '.join(TARGETS)}"
        )
    found: dict[str, str] = importlib.import_module(f"powerband.export.{to.replace('-', '_')}").files(recipe)
    return found
