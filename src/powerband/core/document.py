"""A document: a frozen value in a YAML or JSON file with the header `powerband: <kind>/<schema>`."""

from __future__ import annotations

import hashlib
import importlib
import json
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self, get_args, get_origin

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic.fields import FieldInfo

from powerband.core import plain_data, yaml12
from powerband.errors import DocumentError, did_you_mean

HEADER = "powerband"
_MAX_SENTENCES = 20
_MAX_DIGITS = 9
_KEY_ERRORS = ("missing", "extra_forbidden")  # the key is not in the data, or there as a number or null


class Value(BaseModel):
    """A frozen value that rejects unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, validate_default=True, defer_build=True)
    renamed_keys: ClassVar[Mapping[str, str]] = {}  # old to new: files of earlier versions stay readable

    @model_validator(mode="before")
    @classmethod
    def _accept_renamed_keys(cls, data: Any) -> Any:
        if cls.renamed_keys and isinstance(data, dict):
            if both := [old for old, new in cls.renamed_keys.items() if old in data and new in data]:
                raise ValueError(f"'{both[0]}' is the old name of '{cls.renamed_keys[both[0]]}'; give one of them")
            return {cls.renamed_keys.get(key, key): value for key, value in data.items()}
        return data


class Document(Value):
    """A value with a kind and a schema number, which Powerband reads and writes as a file."""

    kind: ClassVar[str]
    schema_number: ClassVar[int] = 1
    labels: ClassVar[frozenset[str]] = frozenset({"name", "description"})  # not part of the digest

    name: str | None = None
    description: str | None = None

    @classmethod
    def header(cls) -> str:
        """Return the value of the key `powerband` in files of this kind."""
        return f"{cls.kind}/{cls.schema_number}"

    @classmethod
    def validate_data(cls, data: dict[str, Any], *, source: str, lines: dict[yaml12.Path, int]) -> Self:
        """Build the value from a file's plain data; errors name the line and the nearest known key."""
        try:
            return cls.model_validate({key: value for key, value in data.items() if key != HEADER})
        except ValidationError as error:
            raise _explain(error, cls, data=data, source=source, lines=lines) from None

    def to_data(self, *, units: bool = False) -> dict[str, Any]:
        """Return plain data without defaults; `units` writes 250ms instead of 0.25."""
        body = self.model_dump(mode="json", exclude_defaults=True, context={"units": units})
        return {HEADER: self.header(), **body}

    def to_text(self) -> str:
        """Return YAML that reads back as an equal value."""
        data = self.to_data(units=True)
        return yaml.dump(data, Dumper=yaml12.Dumper, sort_keys=False, allow_unicode=True, width=100)

    def to_json(self) -> str:
        """Return JSON that reads back as an equal value."""
        return json.dumps(self.to_data(), ensure_ascii=False, separators=(",", ":")) + "\n"

    def to_records(self) -> list[dict[str, Any]]:
        """Return flat rows for a data frame; nested keys are joined with dots."""
        return [flatten(self.to_data())]

    def _repr_html_(self) -> str:
        """Return the document as HTML, for a notebook."""
        notebook = importlib.import_module("powerband.reports.notebook")  # on demand: core imports no report
        return str(notebook.render(self))

    def digest(self) -> str:
        """Return a stable hash of the value, without labels and without fields that have their default."""
        data = {key: value for key, value in self.to_data().items() if key not in self.labels}
        canonical = json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        return "sha256:" + hashlib.sha256(canonical.encode()).hexdigest()


