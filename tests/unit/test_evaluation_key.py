"""The key under which a quality verdict is kept: it changes with everything that may change answers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from powerband import engines
from powerband.core.document import Document
from powerband.evaluate import keys
from powerband.runtime import file_digests, model_files

SHARD = "model-{:05d}-of-00002.safetensors"


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("POWERBAND_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "model"
    for name, text in {
        SHARD.format(1): "one",
        SHARD.format(2): "two",
        "config.json": "{}",
        "tokenizer.json": "{}",
        "tokenizer.model": "pieces",
        "chat_template.jinja": "{{ messages }}",
        "lora/adapter_model.safetensors": "adapter",
        "draft/model.safetensors": "draft",
        "template.jinja": "{{ bos }}",
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def key(model: Path, version: str = "0.32.0", **more: Any) -> dict[str, Any]:
    config = {
        "lora_modules": [{"name": "a", "path": str(model / "lora")}],
        "speculative_config": {"method": "draft_model", "model": str(model / "draft"), "num_speculative_tokens": 3},
        "chat_template": str(model / "template.jinja"),
    }
    data = {"variant": {"source": str(model)}, "engine": "vllm", "config": config, **more}
    deployment: Document = engines.deployment_of(data)
    prepared: Any = SimpleNamespace(
        deployment=deployment, engine=engines.get("vllm"), installation=SimpleNamespace(version=version)
    )
    return keys.deployment_key(prepared)


@pytest.mark.parametrize(
    "name",
    [
        SHARD.format(1),
        SHARD.format(2),
        "config.json",
        "tokenizer.json",
        "tokenizer.model",
        "chat_template.jinja",
        "template.jinja",
        "lora/adapter_model.safetensors",
        "draft/model.safetensors",
    ],
)
def test_a_changed_file_changes_the_key(model: Path, name: str) -> None:
    before = key(model)
    (model / name).write_text("changed")
    assert key(model) != before


@pytest.mark.parametrize(
    "change",
    [
        lambda model: key(model, version="0.32.1"),
        lambda model: key(model, config={"kv_cache_dtype": "fp8"}),
    ],
)
def test_another_version_or_knob_changes_the_key(model: Path, change: Callable[[Path], dict[str, Any]]) -> None:
    assert change(model) != key(model)


def test_name_and_placement_change_no_answers(model: Path) -> None:
    assert key(model, name="other", placement={"cores": 2, "port": 9000}) == key(model)


def test_large_files_are_read_once(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (model / SHARD.format(1)).write_bytes(bytes(2_000_000))
    read: list[str] = []
    whole = file_digests._read

    def spy(path: Path) -> bytes:
        read.append(path.name)
        return whole(path)

    monkeypatch.setattr(file_digests, "_read", spy)
    first = model_files.digest(str(model))
    assert SHARD.format(1) in read
    read.clear()
    assert model_files.digest(str(model)) == first and SHARD.format(1) not in read
    (model / SHARD.format(1)).write_bytes(bytes(1_999_999) + b"x")
    assert model_files.digest(str(model)) != first and SHARD.format(1) in read
