"""Record the options that an engine accepts, as plain facts: one JSON object a line.

    VLLM_ENVIRONMENT/bin/python record_flags.py vllm > flags/vllm-0.32.0.json
    python record_flags.py llamacpp PATH/llama-server 0.3.36 > flags/llamacpp-0.3.36.json

vLLM's parser is imported, so its own interpreter must run this file, which therefore imports only the standard library.
llama-server is asked: each option is given a few values, followed by an unknown option, so that it never starts.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Facts = dict[str, Any]
_LIMITS = ("gt", "ge", "lt", "le")
_CONFIGS = ("ModelConfig", "CacheConfig", "ParallelConfig", "SchedulerConfig", "LoRAConfig", "VllmConfig")
_NO_SUCH, _NO_VALUE = "--no-such-flag", "qqq"
_TRIED = (-9999, -9, -1, 0, 1, 9999)
_NUMBERS = {"stoi": "int", "stol": "int", "stoul": "int", "stoull": "int", "stof": "float", "stod": "float"}


def main() -> None:
    """Print what is recorded of the engine named by the first argument."""
    if sys.argv[1] == "vllm":
        facts, options = of_vllm()
    else:
        facts = {"version": sys.argv[3], "architectures": _gguf_architectures(Path(sys.argv[2]))}
        options = list(of_llama_server(sys.argv[2]))
    head = "".join(f'"{key}": {json.dumps(value)},\n' for key, value in facts.items())
    lines = ",\n".join(json.dumps({key: value for key, value in one.items() if _said(value)}) for one in options)
    print(f'{{"engine": "{sys.argv[1]}",\n{head}"options": [\n{lines}\n]}}')


def _said(value: Any) -> bool:
    """Return whether a fact is worth a place: a limit of 0 is, an empty list is not."""
    return value is not False and bool(value or isinstance(value, int | float))


def of_vllm() -> tuple[Facts, list[Facts]]:
    """Return facts of the vLLM in this environment, and the options of its server."""
    sys.path = [one for one in sys.path if one != str(Path(__file__).parent)]  # where `vllm` is the stand-in
    arguments = importlib.import_module("vllm.utils.argparse_utils")
    cli = importlib.import_module("vllm.entrypoints.launchers.cli_args")
    parser: argparse.ArgumentParser = cli.make_arg_parser(arguments.FlexibleArgumentParser())
    limits = dict(_limits())
    speculative = importlib.import_module("vllm.config").SpeculativeConfig
    found = []
    for action in parser._actions:
        if action.dest in ("help", "model_tag"):
            continue
        facts: Facts = {"names": list(action.option_strings)}
        if action.nargs == 0:
            facts |= {"values": "0", "pair": isinstance(action, argparse.BooleanOptionalAction)}
        else:
            facts |= {"values": str(action.nargs or ""), **_converter(action.type)}
        facts["choices"] = [one for one in action.choices or () if one is not None]
        facts |= limits.get(action.dest, {})
        if action.dest == "speculative_config":
            facts["keys"] = _keys(speculative)
        found.append(facts)
    methods = importlib.import_module("vllm.model_executor.layers.quantization")
    needs = {name: methods.get_quantization_config(name).get_min_capability() for name in methods.QUANTIZATION_METHODS}
    registry = importlib.import_module("vllm.model_executor.models.registry").ModelRegistry
    facts = {"version": importlib.import_module("vllm.version").__version__, "quantization": needs}
    return facts | {"architectures": sorted(registry.get_supported_archs())}, found


def _converter(convert: Any) -> Facts:
    """Return the type of a value, by the function that converts it."""
    facts: Facts = {}
    while (inner := _enclosed(convert, "return_type")) is not None:
        facts["optional"] = facts.get("optional") or convert.__name__ == "_optional_type"
        convert = inner
    name = getattr(convert, "__name__", "str")
    if name == "parse_dataclass":
        return facts | {"type": "json", "keys": _keys(convert.__defaults__[0])}
    kinds = {"str": "", "NoneType": "", "<lambda>": "", "loads": "json", "union_dict_and_str": "json or str"}
    return facts | {"type": kinds.get(name, name)}


def _keys(config: Any) -> list[str]:
    return sorted(one.name for one in dataclasses.fields(config) if one.init)


def _enclosed(function: Any, name: str) -> Any:
    code = getattr(function, "__code__", None)
    if code is None or name not in code.co_freevars:
        return None
    return function.__closure__[code.co_freevars.index(name)].cell_contents


def _limits() -> Iterator[tuple[str, Facts]]:
    """Yield the limits of numbers that vLLM's config classes declare, by option."""
    configs = importlib.import_module("vllm.config")
    for name in reversed(_CONFIGS):
        for field in dataclasses.fields(getattr(configs, name)):
            found: Facts = {}
            for one in getattr(field.default, "metadata", ()):
                found |= {limit: getattr(one, limit) for limit in _LIMITS if hasattr(one, limit)}
            if found:
                yield field.name, {"config": name, **found}


