"""The interface of a quantizer. Its methods are pure: they return commands and run none."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar

from powerband.core.document import Value
from powerband.core.engine import Step
from powerband.core.model import Format, Model


class Job(Value):
    """One variant to create."""

    model: Model
    weights: str  # directory or file of the published weights
    scheme: str
    folder: str  # where the variant is written
    shared: str  # for files that several schemes use
    samples: str | None = None  # calibration texts as JSON lines
    plain_text: str | None = None  # the same texts as plain text
    threads: int = 1


class Quantizer(ABC):
    """Creates variants of a model with tools that run in separate environments."""

    name: ClassVar[str]
    schemes: ClassVar[tuple[str, ...]]
    format: ClassVar[Format]
    tools: ClassVar[tuple[str, ...]]  # engines or tools that it runs

    @abstractmethod
    def check(self, model: Model, scheme: str) -> None:
        """Raise, with a hint, if the variant cannot be created."""

    @abstractmethod
    def file(self, job: Job) -> str:
        """Return the path of the variant's weights, relative to its folder."""

    @abstractmethod
    def steps(self, job: Job, tools: Mapping[str, str]) -> tuple[Step, ...]:
        """Return the commands in order; `tools` maps the names of installed tools to their paths."""


def partial_path(path: str) -> str:
    """Return the temporary path of an output file; it is renamed once the step is complete."""
    folder, _, name = path.rpartition("/")
    return f"{folder}/partial-{name}"
