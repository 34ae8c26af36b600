"""Built-in devices, schemes, workloads, SLOs and models: one data file per entry, found by its name."""

from __future__ import annotations

import itertools
import json
from functools import cache
from importlib import resources
from typing import Any

from powerband.errors import InputError, did_you_mean

_FOLDERS = {
    "workload": "workloads",
    "slo": "slos",
    "device": "devices",
    "scheme": "schemes",
    "coefficients": "coefficients",
    "model": "models",
    "residual": "residuals",
    "quality": "floors",
    "task": "tasks",
    "support": "support",
    "evidence": "evidence",
    "finding": "findings",
}
CLASSES = ("chat", "code", "maths", "prose")  # of text samples
EVALUATION_SAMPLES = 40  # of each class; the other samples are for calibration


@cache
def names(kind: str) -> tuple[str, ...]:
    """Return the names of all entries of a kind."""
    folder = resources.files(__name__) / _FOLDERS[kind]
    return tuple(sorted(_entry(item.name) for item in folder.iterdir() if item.name.endswith((".yaml", ".json"))))


def _entry(file: str) -> str:
    """Return the name of the entry in a file; models have their hub id."""
    return file.rpartition(".")[0].replace("--", "/")


def text(kind: str, name: str) -> str:
    """Return the text of an entry's file."""
    if name not in names(kind):
        raise InputError(
            f"there is no {kind} '{name}' in the catalogue, and no such file.{did_you_mean(name, names(kind))}",
            hint=f"give a file, or one of: {', '.join(names(kind))}",
        )
    ending = "json" if kind in ("model", "residual") else "yaml"
    return (resources.files(__name__) / _FOLDERS[kind] / f"{name.replace('/', '--')}.{ending}").read_text("utf-8")


@cache
def words(content: str) -> tuple[str, ...]:
    """Return the vocabulary of synthetic text of a kind."""
    listed = (resources.files(__name__) / "words" / f"{content}.txt").read_text("utf-8").split()
    return tuple(dict.fromkeys(listed))


@cache
def _texts(content: str) -> tuple[dict[str, Any], ...]:
    lines = (resources.files(__name__) / "texts" / f"{content}.jsonl").read_text("utf-8").splitlines()
    return tuple(json.loads(line) for line in lines)


def texts(content: str) -> tuple[dict[str, Any], ...]:
    """Return the evaluation samples of a class; chats have `turns`, the other classes a `text`."""
    return _texts(content)[:EVALUATION_SAMPLES]


def reserve_texts(content: str) -> tuple[dict[str, Any], ...]:
    """Return the evaluation samples of a class that are used only if the others do not decide."""
    return _texts(f"{content}-reserve")


def calibration_texts() -> list[str]:
    """Return the calibration samples as plain text, interleaved by class; evaluation samples are not among them."""
    rows = itertools.zip_longest(*(_texts(content)[EVALUATION_SAMPLES:] for content in CLASSES))
    return ["\n".join(one.get("turns") or [one["text"]]) for row in rows for one in row if one]
