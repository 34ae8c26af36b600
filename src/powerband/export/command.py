"""A shell script with the command line that was measured."""

from __future__ import annotations

from powerband.core.recipe import Recipe


def files(recipe: Recipe) -> dict[str, str]:
    """Return the script."""
    return {"serve.sh": f"#!/bin/sh\n# {recipe.summary}\n# measured on: {recipe.devices}\nexec env {recipe.command}\n"}