def of_llama_server(program: str) -> Iterator[Facts]:
    """Yield the options of a llama-server."""
    text = subprocess.run([program, "--help"], capture_output=True, text=True, check=True).stdout
    for entry in re.split(r"\n(?=-)", text):
        head, _, rest = entry.partition("\n")
        names, value, said = _head(head)
        if not names:
            continue
        text = "\n".join((said, *(line for line in rest.splitlines() if line.startswith(" " * 20))))
        environment = re.search(r"\(env: (\w+)\)", text)
        off = [one for one in names if one.startswith(("--no-", "-no-", "-nkvo", "-nr", "-nocb"))]
        on = [one for one in names if one not in off]
        facts: Facts = {"names": on or off, "off": off if on else []}
        facts["env"] = environment[1] if environment else ""
        if "has been removed" in text:
            yield facts | {"values": "", "removed": _refusal(program, facts["names"][0], "1")}
        elif not value:
            yield facts | {"values": "0"}
        else:
            yield (
                facts
                | {"values": str(len(value.split())) if value == "START END" else ""}
                | _values(program, facts["names"][-1], f"{value}\n{text}")
            )


def _gguf_architectures(program: Path) -> list[str]:
    """Return the architectures of GGUF files, from the converter installed beside a llama-server."""
    text = (program.parent.parent / "convert" / "gguf-py" / "gguf" / "constants.py").read_text()
    table = text.partition("MODEL_ARCH_NAMES")[2].partition("}")[0]
    return re.findall(r'MODEL_ARCH\.\w+:\s*"([^"]+)"', table)


def _head(line: str) -> tuple[list[str], str, str]:
    """Split the first line of an entry into names, the placeholder of a value, and the start of its description."""
    words = re.match(r"((?:-[\w.-]+(?:,\s+|\s|$))+)(.*)", line)
    if words is None:
        return [], "", ""
    names = re.findall(r"(?<!-)--?\w[\w.-]*", words[1])
    if words[1].endswith("  ") or not words[2]:
        return names, "", words[2]
    value, _, said = words[2].partition("  ")
    return names, value, said.strip()


def _values(program: str, name: str, text: str) -> Facts:
    """Return what values an option accepts, by trying a word, numbers, and every word that its help names."""
    refusal = _refusal(program, name, _NO_VALUE)
    if refusal is None:
        return {}
    kind = _NUMBERS.get(refusal.strip(), "")
    words = dict.fromkeys(re.findall(r"(?<![\w-])[\w.+-]*\w", text))
    if kind:
        words = {one: None for one in words if not re.match(r"[-+.\d]|inf|nan", one)}
    choices = [one for one in words if _refusal(program, name, one) is None]
    facts: Facts = {"type": kind, "refusal": "" if kind else refusal, "choices": choices}
    if kind == "int":
        facts |= _limits_of(program, name)
    if kind or len(choices) > 1:  # of a list, every part is checked
        facts["list"] = (
            (_refusal(program, name, f"1,{_NO_VALUE}") is not None)
            if kind
            else (_refusal(program, name, ",".join(choices[:2])) is None)
        )
    return facts


def _limits_of(program: str, name: str) -> Facts:
    """Return the least and the most that an option accepts, and other numbers that it refuses, with its words."""
    said = {number: _refusal(program, name, str(number)) for number in _TRIED}
    accepted = [number for number, words in said.items() if words is None]
    facts: Facts = {}
    for key, end, inside in (("ge", _TRIED[0], accepted[0]), ("le", _TRIED[-1], accepted[-1])):
        if said[end] is None:
            continue
        outside = end
        while abs(outside - inside) > 1:
            middle = (outside + inside) // 2
            outside, inside = (outside, middle) if _refusal(program, name, str(middle)) is None else (middle, inside)
        facts |= {key: inside, "refusal": str(said[end]).replace(str(end), "{}")}
    between = [number for number in said if accepted[0] < number < accepted[-1] and said[number] is not None]
    return facts | {"refused": {str(number): said[number] for number in between}}


def _refusal(program: str, name: str, value: str) -> str | None:
    """Return what llama-server says of a value; None if it accepts it."""
    second = ["1"] if name == "--control-vector-layer-range" else []
    environment = {key: text for key, text in os.environ.items() if not key.startswith("LLAMA_")}
    with tempfile.TemporaryDirectory() as folder:
        argv = [program, name, value, *second, _NO_SUCH]
        done = subprocess.run(argv, capture_output=True, text=True, cwd=folder, env=environment, timeout=60)
    said = done.stdout + done.stderr
    if f"invalid argument: {_NO_SUCH}" in said:
        return None
    match = re.search(r"error while handling argument \"[^\"]+\": (.*?)\n\nusage:", said, re.DOTALL)
    return match[1].replace(_NO_VALUE, "{}") if match else said.strip()[:200]


if __name__ == "__main__":
    main()
