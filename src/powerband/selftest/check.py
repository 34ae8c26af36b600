"""What a check is: a name, what it verifies, a function, and its outcome."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from powerband.core.allocation import NoRoom
from powerband.core.engine import FailureKind
from powerband.core.selftest import CheckName, CheckResult, Reason, State
from powerband.errors import DeploymentRefused, EngineFailed, InputError, PowerbandError

Figures = Mapping[str, float | str]
C = TypeVar("C")


@dataclass(frozen=True)
class Outcome:
    """The outcome of a check; `detail` is for the terminal only, because it may name paths."""

    state: State
    reason: Reason | None = None
    figures: Figures = field(default_factory=dict)
    failure: FailureKind | None = None
    detail: str = ""


@dataclass(frozen=True)
class Check(Generic[C]):
    """A check of a machine or of an engine on it, the context that its function is given."""

    name: CheckName
    verifies: str
    run: Callable[[C], Awaitable[Outcome]]


class Deadline:
    """The time that a self-test may take."""

    def __init__(self, budget_s: float) -> None:
        self._until = time.monotonic() + budget_s

    @property
    def remaining_s(self) -> float:
        """Return the time that is left; not negative."""
        return max(0.0, self._until - time.monotonic())


def passed(figures: Figures | None = None, **more: float | str) -> Outcome:
    """Return the outcome of a check that passed."""
    return Outcome("passed", figures={**(figures or {}), **more})


def failed(reason: Reason, figures: Figures | None = None, *, detail: str = "", **more: float | str) -> Outcome:
    """Return the outcome of a check that failed."""
    return Outcome("failed", reason, {**(figures or {}), **more}, detail=detail)


def not_possible(reason: Reason, **figures: float | str) -> Outcome:
    """Return the outcome of a check that this machine cannot run."""
    return Outcome("not possible", reason, figures)


def not_run(reason: Reason, figures: Figures | None = None, **more: float | str) -> Outcome:
    """Return the outcome of a check that did not run."""
    return Outcome("not run", reason, {**(figures or {}), **more})


def engine_failed(error: EngineFailed, **figures: float | str) -> Outcome:
    """Return the outcome of a check whose engine failed."""
    detail = f"{error.message}; {error.hint}"
    return Outcome("failed", "cannot start", figures, failure=error.failure, detail=detail)  # type: ignore[arg-type]


async def perform(check: Check[C], context: C, *, engine: str | None) -> tuple[CheckResult, str]:
    """Run a check; return its result and the detail for the terminal."""
    began_s = time.monotonic()
    try:
        try:
            outcome = await check.run(context)
        except EngineFailed as error:
            outcome = engine_failed(error)
        except PowerbandError as error:
            detail = f"{error.message}; {error.hint}"
            outcome = failed(_reason(error), detail=detail, error=type(error).__name__)
        result = _result(check.name, outcome, engine=engine, began_s=began_s)
    except Exception as error:  # a bug of one check must not lose the results of the others
        outcome = failed("internal error", detail=f"{type(error).__name__}: {error}", error=type(error).__name__)
        result = _result(check.name, outcome, engine=engine, began_s=began_s)
    return result, outcome.detail


def _reason(error: PowerbandError) -> Reason:
    if isinstance(error, NoRoom):
        return "no free devices"
    if isinstance(error, DeploymentRefused):
        return "cannot start"
    return "internal error" if isinstance(error, InputError) else "requests failed"


def _result(name: CheckName, outcome: Outcome, *, engine: str | None, began_s: float) -> CheckResult:
    rounded = {key: round(value, 6) if isinstance(value, float) else value for key, value in outcome.figures.items()}
    return CheckResult(
        check=name,
        engine=engine,
        state=outcome.state,
        reason=outcome.reason,
        failure=outcome.failure,
        figures=rounded,
        took_s=round(time.monotonic() - began_s, 1),
    )
