"""The exception tree and the exit codes.

    PowerbandError              exit 1   a bug in Powerband, unless a subclass says otherwise
    ├── InputError              exit 2   an argument, option or file cannot be used
    │   ├── DocumentError                a file does not parse or validate
    │   └── DeploymentRefused            a deployment that is known not to work
    ├── EngineError             exit 3   an engine or quantizer failed
    │   ├── EngineMissing                the engine is not installed
    │   ├── InstallFailed                the engine could not be installed
    │   ├── EngineFailed                 the engine failed to start, to answer or to stay alive
    │   └── QuantizeFailed               the variant could not be built
    ├── RequirementNotMet       exit 4   everything worked; the SLO, floor or recipe was not met
    ├── InvalidMeasurement      exit 5   a guard rejected the measurement, so no number is printed
    └── Undecided               exit 6   too few samples to decide either way

Every error has a hint: a command to run where there is one.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import ClassVar

_MAX_WORD = 200
EXIT_CODES: Mapping[int, str] = {
    0: "success",
    1: "internal error: a bug in Powerband",
    2: "invalid input: an argument, option or file cannot be used",
    3: "engine failure: an engine or quantizer could not be installed, started or kept alive",
    4: "requirement not met: the SLO, the quality floor or a recipe's promise does not hold",
    5: "invalid measurement: a guard rejected it, so no number is printed",
    6: "undecided: too few samples to say whether the requirement is met",
    130: "interrupted with Ctrl-C or SIGTERM; results so far are on disk",
}


class PowerbandError(Exception):
    """The root of every error that Powerband raises deliberately."""

    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, *, hint: str) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class InputError(PowerbandError):
    """An argument, option or file cannot be used."""

    exit_code = 2


class DocumentError(InputError):
    """A file is not a valid document of its kind."""


class DeploymentRefused(InputError):
    """A deployment that is known not to work, rejected before anything starts."""


class EngineError(PowerbandError):
    """An engine or quantizer failed."""

    exit_code = 3


class EngineMissing(EngineError):
    """The engine of a deployment is not installed on this machine."""


class InstallFailed(EngineError):
    """An engine could not be installed."""


class QuantizeFailed(EngineError):
    """A quantizer failed."""


class EngineFailed(EngineError):
    """An engine failed to start, to answer or to stay alive; `failure` is its kind."""

    def __init__(self, message: str, *, hint: str, failure: str, evidence: str = "") -> None:
        super().__init__(message, hint=hint)
        self.failure = failure
        self.evidence = evidence


class RequirementNotMet(PowerbandError):
    """Everything worked, and the SLO, the quality floor or the recipe's promise does not hold."""

    exit_code = 4


class InvalidMeasurement(PowerbandError):
    """A guard rejected a measurement."""

    exit_code = 5


class Undecided(PowerbandError):
    """The samples are too few to say whether the requirement is met."""

    exit_code = 6


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return " Did you mean 'x'?" for the nearest known word, or an empty string."""
    if len(word) > _MAX_WORD:  # the comparison takes quadratic time
        return ""
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f" Did you mean '{near[0]}'?" if near else ""
