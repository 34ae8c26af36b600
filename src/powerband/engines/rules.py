"""Read `data/<engine>.yaml`: setting conflicts, log patterns of failures and phases, and metric names."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from importlib import resources
from typing import Any, Literal

import yaml
from prometheus_client.parser import text_string_to_metric_families
from pydantic import Field

from powerband.core.document import Value
from powerband.core.engine import Archive, Failure, FailureKind, Gauges, Problem


class Conflict(Value):
    """Settings that do not work together; `when` is an expression over knobs, model and host."""

    rule: str
    when: str
    message: str
    hint: str
    severity: Literal["refuse", "warn"] = "refuse"


class Signature(Value):
    """A log pattern of a failure; `message` and `hint` can use its named groups."""

    failure: FailureKind
    pattern: str
    message: str
    hint: str
    silent: bool = False  # the engine keeps running, without the requested setting


class Phase(Value):
    """A phase of a start, and the log pattern that ends it."""

    name: str
    pattern: str


class Facts(Value):
    """The contents of an engine's data file."""

    minimum_version: str | None = None
    conflicts: tuple[Conflict, ...] = ()
    failures: tuple[Signature, ...] = ()
    phases: tuple[Phase, ...] = ()
    readings: dict[str, str] = Field(default_factory=dict)
    gauges: dict[str, str] = Field(default_factory=dict)
    histograms: dict[str, str] = Field(default_factory=dict)
    archives: tuple[Archive, ...] = ()


@cache
def facts(engine: str) -> Facts:
    """Read `data/<engine>.yaml`."""
    text = resources.files("powerband.engines").joinpath(f"data/{engine}.yaml").read_text("utf-8")
    return Facts.model_validate(yaml.safe_load(text))


def problems(conflicts: Iterable[Conflict], names: Mapping[str, Any]) -> list[Problem]:
    """Return a problem for each conflict whose expression is true."""
    return [
        Problem(
            rule=conflict.rule,
            sentence=_fill(conflict.message, names),
            hint=_fill(conflict.hint, names),
            severity=conflict.severity,
        )
        for conflict in conflicts
        if holds(conflict.when, names)
    ]


def diagnose(signatures: Iterable[Signature], log: str) -> Failure | None:
    """Return the failure of the first signature that matches the log."""
    for signature in signatures:
        match = re.search(signature.pattern, log, re.MULTILINE)
        if match:
            groups = {name: text or "" for name, text in match.groupdict().items()}
            start = log.rfind("\n", 0, match.start()) + 1
            end = log.find("\n", match.end())
            return Failure(
                kind=signature.failure,
                sentence=_fill(signature.message, groups),
                hint=_fill(signature.hint, groups),
                evidence=log[start : end if end >= 0 else None].strip()[:500],
            )
    return None


_MAX_VALUE = 1e300  # so that sums are finite


def gauges(table: Mapping[str, str], exposition: str) -> Gauges:
    """Sum each metric of the table over its label sets; a missing metric is None."""
    totals: dict[str, float] = {}
    wanted = tuple(table.values())
    lines = [line for line in exposition.splitlines() if line.startswith(wanted)]  # vLLM's page has thousands
    for line in lines:
        for name, value in _samples(line):
            totals[name] = totals.get(name, 0.0) + value
    return Gauges(**{name: totals.get(metric) for name, metric in table.items()})


def _samples(line: str) -> list[tuple[str, float]]:
    """Return the samples of a line; nothing of one that is malformed or has no finite value."""
    try:
        found = [one for family in text_string_to_metric_families(line) for one in family.samples]
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
        return []
    return [(one.name, one.value) for one in found if abs(one.value) <= _MAX_VALUE]


def _fill(text: str, names: Mapping[str, Any]) -> str:
    return re.sub(r"\{(\w+)\}", lambda m: str(names.get(m[1], m[0])), text)


class _Unknown(Exception):
    """The expression depends on an unknown value."""


_BINARY: dict[type[ast.AST], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Mod: operator.mod,
    ast.FloorDiv: operator.floordiv,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}


def holds(expression: str, names: Mapping[str, Any]) -> bool:
    """Evaluate a rule's expression; False if it depends on an unknown value."""
    return bool(value(expression, names))


def value(expression: str, names: Mapping[str, Any]) -> Any:
    """Return the value of an expression; None if it depends on an unknown value or compares text with a number."""
    try:
        return _evaluate(ast.parse(expression, mode="eval").body, names)
    except (_Unknown, ZeroDivisionError, TypeError):
        return None


def names_in(expression: str) -> frozenset[str]:
    """Return the names that an expression depends on."""
    return frozenset(node.id for node in ast.walk(ast.parse(expression, mode="eval")) if isinstance(node, ast.Name))


def _evaluate(node: ast.expr, names: Mapping[str, Any]) -> Any:
    match node:
        case ast.Constant(value=value):
            return value
        case ast.Name(id=name):
            return names.get(name)
        case ast.Tuple(elts=items) | ast.List(elts=items) | ast.Set(elts=items):
            return tuple(_evaluate(item, names) for item in items)
        case ast.BoolOp(op=ast.And(), values=values):
            return all(_evaluate(value, names) for value in values)
        case ast.BoolOp(op=ast.Or(), values=values):
            return any(_evaluate(value, names) for value in values)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return not _evaluate(operand, names)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            return _BINARY[type(op)](_known(left, names), _known(right, names))
        case ast.Compare(left=left, ops=[ast.Is()], comparators=[ast.Constant(value=None)]):
            return _evaluate(left, names) is None
        case ast.Compare(left=left, ops=[ast.IsNot()], comparators=[ast.Constant(value=None)]):
            return _evaluate(left, names) is not None
        case ast.Compare(left=left, ops=[ast.In()], comparators=[right]):
            return _known(left, names) in _known(right, names)
        case ast.Compare(left=left, ops=[ast.NotIn()], comparators=[right]):
            return _known(left, names) not in _known(right, names)
        case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in _BINARY:
            return _BINARY[type(op)](_known(left, names), _known(right, names))
    raise ValueError(f"unsupported expression in a rule: '{ast.unparse(node)}'")


def _known(node: ast.expr, names: Mapping[str, Any]) -> Any:
    value = _evaluate(node, names)
    if value is None:
        raise _Unknown
    return value
