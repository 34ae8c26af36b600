"""A document: a frozen value that lives in a file headed `powerband: <kind>/<schema>`."""

from __future__ import annotations

import hashlib
import json
from typing import Any, ClassVar, Self

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from powerband.core import yaml12
from powerband.errors import DocumentError, did_you_mean

HEADER = "powerband"


class Value(BaseModel):
    """A frozen value that refuses keys it does not know."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, validate_default=True)


class Document(Value):
    """A value with a kind and a schema number: what Powerband reads and writes as a file."""

    kind: ClassVar[str]
    schema_number: ClassVar[int] = 1
    labels: ClassVar[frozenset[str]] = frozenset({"name", "description"})  # told to people, not part of the identity

    name: str | None = None
    description: str | None = None

    @classmethod
    def header(cls) -> str:
        """Return what stands behind `powerband:` in a file of this kind."""
        return f"{cls.kind}/{cls.schema_number}"

    @classmethod
    def validate_data(cls, data: dict[str, Any], *, source: str, lines: dict[yaml12.Path, int]) -> Self:
        """Build the value from a file's plain data; errors name the line and the nearest known key."""
        try:
            return cls.model_validate({key: value for key, value in data.items() if key != HEADER})
        except ValidationError as error:
            raise _explain(error, cls, source=source, lines=lines) from None

    def to_data(self, *, units: bool = False) -> dict[str, Any]:
        """Return plain data without defaults; `units` writes 250ms instead of 0.25."""
        body = self.model_dump(mode="json", exclude_defaults=True, context={"units": units})
        return {HEADER: self.header(), **body}

    def to_text(self) -> str:
        """Return the YAML file that reads back as this very value."""
        data = self.to_data(units=True)
        return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)

    def digest(self) -> str:
        """Return a stable hash of what this value means: labels and spelled-out defaults do not count."""
        data = {key: value for key, value in self.to_data().items() if key not in self.labels}
        canonical = json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        return "sha256:" + hashlib.sha256(canonical.encode()).hexdigest()


class _Dumper(yaml.SafeDumper):
    """Quote whatever YAML 1.1 or 1.2 would read as something else than text."""


def read_header(text: str, *, source: str) -> tuple[str, int, dict[str, Any], dict[yaml12.Path, int]]:
    """Split a file into its kind, its schema number, its data and the line of each path."""
    data, lines = yaml12.read(text, source=source)
    if not isinstance(data, dict) or HEADER not in data:
        raise DocumentError(
            f"{source}: not a Powerband document: its header is missing",
            hint=f"begin the file with a line like '{HEADER}: deployment/1'",
        )
    kind, slash, number = str(data[HEADER]).partition("/")
    if not slash or not number.isdigit():
        raise DocumentError(
            f"{source}:{lines[(HEADER,)]}: the header '{data[HEADER]}' is not <kind>/<schema>",
            hint=f"write it like '{HEADER}: deployment/1'",
        )
    return kind, int(number), data, lines


def _explain(
    error: ValidationError, model: type[BaseModel], *, source: str, lines: dict[yaml12.Path, int]
) -> DocumentError:
    """Turn pydantic's errors into one sentence each, the first of which leads."""
    sentences = []
    hint = f"see the fields with 'powerband schema {getattr(model, 'kind', '')}'"
    for problem in error.errors():
        path = tuple(part for part in problem["loc"] if not _is_type_tag(part))
        line = next((lines[path[:n]] for n in range(len(path), -1, -1) if path[:n] in lines), None)
        where, dotted = f"{source}:{line}" if line else source, ".".join(map(str, path))
        if problem["type"] == "extra_forbidden":
            known = _known_keys(model, path[:-1])
            guess = did_you_mean(str(path[-1]), known)
            sentences.append(f"{where}: unknown key '{dotted}'.{guess}")
            if len(sentences) == 1:
                hint = f"known keys here: {', '.join(sorted(known))}"
        elif problem["type"] == "missing":
            sentences.append(f"{where}: the key '{dotted}' is missing")
        else:
            message = problem["msg"].removeprefix("Value error, ")
            sentences.append(f"{where}: {dotted or 'the file'}: {message}")
    return DocumentError("\n".join(sentences), hint=hint)


def _is_type_tag(part: str | int) -> bool:
    return (
        isinstance(part, str) and (part.endswith("]") or part[:1].isupper()) and not part.isupper() and "_" not in part
    )


def _known_keys(model: type[BaseModel], path: yaml12.Path) -> list[str]:
    """Return the keys that are known where `path` leads, as far as the types tell."""
    here: type[BaseModel] | None = model
    for part in path:
        field = here.model_fields.get(str(part)) if here else None
        if field is None:
            continue  # an index into a list keeps the model that the list holds
        here = _model_inside(field.annotation)
    return list(here.model_fields) if here else []


def _model_inside(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for argument in getattr(annotation, "__args__", ()):
        found = _model_inside(argument)
        if found is not None:
            return found
    return None
