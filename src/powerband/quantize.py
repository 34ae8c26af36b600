"""The stage `quantize`: create a variant of a model in another scheme, cached with its lineage."""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from powerband import catalog, quantizers
from powerband.core.engine import Installation, StepProgress
from powerband.core.model import Model
from powerband.core.variant import Calibration, Lineage
from powerband.core.workload import Workload
from powerband.errors import EngineMissing, QuantizeFailed
from powerband.load import prompts, tokens
from powerband.quantizers.base import Job, Quantizer
from powerband.runtime import devices, hub, installations, model_files
from powerband.runtime.installations import OnProgress
from powerband.store import documents

DOCUMENT = "variant.yaml"
_SAMPLES = 256
MIN_COVERAGE = 0.85  # below it, the calibration text is too different from the served text
_SCRATCH = ("samples.jsonl", "samples.txt")


@dataclass(frozen=True)
class QuantizeSpec:
    """The model, the target scheme and the calibration text."""

    source: str
    scheme: str
    workload: Workload | None = None  # calibrate with its requests; None: the catalogue's mixed texts
    base: Path | None = None  # folder of the workload's relative paths
    samples: int = _SAMPLES


@dataclass(frozen=True)
class QuantizedVariant:
    """A variant on this machine."""

    folder: Path
    lineage: Lineage
    made_now: bool

    @property
    def path(self) -> Path:
        """Return the file or folder that an engine loads."""
        return (self.folder / self.lineage.file).resolve()


