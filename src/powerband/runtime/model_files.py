"""Read the architecture and size of a model from its files, the cache, the catalogue or the hub."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from powerband import catalog
from powerband.core import gguf
from powerband.core.model import Model, from_config_json, from_gguf
from powerband.errors import InputError
from powerband.runtime import installations


def inspect(source: str) -> Model:
    """Read a model from local files; for a hub id return a Model with only its source."""
    path = Path(source).expanduser()
    if path.is_dir():
        return _directory(path)
    if path.is_file():
        return _file(path)
    if is_local(source):
        raise InputError(f"no model found at {source}", hint="give a GGUF file, a model directory, or a hub id")
    return Model(source=source)


def absolute_source(source: str) -> str:
    """Return the absolute path of a local model; a hub id is returned unchanged."""
    path = Path(source).expanduser()
    return str(path.resolve()) if path.exists() else source


def architecture(source: str) -> Model:
    """Return a model's architecture without its weights: from local files, a cache, the catalogue or the hub."""
    path = Path(source).expanduser()
    if path.is_file() and path.suffix == ".json":
        return from_config_json(_json(path), source=str(path), weight_bytes=None)
    if path.is_dir() and (path / "config.json").is_file():
        return _directory(path) if any(path.glob("*.safetensors")) else architecture(str(path / "config.json"))
    if path.exists() or is_local(source):
        return inspect(source)
    name = source.replace("/", "--")
    cached = installations.cache_root() / "models" / name / "config.json"
    hub = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser() / "hub" / f"models--{name}" / "snapshots"
    for found in (cached, *sorted(hub.glob("*/config.json"))):
        if found.is_file():
            return from_config_json(_json(found), source=source, weight_bytes=None)
    if source in catalog.names("model"):
        return from_config_json(json.loads(catalog.text("model", source)), source=source, weight_bytes=None)
    cached.parent.mkdir(parents=True, exist_ok=True)
    cached.write_text(_from_hub(source))
    return from_config_json(_json(cached), source=source, weight_bytes=None)


def _from_hub(source: str) -> str:
    import httpx

    address = f"{os.environ.get('HF_ENDPOINT', 'https://huggingface.co')}/{source}/resolve/main/config.json"
    token = os.environ.get("HF_TOKEN")
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    hint = "give a directory with its config.json, a GGUF file, or one of: " + ", ".join(catalog.names("model"))
    try:
        answer = httpx.get(address, headers=headers, timeout=10, follow_redirects=True)
    except httpx.HTTPError as error:
        raise InputError(
            f"{source} was not found locally, and the hub cannot be reached ({error})", hint=hint
        ) from None
    if answer.status_code != 200:
        raise InputError(f"the hub has no config.json of {source} (HTTP {answer.status_code})", hint=hint)
    return answer.text


def digest(source: str) -> str:
    """Return the SHA-256 of a model's weights and JSON files; a hub id is returned unchanged."""
    path = Path(source).expanduser()
    if not path.exists():
        return source
    files = (
        sorted(one for one in path.iterdir() if one.suffix in (".safetensors", ".json")) if path.is_dir() else [path]
    )
    total = hashlib.sha256()
    for one in files:
        with one.open("rb") as stream:
            total.update(hashlib.file_digest(stream, "sha256").digest())
    return total.hexdigest()


def is_local(source: str) -> bool:
    """Return whether a source is a path; a hub id is exactly `owner/name`, without a file extension."""
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
    return from_config_json(_json(config), source=str(path), weight_bytes=sum(shard.stat().st_size for shard in shards))


def _json(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text()))
    except ValueError as error:
        raise InputError(f"{path} is not valid JSON: {error}", hint="download it again") from None
