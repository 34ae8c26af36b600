"""The files of models and adapters as vLLM reads them, and its words for what is wrong with them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from powerband.testing.lab.vllm_log import Refused


def config_json(path: Path) -> dict[str, Any]:
    """Return the `config.json` of a model."""
    file = path / "config.json"
    if not file.is_file():
        raise Refused(
            f"Invalid repository ID or local directory specified: '{path}'.\nPlease verify the following "
            "requirements:\n1. Provide a valid Hugging Face repository ID.\n2. Specify a local directory that contains "
            "a recognized configuration file.\n   - For Hugging Face models: ensure the presence of a 'config.json'.\n"
            "   - For Mistral models: ensure the presence of a 'params.json'.\n",
            config="ModelConfig",
        )
    try:
        return dict(json.loads(file.read_text()))
    except ValueError:
        raise Refused(f"It looks like the config file at '{file}' is not a valid JSON file.", error="OSError") from None


def weight_file_bytes(path: Path, *, process: str = "Worker") -> int:
    """Return the size of a model's weights."""
    shards = sorted(path.glob("*.safetensors"))
    if not shards:
        raise Refused(f"Cannot find any model weights with `{path}`", error="RuntimeError", process=process)
    return sum(_data_bytes(one, process=process) for one in shards)


def _data_bytes(path: Path, *, process: str) -> int:
    """Return the bytes of the tensors in a safetensors file, which must cover it."""

    def broken(text: str) -> Refused:
        return Refused(
            f"Error while deserializing header: {text}", error="safetensors_rust.SafetensorError", process=process
        )

    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8:
            raise broken("header too small")
        if length > 100_000_000:
            raise broken("header too large")
        if length > size - 8:
            raise broken("invalid header length")
        try:
            header: dict[str, Any] = json.loads(file.read(length))
        except ValueError:
            raise broken("invalid JSON in header") from None
    end = max((one["data_offsets"][1] for key, one in header.items() if key != "__metadata__"), default=0)
    if 8 + length + end != size:
        raise broken("incomplete metadata, file not fully covered")
    return int(end)


def adapter(module: Any) -> tuple[str, Path]:
    """Return the name and the folder of one value of `--lora-modules`."""
    text = str(module)
    name, equals, path = text.partition("=")
    if equals and "," not in text:
        return name, Path(path)
    fields: dict[str, str] = json.loads(text)
    return fields["name"], Path(fields["path"])


def check_adapters(given: Mapping[str, Any]) -> None:
    """Refuse adapters that vLLM cannot load when the engine is ready."""
    for module in given.get("lora_modules") or ():
        name, path = adapter(module)
        if not given.get("enable_lora"):
            raise Refused("Call to add_lora method failed: LoRA is not enabled")
        file = path / "adapter_config.json"
        if not file.is_file():
            raise Refused(f"Loading lora {name} failed: No adapter found for {path}")
        config = json.loads(file.read_text())
        missing = {key for key in ("r", "lora_alpha", "target_modules") if key not in config}
        if missing:
            raise _worker_failed(f"Missing required configuration fields: {missing}")
        most = given.get("max_lora_rank") or 16
        if config["r"] > most:
            raise _worker_failed(f"LoRA rank {config['r']} is greater than max_lora_rank {most}.")


def _worker_failed(text: str) -> Refused:
    return Refused(
        f"Call to add_lora method failed: Worker failed with error '{text}', please check the stack trace above for "
        "the root cause"
    )