async def quantize(spec: QuantizeSpec, *, progress: OnProgress = lambda _: None) -> QuantizedVariant:
    """Return the variant from the cache, or create it; an interrupted job leaves no incomplete variant behind."""
    quantizer = quantizers.for_scheme(spec.scheme)

    def report(message: str) -> None:
        progress(StepProgress(title=message, number=1, total=1))

    model = model_files.inspect(await hub.fetch(spec.source, report=report))
    quantizer.check(model, spec.scheme)
    tools, versions = await _tools(quantizer, model, progress)
    texts, calibration = _calibration(spec, model)
    origin = model_files.digest(model.source)
    inputs: list[Any] = [origin, calibration.digest, sorted(versions.items())]
    inputs += ["routers in 16 bits"] if model.experts else []  # 0.1 quantized them
    name = f"{model.name}-{spec.scheme}-{_short_hash([spec.scheme, *inputs])}"
    folder = installations.cache_root() / "variants" / name
    # the converted model and its importance matrix, which several schemes use
    shared = folder.with_name(f"{model.name}-base-{_short_hash(inputs)}")
    shared.mkdir(parents=True, exist_ok=True)
    waiting = StepProgress(title="wait for another process that quantizes this model", number=1, total=1)
    async with installations.locked(shared / "lock", on_wait=lambda: progress(waiting)):
        if (folder / DOCUMENT).is_file():
            return QuantizedVariant(folder, documents.read_as(Lineage, folder / DOCUMENT), made_now=False)
        began, partial = time.monotonic(), folder.with_name(name + ".partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        job = _job(spec, model, partial, shared, texts)
        steps = [step for step in quantizer.steps(job, tools) if not (step.makes and Path(step.makes).is_file())]
        log = folder.with_name(name + ".log")
        log.unlink(missing_ok=True)
        for number, step in enumerate(steps, start=1):
            error = await installations.run_step(step, log=log, number=number, total=len(steps), progress=progress)
            if error:
                raise QuantizeFailed(f"step '{step.title}' failed: {error}", hint=f"read {log}")
            if step.makes:
                Path(quantizers.partial_path(step.makes)).rename(step.makes)
        for scratch in _SCRATCH:
            (partial / scratch).unlink(missing_ok=True)
        weights = (partial / quantizer.file(job)).resolve()
        lineage = Lineage(
            name=name,
            model=model.source,
            model_digest=origin,
            scheme=spec.scheme,
            format=quantizer.format,
            file=quantizer.file(job),
            weights_digest=model_files.digest(str(weights)),
            bytes=model_files.inspect(str(weights)).weight_bytes or 0,
            calibration=calibration,
            tools=versions,
            seconds=round(time.monotonic() - began, 1),
        )
        (partial / DOCUMENT).write_text(lineage.to_text())
        partial.rename(folder)
    return QuantizedVariant(folder, lineage, made_now=True)


async def _tools(quantizer: Quantizer, model: Model, progress: OnProgress) -> tuple[dict[str, str], dict[str, str]]:
    """Return the paths and versions of the tools that the job needs; a quantizer's tool is installed if missing."""
    paths: dict[str, str] = {}
    versions: dict[str, str] = {}
    for name in quantizer.tools:
        if name in quantizers.names():
            if name != quantizer.name and model.format == quantizer.format:
                continue  # no conversion needed
            # conversion needs only torch and transformers, which vLLM's environment has too
            candidates = (name,) if name == quantizer.name else (name, "vllm")
            found = next((one for candidate in candidates for one in installations.managed(candidate)), None)
            if found is None:
                tool = quantizers.get(name)
                found, _ = await installations.install(tool, host=devices.this_host(), progress=progress)  # type: ignore[arg-type]
        else:
            found = _with_tools(name, conversion=model.format != quantizer.format)
        paths |= found.tools
        versions[found.engine] = found.version
    return paths, versions


def _with_tools(engine: str, *, conversion: bool) -> Installation:
    """Return an installation that has the tools: one on PATH has none, a published archive has no converters."""
    needed = {"llama-quantize", "llama-imatrix"} | ({"converters"} if conversion else set())
    found = installations.find(engine)
    for one in (found, *installations.managed(engine)):
        if needed <= one.tools.keys():
            return one
    missing = ", ".join(sorted(needed - found.tools.keys()))
    raise EngineMissing(
        f"{engine} {found.version} comes without {missing}", hint=f"run 'powerband engine install {engine} --compile'"
    )


def _calibration(spec: QuantizeSpec, model: Model) -> tuple[list[str], Calibration]:
    """Return the calibration texts: the workload's requests, or else the catalogue's mixed texts."""
    if spec.workload is None:
        texts, name, natural = catalog.calibration_texts()[: spec.samples], "catalogue", True
    else:
        vocabulary = tokens.vocabulary(model_files.location(model.source))
        traffic = prompts.prepare(spec.workload, spec.samples, vocabulary=vocabulary, base=spec.base)
        texts = traffic.texts()
        name, natural = spec.workload.name or "workload", spec.workload.dataset is not None
    digest = hashlib.sha256("\0".join(texts).encode()).hexdigest()
    return texts, Calibration(workload=name, samples=len(texts), digest=digest, natural=natural)


def calibration_coverage(spec: QuantizeSpec, served: QuantizeSpec) -> float:
    """Return the share of served words that the calibration text contains, relative to one half of the served text."""
    model = model_files.inspect(hub.local(spec.source))
    calibration_texts, _ = _calibration(spec, model)
    served_texts, _ = _calibration(served, model)
    first, second = served_texts[::2], served_texts[1::2]
    return min(1.0, _word_coverage(second, calibration_texts) / max(_word_coverage(second, first), 1e-9))


def _word_coverage(texts: list[str], others: list[str]) -> float:
    """Return the share of the texts' words that occur in the others."""
    vocabulary, words = set(" ".join(others).casefold().split()), " ".join(texts).casefold().split()
    return sum(word in vocabulary for word in words) / max(1, len(words))


def _short_hash(parts: list[Any]) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:8]


def _job(spec: QuantizeSpec, model: Model, folder: Path, shared: Path, texts: list[str]) -> Job:
    lines, plain = folder / "samples.jsonl", folder / "samples.txt"
    lines.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    plain.write_text("\n\n".join(texts))
    return Job(
        model=model,
        weights=str(model_files.location(model.source)),
        scheme=spec.scheme,
        folder=str(folder),
        shared=str(shared),
        samples=str(lines),
        plain_text=str(plain),
        threads=installations.cores(),
    )
