"""The stage `quantize`: a model in another scheme, made once, with its lineage beside it."""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from powerband import catalog, quantizers
from powerband.core.model import Model
from powerband.core.variant import Calibration, Lineage
from powerband.core.workload import Workload
from powerband.errors import InputError, QuantizeFailed
from powerband.load import prompts, tokens
from powerband.quantizers.base import Job, Quantizer
from powerband.runtime import devices, installations, model_files
from powerband.store import documents

DOCUMENT = "variant.yaml"
_SAMPLES = 256
ALIKE = 0.85  # below it, calibration text is not like what will be served
_SCRATCH = ("samples.jsonl", "samples.txt")


@dataclass(frozen=True)
class QuantizeSpec:
    """What to make."""

    source: str
    scheme: str
    workload: Workload | None = None  # whose requests calibrate; None: the catalogue's mixed texts
    base: Path | None = None  # of the workload's own paths
    samples: int = _SAMPLES


@dataclass(frozen=True)
class QuantizedVariant:
    """A variant on this machine."""

    folder: Path
    lineage: Lineage
    made_now: bool

    @property
    def path(self) -> Path:
        """Return what an engine loads."""
        return (self.folder / self.lineage.file).resolve()


Progress = Callable[[str, int, int], None]


async def quantize(order: QuantizeSpec, *, progress: Progress = lambda *_: None) -> QuantizedVariant:
    """Make the variant unless it is here; an interrupted job leaves nothing that looks like one."""
    quantizer, model = quantizers.that_makes(order.scheme), model_files.inspect(order.source)
    if model.format is None:
        raise InputError(
            f"{order.source} is not on this machine", hint="download its weights first, and give the folder"
        )
    quantizer.check(model, order.scheme)
    tools, versions = await _tools(quantizer, model, progress)
    texts, calibration = _calibration(order, model)
    origin = model_files.digest(model.source)
    basis = [origin, calibration.digest, sorted(versions.items())]
    name = f"{model.name}-{order.scheme}-{_short([order.scheme, *basis])}"
    folder = installations.cache_root() / "variants" / name
    shared = folder.with_name(f"{model.name}-base-{_short(basis)}")  # the converted model, and its weighed weights
    shared.mkdir(parents=True, exist_ok=True)
    async with installations.locked(
        shared / "lock", waiting=lambda: progress("wait for another process that makes one", 0, 1)
    ):
        if (folder / DOCUMENT).is_file():
            return QuantizedVariant(folder, documents.of(Lineage, folder / DOCUMENT), made_now=False)
        began, partial = time.monotonic(), folder.with_name(name + ".partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        job = _job(order, model, partial, shared, texts)
        steps = [step for step in quantizer.steps(job, tools) if not (step.makes and Path(step.makes).is_file())]
        log = folder.with_name(name + ".log")
        log.unlink(missing_ok=True)
        for number, step in enumerate(steps):
            progress(step.title, number, len(steps))
            if last := await installations.run_step(step, log=log):
                raise QuantizeFailed(f"'{step.title}' failed: {last}", hint=f"read {log}")
            if step.makes:
                Path(quantizers.partial(step.makes)).rename(step.makes)
        for scratch in _SCRATCH:
            (partial / scratch).unlink(missing_ok=True)
        made = (partial / quantizer.file(job)).resolve()
        lineage = Lineage(
            name=name,
            model=model.source,
            model_digest=origin,
            scheme=order.scheme,
            format=quantizer.format,
            file=quantizer.file(job),
            weights_digest=model_files.digest(str(made)),
            bytes=model_files.inspect(str(made)).weight_bytes or 0,
            calibration=calibration,
            tools=versions,
            seconds=round(time.monotonic() - began, 1),
        )
        (partial / DOCUMENT).write_text(lineage.to_text())
        partial.rename(folder)
    return QuantizedVariant(folder, lineage, made_now=True)


async def _tools(quantizer: Quantizer, model: Model, progress: Progress) -> tuple[dict[str, str], dict[str, str]]:
    """Return the paths and the versions of what the job needs; the quantizer's own tool is installed on demand."""
    paths: dict[str, str] = {}
    versions: dict[str, str] = {}
    for name in quantizer.tools:
        if name in quantizers.names():
            if name != quantizer.name and model.format == quantizer.format:
                continue  # nothing to convert
            able = (name,) if name == quantizer.name else (name, "vllm")  # to convert, torch and transformers will do
            found = next((one for maker in able for one in installations.managed(maker)), None)
            if found is None:
                tool = quantizers.get(name)
                found, _ = await installations.install(tool, host=devices.this_host(), progress=progress)  # type: ignore[arg-type]
        else:
            found = installations.find(name)
        paths |= found.tools
        versions[found.engine] = found.version
    return paths, versions


def _calibration(order: QuantizeSpec, model: Model) -> tuple[list[str], Calibration]:
    """Return the texts to calibrate with: the workload's own requests, else a mixture of the catalogue's."""
    if order.workload is None:
        texts, name, natural = catalog.calibration_texts()[: order.samples], "catalogue", True
    else:
        vocabulary = tokens.vocabulary(model.source)
        traffic = prompts.prepare(order.workload, order.samples, vocabulary=vocabulary, base=order.base)
        texts = traffic.texts()
        name, natural = order.workload.name or "workload", order.workload.dataset is not None
    whole = hashlib.sha256("\0".join(texts).encode()).hexdigest()
    return texts, Calibration(workload=name, samples=len(texts), digest=whole, natural=natural)


def likeness(order: QuantizeSpec, served: QuantizeSpec) -> float:
    """Return how much of the served text is in words that the calibration text has, over what its own half has."""
    model = model_files.inspect(order.source)
    known, _ = _calibration(order, model)
    ours, _ = _calibration(served, model)
    first, second = ours[::2], ours[1::2]
    return min(1.0, _known(second, known) / max(_known(second, first), 1e-9))


def _known(texts: list[str], by: list[str]) -> float:
    """Return the share of words that occur in other texts."""
    vocabulary, words = set(" ".join(by).casefold().split()), " ".join(texts).casefold().split()
    return sum(word in vocabulary for word in words) / max(1, len(words))


def _short(parts: list[Any]) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:8]


def _job(order: QuantizeSpec, model: Model, folder: Path, shared: Path, texts: list[str]) -> Job:
    lines, plain = folder / "samples.jsonl", folder / "samples.txt"
    lines.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    plain.write_text("\n\n".join(texts))
    jobs = installations.cores()
    return Job(
        model=model,
        scheme=order.scheme,
        folder=str(folder),
        shared=str(shared),
        samples=str(lines),
        plain=str(plain),
        jobs=jobs,
    )
