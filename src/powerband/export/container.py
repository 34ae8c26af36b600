"""A recipe as a container: the engine's published image, with the options that were measured."""

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
_IMAGES = {  # as published by the engines' projects: image, and the command before the options
    "vllm": ("vllm/vllm-openai:v{version}", ("serve",)),
    "llamacpp": ("ghcr.io/ggml-org/llama.cpp:server", ("llama-server",)),
}


@dataclass(frozen=True)
class Container:
    """Image, options and resources of a container."""

    name: str
    image: str
    args: tuple[str, ...]
    env: dict[str, str]
    weights: str  # path on the host; empty: the engine downloads them
    mount_path: str  # in the container
    gpus: int
    memory_bytes: int | None


def deployment(recipe: Recipe, **changes: Any) -> Deployment[Any]:
    """Return the recipe's deployment, with some fields replaced."""
    return engines.deployment_of({**recipe.deployment, **changes})


def container(recipe: Recipe) -> Container:
    """Return the recipe as a container."""
    own = deployment(recipe)
    source = own.variant.source
    mount_path = f"/models/{PurePosixPath(source).name}" if source.startswith("/") else source
    inside = deployment(
        recipe,
        variant={**own.variant.model_dump(exclude_none=True), "source": mount_path},
        placement={"host": "0.0.0.0"},
    )
    if own.engine not in _IMAGES:
        raise InputError(f"no container image is known for engine '{own.engine}'", hint="use --to command")
    image, program = _IMAGES[own.engine]
    version = recipe.engine_version.partition("+")[0]
    installation = Installation(engine=own.engine, version=version, origin="given", program=program)
    command = engines.get(own.engine).command(inside, installation=installation, port=PORT)
    return Container(
        name=own.served_name.lower().replace("_", "-").replace(".", "-"),
        image=image.format(version=version),
        args=command.argv[len(program) :],
        env=command.env,
        weights=source if mount_path != source else "",
        mount_path=mount_path,
        gpus=len(own.placement.gpus or ()),
        memory_bytes=recipe.promise.memory_bytes,
    )


def to_yaml(*documents: dict[str, Any]) -> str:
    """Return documents as one YAML stream."""
    return "---\n".join(yaml.safe_dump(one, sort_keys=False, width=120) for one in documents)
