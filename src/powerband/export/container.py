"""A recipe as a container: the engine's published image, and the very options that were proven."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

import yaml

from powerband import engines
from powerband.core.deployment import Deployment
from powerband.core.engine import Installation
from powerband.core.recipe import Recipe
from powerband.errors import InputError

PORT = 8000
_IMAGES = {  # where the engines' own projects publish them
    "vllm": ("vllm/vllm-openai:v{version}", ("serve",)),
    "llamacpp": ("ghcr.io/ggml-org/llama.cpp:server", ("llama-server",)),
}


@dataclass(frozen=True)
class Container:
    """What to run, and what it needs from outside."""

    name: str
    image: str
    args: tuple[str, ...]
    env: dict[str, str]
    weights: str  # on the host
    mounted: str  # in the container
    gpus: int
    memory_bytes: int | None


def deployment(recipe: Recipe, **changes: Any) -> Deployment[Any]:
    """Return the recipe's deployment, with some of its parts replaced."""
    return engines.deployment_of({**recipe.deployment, **changes})


def container(recipe: Recipe) -> Container:
    """Return the recipe as a container."""
    own = deployment(recipe)
    source = own.variant.source
    mounted = f"/models/{PurePosixPath(source).name}" if source.startswith("/") else source
    inside = deployment(
        recipe,
        variant={**own.variant.model_dump(exclude_none=True), "source": mounted},
        placement={"host": "0.0.0.0"},
    )
    if own.engine not in _IMAGES:
        raise InputError(f"there is no image of '{own.engine}'", hint="export it --to command")
    image, program = _IMAGES[own.engine]
    version = recipe.engine_version.partition("+")[0]
    there = Installation(engine=own.engine, version=version, origin="given", program=program)
    command = engines.get(own.engine).command(inside, installation=there, port=PORT)
    return Container(
        name=own.served_name.lower().replace("_", "-").replace(".", "-"),
        image=image.format(version=version),
        args=command.argv[len(program) :],
        env=command.env,
        weights=source if mounted != source else "",
        mounted=mounted,
        gpus=len(own.placement.gpus or ()),
        memory_bytes=recipe.promise.memory_bytes,
    )


def text(*documents: dict[str, Any]) -> str:
    """Return YAML."""
    return "---\n".join(yaml.safe_dump(one, sort_keys=False, width=120) for one in documents)
