"""Read YAML 1.2: `on` is a string, a duplicate key is an error, and every value has a line number."""

from __future__ import annotations

import re
from typing import Any

import yaml

from powerband.errors import DocumentError

Path = tuple[str | int, ...]


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]  # C parses ten times as fast
    """PyYAML's safe loader, with the implicit types of YAML 1.2's core schema."""

    yaml_implicit_resolvers: dict[str, Any] = {}


class Dumper(yaml.SafeDumper):
    """PyYAML's safe dumper; it also quotes the texts that YAML 1.2 reads as another type, such as 1e1."""


for _tag, _pattern, _first in (
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("null", r"~|null|Null|NULL|", "~nN\0"),
    ("int", r"[-+]?[0-9]+", "-+0123456789"),
    ("float", r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?", "-+.0123456789"),
):
    for _kind in (_Loader, Dumper):
        _kind.add_implicit_resolver(
            f"tag:yaml.org,2002:{_tag}",
            re.compile(rf"^(?:{_pattern})$"),
            [c if c != "\0" else "" for c in _first],
        )


def _int(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    return int(node.value)


def _float(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> float:
    return float(node.value)


_Loader.add_constructor("tag:yaml.org,2002:int", _int)
_Loader.add_constructor("tag:yaml.org,2002:float", _float)


def read(text: str, *, source: str) -> tuple[Any, dict[Path, int]]:
    """Parse one YAML (or JSON) document into plain values and the line of each path."""
    loader = _Loader(text)
    lines: dict[Path, int] = {}
    try:
        node = loader.get_single_node()
        if node is None:
            return None, lines
        _index(node, (), lines, source)
        return loader.construct_document(node), lines
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise DocumentError(
            f"{source}:{line}: not valid YAML: {error.problem}",
            hint="check the indentation and the quotes on that line",
        ) from None
    except yaml.YAMLError as error:
        raise DocumentError(f"{source}: not a text file: {error}", hint="a document is YAML or JSON text") from None
    finally:
        loader.dispose()


def _index(node: yaml.Node, path: Path, lines: dict[Path, int], source: str) -> None:
    lines.setdefault(path, node.start_mark.line + 1)
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            here = (*path, key.value)
            if here in lines:
                raise DocumentError(
                    f"{source}:{key.start_mark.line + 1}: duplicate key '{key.value}'",
                    hint=f"remove one of them; the first is on line {lines[here]}",
                )
            lines[here] = key.start_mark.line + 1
            _index(value, here, lines, source)
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            _index(value, (*path, index), lines, source)
