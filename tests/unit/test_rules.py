"""The expression language of rules."""

import pytest

from powerband import engines
from powerband.engines import rules


@pytest.mark.parametrize(
    ("expression", "holds"),
    [
        ("tp is not None and heads % tp != 0", True),
        ("heads % missing != 0", False),  # an unknown value makes it False
        ("missing is None", True),
        ("missing > 3 or heads == 9", False),
        ("heads == 9 or missing > 3", True),
        ("not flag", True),
        ("kind in ('a', 'b')", True),
        ("kind not in ('a', 'b')", False),
        ("'x' in words and 'z' not in words", True),
        ("heads // 2 + 1 == 5", True),
        ("flag == False", True),
    ],
)
def test_expressions(expression: str, holds: bool) -> None:
    names = {"tp": 2, "heads": 9, "flag": False, "kind": "a", "words": ("x", "y")}
    assert rules.holds(expression, names) is holds


@pytest.mark.parametrize("expression", ["__import__('os')", "heads.real", "[x for x in words]", "heads if tp else 1"])
def test_other_expressions_are_rejected(expression: str) -> None:
    with pytest.raises(ValueError, match="unsupported expression"):
        rules.holds(expression, {"heads": 9, "tp": 1, "words": ()})


@pytest.mark.parametrize("name", engines.names())
def test_every_rule_uses_only_known_names(name: str) -> None:
    """A rule about a renamed knob would silently never apply."""
    import ast

    engine = engines.get(name)
    facts = {"gpus", "cores", "last_core", "compiler", "slots", "context_per_slot", "max_ctx_size"}
    facts |= {"gpus_needed", "parallelism"}
    from powerband.core.model import Model

    known = set(engine.config_type.model_fields) | {f"model_{field}" for field in Model.model_fields} | facts
    for conflict in rules.facts(name).conflicts:
        used = {node.id for node in ast.walk(ast.parse(conflict.when)) if isinstance(node, ast.Name)}
        assert used <= known, conflict.rule
        assert conflict.hint
