"""The proofs use names that the package has: a renamed function is found here, not by a proof of twenty minutes."""

import ast
import importlib
from pathlib import Path
from types import ModuleType

import pytest

PROOFS = Path(__file__).parents[2] / "proofs"


def scripts() -> list[Path]:
    """Return the proofs and the modules that they share."""
    files = [one for one in sorted(PROOFS.iterdir()) if one.is_file() and one.suffix in ("", ".py")]
    return [one for one in files if one.suffix or "python3" in one.read_text().partition("\n")[0]]


def take(module: str, name: str) -> object:
    """Return what `from module import name` gives; None if it fails."""
    found = getattr(importlib.import_module(module), name, None)
    try:
        return importlib.import_module(f"{module}.{name}")
    except ModuleNotFoundError:
        return found


def missing_names(script: Path) -> list[str]:
    """Return the names that `script` takes from the package and that the package lacks."""
    tree = ast.parse(script.read_text())
    imported: dict[str, object] = {
        one.asname or one.name: take(node.module, one.name)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module and node.module.partition(".")[0] == "powerband"
        for one in node.names
    }
    missing = [name for name, found in imported.items() if found is None]
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            owner = imported.get(node.value.id)
            if isinstance(owner, ModuleType) and not hasattr(owner, node.attr):
                missing.append(f"{owner.__name__}.{node.attr}")
    return missing


@pytest.mark.parametrize("script", scripts(), ids=lambda one: one.name)
def test_the_package_has_what_a_proof_uses(script: Path) -> None:
    assert missing_names(script) == []
