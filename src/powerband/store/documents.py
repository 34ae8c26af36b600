"""Read documents of every kind, and return their JSON schemas."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any, TypeVar

from powerband import catalog, engines, untrusted
from powerband.core.deployment import Deployment
from powerband.core.document import HEADER, Document, read_header
from powerband.errors import DocumentError, InputError, did_you_mean

D = TypeVar("D", bound=Document)
# The module and class of each kind; imported on demand, so that a command loads only the kinds it reads.
_CLASSES = {
    "coefficients": ("coefficients", "Coefficients"),
    "device": ("device", "Device"),
    "diagnosis": ("diagnosis", "Diagnosis"),
    "evaluation": ("evaluation", "Evaluation"),
    "evidence": ("evidence", "Evidence"),
    "inventory": ("device", "Inventory"),
    "measurement": ("measurement", "Measurement"),
    "plan": ("plan", "Plan"),
    "quality": ("quality", "QualityFloor"),
    "recipe": ("recipe", "Recipe"),
    "fleet": ("fleet", "Fleet"),
    "tenants": ("fleet", "Tenants"),
    "scheme": ("scheme", "Scheme"),
    "selftest": ("selftest", "Selftest"),
    "slo": ("slo", "SLO"),
    "study": ("study", "Study"),
    "support": ("support", "Support"),
    "variant": ("variant", "Lineage"),
    "workload": ("workload", "Workload"),
}
KINDS = tuple(sorted([*_CLASSES, Deployment.kind]))


def _class_of(kind: str) -> type[Document]:
    module, name = _CLASSES[kind]
    found: type[Document] = getattr(importlib.import_module(f"powerband.core.{module}"), name)
    return found


def read(path: str | Path) -> Document:
    """Read a document; its header gives the kind."""
    return parse(untrusted.text(Path(path)), source=str(path))


def read_as(kind: type[D], path: str | Path) -> D:
    """Read a document; raise InputError if it is of another kind."""
    document = read(path)
    if not isinstance(document, kind):
        raise InputError(f"{path} is a {document.kind}, not a {kind.kind}", hint=f"give a {kind.kind}")
    return document


def find(kind: str, name_or_path: str) -> Document:
    """Read a file of a kind, or an entry of the catalogue."""
    in_catalogue = name_or_path in catalog.names(kind) and not Path(name_or_path).exists()
    if not in_catalogue and ("/" in name_or_path or "." in name_or_path):
        document = read(name_or_path)
        if document.kind != kind:
            raise InputError(f"{name_or_path} is a {document.kind}, not a {kind}", hint=f"give a {kind}")
        return document
    return parse(catalog.text(kind, name_or_path), source=name_or_path)


def parse(text: str, *, source: str) -> Document:
    """Read a document from text."""
    kind, number, data, lines = read_header(text, source=source)
    model = document_type(kind, data, source=source)
    if number != model.schema_number:
        raise DocumentError(
            f"{source}: schema {kind}/{number} is not supported by this version",
            hint=f"this version reads {model.header()}; update Powerband or the file",
        )
    return model.validate_data(data, source=source, lines=lines)


def document_type(kind: str, data: dict[str, Any], *, source: str) -> type[Document]:
    """Return the class of a kind; that of a deployment depends on its engine."""
    if kind in _CLASSES:
        return _class_of(kind)
    if kind != Deployment.kind:
        raise DocumentError(
            f"{source}: unknown kind '{kind}'.{did_you_mean(kind, KINDS)}",
            hint=f"kinds: {', '.join(KINDS)}",
        )
    engine = data.get("engine")
    if engine is None:
        raise DocumentError(f"{source}: the key 'engine' is missing", hint=f"engines: {', '.join(engines.names())}")
    return engines.deployment_type(str(engine))


def json_schema(kind: str) -> dict[str, Any]:
    """Return the JSON Schema of a kind, for editors."""
    if kind in _CLASSES:
        return _with_header(_class_of(kind))
    if kind != Deployment.kind:
        raise InputError(f"unknown kind '{kind}'.{did_you_mean(kind, KINDS)}", hint=f"kinds: {', '.join(KINDS)}")
    branches: list[dict[str, Any]] = []
    definitions: dict[str, Any] = {}
    for name in engines.names():
        schema = _with_header(engines.deployment_type(name))
        schema["properties"]["engine"] = {"const": name}
        definitions |= schema.pop("$defs", {})
        branches.append(schema)
    return {"$schema": _DIALECT, "title": "deployment", "oneOf": branches, "$defs": definitions}


_DIALECT = "https://json-schema.org/draft/2020-12/schema"


def _with_header(model: type[Document]) -> dict[str, Any]:
    schema = model.model_json_schema()
    schema["$schema"] = _DIALECT
    schema["properties"] = {HEADER: {"const": model.header()}, **schema["properties"]}
    schema["required"] = [HEADER, *schema.get("required", [])]
    return schema
