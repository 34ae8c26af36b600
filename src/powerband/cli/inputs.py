"""What the user gave, turned into documents; and how a start is shown."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Any

from powerband.cli.output import stderr

if TYPE_CHECKING:
    from pathlib import Path

    from powerband.core.deployment import Deployment
    from powerband.core.quality import QualityFloor
    from powerband.core.slo import SLO
    from powerband.core.workload import Workload
    from powerband.evaluate.tasks import Task
    from powerband.runtime.replica import Replica


@contextlib.contextmanager
def start_progress(json: bool) -> Any:
    """Show each phase as it ends: live on a terminal, a line each elsewhere, nothing beside JSON."""
    console, began = stderr(), time.monotonic()

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
        set_knob(data.setdefault("config", {}), setting)
    placement = {"host": host, "port": port}
    if any(value is not None for value in placement.values()):
        given = {key: value for key, value in placement.items() if value is not None}
        data["placement"] = {**data.get("placement", {}), **given}
    model = documents.document_type(Deployment.kind, data, source=what)
    result = model.validate_data(data, source="--set" if settings else what, lines={})
    assert isinstance(result, Deployment)
    return result


def set_knob(config: dict[str, Any], setting: str) -> None:
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


def floor(name: str) -> QualityFloor:
    """Return a quality floor from a file or the catalogue."""
    from powerband.core.quality import QualityFloor
    from powerband.store import documents

    found = documents.find("quality", name)
    assert isinstance(found, QualityFloor)
    return found


def exams(
    given_tasks: list[str],
    floor: QualityFloor | None,
    *,
    source: str,
    most: int,
    tells_prompts: bool = False,
    run_code: bool = False,
) -> dict[str, Task]:
    """Read every NAME=FILE; a floor may ask for our own task without one."""
    from pathlib import Path

    from powerband import catalog
    from powerband.errors import InputError
    from powerband.evaluate.tasks import QuestionTask
    from powerband.evaluators import lm_eval, questions, recall

    found: dict[str, Task] = {}
    if floor is None:
        return found
    for text in given_tasks:
        name, _, file = text.rpartition("=")
        path = Path(file).expanduser()
        if not path.is_file():
            raise InputError(f"there is no task file {file}", hint="write --task NAME=FILE")
        if name in catalog.names("task"):
            lm_eval.check(name, tells_prompts=tells_prompts, run_code=run_code)
            found[name] = _harness(name, path, source, most=most)
        else:
            found[name or path.stem] = QuestionTask(questions.read(path.read_text(), source=file)[:most])
    for name in floor.tasks:
        if name == "recall":
            found.setdefault(name, QuestionTask(recall.questions(most)))
        elif name not in found:
            raise InputError(f"the floor asks for the task '{name}'", hint=f"give --task {name}=FILE")
    return found


def _harness(name: str, path: Path, source: str, *, most: int) -> Task:
    """Return a task of lm-eval, which is installed on demand."""
    import asyncio

    from powerband.evaluate.tasks import HarnessTask, spread
    from powerband.evaluators import lm_eval
    from powerband.runtime import devices, installations

    def progress(title: str, number: int, total: int) -> None:
        stderr().print(f"[dim]lm-eval: {number + 1}/{total}  {title}[/]")

    installed, _ = asyncio.run(installations.install(lm_eval.TOOL, host=devices.this_host(), progress=progress))
    rows = spread(lm_eval.rows(name, path), most)
    return HarnessTask(name, path, installed.tools["python"], source, tuple(rows))


def cluster(launcher: str, address: str) -> str:
    """Return the address of the Ray cluster that is to be used; nothing where this machine is enough."""
    from powerband.errors import InputError

    if launcher not in ("local", "ray"):
        raise InputError(f"there is no launcher '{launcher}'", hint="local or ray")
    return address if launcher == "ray" else ""
