"""Turn the arguments of the command line and of the Python API into documents and values."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from powerband import catalog, untrusted
from powerband.core import yaml12
from powerband.core.deployment import Deployment
from powerband.core.document import HEADER
from powerband.core.quality import QualityFloor
from powerband.core.slo import SLO
from powerband.core.units import parse_seconds
from powerband.core.workload import Workload
from powerband.errors import InputError
from powerband.store import documents

if TYPE_CHECKING:
    from powerband.core.engine import StepProgress
    from powerband.evaluate.tasks import Task
    from powerband.plan.options import Offer
    from powerband.plan.step_time import Speculation

MAX_QUESTIONS = 200  # of a task, unless the user sets another number
RESERVE_QUESTIONS = 400  # of a task, asked only if the verdict is undecided


def names(given: str | Sequence[str]) -> list[str]:
    """Return a list of names from one name or several."""
    return [given] if isinstance(given, str) else list(given)


def base(workload: str | Path | Workload) -> Path | None:
    """Return the directory that paths in a workload file are relative to; None for a catalogue name."""
    return Path(workload).parent if isinstance(workload, (str, Path)) and "." in str(workload) else None


def folder(path: str | Path) -> Path:
    """Create a directory for results if it does not exist."""
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"cannot create the directory {path}: {error.strerror}", hint="choose another directory"
        ) from None
    return Path(path)


def seconds(duration: str | float) -> float:
    """Parse a duration such as 90s or 10min; a bare number is in seconds."""
    text = str(duration)
    try:
        return float(parse_seconds(text if text[-1:].isalpha() else f"{text}s"))  # type: ignore[arg-type]
    except ValueError as error:
        raise InputError(str(error), hint="write a duration like 90s or 10min") from None


def deployment(
    what: str | Path | Deployment[Any],
    *,
    engine: str | None,
    settings: Mapping[str, Any] | Sequence[str] = (),
    host: str | None = None,
    port: int | None = None,
) -> Deployment[Any]:
    """Read a deployment file, or build a deployment from a model or URL; settings override both."""
    source = what.served_name if isinstance(what, Deployment) else str(what)
    if isinstance(what, Deployment) or source.endswith((".yaml", ".yml", ".json")):
        document = what if isinstance(what, Deployment) else documents.read(source)
        if not isinstance(document, Deployment):
            raise InputError(f"{source} is a {document.kind}, not a deployment", hint="give a deployment or a model")
        data = document.to_data(units=True)
        if engine and engine != document.engine:
            raise InputError(
                f"{source} is for {document.engine}, not {engine}",
                hint="omit --engine, or give a model instead of the file",
            )
    else:
        derived = "llamacpp" if source.endswith(".gguf") else "openai" if source.startswith("http") else "vllm"
        data = {HEADER: Deployment.header(), "engine": engine or derived, "variant": {"source": source}}
        if data["engine"] == "openai" and source.startswith("http"):
            data["config"] = {"base_url": source.rstrip("/").removesuffix("/v1")}
    if settings:
        data["config"] = with_knobs(data.get("config") or {}, settings)
    placement = {key: value for key, value in (("host", host), ("port", port)) if value is not None}
    if placement:
        data["placement"] = {**data.get("placement", {}), **placement}
    model = documents.document_type(Deployment.kind, data, source=source)
    result = model.validate_data(data, source="--set" if settings else source, lines={})
    assert isinstance(result, Deployment)
    return result


def with_knobs(config: Mapping[str, Any], settings: Mapping[str, Any] | Sequence[str]) -> dict[str, Any]:
    """Return a config with settings applied: a mapping, or texts `knob=value` and `knob.part=value` in YAML."""
    found = copy.deepcopy(dict(config))
    if isinstance(settings, Mapping):
        return found | dict(settings)
    for setting in settings:
        path, equals, text = setting.partition("=")
        if not equals or not path:
            raise InputError(f"--set {setting} is not KNOB=VALUE", hint="write it like --set ctx_size=4096")
        *parents, last = path.split(".")
        inner = found
        for parent in parents:
            inner = inner.setdefault(parent, {})
        inner[last] = yaml12.read(text, source=f"--set {path}")[0]
    return found


def workload(given: str | Path | Workload, *, rate: float | None = None, users: int | None = None) -> Workload:
    """Return a workload from a file or the catalogue, at the given request rate or concurrency."""
    if rate and users:
        raise InputError("--rate and --users exclude each other", hint="omit --rate or --users")
    found = given if isinstance(given, Workload) else documents.find("workload", str(given))
    assert isinstance(found, Workload)
    found = found.at_rate(rate) if rate is not None else found
    return found.with_users(users) if users is not None else found


def slo(given: str | Path | SLO) -> SLO:
    """Return an SLO from a file or the catalogue."""
    found = given if isinstance(given, SLO) else documents.find("slo", str(given))
    assert isinstance(found, SLO)
    return found


def numbers(option: str, text: str) -> tuple[float, ...]:
    """Parse a list such as 1,2,4."""
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise InputError(f"{option} {text} is not a list of numbers", hint="write it like 1,2,4") from None


def floor(given: str | Path | QualityFloor | None) -> QualityFloor | None:
    """Return a quality floor from a file or the catalogue; None for 'none'."""
    if given is None or given == "none" or isinstance(given, QualityFloor):
        return given if isinstance(given, QualityFloor) else None
    found = documents.find("quality", str(given))
    assert isinstance(found, QualityFloor)
    return found


def tasks(
    files: Sequence[str],
    floor: QualityFloor | None,
    *,
    source: str,
    max_questions: int = MAX_QUESTIONS,
    reserve: int = RESERVE_QUESTIONS,
    echoes_prompt_logprobs: bool = False,
    run_code: bool = False,
    on_step: Callable[[StepProgress], None] = lambda _: None,
) -> dict[str, Task]:
    """Read the tasks given as NAME=FILE, and those that the floor requires; `recall` needs no file.

    The `reserve` of a task is asked only if the verdict is undecided.
    """
    from powerband.evaluate.tasks import QuestionTask
    from powerband.evaluators import lm_eval, questions, recall
    from powerband.evaluators.questions import Question

    most = max_questions + reserve
    found: dict[str, Task] = {}

    def cut(all_questions: tuple[Question, ...]) -> Task:
        return QuestionTask(all_questions[:max_questions], all_questions[max_questions:most])

    if floor is None:
        return found
    for text in files:
        name, _, file = text.rpartition("=")
        path = Path(file).expanduser()
        if not path.is_file():
            raise InputError(f"task file not found: {file}", hint="write it as --task NAME=FILE")
        if name in catalog.names("task"):
            lm_eval.check(name, echoes_prompt_logprobs=echoes_prompt_logprobs, run_code=run_code)
            found[name] = _harness(name, path, source, questions=(max_questions, most), on_step=on_step)
        else:
            found[name or path.stem] = cut(questions.read(untrusted.text(path), source=file))
    for name in floor.tasks:
        if name == "recall":
            found.setdefault(name, cut(recall.questions(most)))
        elif name not in found:
            raise InputError(f"the quality floor requires the task '{name}'", hint=f"give its data: --task {name}=FILE")
    return found


def _harness(
    name: str, path: Path, source: str, *, questions: tuple[int, int], on_step: Callable[[StepProgress], None]
) -> Task:
    """Return a task of lm-eval, which is installed on first use."""
    from powerband.evaluate.tasks import HarnessTask, spread
    from powerband.evaluators import lm_eval
    from powerband.runtime import devices, installations

    installed, _ = asyncio.run(installations.install(lm_eval.TOOL, host=devices.this_host(), progress=on_step))
    everything = lm_eval.rows(name, path)
    rows, all_rows = (tuple(spread(everything, count)) for count in questions)
    reserve = tuple(row for row in all_rows if row not in set(rows))[: questions[1] - questions[0]]
    return HarnessTask(name, path, installed.tools["python"], source, rows, reserve)


def speculation(text: str | None) -> Speculation:
    """Parse TOKENS:ACCEPTANCE."""
    from powerband.plan.step_time import NO_SPECULATION, Speculation

    if text is None:
        return NO_SPECULATION
    tokens, _, acceptance = text.partition(":")
    try:
        found = Speculation(int(tokens), float(acceptance))
    except ValueError:
        found = NO_SPECULATION
    if found.tokens < 1 or not 0 <= found.acceptance <= 1:
        raise InputError(f"--speculate {text} is not TOKENS:ACCEPTANCE", hint="write it like 4:0.6")
    return found


def offers(on: Sequence[str], inventory: str | Path | None, *, prices: Prices) -> list[Offer]:
    """Return the offered devices; one node of a device where no count is given."""
    import powerband.plan as stage
    from powerband.core.device import Inventory
    from powerband.plan import local_device
    from powerband.plan.options import Offer
    from powerband.runtime import devices

    wanted: list[tuple[str, int | None, float | None]] = []
    if inventory:
        machines = documents.read_as(Inventory, inventory).machines
        wanted += [(one.device, one.count, one.usd_per_h) for one in machines]
    for text in on or ([] if inventory else ["all"]):
        name, _, number = text.partition(":")
        if number and not number.isdigit():
            raise InputError(f"--on {text}: '{number}' is not a number of devices", hint="write it like h100-sxm:8")
        found = catalog.names("device") if name == "all" else (name,)
        wanted += [(one, int(number) if number else None, None) for one in found]
    result = []
    for name, count, usd in wanted:
        if name == local_device.NAME:
            device, here = stage.this_machine(devices.this_host())
            count = count or here
        else:
            device = stage.device(name)
        given = prices.get(name, device.name or "")
        price = next(one for one in (given, usd, device.price.usd_per_h) if one is not None)
        requested_as = name if name not in (device.name, local_device.NAME) else ""
        result.append(Offer(device, count or min(8, device.node), price, requested_as))
    return result


class Prices:
    """Prices per device and hour: one for all devices (`2.50`) or by device (`h100-sxm=2.50`)."""

    def __init__(self, given: float | str | Sequence[str]) -> None:
        import powerband.plan as stage
        from powerband.plan import local_device

        self.default: float | None = None
        self.by_device: dict[str, float] = {}
        for text in [str(given)] if isinstance(given, (int, float)) else names(given):
            name, _, value = text.rpartition("=")
            try:
                usd = float(value)
            except ValueError:
                raise InputError(
                    f"--price {text} is not a price", hint="write it as 2.50, or as h100-sxm=2.50 for one device"
                ) from None
            if name:
                self.by_device[name if name == local_device.NAME else stage.device(name).name or name] = usd
            else:
                self.default = usd

    def get(self, *device_names: str) -> float | None:
        """Return the price of a device by any of its names, if one was given."""
        return next((self.by_device[name] for name in device_names if name in self.by_device), self.default)


def price_here(given: float | str | Sequence[str]) -> float | None:
    """Return the price of this machine per hour, if one was given."""
    from powerband.plan import local_device

    return Prices(given).get(local_device.NAME) if given else None
