"""Whether a machine has the devices that a recipe was measured on."""

from __future__ import annotations

from typing import Any

from powerband import engines
from powerband.core.deployment import Deployment
from powerband.core.host import Host
from powerband.core.model import Model
from powerband.core.recipe import Recipe
from powerband.errors import DeploymentRefused
from powerband.runtime import model_files


def require(recipe: Recipe, deployment: Deployment[Any], host: Host, *, changed: bool = False) -> None:
    """Raise if this machine has fewer GPUs than one replica of the recipe: its promise would not hold here."""
    if getattr(deployment.config, "distributed_executor_backend", None) == "ray":
        return  # the GPUs of one replica are on several machines
    if changed and recipe.gpus:
        recipe = recipe.model_copy(update={"gpus": _gpus_needed(recipe, deployment, host)})
    usable = [gpu for gpu in host.gpus if gpu.vendor == recipe.device_vendor]
    if len(usable) >= recipe.gpus:
        return
    listed = f" ({', '.join(sorted({gpu.name for gpu in host.gpus}))})" if host.gpus else ""
    raise DeploymentRefused(
        f"a replica of the recipe runs on {recipe.devices} ({recipe.device_vendor}); "
        f"{len(usable)} of the {len(host.gpus)} visible GPUs are from {recipe.device_vendor}{listed}",
        hint="use a machine like the one it was measured on, make more GPUs visible ('powerband doctor' lists them), "
        "or find a recipe for this machine with 'powerband tune'",
    )


def _gpus_needed(recipe: Recipe, deployment: Deployment[Any], host: Host) -> int:
    """Return the GPUs of one replica with other knobs than the recipe's."""
    engine, source = engines.get(deployment.engine), deployment.variant.full_source
    needed: int | None = engine.derived(deployment, model=Model(source=source)).get("gpus_needed")
    if needed is None and host.gpus:
        needed = engine.footprint(deployment, model=model_files.inspect(source), host=host).devices
    return recipe.gpus if needed is None else needed
