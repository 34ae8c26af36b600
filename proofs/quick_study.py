"""Run `powerband tune` as a user would, and read what it said and wrote."""

from __future__ import annotations

import json
import re
import time
from dataclasses import dataclass
from pathlib import Path

from prelude import powerband

from powerband.core.recipe import Recipe
from powerband.core.study import Study
from powerband.store import documents

_UNITS = {"s": 1.0, "min": 60.0, "h": 3600.0}


@dataclass(frozen=True)
class Finished:
    """A study that ended with a recipe."""

    seconds: float
    predicted_s: float  # by its first line
    study: Study
    recipe: Recipe

    @property
    def looked(self) -> int:
        """Return the number of configurations that were started."""
        return sum(one.outcome != "ruled out" for one in self.study.trials)

    @property
    def building_s(self) -> float:
        """Return the time that built variants, which is outside the budget."""
        return sum(one.excluded_s for one in self.study.trials)


def tune(folder: Path, *arguments: str, timeout: float = 3600) -> Finished:
    """Run a study to its end; raise with its output if it has no recipe."""
    began = time.monotonic()
    done, left = powerband("tune", *arguments, "--output", str(folder), timeout=timeout)
    seconds = time.monotonic() - began
    if done.returncode or left:
        raise SystemExit(f"exit code {done.returncode}, processes left: {left}\n{done.stderr[-3000:]}")
    said = re.search(r"expected duration ([\d.]+) (s|min|h)", done.stderr)
    predicted_s = float(said[1]) * _UNITS[said[2]] if said else 0.0
    (folder / "took.json").write_text(json.dumps({"seconds": seconds, "predicted_s": predicted_s}))
    return finished(folder)


def finished(folder: Path) -> Finished:
    """Read a study that ended, with the durations in took.json."""
    study, recipe = documents.read_as(Study, folder / "study.json"), documents.read_as(Recipe, folder / "recipe.yaml")
    return Finished(**json.loads((folder / "took.json").read_text()), study=study, recipe=recipe)
