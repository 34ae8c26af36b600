"""Parse a command line as an engine does, by the options recorded of it, and refuse it with the engine's words."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from pydantic import Field

from powerband.core.document import Value

FOLDER = Path(__file__).with_name("flags")


class Option(Value):
    """One option of an engine."""

    names: tuple[str, ...]
    off: tuple[str, ...] = Field(default=(), description="names that turn it off")
    values: str = Field(default="", description="how many values follow: empty is one, else 0, 2, ? or +")
    type: str = ""
    optional: bool = Field(default=False, description="an empty value or None means unset")
    pair: bool = Field(default=False, description="its names include the one that turns it off")
    choices: tuple[Any, ...] = ()
    keys: tuple[str, ...] = Field(default=(), description="keys that its JSON value may have")
    config: str = Field(default="", description="vLLM's class that checks the limits")
    gt: float | None = None
    ge: float | None = None
    lt: float | None = None
    le: float | None = None
    env: str = ""
    refusal: str = Field(default="", description="llama-server's words for a wrong value, {} in its place")
    refused: dict[str, str] = Field(default_factory=dict, description="numbers that llama-server refused")
    list: bool = Field(default=False, description="several choices may follow, separated by commas")
    removed: str = Field(default="", description="llama-server's words for an option that it no longer has")

    @property
    def knob(self) -> str:
        """Return its longest name as an identifier."""
        return max(self.names, key=len).lstrip("-").replace("-", "_")


class Recorded(Value):
    """What was recorded of one version of an engine."""

    engine: str
    version: str
    options: tuple[Option, ...]
    quantization: dict[str, int] = Field(default_factory=dict, description="methods, with the capability they need")
    architectures: tuple[str, ...] = ()


def recorded(engine: str, version: str) -> Recorded:
    """Return what was recorded of an engine."""
    return Recorded.model_validate_json((FOLDER / f"{engine}-{version}.json").read_text())


# vLLM: argparse, after the changes that its FlexibleArgumentParser makes to the arguments.


def vllm_arguments(argv: Sequence[str], options: Sequence[Option], *, program: str = "vllm") -> dict[str, Any]:
    """Return the options given to `vllm serve`, by name; end the process as vLLM does if they are wrong or for help."""
    parser = _Parser(prog=f"{program} serve", argument_default=argparse.SUPPRESS)
    parser.add_argument("model_tag", nargs="?")
    for one in options:
        _add(parser, one)
    arguments = _joined_json(_with_dashes(_model_first(argv)))
    known, unknown = parser.parse_known_args(arguments)
    if unknown:
        parser.prog = program  # vLLM's main parser reports these
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    given = vars(known)
    tag = given.pop("model_tag", None)
    return given if tag is None else given | {"model": tag}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.format_usage()}{self.prog}: error: {message}\n")


def _add(parser: argparse.ArgumentParser, option: Option) -> None:
    dest = option.names[0].lstrip("-").replace("-", "_")
    if option.pair:
        names = [one for one in option.names if not one.startswith("--no-")]
        parser.add_argument(*names, dest=dest, action=argparse.BooleanOptionalAction)
    elif option.values == "0":
        parser.add_argument(*option.names, dest=dest, action="store_true")
    else:
        more: dict[str, Any] = {"nargs": option.values} if option.values else {}
        convert = _converter(option)
        if option.choices:
            more["choices"] = [*(convert(str(one)) for one in option.choices), *([None] if option.optional else [])]
        parser.add_argument(*option.names, dest=dest, type=convert, **more)


def _converter(option: Option) -> Callable[[str], Any]:
    readers: dict[str, Callable[[str], Any]] = {
        "int": int,
        "float": float,
        "json": json.loads,
        "json or str": _json_or_text,
        "human_readable_int": _human_readable_int,
        "human_readable_int_or_auto": lambda text: -1 if text in ("-1", "auto") else _human_readable_int(text),
    }
    plain = readers.get(option.type, str)

    def convert(text: str) -> Any:
        if option.optional and text in ("", "None"):
            return None
        try:
            value = plain(text)
        except ValueError:
            if option.optional or option.type == "json":
                raise argparse.ArgumentTypeError(f"Value {text} cannot be converted to {plain}.") from None
            raise
        unknown = [key for key in value if key not in option.keys] if option.keys and isinstance(value, dict) else []
        if unknown and option.type == "json" and not option.optional:
            raise argparse.ArgumentTypeError(f"1 validation error\n{unknown[0]}\n  Unexpected keyword argument")
        return value

    convert.__name__ = option.type or "str"  # argparse names it in 'invalid int value'
    return convert


def _json_or_text(text: str) -> Any:
    return json.loads(text) if re.fullmatch(r"\s*{.*}\s*", text, re.DOTALL) else text


def _human_readable_int(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kKmMgGtT])", text.strip())
    if match is None:
        return int(text)
    power = "kmgt".index(match[2].lower()) + 1
    if match[2].islower():
        return int(float(match[1]) * int(1000**power))
    if "." in match[1]:
        raise argparse.ArgumentTypeError(f"Decimals are not allowed with binary suffixes like {match[2]}.")
    return int(match[1]) * int(1024**power)


def _model_first(argv: Sequence[str]) -> list[str]:
    """Turn `--model NAME` into the positional argument."""
    given = list(argv)
    for at, word in enumerate(given):
        if word == "--model":
            return [*given[at + 1 : at + 2], *given[:at], *given[at + 2 :]]
        if word.startswith("--model="):
            return [word.partition("=")[2], *given[:at], *given[at + 1 :]]
    if given and given[0].startswith("-") and any(re.match(r"--served[-_]model[-_]name(=|$)", one) for one in given):
        sys.exit("ValueError: `model` should be provided as the first positional argument when using `vllm serve`.")
    return given


def _with_dashes(argv: Sequence[str]) -> list[str]:
    """Replace underscores in names, and spell out --help=all and -O3."""
    changed: list[str] = []
    for at, word in enumerate(argv):
        if word.startswith("--help="):
            changed.append("--help")
        elif word.startswith("--"):
            name, equals, value = word.partition("=")
            top, dot, keys = name.partition(".")
            changed.append(top.replace("_", "-") + dot + keys + equals + value)
        elif word.startswith("-O") and word != "-O":
            changed += ["--optimization-level", word[2:].removeprefix("=")]
        elif word == "-O" and argv[at + 1 : at + 2] and argv[at + 1] in "0123":
            changed.append("--optimization-level")
        else:
            changed.append(word)
    return changed


def _joined_json(argv: Sequence[str]) -> list[str]:
    """Collect `--config.key value` into `--config '{"key": value}'`."""
    plain: list[str] = []
    trees: dict[str, dict[str, Any]] = {}
    words = iter(argv)
    for word in words:
        name, equals, value = word.partition("=")
        if not word.startswith("-") or "." not in name or re.fullmatch(r"-[\d.]+", name):
            plain.append(word)
            continue
        text = value if equals else next(words, "")
        top, *keys = name.removesuffix("+").split(".")
        leaf: Any = text.split(",") if name.endswith("+") else _leaf(text)
        tree = trees.setdefault(top, {})
        for key in keys[:-1]:
            tree = tree.setdefault(key, {})
        if isinstance(leaf, list) and isinstance(tree.get(keys[-1]), list):
            leaf = tree[keys[-1]] + leaf
        tree[keys[-1]] = leaf
    for name, tree in trees.items():
        plain += [name, json.dumps(tree)]
    return plain


def _leaf(text: str) -> Any:
    for read in (json.loads, _human_readable_int):
        try:
            return read(text)
        except (ValueError, argparse.ArgumentTypeError):
            continue
    return text


# llama-server: exact names; numbers are read from the start of a value, as C++'s stoi does.


class WrongArgument(Exception):
    """llama-server prints this and exits with 1."""


def llama_arguments(
    argv: Sequence[str], options: Sequence[Option], environment: Mapping[str, str], *, devices: Sequence[str] = ()
) -> dict[str, bool | str]:
    """Return the options given to llama-server, by their longest name; raises WrongArgument.

    `environment` comes before the arguments; `devices` are the names that --device accepts.
    """
    by_name = {name: one for one in options for name in (*one.names, *one.off)}
    given: dict[str, bool | str] = {}
    for one in options:
        text = environment.get(one.env) if one.env else None
        if one.off and one.env.replace("LLAMA_ARG_", "LLAMA_ARG_NO_") in environment:
            text = "0"
        if text is None:
            continue
        try:
            given |= _from_environment(one, text, devices)
        except ValueError as error:
            raise WrongArgument(f'error while handling environment variable "{one.env}": {error}\n\n') from None
    words = iter(argv)
    for word in words:
        name = word.replace("_", "-") if word.startswith("--") else word
        if name not in by_name:
            raise WrongArgument(f"error: invalid argument: {name}")
        option = by_name[name]
        try:
            if option.values == "0" and not option.removed:
                given[option.knob] = name not in option.off
                continue
            count = int(option.values or 1)
            values = [value for _, value in zip(range(count), words, strict=False)]
            if len(values) < count:
                raise ValueError("expected value for argument")
            if option.removed:
                raise ValueError(option.removed)
            for value in values:
                _check(option, value, devices)
            given[option.knob] = " ".join(values)
        except ValueError as error:
            usage = ", ".join((*option.names, *option.off))
            raise WrongArgument(
                f'error while handling argument "{name}": {error}\n\nusage:\n{usage}\n\n\n'
                "to show complete usage, run with -h"
            ) from None
    return given


def _from_environment(option: Option, text: str, devices: Sequence[str]) -> dict[str, bool | str]:
    true, false = text in ("on", "enabled", "true", "1"), text in ("off", "disabled", "false", "0")
    if option.values != "0":
        _check(option, text, devices)
        return {option.knob: text}
    if option.off and not (true or false):
        raise ValueError("invalid boolean value")
    return {option.knob: true} if true or option.off else {}


def _check(option: Option, text: str, devices: Sequence[str]) -> None:
    """Raise ValueError with llama-server's words unless an option accepts a value."""
    several = option.list or option.refusal.startswith("invalid device")
    for one in re.split(r"[,/]" if option.type else ",", text) if several else [text]:
        if one in option.choices or (not option.type and not option.refusal):
            continue
        if option.type:
            _check_number(option, one)
        elif not _accepted(option, one, devices):
            raise ValueError(option.refusal.replace("{}", one))


