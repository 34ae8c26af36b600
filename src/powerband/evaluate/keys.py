"""The keys under which evaluations and the reference's answers are cached: everything that may change answers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from powerband.evaluate.probes import Probes
from powerband.evaluate.tasks import Task
from powerband.launchers.local import Prepared
from powerband.runtime import model_files
from powerband.store import runs

TOP_LOGPROBS = 20  # tokens compared at each position; vLLM's default maximum
_CHANGE_NO_ANSWERS = ("name", "description", "placement", "start_timeout")  # keys of a deployment


def deployment_key(prepared: Prepared) -> dict[str, Any]:
    """Return the part of a key with everything of a deployment that can change answers; reads weights that are new.

    These are its knobs, the engine's version, and the contents of weights, tokenizer, templates and of all files that a
    knob names, such as LoRA adapters and draft models. Its name and its place on the machine change no answers.
    """
    deployment, source = prepared.deployment, prepared.deployment.variant.full_source
    named = prepared.engine.files(deployment)
    return {
        "deployment": {name: part for name, part in deployment.to_data().items() if name not in _CHANGE_NO_ANSWERS},
        "weights": model_files.digest(source),
        "texts": model_files.texts_digest(source),
        "files": {knob: model_files.path_digest(Path(path).expanduser()) for knob, path in sorted(named.items())},
        "version": prepared.installation.version,
    }


def reference_key(reference: Prepared, probes: Probes, tasks: Mapping[str, Task]) -> dict[str, Any]:
    """Return the part of a key that identifies the reference, the probes and the tasks."""
    asked = {name: task.digest for name, task in tasks.items()}
    return {**deployment_key(reference), "probes": probes.digest, "tasks": asked, "top": TOP_LOGPROBS}


def cache_path(folder: str, key: list[Any]) -> Path:
    """Return the cache file of a key."""
    digest = hashlib.sha256(json.dumps(key, sort_keys=True, default=str).encode()).hexdigest()[:16]
    return runs.state_root() / folder / f"{digest}.json"
