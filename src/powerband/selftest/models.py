"""Find a model to serve: the given ones, or the smallest of each format in the caches that generates text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from powerband import engines
from powerband.core.engine import Installation
from powerband.core.model import Model
from powerband.errors import EngineMissing, InputError
from powerband.runtime import hub_files, installations, model_files

_GET_ONE = "hf download Qwen/Qwen3-0.6B"
_ENGINES = ("vllm", "llamacpp")
_GENERATING = ("ForCausalLM", "ForConditionalGeneration")  # how the names of architectures end
_NOT_GENERATING = ("clip", "bert", "nomic-bert")  # architectures of GGUF files


def installed(wanted: str | None = None) -> list[Installation]:
    """Return the engines to check: the wanted one, or all that are installed."""
    found = []
    for name in [wanted] if wanted else _ENGINES:
        try:
            found.append(installations.find(name))
        except EngineMissing:
            if wanted:
                raise
    if not found:
        raise EngineMissing("no engine is installed", hint="run 'powerband engine install vllm'")
    return found


def choose(found: Sequence[Installation], given: Sequence[str]) -> dict[str, Model]:
    """Return the model for each engine that can load one, by the engine's name."""
    models = [_read(source) for source in given] if given else list(_cached())
    chosen = {}
    for one in found:
        fitting = [model for model in models if model.format in engines.get(one.engine).formats]
        if fitting:
            chosen[one.engine] = min(fitting, key=lambda model: model.weight_bytes or 0)
    if not chosen:
        names = ", ".join(one.engine for one in found)
        what = f"none of the given models can be loaded by {names}" if given else "no model found in the caches"
        raise InputError(what, hint=f"get one with '{_GET_ONE}', or give a model directory or a GGUF file")
    return chosen


def _read(source: str) -> Model:
    model = model_files.inspect(model_files.absolute_source(source))
    if model.format is None:
        raise InputError(f"{source} is not on this machine", hint="give a model directory or a GGUF file")
    return model


def _cached() -> Iterator[Model]:
    for path in _candidates():
        try:
            model = model_files.inspect(str(path))
        except (InputError, OSError):  # an interrupted download, or a file of another kind
            continue
        if _generates(model):
            yield model


def _generates(model: Model) -> bool:
    """Return whether a model has weights and generates text."""
    if not model.weight_bytes or not model.architecture:
        return False
    if model.format == "gguf":
        return model.architecture not in _NOT_GENERATING
    return model.architecture.endswith(_GENERATING)


def _candidates() -> Iterable[Path]:
    for folder in (hub_files.cache(), installations.cache_root() / "models", installations.cache_root() / "variants"):
        yield from (one.parent for one in folder.rglob("config.json") if any(one.parent.glob("*.safetensors")))
        yield from (path for path in folder.rglob("*.gguf") if not path.name.startswith("mmproj"))
