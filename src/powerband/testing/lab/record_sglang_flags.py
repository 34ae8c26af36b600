"""Record the options of SGLang's server from its wheel, as plain facts: one JSON object a line.

    python record_sglang_flags.py sglang-0.5.23-cp311-cp311-manylinux_2_34_x86_64.whl > flags/sglang-0.5.23.json

The sources are parsed, never imported, so neither SGLang nor CUDA is needed. Each field of `srt/arg_groups/fields` is
an option, and `ServerArgs.add_cli_args` adds a few. Choices that only a running SGLang knows stay out.
"""

from __future__ import annotations

import ast
import json
import sys
import zipfile
from collections.abc import Iterator, Mapping
from typing import Any

Facts = dict[str, Any]
_SRT = "sglang/srt/"
_FIELDS, _CHOICES = f"{_SRT}arg_groups/fields/", f"{_SRT}arg_groups/choices.py"
_ACTIONS = {"store_true": "0", "DeprecatedStoreTrueAction": "0"}
_CONVERTERS = {"loads": "json", "human_readable_int": "human_readable_int"}


def main() -> None:
    """Print what is recorded of the wheel that is the first argument."""
    with zipfile.ZipFile(sys.argv[1]) as wheel:
        options = list(of_wheel(wheel))
        version = next(name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")).split("-")[1]
    lines = ",\n".join(json.dumps({key: value for key, value in one.items() if value}) for one in options)
    print(f'{{"engine": "sglang",\n"version": "{version.removesuffix(".dist")}",\n"options": [\n{lines}\n]}}')


def of_wheel(wheel: zipfile.ZipFile) -> Iterator[Facts]:
    """Yield the options, in the order of their files and lines."""
    constants = dict(_constants(_parsed(wheel, _CHOICES)))
    for path in sorted(name for name in wheel.namelist() if name.startswith(_FIELDS) and name.endswith(".py")):
        for node in ast.walk(_parsed(wheel, path)):
            if isinstance(node, ast.ClassDef):
                yield from _of_namespace(node, constants)
    yield from _added(_parsed(wheel, f"{_SRT}server_args.py"))


def _parsed(wheel: zipfile.ZipFile, path: str) -> ast.Module:
    return ast.parse(wheel.read(path).decode())


def _constants(module: ast.Module) -> Iterator[tuple[str, Any]]:
    """Yield the lists of texts that a module assigns."""
    for node in module.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            try:
                yield node.targets[0].id, ast.literal_eval(node.value)
            except ValueError:
                continue


def _of_namespace(space: ast.ClassDef, constants: Mapping[str, Any]) -> Iterator[Facts]:
    for node in space.body:
        if not (isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)):
            continue
        found = node.annotation
        if isinstance(found, ast.Subscript) and _name(found.value) == "A" and isinstance(found.slice, ast.Tuple):
            kind, about = found.slice.elts[0], found.slice.elts[1]
            given = {one.arg: one.value for one in about.keywords} if isinstance(about, ast.Call) else {}
            if "no_cli" not in given:
                yield _option(node.target.id, kind, given, constants)


def _option(field: str, kind: ast.expr, given: Mapping[str | None, ast.expr], constants: Mapping[str, Any]) -> Facts:
    own = _value(given["cli_name"], constants) if "cli_name" in given else "--" + field.replace("_", "-")
    names = [own, *(_value(given["aliases"], constants) if "aliases" in given else ())]
    if _name(given.get("action")) == "BooleanOptionalAction":
        return {"names": [*names, *(f"--no-{one[2:]}" for one in names)], "values": "0", "pair": True}
    inner = _required(kind)
    facts: Facts = {"names": names}
    converter = _CONVERTERS.get(_name(given.get("type_parser")) or "")
    facts["choices"] = _value(given["choices"], constants) if "choices" in given else None
    if isinstance(inner, ast.Subscript) and _name(inner.value) == "Literal":
        facts["choices"] = facts["choices"] or _value(inner.slice, constants)
    elif isinstance(inner, ast.Subscript) and _name(inner.value) == "List" and "type_parser" not in given:
        facts |= {"values": "+", "type": _type(inner.slice)}
    elif _name(inner) == "bool" and "action" not in given:
        facts["values"] = "0"
    else:
        facts["type"] = converter or _type(inner)
    nargs = given.get("nargs") or _argument(given.get("action_kwargs"), "nargs")
    if nargs is not None:
        facts["values"] = _value(nargs, constants)
    return facts


def _added(module: ast.Module) -> Iterator[Facts]:
    """Yield the options that `add_cli_args` adds itself."""
    for node in ast.walk(module):
        if isinstance(node, ast.Call) and _name(node.func) == "add_argument":
            given = {one.arg: one.value for one in node.keywords}
            action = _value(given["action"], {}) if isinstance(given.get("action"), ast.Constant) else None
            values = _ACTIONS.get(action or _name(given.get("action")) or "", "")
            yield {"names": [_value(one, {}) for one in node.args], "values": values}


def _required(kind: ast.expr) -> ast.expr:
    """Return the type inside Optional[...]."""
    optional = isinstance(kind, ast.Subscript) and _name(kind.value) == "Optional"
    return kind.slice if optional and isinstance(kind, ast.Subscript) else kind


def _type(kind: ast.expr) -> str:
    return name if (name := _name(kind)) in ("int", "float") and name else ""


def _name(node: ast.expr | None) -> str | None:
    """Return the last part of a name, as `loads` of `json.loads`."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else None


def _argument(node: ast.expr | None, key: str) -> ast.expr | None:
    if not isinstance(node, ast.Dict):
        return None
    return next((value for name, value in zip(node.keys, node.values, strict=True) if _value(name, {}) == key), None)


def _value(node: ast.expr | None, constants: Mapping[str, Any]) -> Any:
    """Return a literal, or a list of another module; None for what only a running SGLang knows."""
    if isinstance(node, ast.Name):
        return constants.get(node.id)
    try:
        return ast.literal_eval(node) if node else None
    except ValueError:
        return None


if __name__ == "__main__":
    main()
