"""A recipe as a container: an image with the measured build, the measured options, and the devices of a replica."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

import yaml

from powerband import engines
from powerband.core import hub_id
from powerband.core.deployment import Deployment
from powerband.core.device import Vendor
from powerband.core.engine import Installation
from powerband.core.recipe import Recipe
from powerband.errors import InputError
from powerband.export import images
from powerband.launchers.local import start_timeout_s

PORT = 8000
_PROGRAMS = {"vllm": ("serve",), "llamacpp": ("llama-server",)}  # in the images, before the options
_SHARED_MEMORY_BYTES = 16 * 2**30  # a limit: it is used only as far as the workers of an engine exchange data


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
    vendor: Vendor
    shared_memory_bytes: int  # 0: the runtime's default
    memory_bytes: int | None
    start_timeout_s: float


def deployment(recipe: Recipe, **changes: Any) -> Deployment[Any]:
    """Return the recipe's deployment, with some fields replaced."""
    return engines.deployment_of({**recipe.deployment, **changes})


def service_name(own: Deployment[Any]) -> str:
    """Return the served name as a DNS label."""
    return own.served_name.lower().replace("_", "-").replace(".", "-")


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
    if own.engine not in _PROGRAMS:
        raise InputError(f"no container image of engine '{own.engine}' is known", hint="use --to command or systemd")
    if own.engine == "llamacpp" and hub_id.parse(source):
        raise InputError(
            f"llama-server cannot download {source}: it has no option for a revision",
            hint="download the file with 'hf download', give its path in the recipe, or use --to systemd",
        )
    program = _PROGRAMS[own.engine]
    installation = Installation(
        engine=own.engine, version=recipe.engine_version, origin="given", program=program, build=recipe.engine_build
    )
    command = engines.get(own.engine).command(inside, installation=installation, port=PORT)
    return Container(
        name=service_name(own),
        image=images.image_of(recipe),
        args=command.argv[len(program) :],
        env=command.env,
        weights=source if mount_path != source else "",
        mount_path=mount_path,
        gpus=recipe.gpus,
        vendor=recipe.device_vendor,
        shared_memory_bytes=_SHARED_MEMORY_BYTES if _has_workers(recipe, own) else 0,
        memory_bytes=recipe.promise.memory_bytes,
        start_timeout_s=own.start_timeout or start_timeout_s(recipe.promise.memory_bytes),
    )


def _has_workers(recipe: Recipe, own: Deployment[Any]) -> bool:
    """Tell whether several workers of one replica exchange data: on several GPUs, or on the sockets of a CPU."""
    return recipe.gpus > 1 or (getattr(own.config, "tensor_parallel_size", None) or 1) > 1


def to_yaml(*documents: dict[str, Any]) -> str:
    """Return documents as one YAML stream."""
    return "---\n".join(yaml.safe_dump(one, sort_keys=False, width=120) for one in documents)
