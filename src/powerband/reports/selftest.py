"""Render the result of a self-test for a terminal."""

from __future__ import annotations

from collections.abc import Mapping

from rich.table import Table
from rich.text import Text

from powerband.core.selftest import CheckResult, Reason, Selftest, State
from powerband.core.units import about_bytes

_STYLES: Mapping[State, str] = {"passed": "green", "failed": "bold red", "not possible": "dim", "not run": "yellow"}
# Sentences of each reason; figures in braces, sizes with `:bytes`.
_REASONS: Mapping[Reason, str] = {
    "cannot start": "the engine did not start",
    "counter not increasing": "after requests these counters are 0: {names}",
    "device unknown": "the catalogue does not know this device",
    "death not noticed": "the engine was killed, and its replica did not notice for {limit_s} s",
    "driver unreachable": "the GPU driver cannot be reached",
    "engine exited": "the engine exited before it was killed",
    "fact unknown": "the driver does not answer a query of {gpus} of {listed} GPUs",
    "gauge missing": "not exported: {names}",
    "GPU not answering": "{silent} of {listed} GPUs do not answer",
    "internal error": "a bug in this check: {names}",
    "KV cache differs": "the KV cache has {kv_ratio:.2f} times the predicted tokens",
    "lever ignored": "accepted and not applied: {names}",
    "memory above prediction": "{used_bytes:bytes} used, {predicted_bytes:bytes} predicted",
    "memory in use": "another process holds up to {used_bytes:bytes} on {gpus} of {listed} GPUs",
    "memory not freed": "{held_bytes:bytes} of GPU memory are held {limit_s:.0f} s after the engine's end",
    "no GPU": "this machine has no GPU",
    "no engine start": "it needs a start of the engine",
    "no free devices": "replicas got {replicas} of {devices} free GPUs",
    "no shape": "the model's architecture cannot be read",
    "out of time": "the time is used up; raise --budget",
    "prediction error": "predicted times are {error_before:.0%} wrong, {error_after:.0%} after a fit to this machine",
    "replicas unequal": "{slow} of {replicas} replicas are slow; the slowest is on {slowest}",
    "requests failed": "requests were not answered",
    "selection differs": "{gpus} of {devices} GPUs cannot be selected by their id",
    "setting fails": "the engine does not start or answer with: {names}",
    "target fails": "these targets cannot be written: {names}",
    "too few devices": "fewer than two devices are free",
    "units shared": "{replicas} replicas share devices or cores",
    "wrong cores": "{replicas} of {devices} free GPUs got cores of another NUMA node",
}
_FINE = ("read-back", "accepted", "written", "not-possible", "not-run")


def table(found: Selftest) -> Table:
    """Return a row for each check."""
    counts = ", ".join(f"{found.count(state)} {state}" for state in _STYLES if found.count(state))
    grid = Table(title=f"self-test: {counts}", title_justify="left", box=None, pad_edge=False)
    for heading in ("check", "engine", "result"):
        grid.add_column(heading, no_wrap=True)
    grid.add_column("", overflow="fold")
    for one in found.checks:
        result = Text(one.state, _STYLES[one.state])
        grid.add_row(one.check, one.engine or "", result, Text(sentence(one)))
    return grid


def sentence(one: CheckResult) -> str:
    """Return why a check did not pass, or its main figures."""
    if one.reason is None:
        return _figures(one)
    values = {name: _Figure(value) for name, value in one.figures.items()}
    try:
        text = _REASONS[one.reason].format(names=_names(one), **values)
    except (KeyError, ValueError):  # a bundle of another version
        text = one.reason
    return f"{text} ({one.failure})" if one.failure else text


def _names(one: CheckResult) -> str:
    """Return the names of what is wrong, from the figures that are words."""
    wrong = [(name, value) for name, value in one.figures.items() if isinstance(value, str) and value not in _FINE]
    return ", ".join(value if name == "error" else name for name, value in wrong)


def _figures(one: CheckResult) -> str:
    shown = [(name, value) for name, value in one.figures.items() if not isinstance(value, str)][:3]
    return ", ".join(_shown(name, value) for name, value in shown)


def _shown(name: str, value: float) -> str:
    """Return a figure with its unit, which the end of its name tells."""
    words = name.replace("_", " ")
    if name.endswith("_bytes"):
        return f"{words.removesuffix(' bytes')} {about_bytes(int(value))}"
    if name.endswith("_s") and not name.endswith("_per_s"):
        return f"{words.removesuffix(' s')} {value:.3g} s"
    if name.startswith("error_") or name.endswith("_share"):
        return f"{words} {value:.0%}"
    return f"{words} {value:.3g}" if isinstance(value, float) else f"{words} {value}"


class _Figure:
    """A figure that formats as a size with `:bytes`."""

    def __init__(self, value: float | str) -> None:
        self.value = value

    def __format__(self, spec: str) -> str:
        return about_bytes(int(float(self.value))) if spec == "bytes" else format(self.value, spec)
