"""Read YAML 1.2: `on` is a string, a duplicate key is an error, and every value has a line number."""

from __future__ import annotations

import re
from typing import Any

import yaml

from powerband.core import plain_data
from powerband.errors import DocumentError

Path = tuple[str | int, ...]
MAX_CHARACTERS = 4 * 2**20
MAX_NODES = 200_000


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
    lines: dict[Path, int] = {}
    try:
        _check_events(text, source)
        loader = _Loader(text)
        try:
            node = loader.get_single_node()
            if node is None:
                return None, lines
            _index(node, (), lines, source)
            data = loader.construct_document(node)
        finally:
            loader.dispose()
        plain_data.check(data)
        return data, lines
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise DocumentError(
            f"{source}:{line}: not valid YAML: {error.problem}",
            hint="check the indentation and the quotes on that line",
        ) from None
    except yaml.YAMLError as error:
        raise DocumentError(f"{source}: not a text file: {error}", hint="a document is YAML or JSON text") from None
    except (ValueError, TypeError, KeyError, AttributeError, ArithmeticError) as error:  # of a value with a tag
        raise DocumentError(f"{source}: a value cannot be read: {error}", hint="see 'powerband schema'") from None


def _check_events(text: str, source: str) -> None:
    """Refuse what PyYAML cannot build in bounded memory: it recurses in C, and keeps a list at the top in n^2 bytes."""
    if len(text) > MAX_CHARACTERS:
        raise _over(source, f"{len(text):,} characters of YAML; at most {MAX_CHARACTERS:,}")
    depth = nodes = 0
    for event in yaml.parse(text, Loader=_Loader):
        if isinstance(event, yaml.NodeEvent):
            nodes += 1
            if nodes == 1 and isinstance(event, yaml.SequenceStartEvent) and not event.flow_style:
                raise DocumentError(f"{source}: it begins with a list", hint="a document begins with 'key: value'")
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        if depth > plain_data.MAX_DEPTH:
            raise _over(source, f"nested more than {plain_data.MAX_DEPTH} levels deep")
        if nodes > MAX_NODES:
            raise _over(source, f"more than {MAX_NODES:,} values in YAML")


def _over(source: str, found: str) -> DocumentError:
    return DocumentError(f"{source}: it is too large: {found}", hint="split the file, or write it as JSON")


def _index(node: yaml.Node, path: Path, lines: dict[Path, int], source: str) -> None:
    lines.setdefault(path, node.start_mark.line + 1)
    if len(lines) > MAX_NODES or len(path) > plain_data.MAX_DEPTH:  # aliases repeat what they name
        raise _over(source, f"with its aliases, more than {MAX_NODES:,} values or {plain_data.MAX_DEPTH} levels")
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                line = key.start_mark.line + 1
                raise DocumentError(f"{source}:{line}: a key is not a text", hint="write it as 'key: value'")
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