def flatten(data: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested mappings as one mapping with dotted keys; an interval's value keeps the plain key."""
    found: dict[str, Any] = {}
    for key, value in data.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            inner = flatten(value, f"{name}.")
            if f"{name}.value" in inner and f"{name}.low" in inner:
                inner = {name: inner.pop(f"{name}.value"), **inner}
            found |= inner
        else:
            found[name] = value
    return found


def read_header(text: str, *, source: str) -> tuple[str, int, dict[str, Any], dict[yaml12.Path, int]]:
    """Split a file into its kind, its schema number, its data and the line of each path."""
    data, lines = _read_json(text, source=source) or yaml12.read(text, source=source)
    if not isinstance(data, dict) or HEADER not in data:
        raise DocumentError(
            f"{source}: not a Powerband document: the header is missing",
            hint=f"begin the file with a line like '{HEADER}: deployment/1'",
        )
    kind, slash, number = str(data[HEADER]).partition("/")
    if not slash or not number.isdecimal() or len(number) > _MAX_DIGITS:
        raise DocumentError(
            f"{source}:{lines[(HEADER,)]}: the header '{str(data[HEADER])[:100]}' is not <kind>/<schema>",
            hint=f"write it like '{HEADER}: deployment/1'",
        )
    return kind, int(number), data, lines


def _read_json(text: str, *, source: str) -> tuple[Any, dict[yaml12.Path, int]] | None:
    """Parse JSON with the JSON parser, which is a hundred times faster than YAML's; None: not JSON."""
    if not text.startswith("{"):
        return None
    try:
        return plain_data.parse_json(text), {(HEADER,): 1}
    except json.JSONDecodeError:
        return None
    except ValueError as error:
        raise DocumentError(f"{source}: not a document: {error}", hint="see 'powerband schema'") from None


def _explain(
    error: ValidationError, model: type[BaseModel], *, data: Any, source: str, lines: dict[yaml12.Path, int]
) -> DocumentError:
    """Turn each of pydantic's errors into one sentence; the hint is for the first."""
    sentences = []
    hint = f"see the fields with 'powerband schema {getattr(model, 'kind', '')}'"
    for problem in error.errors(include_url=False)[:_MAX_SENTENCES]:
        path = _path_in(data, problem["loc"], may_lack_last=problem["type"] in _KEY_ERRORS)
        line = next((lines[path[:n]] for n in range(len(path), -1, -1) if path[:n] in lines), None)
        where, dotted = f"{source}:{line}" if line else source, ".".join(map(str, path))
        if problem["type"] == "extra_forbidden":
            known = _known_keys(model, problem["loc"][:-1])
            sentences.append(f"{where}: unknown key '{dotted}'.{did_you_mean(str(path[-1]), known)}")
            if len(sentences) == 1:
                hint = f"known keys here: {', '.join(known)}"
        elif problem["type"] == "missing":
            sentences.append(f"{where}: the key '{dotted}' is missing")
        else:
            message = problem["msg"].removeprefix("Value error, ")
            sentences.append(f"{where}: {dotted or 'the file'}: {message}")
    if error.error_count() > _MAX_SENTENCES:
        sentences.append(f"{source}: {error.error_count() - _MAX_SENTENCES} more of this kind")
    return DocumentError("\n".join(sentences), hint=hint)


def _path_in(data: Any, location: yaml12.Path, *, may_lack_last: bool) -> yaml12.Path:
    """Return pydantic's location as a path in the file, without the names of types and union members."""
    path: list[str | int] = []
    for number, part in enumerate(location):
        children: Any = dict(enumerate(data)) if isinstance(data, list) else data
        if isinstance(children, dict) and part in children:
            data = children[part]
            path.append(part)
        elif may_lack_last and number == len(location) - 1:
            path.append(part)
    return tuple(path)


def _known_keys(model: type[BaseModel], location: yaml12.Path) -> list[str]:
    """Return the valid keys at pydantic's location."""
    candidates = [model]
    for part in location:
        tagged = [one for one in candidates if part in _tags(one)]
        inside = [found for one in candidates for found in _models_in(one.model_fields.get(str(part)))]
        candidates = tagged or inside or candidates
    return sorted({key for one in candidates for key in one.model_fields})


def _tags(model: type[BaseModel]) -> set[Any]:
    """Return the literal values that select a model in a union."""
    return {value for field in model.model_fields.values() for value in _literal(field.annotation)}


def _literal(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation) if get_origin(annotation) is Literal else ()


def _models_in(field: FieldInfo | None) -> list[type[BaseModel]]:
    pending, found = [field.annotation if field else None], []
    while pending:
        annotation = pending.pop()
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            found.append(annotation)
        pending += get_args(annotation)
    return found
