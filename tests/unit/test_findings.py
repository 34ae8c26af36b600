"""The rules of `diagnose`: every one is complete, and names only what an observation has."""

from __future__ import annotations

import string

import pytest

from powerband import engines
from powerband.core.diagnosis import Observation
from powerband.diagnose import derived, expected_effect, rules
from powerband.engines import live
from powerband.engines import rules as expressions

# Set by `derived.names` only where their inputs are known.
DERIVED = {
    "threads_per_core",
    "wanted_total_context",
    "wanted_threads",
    "wanted_binding",
    "model_experts",
    "model_layers",
}
ALL = {one.rule: one for one in rules.all_rules()}


def known(engine: str) -> set[str]:
    """Return every name that a rule of an engine may use."""
    found = set(Observation.model_fields) | live.setting_names(engine) | set(live.facts(engine).log) | DERIVED
    return found | set(derived.names(Observation(engine=engine), None, None))


@pytest.mark.parametrize("name", ALL)
def test_a_rule_is_complete(name: str) -> None:
    rule = ALL[name]
    assert rule.rule == name
    assert set(rule.when) == set(rule.change) == set(rule.docs)
    for text in (*rule.docs.values(), rule.source):
        assert text.startswith("https://")
    for text in (rule.why, rule.risk, rule.evidence, rule.effect.metric):
        assert text
    assert rule.effect.estimate in ("", *expected_effect.ESTIMATORS)
    assert rule.effect.estimate or rule.effect.published or rule.effect.note
    assert rule.effect.published is None or rule.effect.note  # a published figure names its case
    for change in rule.change.values():
        assert change.set or change.remove or change.text


@pytest.mark.parametrize("name", ALL)
def test_a_rule_names_only_what_exists(name: str) -> None:
    rule = ALL[name]
    for engine in rule.when:
        conditions = rule.conditions(engine)
        names = set[str]().union(*map(expressions.names_in, conditions))
        change = rule.change[engine]
        assert set(change.set) | set(change.remove) <= live.setting_names(engine), name
        for value in change.set.values():
            if isinstance(value, str) and value.startswith("="):
                names |= expressions.names_in(value[1:])
        for text in (rule.title, rule.evidence, rule.why, change.text):
            names |= {field for _, field, _, _ in string.Formatter().parse(text) if field}
        shared = set().union(*(known(one) for one in rule.when))
        assert names <= (known(engine) | shared), (engine, names - known(engine))
        for when in conditions:
            expressions.holds(when, {})  # raises where the expression is not supported


@pytest.mark.parametrize("engine", live.known())
def test_live_facts_name_existing_knobs(engine: str) -> None:
    table = live.facts(engine)
    fields = set(engines.get(engine).config_type.model_fields) | live.setting_names(engine)
    assert {one.lstrip("!") for one in table.aliases.values()} <= fields
    assert set(table.log_settings) <= fields
