"""What every quantizer must offer; all of it pure."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar

from powerband.core.document import Value
from powerband.core.engine import Step
from powerband.core.model import Format, Model


class Job(Value):
    """One variant to make."""

    model: Model
    scheme: str
    folder: str  # where the variant is written
    shared: str  # where files lie that other schemes need too
    samples: str | None = None  # a file with a calibration text on each line, as JSON
    plain: str | None = None  # the same as plain text
    jobs: int = 1


class Quantizer(ABC):
    """Turns a model into variants, by commands of tools that have environments of their own."""

    name: ClassVar[str]
    schemes: ClassVar[tuple[str, ...]]
    format: ClassVar[Format]
    tools: ClassVar[tuple[str, ...]]  # engines or tools that must be installed

    @abstractmethod
    def check(self, model: Model, scheme: str) -> None:
        """Refuse, with a hint, what cannot be made."""

    @abstractmethod
    def file(self, job: Job) -> str:
        """Return the variant's weights, as a name in its folder."""

    @abstractmethod
    def steps(self, job: Job, tools: Mapping[str, str]) -> tuple[Step, ...]:
        """Return the commands, in order; `tools` are the paths that the installations tell."""


def partial(path: str) -> str:
    """Return where a step writes the file that it makes, until it is whole."""
    folder, _, name = path.rpartition("/")
    return f"{folder}/partial-{name}"
