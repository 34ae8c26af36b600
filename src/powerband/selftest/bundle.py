"""Make the bundle of a self-test, and refuse to write one that names its owner."""

from __future__ import annotations

import getpass
import json
import os
import re
import socket
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import powerband.plan as plan
from powerband import catalog, engines
from powerband.core.engine import Installation
from powerband.core.host import Host
from powerband.core.model import Model
from powerband.core.scheme import Scheme
from powerband.core.selftest import EngineFacts, GpuFacts, MachineFacts, Selftest
from powerband.errors import InputError
from powerband.selftest.machine import device_name
from powerband.store import runs, schemes

_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASS|CREDENTIAL", re.IGNORECASE)
_PATH = re.compile(r"(?:^|[\s'\"=:(])(?:~|\.{1,2}|[A-Za-z]:)?[/\\]\w|\w+/\w+/\w+")
_LABEL = 100  # characters that are kept of a text
_MIN_LENGTH = 3  # of a name to look for
# Names of users and hosts that tell nothing, and are parts of words of a bundle.
_GENERIC = frozenset({"amd", "cuda", "gpu", "intel", "linux", "llama", "nvidia", "powerband", "selftest", "vllm"})
_MIN_SECRET = 6
# Names are searched only in facts of drivers and versions: other texts are of the code, and may have the same words.
_NAMES = ("the host name", "the short host name", "the user name")
_FACTS = ("machine.", "engines[")


def machine_facts(host: Host) -> MachineFacts:
    """Return what the bundle tells of a machine."""
    gpus = tuple(
        GpuFacts(
            name=gpu.name[:_LABEL],
            memory_bytes=gpu.memory_bytes,
            driver=gpu.driver,
            compute_capability=gpu.compute_capability,
            island=gpu.island,
            unknown=gpu.unknown,
        )
        for gpu in host.gpus
    )
    return MachineFacts(
        system=host.system,
        machine=host.machine,
        cpu=host.cpu_name[:_LABEL],
        cores=len(host.cores),
        numa_nodes=max(1, len(host.numa_nodes)),
        memory_bytes=host.memory_bytes,
        device=device_name(host),
        gpus=gpus,
    )


def engine_facts(installation: Installation, model: Model) -> EngineFacts:
    """Return what the bundle tells of an engine and of the model that it served."""
    scheme = published_scheme(model)
    return EngineFacts(
        engine=installation.engine,
        version=installation.version,
        build=(installation.build or "")[:_LABEL] or None,
        architecture=model.architecture if model.architecture in _public_architectures() else None,
        layers=model.layers,
        hidden=model.hidden,
        weight_bytes=model.weight_bytes,
        scheme=scheme.name if scheme else None,
    )


def published_scheme(model: Model) -> Scheme | None:
    """Return the scheme of the model's weights; None: the catalogue has none for them."""
    try:
        return schemes.published_scheme(model)
    except InputError:
        return None


def write(found: Selftest, path: Path) -> None:
    """Write a bundle that contains no name, path or secret of this machine."""
    check(found)
    runs.write_atomic(path, found.to_json())


def check(found: Selftest, private: Mapping[str, str] | None = None) -> None:
    """Raise InputError if a text of the bundle contains a path, or one of the private texts, by what they are."""
    known = private_texts() if private is None else private
    public = _public_words()
    for where, text in _texts(found.to_data()):
        if text in public:
            continue
        if _PATH.search(text):
            raise _refusal("a path", where)
        fact = where.startswith(_FACTS) and not where.endswith(f".{text}")  # and not a key
        for text_of, secret in known.items():
            pattern = rf"(?<![A-Za-z0-9]){re.escape(secret)}(?![A-Za-z0-9])"
            if (fact or text_of not in _NAMES) and re.search(pattern, text, re.IGNORECASE):
                raise _refusal(text_of, where)


def private_texts() -> dict[str, str]:
    """Return the texts of this machine that no bundle may contain, by what they are."""
    host = socket.gethostname()
    names = dict(zip(_NAMES, (host, host.partition(".")[0], _user_name()), strict=True))
    found = {what: name for what, name in names.items() if name.lower() not in _GENERIC}
    found["the home directory"] = str(Path.home())
    secrets = {f"the value of ${name}": value for name, value in os.environ.items() if _SECRET.search(name)}
    found |= {what: value for what, value in secrets.items() if len(value) >= _MIN_SECRET}
    return {what: text for what, text in found.items() if len(text) >= _MIN_LENGTH}


def _user_name() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user without an entry in its user database
        return ""


def _public_words() -> frozenset[str]:
    """Return the words that no owner can have chosen: of the schema, the engines and the catalogue."""
    devices = catalog.names("device")
    drivers = {name for one in devices for name in plan.device(one).driver_names}
    states = {"passed", "failed", "not possible", "not run", Selftest.header()}
    return frozenset({*engines.names(), *devices, *drivers, *states, *catalog.names("scheme")})


@cache
def _public_architectures() -> frozenset[str]:
    """Return the architectures of the catalogue's models, and their types, which GGUF files name."""
    configs = [json.loads(catalog.text("model", name)) for name in catalog.names("model")]
    found = {text for one in configs for text in (*one["architectures"], one.get("model_type"))}
    return frozenset(found - {None})  # of another model, the class name may be private


def _texts(data: Any, where: str = "") -> Iterator[tuple[str, str]]:
    """Yield every text of plain data, with its place."""
    if isinstance(data, dict):
        for key, value in data.items():
            yield f"{where}.{key}".lstrip("."), str(key)
            yield from _texts(value, f"{where}.{key}".lstrip("."))
    elif isinstance(data, list):
        for number, value in enumerate(data):
            yield from _texts(value, f"{where}[{number}]")
    elif isinstance(data, str):
        yield where, data


def _refusal(what: str, where: str) -> InputError:
    return InputError(
        f"'{where}' of the bundle contains {what}, which no bundle may contain",
        hint="no file was written; report it as a bug of powerband selftest, with the name of that field",
    )
