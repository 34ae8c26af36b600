"""Read the architecture and size of a model from its files, the cache, the catalogue or the hub."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from powerband import catalog, untrusted
from powerband.core import gguf, hub_id, plain_data
from powerband.core.hub_id import HubId
from powerband.core.model import Model, from_config_json, from_gguf
from powerband.errors import InputError
from powerband.runtime import file_digests, hub_files, installations

_MAX_NAME = 255
_TEXTS = ("*.jinja", "tokenizer*", "*.txt", "*.model", "*.py")


def inspect(source: str) -> Model:
    """Read a model from its files; a hub id that is not completely in the cache gives a Model with only its source."""
    path, on_hub = location(source), _is_hub_id(source)
    if path is None or (on_hub and not _complete(path)):
        return Model(source=source)
    if path.is_dir():
        model = _directory(path)
    elif path.is_file():
        model = _file(path)
    else:
        raise InputError(f"no model found at {source}", hint="give a GGUF file, a model directory, or a hub id")
    return model.model_copy(update={"source": source}) if on_hub else model


def location(source: str) -> Path | None:
    """Return where a model's files are on this machine; None for a hub id that was not downloaded."""
    path = _path(source)
    found = None if path.exists() else hub_id.parse(source)
    return hub_files.snapshot(found) if found else path


def _path(source: str) -> Path:
    """Return a model's source as a path; raise InputError for one that the system refuses to look for."""
    if "\0" in source or any(len(part) > _MAX_NAME for part in source.split("/")):
        raise InputError(f"{source[:100]!r}... is no path", hint="give a GGUF file, a model directory, or a hub id")
    return Path(source).expanduser()


def absolute_source(source: str) -> str:
    """Return the absolute path of a local model; a hub id is returned unchanged."""
    path = _path(source)
    return str(path.resolve()) if path.exists() else source


def architecture(source: str) -> Model:
    """Return a model's architecture without its weights: from local files, a cache, the catalogue or the hub."""
    path = _path(source)
    if path.is_file() and path.suffix == ".json":
        return from_config_json(_json(path), source=str(path), weight_bytes=None)
    if path.is_dir() and (path / "config.json").is_file():
        return _directory(path) if any(path.glob("*.safetensors")) else architecture(str(path / "config.json"))
    wanted = hub_id.parse(source)
    if path.exists() or wanted is None:
        return inspect(source)
    if (model := inspect(source)).format:
        return model
    cached = installations.cache_root() / "models" / source.replace("/", "--") / "config.json"
    snapshot = hub_files.snapshot(wanted)
    for found in (cached, *([snapshot / "config.json"] if snapshot else [])):
        if found.is_file():
            return from_config_json(_json(found), source=source, weight_bytes=None)
    if snapshot and snapshot.is_file() and hub_files.first_shards([snapshot.name]):  # other shards are missing
        return from_gguf(_header(snapshot), source=source, weight_bytes=0).model_copy(update={"weight_bytes": None})
    if source in catalog.names("model"):
        return from_config_json(json.loads(catalog.text("model", source)), source=source, weight_bytes=None)
    text = _from_hub(wanted)
    cached.parent.mkdir(parents=True, exist_ok=True)
    cached.write_text(text)
    return from_config_json(_json(cached), source=source, weight_bytes=None)


def _from_hub(wanted: HubId) -> str:
    import httpx

    hint = "give a directory with its config.json, a GGUF file, or one of: " + ", ".join(catalog.names("model"))
    if hub_files.offline():
        raise InputError(f"{wanted} was not found locally, and {hub_files.offline_variable()} is set", hint=hint)
    address = f"{hub_files.endpoint()}/{wanted.repo}/resolve/{wanted.revision or 'main'}/config.json"
    token = os.environ.get("HF_TOKEN")
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    try:
        answer = httpx.get(address, headers=headers, timeout=10, follow_redirects=True)
    except httpx.HTTPError as error:
        raise InputError(
            f"{wanted} was not found locally, and the hub cannot be reached ({error})", hint=hint
        ) from None
    if answer.status_code != 200:
        raise InputError(f"the hub has no config.json of {wanted} (HTTP {answer.status_code})", hint=hint)
    return answer.text


