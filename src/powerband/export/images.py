"""Container images that the engines' projects publish, pinned to the build that a recipe was measured with.

vLLM publishes an image of each release for CUDA, ROCm and CPU. llama.cpp publishes images of each release (v0.5.0) and
of about one build a day (b9603), with the backend in the tag.
"""

from __future__ import annotations

import re

from powerband.core.recipe import Recipe
from powerband.errors import InputError

_VLLM = {"nvidia": "vllm/vllm-openai", "amd": "vllm/vllm-openai-rocm", "cpu": "vllm/vllm-openai-cpu"}
_VLLM_BUILDS = {"nvidia": "cuda", "amd": "rocm", "cpu": "cpu"}  # how the name of a fitting build begins
_LLAMACPP = {"nvidia": "server-cuda", "amd": "server-rocm", "cpu": "server"}
_RELEASE = re.compile(r"\d+\.\d+\.\d+(\.post\d+)?")
_BUILD_NUMBER = re.compile(r"\d{4,}")


def image_of(recipe: Recipe) -> str:
    """Return the image that the recipe names, else the published one of its engine's build; fail if there is none."""
    if recipe.image:
        return recipe.image
    return _vllm(recipe) if recipe.deployment["engine"] == "vllm" else _llamacpp(recipe)


def _vllm(recipe: Recipe) -> str:
    """Return the image of the release, for the vendor of the recipe's devices."""
    version, build, vendor = recipe.engine_version.partition("+")[0], recipe.engine_build, recipe.device_vendor
    if vendor not in _VLLM:
        raise _no_image(f"vLLM publishes no image for {vendor} devices")
    if not _RELEASE.fullmatch(version):
        raise _no_image(f"vLLM publishes images of releases only; the recipe has version '{version}'")
    if build and not build.startswith(_VLLM_BUILDS[vendor]):
        raise _no_image(f"the recipe has the {build} build of vLLM, but its devices are: {recipe.devices} ({vendor})")
    return f"{_VLLM[vendor]}:v{version}"


def _llamacpp(recipe: Recipe) -> str:
    """Return the image of the release or build number, with the backend of the recipe's devices."""
    version, vendor = recipe.engine_version, recipe.device_vendor
    if recipe.engine_build:  # the version is that of llama-cpp-python, whose source states no llama.cpp release
        raise _no_image(f"no published image is known to contain the llama.cpp of llama-cpp-python {version}")
    if vendor not in _LLAMACPP:
        raise _no_image(f"llama.cpp publishes no image for {vendor} devices")
    if _BUILD_NUMBER.fullmatch(version):
        return f"ghcr.io/ggml-org/llama.cpp:{_LLAMACPP[vendor]}-b{version}"
    if _RELEASE.fullmatch(version):
        return f"ghcr.io/ggml-org/llama.cpp:{_LLAMACPP[vendor]}-v{version}"
    raise _no_image(
        f"llama.cpp publishes images of releases and build numbers only; the recipe has version '{version}'"
    )


def _no_image(found: str) -> InputError:
    return InputError(found, hint="give an image with the measured build with --image, or use --to command or systemd")
