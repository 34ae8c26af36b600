"""Evaluate the rules of `catalog/findings/` on an observation."""

from __future__ import annotations

import math
import string
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import yaml
from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version
from pydantic import Field

from powerband import catalog
from powerband.core.diagnosis import SEVERITIES, Change, Finding, Observation, Severity
from powerband.core.document import Value
from powerband.core.model import Model
from powerband.core.units import about_bytes
from powerband.diagnose import command_line, derived, expected_effect
from powerband.diagnose.roofline import StepModel
from powerband.engines import live
from powerband.engines import rules as expressions


class RuleChange(Value):
    """What a rule proposes for one engine; a value that begins with `=` is an expression."""

    set: dict[str, Any] = Field(default_factory=dict, description="settings, by the engine's names")
    remove: tuple[str, ...] = Field(default=(), description="settings to leave at their default")
    text: str = ""


class RuleEffect(Value):
    """The expected effect of a rule's change."""

    metric: str
    estimate: str = Field(default="", description="an estimator of `expected_effect`")
    published: tuple[float, float] | None = Field(default=None, description="factors of the cases in `source`")
    note: str = ""


class Rule(Value):
    """One rule: when it holds, why it matters, and what to change."""

    rule: str
    title: str
    severity: Severity
    when: dict[str, str | tuple[str, ...]] = Field(
        min_length=1, description="expression by engine, over the names of `derived`; of several, one must hold"
    )
    versions: str = Field(default="", description="engine versions that it is about; empty: all")
    why: str
    evidence: str = Field(description="a template over the observation's names")
    change: dict[str, RuleChange] = Field(description="by engine")
    effect: RuleEffect
    risk: str
    docs: dict[str, str] = Field(description="by engine")
    source: str

    def conditions(self, engine: str) -> tuple[str, ...]:
        """Return the expressions for an engine; one of them must hold."""
        when = self.when.get(engine, ())
        return (when,) if isinstance(when, str) else when


@cache
def all_rules() -> tuple[Rule, ...]:
    """Read every rule of the catalogue."""
    return tuple(
        Rule.model_validate(yaml.safe_load(catalog.text("finding", name))) for name in catalog.names("finding")
    )


def evaluate(
    observation: Observation, *, model: Model | None, found: StepModel | None, argv: tuple[str, ...]
) -> tuple[Finding, ...]:
    """Return the findings: the severe ones first, and of these the largest expected gain."""
    known = derived.names(observation, model, found)
    holding = [one for one in all_rules() if _holds(one, observation, known)]
    findings = [_finding(one, observation, known, found, argv) for one in holding]
    return tuple(sorted(findings, key=_rank))


def _rank(one: Finding) -> tuple[int, float, str]:
    gain = abs(math.log(max(one.effect.factor.value, 1e-3))) if one.effect.factor else 0.0
    return SEVERITIES.index(one.severity), -gain, one.rule


def _holds(rule: Rule, observation: Observation, known: Mapping[str, Any]) -> bool:
    if not any(expressions.holds(when, known) for when in rule.conditions(observation.engine)):
        return False
    return not rule.versions or _in_versions(rule.versions, observation.engine_version)


def _in_versions(wanted: str, version: str | None) -> bool:
    try:
        return version is not None and SpecifierSet(wanted, prereleases=True).contains(Version(version))
    except InvalidVersion:
        return False


def _finding(
    rule: Rule, observation: Observation, known: Mapping[str, Any], found: StepModel | None, argv: tuple[str, ...]
) -> Finding:
    engine = observation.engine
    proposed = rule.change[engine]
    wanted = {key: _value(value, known) for key, value in proposed.set.items()}
    wanted = {key: value for key, value in wanted.items() if value is not None}
    flags: list[str] = []
    environment: dict[str, str] = {}
    for field, value in wanted.items():
        words, variables = live.flags(engine, field, value)
        flags += [" ".join(words)] if words else []
        environment |= variables
    removed = [name for name in proposed.remove if name in observation.settings]
    command = command_line.changed(engine, argv, wanted, removed) if argv and (wanted or removed) else None
    template = _Template(known)
    return Finding(
        rule=rule.rule,
        title=template.fill(rule.title),
        severity=rule.severity,
        evidence=template.fill(rule.evidence),
        why=template.fill(rule.why),
        change=Change(
            flags=tuple(flags),
            remove=tuple(command_line.spelling(engine, argv, name) for name in removed),
            environment=environment,
            text=template.fill(proposed.text),
            command=command,
        ),
        effect=expected_effect.effect(
            rule.effect.metric,
            rule.effect.estimate,
            observation,
            found,
            wanted=wanted,
            published=rule.effect.published,
            note=rule.effect.note,
        ),
        risk=rule.risk,
        docs=rule.docs[engine],
        source=rule.source,
    )


def proposals(
    observation: Observation, findings: Sequence[Finding], found: StepModel | None
) -> tuple[dict[str, Any], list[str]]:
    """Return the settings that problems and warnings set and remove; the first finding wins a conflict."""
    wanted: dict[str, Any] = {}
    removed: list[str] = []
    known = derived.names(observation, None, found)
    proposing = {one.rule for one in findings if one.severity != "note"}
    by_name = {rule.rule: rule for rule in all_rules()}
    for name in (one.rule for one in findings if one.rule in proposing):
        proposed = by_name[name].change[observation.engine]
        for field, text in proposed.set.items():
            if field not in removed and (value := _value(text, known)) is not None:
                wanted.setdefault(field, value)
        removed += [one for one in proposed.remove if one in observation.settings and one not in wanted]
    return wanted, removed


def _value(value: Any, known: Mapping[str, Any]) -> Any:
    if isinstance(value, str) and value.startswith("="):
        found = expressions.value(value[1:], known)
        return int(found) if isinstance(found, float) and found > 2 else found
    return value


class _Template(string.Formatter):
    """Fills `{name}` and `{name:.0%}`; `{name:bytes}` is a size, and an unknown name is a question mark."""

    def __init__(self, known: Mapping[str, Any]) -> None:
        self.known = known

    def fill(self, text: str) -> str:
        """Return the text with its names replaced."""
        return self.vformat(text, (), dict(self.known))

    def get_value(self, key: Any, args: Any, kwargs: Any) -> Any:
        """Return the value of a name."""
        return kwargs.get(key)

    def format_field(self, value: Any, format_spec: str) -> str:
        """Format a value."""
        if value is None:
            return "?"
        if format_spec == "bytes":
            return about_bytes(int(value))
        if not format_spec and isinstance(value, float):
            return f"{value:.3g}"
        return str(super().format_field(value, format_spec))
