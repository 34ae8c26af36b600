"""Facts of a running engine: metric names, flag aliases and log lines, from `data/live/<engine>.yaml`."""

from __future__ import annotations

import ast
import json
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib import resources
from typing import Any, NamedTuple

import yaml
from pydantic import Field, TypeAdapter, ValidationError

from powerband import engines
from powerband.core.document import Value
from powerband.engines import knobs

_SECRET = re.compile(r"key|token(?!s|iz)|password|secret", re.IGNORECASE)
_SAMPLE = re.compile(r"^(?P<name>[A-Za-z_:][\w:]*)(?:\{(?P<labels>.*)\})?\s+(?P<value>\S+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
MODEL = "model"
_MODEL_FLAGS = ("--model", "-m", "--hf-repo", "-hf", "-hfr")
_LOG_HEAD_CHARS, _LOG_TAIL_CHARS = 400_000, 400_000


class LiveFacts(Value):
    """How to read a running engine."""

    programs: tuple[str, ...] = Field(default=(), description="words of a command line that name the engine")
    prefix: str = Field(description="of its metrics")
    gauges: dict[str, tuple[str, ...]] = Field(default_factory=dict, description="metrics by name, the newest first")
    counters: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    histograms: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    labels: dict[str, str] = Field(default_factory=dict, description="settings in labels: knob to metric.label")
    aliases: dict[str, str] = Field(
        default_factory=dict,
        description="further spellings of flags, to the knob; ! before it: the flag sets it to false",
    )
    switches: dict[str, bool] = Field(default_factory=dict, description="flags without a value that are no knobs")
    options: tuple[str, ...] = Field(default=(), description="flags with a value that are no knobs")
    values: dict[str, str] = Field(default_factory=dict, description="spelling of the flag of a further option")
    environment: dict[str, str] = Field(default_factory=dict, description="environment variables that set a knob")
    log: dict[str, str] = Field(default_factory=dict, description="patterns by name; a group is the value")
    log_settings: dict[str, str] = Field(default_factory=dict, description="patterns of knobs in the log")
    log_dictionary: str = Field(default="", description="pattern of a Python dictionary of knobs in the log")
    log_gauges: dict[str, str] = Field(default_factory=dict, description="patterns of a periodic line with gauges")
    defaults: dict[str, Any] = Field(default_factory=dict, description="knobs that are not set anywhere")


class Histogram(NamedTuple):
    """A histogram: counts up to each bound, their sum and how many they are."""

    bounds: tuple[float, ...]
    counts: tuple[float, ...]
    total: float
    events: float


class Page(NamedTuple):
    """One reading of a metrics page, by our names."""

    gauges: dict[str, float]
    counters: dict[str, float]
    histograms: dict[str, Histogram]
    labels: dict[str, Any]


class Argument(NamedTuple):
    """Words of a command line that belong together, the setting that they set, and its value."""

    words: tuple[str, ...]
    field: str | None
    value: Any


class CommandLine(NamedTuple):
    """A parsed command line."""

    settings: dict[str, Any]
    model: str | None


@cache
def facts(engine: str) -> LiveFacts:
    """Read `data/live/<engine>.yaml`."""
    text = resources.files("powerband.engines").joinpath(f"data/live/{engine}.yaml").read_text("utf-8")
    return LiveFacts.model_validate(yaml.safe_load(text))


@cache
def known() -> tuple[str, ...]:
    """Return the engines that can be read."""
    folder = resources.files("powerband.engines").joinpath("data/live")
    return tuple(sorted(item.name.removesuffix(".yaml") for item in folder.iterdir() if item.name.endswith(".yaml")))


def engine_of(*, page: str = "", argv: Sequence[str] = ()) -> str | None:
    """Return the engine whose metrics or command line these are."""
    for name in known():
        table = facts(name)
        if f"\n{table.prefix}" in f"\n{page}" or any(word in part for part in argv[:4] for word in table.programs):
            return name
    return None


def setting_names(engine: str) -> set[str]:
    """Return every setting that a command line, a metrics page or a log of the engine can have."""
    table = facts(engine)
    found = {field for field, _ in knobs.knobs(engines.get(engine).config_type)}
    found |= {_field(flag) for flag in table.options} | {_switch(*one)[0] for one in table.switches.items()}
    return found | set(table.labels) | set(table.log_settings) | set(table.environment.values()) | set(table.defaults)


def read_page(engine: str, text: str) -> Page:
    """Return a metrics page by our names; values are summed over engines, shares are the largest."""
    table = facts(engine)
    totals: dict[str, dict[str, float]] = {}
    peaks: dict[str, float] = {}
    info: dict[str, dict[str, str]] = {}
    wanted = {name for names in (*table.gauges.values(), *table.counters.values()) for name in names}
    bases = {name.partition("{")[0] for name in wanted} | {one.partition(".")[0] for one in table.labels.values()}
    series = {name for names in table.histograms.values() for name in names}
    for line in text.splitlines():
        if not line.startswith(table.prefix) or (match := _SAMPLE.match(line)) is None:
            continue
        name = match["name"].removeprefix(table.prefix)
        stem = re.sub(r"_(bucket|sum|count)$", "", name)
        if name.removesuffix("_total") not in bases and name not in bases and stem not in series:
            continue
        labels, value = dict(_LABEL.findall(match["labels"] or "")), float(match["value"])
        if stem in series and name != stem:
            kind = name[len(stem) + 1 :]
            key = labels.get("le", "") if kind == "bucket" else kind
            totals.setdefault(stem, {})[key] = totals.setdefault(stem, {}).get(key, 0.0) + value
            continue
        info.setdefault(name, {}).update(labels)
        keys = [name, *(f'{name}{{{label}="{text}"}}' for label, text in labels.items())]
        for key in keys:
            found = totals.setdefault("", {})
            found[key] = found.get(key, 0.0) + value
            peaks[key] = max(peaks.get(key, value), value)
    plain = totals.get("", {})

    def of(names: Iterable[str], source: Mapping[str, float]) -> float | None:
        for name in names:
            base, brace, rest = name.partition("{")
            for spelled in (name, f"{base}_total{brace}{rest}"):
                if spelled in source:
                    return source[spelled]
        return None

    gauges = {
        ours: read
        for ours, names in table.gauges.items()
        if (read := of(names, peaks if ours.endswith("_use") else plain)) is not None
    }
    counters = {ours: read for ours, names in table.counters.items() if (read := of(names, plain)) is not None}
    histograms = {
        ours: _histogram(totals[name]) for ours, names in table.histograms.items() for name in names if name in totals
    }
    labelled = {}
    for knob, place in table.labels.items():
        metric, _, label = place.partition(".")
        if (value_text := info.get(metric, {}).get(label)) is not None:
            labelled[knob] = _plain(value_text)
    return Page(gauges, counters, histograms, labelled)


def _histogram(parts: Mapping[str, float]) -> Histogram:
    bounds = sorted((float(key), value) for key, value in parts.items() if key not in ("sum", "count", "created"))
    return Histogram(
        tuple(bound for bound, _ in bounds),
        tuple(value for _, value in bounds),
        parts.get("sum", 0.0),
        parts.get("count", 0.0),
    )


def read_command(engine: str, argv: Sequence[str], environment: Mapping[str, str]) -> CommandLine:
    """Return the settings of a command line and of its environment, by the engine's knob names."""
    table, config = facts(engine), engines.get(engine).config_type
    settings: dict[str, Any] = {}
    for name, field in table.environment.items():
        if name in environment:
            settings[field] = _typed(config, field, environment[name])
    for field, knob in knobs.knobs(config):
        if knob.env and field in environment:
            settings[field] = _typed(config, field, environment[field])
    model: str | None = None
    for one in arguments(engine, argv):
        if one.field == MODEL:
            model = str(one.value)
        elif one.field is not None:
            settings[one.field] = one.value
    return CommandLine(settings, model)


def arguments(engine: str, argv: Sequence[str]) -> list[Argument]:
    """Split a command line into the program and its arguments, each with the knob that it sets."""
    spelled, words = _spellings(engine), list(argv)
    place = _start_of_options(words, facts(engine))
    found = [Argument(tuple(words[:place]), None, None)]
    while place < len(words):
        word, following = words[place], words[place + 1] if place + 1 < len(words) else None
        flag, equals, text = word.partition("=")
        flag = flag.replace("_", "-") if flag.startswith("--") else flag
        field, value = spelled.get(flag, (None, None))
        if not word.startswith("-"):
            is_model = engine == "vllm" and len(found) == 1
            found.append(Argument((word,), MODEL if is_model else None, word))
            place += 1
            continue
        if equals or (value is not None and following not in ("true", "false", "on", "off")):
            taken = 1
        elif following is not None and (field is not None or not following.startswith("-")):
            taken, text = 2, following
        else:
            taken = 1
        if field is not None and (equals or taken == 2):
            value = text if field == MODEL else _typed(engines.get(engine).config_type, field, text)
        found.append(Argument(tuple(words[place : place + taken]), field, value))
        place += taken
    return found


def _spellings(engine: str) -> dict[str, tuple[str, Any]]:
    """Return the setting of every flag, and the value of a flag without one."""
    table, config = facts(engine), engines.get(engine).config_type
    spelled: dict[str, tuple[str, Any]] = dict.fromkeys(_MODEL_FLAGS, (MODEL, None))
    booleans = {field for field, _ in knobs.knobs(config) if bool in _types(config, field)}
    for field, knob in knobs.knobs(config):
        spelled[knobs.spelling(field, knob)] = (field, True if field in booleans else None)
        if knob.off:
            spelled[knob.off] = (field, False)
    for flag, switch in table.switches.items():
        spelled[flag] = _switch(flag, switch)
    for flag in table.options:
        spelled[flag] = (_field(flag), None)
    for alias, target in table.aliases.items():
        field = target.lstrip("!")
        spelled[alias] = (field, field == target if field in booleans else None)
    return spelled


def _start_of_options(words: Sequence[str], table: LiveFacts) -> int:
    """Return the place of the first word after the program and its subcommand."""
    if "serve" in words[:5]:
        return words.index("serve") + 1
    for place, word in enumerate(words[:6]):
        if any(program in word for program in table.programs):
            return place + 1
    return 0


def flags(engine: str, field: str, value: Any) -> tuple[tuple[str, ...], dict[str, str]]:
    """Return the words, and the environment variables, that set a setting to a value."""
    config = engines.get(engine).config_type
    knob = knobs.knob_of(config, field) if field in config.model_fields else None
    if knob is not None and knob.env:
        return (), {field: str(int(value)) if isinstance(value, bool) else str(value)}
    if variable := next((name for name, one in facts(engine).environment.items() if one == field and not knob), None):
        return (), {variable: str(value)}
    flag = knobs.spelling(field, knob) if knob else facts(engine).values.get(field, "--" + field.replace("_", "-"))
    if isinstance(value, bool):
        off = (knob.off if knob else None) or "--no-" + flag.removeprefix("--")
        return (flag if value else off,), {}
    return (flag, json.dumps(value, separators=(",", ":")) if isinstance(value, dict) else str(value)), {}


def _field(flag: str) -> str:
    return flag.lstrip("-").replace("-", "_").replace(".", "_")


def _switch(flag: str, value: bool) -> tuple[str, bool]:
    """Return the setting of a flag without a value; `--no-x` sets x to false."""
    return _field(flag).removeprefix("" if value else "no_"), value


def _types(config: Any, field: str) -> tuple[Any, ...]:
    annotation = config.model_fields[field].annotation
    return getattr(annotation, "__args__", (annotation,))


def _typed(config: Any, field: str, text: str) -> Any:
    """Return a value as the knob's type, or as it is written if it is none of ours."""
    if field in config.model_fields:
        info = config.model_fields[field]
        candidates: list[Any] = [text, _plain(text)]
        if "," in text:
            candidates.append(tuple(text.split(",")))
        for candidate in candidates:
            try:
                value = TypeAdapter(info.rebuild_annotation()).validate_python(candidate)
            except (ValidationError, TypeError):
                continue
            return value.model_dump(exclude_none=True) if isinstance(value, Value) else value
    return _plain(text)


def _plain(text: str) -> Any:
    """Return a text as a number, truth value or JSON value if it is one."""
    if text in ("True", "true", "False", "false"):
        return text.lower() == "true"
    if text in ("None", "null"):
        return None
    try:
        return json.loads(text)
    except ValueError:
        return text


def read_log(engine: str, text: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the settings and the further facts in a log; no other part of it is kept."""
    table = facts(engine)
    head, tail = text[:_LOG_HEAD_CHARS], text[_LOG_HEAD_CHARS:][-_LOG_TAIL_CHARS:]
    settings: dict[str, Any] = {}
    for field, pattern in table.log_settings.items():
        if match := re.search(pattern, head):
            settings[field] = _plain(match[1].strip("'\""))
    if table.log_dictionary and (match := re.search(table.log_dictionary, head)):
        try:
            given = ast.literal_eval(match[1])
        except (ValueError, SyntaxError):
            given = {}
        settings |= {key: value for key, value in given.items() if not _SECRET.search(key)}
    logged: dict[str, Any] = {}
    for name, pattern in table.log.items():
        match = re.search(pattern, head, re.MULTILINE) or re.search(pattern, tail, re.MULTILINE)
        if match:
            logged[name] = _plain(match[1].replace(",", "")) if match.groups() else True
    return {key: value for key, value in settings.items() if value is not None}, logged


def read_log_gauges(engine: str, text: str) -> list[dict[str, float]]:
    """Return the gauges of the periodic lines of a log, oldest first."""
    found = []
    patterns = facts(engine).log_gauges
    for line in text[-_LOG_TAIL_CHARS:].splitlines() if patterns else ():
        values = {name: float(match[1]) for name, pattern in patterns.items() if (match := re.search(pattern, line))}
        if "running" in values:
            found.append(values)
    return found


def redacted(argv: Sequence[str]) -> str:
    """Return a command line without the values of keys and tokens."""
    words = list(argv)
    for place, word in enumerate(words):
        flag, equals, _ = word.partition("=")
        if word.startswith("-") and _SECRET.search(flag):
            if equals:
                words[place] = f"{flag}=REDACTED"
            elif place + 1 < len(words) and not words[place + 1].startswith("-"):
                words[place + 1] = "REDACTED"
    return shlex.join(words)
