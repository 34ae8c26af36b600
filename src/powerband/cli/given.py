"""What the user gave, turned into documents; and how a start is shown."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Any

from powerband.cli.output import talk

if TYPE_CHECKING:
    from pathlib import Path

    from powerband.core.deployment import Deployment
    from powerband.core.slo import SLO
    from powerband.core.workload import Workload
    from powerband.runtime.replica import Replica


@contextlib.contextmanager
def start_progress(json: bool) -> Any:
    """Show each phase as it ends: live on a terminal, a line each elsewhere, nothing beside JSON."""
    console, began = talk(), time.monotonic()

    def on_change(replica: Replica, event: str) -> None:
        if json:
            return
        if event in ("ready", "stopping", "stopped", "failed"):
            if status:
                status.stop()
        elif status:
            status.update(f"{replica.engine.name}: {event} ({time.monotonic() - began:.1f} s)")
        else:
            console.print(f"{time.monotonic() - began:7.2f} s  {event}")

    status = console.status("starting") if console.is_terminal and not json else None
    if status:
        status.start()
    try:
        yield on_change
    finally:
        if status:
            status.stop()


def base(workload: str) -> Path | None:
    """Return the folder of a workload's own paths: that of its file; None for a name of the catalogue."""
    from pathlib import Path

    return Path(workload).parent if "." in workload else None


def folder(path: str) -> Path:
    """Make a folder for results, unless it is there."""
    from pathlib import Path

    from powerband.errors import InputError

    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{path} cannot hold results: {error.strerror}", hint="give another folder") from None
    return Path(path)


def seconds(text: str) -> float:
    """Read a duration of the command line; a bare number is seconds."""
    from powerband.core.units import parse_seconds
    from powerband.errors import InputError

    try:
        return float(parse_seconds(text if text[-1:].isalpha() else f"{text}s"))  # type: ignore[arg-type]
    except ValueError as error:
        raise InputError(str(error), hint="write a duration like 90s or 10min") from None


def deployment(
    what: str, *, engine: str | None, settings: list[str], host: str | None, port: int | None
) -> Deployment[Any]:
    """Read the deployment file, or make a deployment of a model; options override either."""
    from powerband.core.deployment import Deployment
    from powerband.core.document import HEADER
    from powerband.errors import InputError
    from powerband.store import documents

    if what.endswith((".yaml", ".yml", ".json")):
        document = documents.read(what)
        if not isinstance(document, Deployment):
            raise InputError(f"{what} is a {document.kind}, not a deployment", hint="give a deployment or a model")
        data = document.to_data(units=True)
        if engine and engine != document.engine:
            raise InputError(
                f"{what} is for {document.engine}, not {engine}",
                hint="leave --engine away, or give a model instead",
            )
    else:
        guess = "llamacpp" if what.endswith(".gguf") else "openai" if what.startswith("http") else "vllm"
        data = {HEADER: Deployment.header(), "engine": engine or guess, "variant": {"source": what}}
        if data["engine"] == "openai" and what.startswith("http"):
            data["config"] = {"base_url": what}
    for setting in settings:
        _set(data.setdefault("config", {}), setting)
    placement = {"host": host, "port": port}
    if any(value is not None for value in placement.values()):
        given = {key: value for key, value in placement.items() if value is not None}
        data["placement"] = {**data.get("placement", {}), **given}
    model = documents.document_type(Deployment.kind, data, source=what)
    result = model.validate_data(data, source="--set" if settings else what, lines={})
    assert isinstance(result, Deployment)
    return result


def _set(config: dict[str, Any], setting: str) -> None:
    """Apply `knob=value` or `knob.part=value`; the value is YAML."""
    from powerband.core import yaml12
    from powerband.errors import InputError

    path, equals, text = setting.partition("=")
    if not equals or not path:
        raise InputError(f"--set {setting} is not KNOB=VALUE", hint="write it like --set ctx_size=4096")
    *parents, last = path.split(".")
    for parent in parents:
        config = config.setdefault(parent, {})
    config[last] = yaml12.read(text, source=f"--set {path}")[0]


def traffic(name: str, *, rate: float | None, users: int | None) -> Workload:
    """Return a workload from a file or the catalogue, at the load that was asked for."""
    from powerband.core.workload import Workload
    from powerband.errors import InputError
    from powerband.store import documents

    if rate and users:
        raise InputError("a load is a rate or a number of users, not both", hint="leave --rate or --users away")
    found = documents.find("workload", name)
    assert isinstance(found, Workload)
    found = found.at_rate(rate) if rate is not None else found
    return found.with_users(users) if users is not None else found


def promise(name: str) -> SLO:
    """Return an SLO from a file or the catalogue."""
    from powerband.core.slo import SLO
    from powerband.store import documents

    found = documents.find("slo", name)
    assert isinstance(found, SLO)
    return found


def numbers(option: str, text: str) -> tuple[float, ...]:
    """Read a list such as 1,2,4."""
    from powerband.errors import InputError

    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise InputError(f"{option} {text} is not a list of numbers", hint="write it like 1,2,4") from None
