"""What can go wrong, whose fault it is, and what to do about it.

    PowerbandError            exit 1   our bug, unless a subclass says otherwise
    ├── InputError            exit 2   what you gave cannot be used
    │   ├── DocumentError              a file that does not parse or validate
    │   └── DeploymentRefused          a deployment that is known not to work
    ├── EngineError           exit 3   the engine did not do its part
    │   ├── EngineMissing              no such engine on this machine
    │   ├── InstallFailed              an engine that could not be installed
    │   ├── EngineFailed               an engine that failed to start, to answer or to live
    │   └── QuantizeFailed             a variant that could not be made
    ├── InvalidMeasurement    exit 3   a number that would not be true, so it is not printed
    └── PromiseBroken         exit 4   everything worked and the promise was not met

Every error carries a hint: a command to run where there is one.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import ClassVar


class PowerbandError(Exception):
    """The root of every error that Powerband raises on purpose."""

    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, *, hint: str) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class InputError(PowerbandError):
    """What the user gave cannot be used."""

    exit_code = 2


class DocumentError(InputError):
    """A file that is not a valid document of its kind."""


class DeploymentRefused(InputError):
    """A deployment that is known not to work, refused before anything is started."""


class EngineError(PowerbandError):
    """The engine did not do its part."""

    exit_code = 3


class EngineMissing(EngineError):
    """The engine that a deployment asks for is not on this machine."""


class InstallFailed(EngineError):
    """An engine could not be installed."""


class QuantizeFailed(EngineError):
    """A quantizer gave up."""


class EngineFailed(EngineError):
    """An engine failed to start, to answer or to stay alive; `failure` names how."""

    def __init__(self, message: str, *, hint: str, failure: str, evidence: str = "") -> None:
        super().__init__(message, hint=hint)
        self.failure = failure
        self.evidence = evidence


class InvalidMeasurement(PowerbandError):
    """A guard refused a measurement."""

    exit_code = 3


class PromiseBroken(PowerbandError):
    """Everything worked, and the promise was not met."""

    exit_code = 4


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return " Did you mean 'x'?" for the nearest known word, or nothing."""
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f" Did you mean '{near[0]}'?" if near else ""
