"""Read a model's facts from its files."""

from __future__ import annotations

import json
from pathlib import Path

from powerband.core import gguf
from powerband.core.model import Model, from_config_json, from_gguf
from powerband.errors import InputError


def inspect(source: str) -> Model:
    """Return what the files at `source` say; a hub id that is not here says nothing yet."""
    path = Path(source).expanduser()
    if path.is_dir():
        return _directory(path)
    if path.is_file():
        return _file(path)
    if is_local(source):
        raise InputError(f"there is no model at {source}", hint="give a GGUF file, a model directory, or a hub id")
    return Model(source=source)


def is_local(source: str) -> bool:
    """Tell whether a source must be a path: a hub id is exactly `owner/name`, without a file's ending."""
    looks_like_path = source.startswith(("/", ".", "~")) or source.endswith((".gguf", ".safetensors"))
    return looks_like_path or source.count("/") != 1


def _file(path: Path) -> Model:
    with path.open("rb") as stream:
        try:
            header = gguf.read_header(stream)
        except gguf.NotGguf as error:
            raise InputError(
                f"{path} is not a usable GGUF file: {error}", hint="download it again, or give the right file"
            ) from None
    return from_gguf(header, source=str(path), weight_bytes=path.stat().st_size)


def _directory(path: Path) -> Model:
    config = path / "config.json"
    if not config.is_file():
        ggufs = sorted(path.glob("*.gguf"))
        hint = f"give the file itself: {ggufs[0]}" if ggufs else "a model directory has a config.json and safetensors"
        raise InputError(f"{path} has no config.json", hint=hint)
    shards = list(path.glob("*.safetensors"))
    if not shards:
        raise InputError(f"{path} has a config.json but no safetensors weights", hint="download the weights as well")
    try:
        facts = json.loads(config.read_text())
    except ValueError as error:
        raise InputError(f"{config} is not valid JSON: {error}", hint="download it again") from None
    return from_config_json(facts, source=str(path), weight_bytes=sum(shard.stat().st_size for shard in shards))
