"""The plain command line, as it was proven."""

from __future__ import annotations

from powerband.core.recipe import Recipe


def files(recipe: Recipe) -> dict[str, str]:
    """Return a shell script."""
    return {"serve.sh": f"#!/bin/sh\n# {recipe.summary}\nexec env {recipe.command}\n"}
