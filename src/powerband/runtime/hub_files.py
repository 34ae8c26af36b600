"""Which files of a hub repository an engine needs, and where the hub's cache keeps them; without a request."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from powerband import untrusted
from powerband.core import plain_data
from powerband.core.hub_id import HubId
from powerband.errors import InputError

DEFAULT_ENDPOINT = "https://huggingface.co"
_SUFFIXES = {".safetensors", ".json", ".jinja", ".txt", ".model", ".tiktoken", ".py"}
_SHARD = re.compile(r"(.+)-\d{5}-of-(\d{5})\.gguf")
_YES = {"1", "on", "yes", "true"}


def endpoint() -> str:
    """Return the address of the hub: $HF_ENDPOINT, or the public one."""
    return (os.environ.get("HF_ENDPOINT") or DEFAULT_ENDPOINT).rstrip("/")


def offline() -> bool:
    """Return whether $HF_HUB_OFFLINE, or else $TRANSFORMERS_OFFLINE, forbids requests to the hub."""
    return os.environ.get(offline_variable(), "").lower() in _YES


def offline_variable() -> str:
    """Return the name of the variable that decides whether requests to the hub are forbidden."""
    return "HF_HUB_OFFLINE" if os.environ.get("HF_HUB_OFFLINE") else "TRANSFORMERS_OFFLINE"


def cache() -> Path:
    """Return the hub's cache: $HF_HUB_CACHE, else `hub` in $HF_HOME or in the user's cache directory."""
    if path := os.environ.get("HF_HUB_CACHE"):
        return Path(path).expanduser().absolute()
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    return Path(home).expanduser().absolute() / "hub"


def repository(wanted: HubId) -> Path:
    """Return the folder of a repository in the cache."""
    return cache() / f"models--{wanted.repo.replace('/', '--')}"


def cached_commit(wanted: HubId) -> str | None:
    """Return the commit that a revision had when it was last downloaded; None: never."""
    if wanted.pinned:
        return wanted.revision
    ref = repository(wanted) / "refs" / (wanted.revision or "main")
    return ref.read_text().strip() if ref.is_file() else None


def snapshot(wanted: HubId) -> Path | None:
    """Return the folder or GGUF file of a hub id in the cache; None if nothing of it was downloaded."""
    commit = cached_commit(wanted)
    folder = repository(wanted) / "snapshots" / commit if commit else None
    path = folder / wanted.file if folder and wanted.file else folder
    return path if path and path.exists() else None


def loaded(names: Iterable[str]) -> list[str]:
    """Return the safetensors that engines load; some repositories have a second copy, `consolidated*.safetensors`."""
    found = sorted(name for name in names if name.endswith(".safetensors"))
    return [name for name in found if not name.startswith("consolidated")] or found


def indexed(path: Path) -> set[str]:
    """Return the shards that an index of safetensors names; raise InputError if one would not be beside it."""
    try:
        index = plain_data.parse_json_object(untrusted.text(path, max_bytes=untrusted.MAX_CONFIG_BYTES))
    except ValueError as error:
        raise InputError(f"{path} is not valid JSON: {error}", hint="download it again") from None
    names = index.get("weight_map")
    found = set(map(str, names.values())) if isinstance(names, dict) else set()
    if odd := [name for name in found if PurePosixPath(name).name != name]:
        raise InputError(f"{path} names a file in another folder: {odd[0][:100]}", hint="download it again")
    return found


def needed(names: Iterable[str], wanted: HubId) -> list[str]:
    """Return the files to download: weights in one format, configuration, tokenizer and chat template."""
    every = sorted(names)
    if wanted.file is not None:
        return _gguf(every, wanted)
    top = [name for name in every if "/" not in name and PurePosixPath(name).suffix in _SUFFIXES]
    templates = [name for name in every if name.startswith("additional_chat_templates/")]
    weights = loaded(top)
    if weights:
        return [name for name in top if name in weights or not name.endswith(".safetensors")] + templates
    if ggufs := first_shards(every):
        listed = ", ".join(str(wanted.model_copy(update={"file": name}).at(None)) for name in ggufs[:4])
        raise InputError(
            f"{wanted.short} has {len(ggufs)} GGUF files and no safetensors",
            hint=f"name one of them: {listed}{', ...' if len(ggufs) > 4 else ''}",
        )
    raise InputError(
        f"{wanted.short} has neither safetensors nor GGUF files", hint="choose a repository with one of these formats"
    )


def first_shards(names: Iterable[str]) -> list[str]:
    """Return the GGUF files of models, by their first shard; projectors of multimodal models are left out."""
    ggufs = [name for name in names if name.endswith(".gguf") and not _base(name).startswith("mmproj")]
    return [name for name in ggufs if not _SHARD.fullmatch(name) or "-00001-of-" in name]


def _gguf(names: list[str], wanted: HubId) -> list[str]:
    """Return the file of the hub id with its other shards."""
    if wanted.file not in names:
        listed = ", ".join(first_shards(names)[:4]) or "none"
        whole = wanted.model_copy(update={"file": None})
        raise InputError(f"{whole.short} has no file {wanted.file}", hint=f"its GGUF files: {listed}")
    shard = _SHARD.fullmatch(wanted.file)
    if shard is None:
        return [wanted.file]
    alike = re.compile(rf"{re.escape(shard[1])}-\d{{5}}-of-{shard[2]}\.gguf")
    return [name for name in names if alike.fullmatch(name)]


def _base(name: str) -> str:
    return PurePosixPath(name).name