def _check_number(option: Option, text: str) -> None:
    match = _NUMBER[option.type].match(text)
    if match is None or (option.type == "int" and not -(2**31) <= int(match[0]) < 2**31):
        raise ValueError(_READERS[option.type])
    number = float(match[0])
    if (option.ge is not None and number < option.ge) or (option.le is not None and number > option.le):
        raise ValueError(option.refusal.replace("{}", text))
    for value, said in option.refused.items():
        if float(value) == number:
            raise ValueError(said)


def _accepted(option: Option, text: str, devices: Sequence[str]) -> bool:
    """Return whether a value has the form whose absence gives the refusal of an option."""
    if option.choices:
        return text in devices and option.refusal.startswith("invalid device")
    if option.refusal.startswith("error: failed to open file"):
        return Path(text).is_file()
    if option.refusal.startswith("not a directory"):
        return Path(text).is_dir()
    forms = {"invalid cpumask": r"(0x)?[0-9a-fA-F]+", "invalid range": r"\d*-\d*", "invalid value": r".+=.+",
             "error: Invalid type for KV override": r"[^=]+=(int|float|bool|str):.*"}  # fmt: skip
    for start, form in forms.items():
        if option.refusal.startswith(start):
            return re.fullmatch(form, text) is not None
    if option.refusal.startswith("[json"):
        try:
            json.loads(text)
        except ValueError:
            return False
        return True
    return "FNAME:SCALE" in option.refusal and ":" in text


_NUMBER = {
    "int": re.compile(r"\s*[+-]?\d+"),
    "float": re.compile(r"\s*[+-]?(\d+\.?\d*([eE][+-]?\d+)?|\.\d+([eE][+-]?\d+)?|inf|nan)"),
}
_READERS = {"int": "stoi", "float": "stof"}