def digest(source: str) -> str:
    """Return the SHA-256 of a model's weights and JSON files; a hub id without files here is returned unchanged."""
    path = location(source)
    if path is None or not path.exists():
        return source
    files = sorted([*_weights(path), *path.glob("*.json")]) if path.is_dir() else [path]
    if path.suffix == ".gguf":
        files = _shards(path)
    return file_digests.of_all(files)


def texts_digest(source: str) -> str:
    """Return the SHA-256 of a model's other files that can change answers: tokenizer, chat template, code."""
    path = location(source)
    if path is None or not path.is_dir():
        return ""
    found = sorted({one for pattern in _TEXTS for one in path.glob(pattern)})
    return file_digests.of_all(found) if found else ""


def path_digest(path: Path) -> str:
    """Return the SHA-256 of a file, or of all files of a directory, such as a LoRA adapter."""
    if path.suffix == ".gguf":
        return file_digests.of_all(_shards(path))
    return file_digests.of_all(sorted(one for one in path.rglob("*") if one.is_file()) if path.is_dir() else [path])


def _is_hub_id(source: str) -> bool:
    """Return whether a source is a hub id; a path that exists is not."""
    return hub_id.parse(source) is not None and not _path(source).exists()


def _weights(folder: Path) -> list[Path]:
    """Return the safetensors of a model directory."""
    return [folder / name for name in hub_files.loaded(path.name for path in folder.glob("*.safetensors"))]


def _complete(path: Path) -> bool:
    """Return whether the snapshot or GGUF file of a hub id has all its shards: a download can be cut."""
    if path.is_file():
        return all(path.with_name(name).is_file() for name in _with_shards(path.name))
    found = [one.name for one in _weights(path)]
    wanted = {"config.json", *(name for one in found for name in _with_shards(one))}
    index = path / "model.safetensors.index.json"
    if index.is_file():
        wanted.update(hub_files.indexed(index))
    return bool(found) and all((path / name).is_file() for name in wanted)


def _with_shards(name: str) -> list[str]:
    """Return the names of all shards of which a file is one; the name alone if it is no shard."""
    match = re.fullmatch(r"(.+)-\d{5}-of-(\d{5})(\.gguf|\.safetensors)", name)
    if match is None:
        return [name]
    return [f"{match[1]}-{number:05d}-of-{match[2]}{match[3]}" for number in range(1, int(match[2]) + 1)]


def _file(path: Path) -> Model:
    header = _header(path)
    return from_gguf(header, source=str(path), weight_bytes=sum(one.stat().st_size for one in _shards(path)))


def _header(path: Path) -> dict[str, Any]:
    with path.open("rb") as stream:
        try:
            return gguf.read_header(stream)
        except gguf.NotGguf as error:
            raise InputError(
                f"{path} is not a usable GGUF file: {error}", hint="download it again, or give the right file"
            ) from None


def _shards(path: Path) -> list[Path]:
    """Return all files of a GGUF that is split into several; engines are given the first."""
    match = re.fullmatch(r"(.+)-(\d{5})-of-(\d{5})\.gguf", path.name)
    if match is None:
        return [path]
    count = int(match[3])
    shards = [path.with_name(f"{match[1]}-{number:05d}-of-{count:05d}.gguf") for number in range(1, count + 1)]
    if missing := [one.name for one in shards if not one.exists()]:
        raise InputError(f"{path.name} is one of {count} files; {missing[0]} is missing", hint="download all of them")
    if int(match[2]) != 1:
        raise InputError(f"{path.name} is not the first of {count} files", hint=f"give {shards[0]}")
    return shards


def _directory(path: Path) -> Model:
    config = path / "config.json"
    if not config.is_file():
        ggufs = sorted(path.glob("*.gguf"))
        hint = f"give the file itself: {ggufs[0]}" if ggufs else "a model directory has a config.json and safetensors"
        raise InputError(f"{path} has no config.json", hint=hint)
    shards = _weights(path)
    if not shards:
        raise InputError(f"{path} has a config.json but no safetensors weights", hint="download the weights as well")
    return from_config_json(_json(config), source=str(path), weight_bytes=sum(shard.stat().st_size for shard in shards))


def _json(path: Path) -> dict[str, Any]:
    try:
        return plain_data.parse_json_object(untrusted.text(path, max_bytes=untrusted.MAX_CONFIG_BYTES), finite=False)
    except ValueError as error:
        raise InputError(f"{path} is not valid JSON: {error}", hint="download it again") from None
