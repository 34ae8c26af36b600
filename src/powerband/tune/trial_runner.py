"""Try settings for real: make the variant, start the engine once, ask the gate, climb the rate."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from powerband import bench, engines, plan
from powerband import evaluate as gate
from powerband import quantize as quantizing
from powerband.bench.profiles import Amount, enough, inconclusive, max_rate
from powerband.core.deployment import Deployment
from powerband.core.evaluation import Evaluation
from powerband.core.measurement import Level, Measurement
from powerband.core.model import Model
from powerband.core.quality import QualityFloor
from powerband.core.slo import SLO
from powerband.core.statistics import Interval
from powerband.core.study import Settings, Trial
from powerband.core.workload import Workload
from powerband.errors import DeploymentRefused, EngineError, InputError, InvalidMeasurement, PowerbandError
from powerband.evaluate.probes import probes
from powerband.evaluate.tasks import Task
from powerband.launchers import local
from powerband.launchers.local import Prepared
from powerband.runtime.replica import Replica
from powerband.tune.search_space import ENGINE, WEIGHTS, Key, SearchSpace, key

HELD_OUT_SEED = 1_000_000  # seeds from here on are of requests that the search never sees
_QUICK_SAMPLES = 8  # texts of each class in the cheap gate
_READY_S = 300.0
_LONGEST_S, _LOADS = 1800.0, 3  # a trial may take so long, or as long as so many loads may
_AS_PUBLISHED = "f16"  # the GGUF that loses nothing of 16-bit weights

Say = Callable[[str], None]


class Attempt(Protocol):
    """A way to try settings; None: the machine that tried them is gone."""

    async def __call__(
        self, number: int, settings: Settings, *, expected: Interval | None, best: Trial | None
    ) -> Trial | None: ...


@dataclass
class TrialRunner:
    """What all trials share."""

    model: Model
    workload: Workload
    slo: SLO
    floor: QualityFloor | None
    levers: SearchSpace
    folder: Path
    usd_per_h: float
    base: Path | None = None
    requests: int | None = None  # at each load, at the least
    longest_s: float = 720.0  # that one load may take; what is so slow is not worth more
    at_once: int = 1  # trials, on as many machines
    tasks: dict[str, Task] = field(default_factory=dict)
    stopping: threading.Event = field(default_factory=threading.Event)
    say: Say = lambda _: None
    judged: dict[Key, Trial] = field(default_factory=dict)  # by the settings that may change answers
    _reference: Prepared | None = None

    @property
    def patience_s(self) -> float:
        """Return how long a trial may take before it is taken to hang."""
        return max(_LONGEST_S, _LOADS * self.longest_s)

    def remember(self, trial: Trial) -> None:
        """Keep what the gate said: deployments that answer alike need not be asked again."""
        if trial.quality:  # the last of those alike knows what the others knew
            self.judged[key(self.levers.answering(trial.settings))] = trial

    def gone_s(self, trials: Sequence[Trial]) -> float:
        """Return how long trials took by the clock."""
        return sum(one.seconds for one in trials) / self.at_once

    async def deployment(self, settings: Settings) -> Deployment[Any]:
        """Return what these settings amount to; the variant is made if it is not here."""
        source, scheme = self.model.source, settings.get(WEIGHTS)
        if scheme and scheme != plan.scheme_of(self.model).name:
            made = await quantizing.quantize(
                quantizing.QuantizeSpec(source, scheme), progress=lambda title, *_: self.say(f"{scheme}: {title}")
            )
            source = str(made.path)
        data = {
            "name": Path(self.model.source).name,
            "variant": {"source": source, "scheme": scheme},
            "engine": settings[ENGINE],
            "config": self.levers.config(settings),
        }
        return engines.deployment_of(data)

    def _reference_settings(self) -> Settings:
        published = plan.scheme_of(self.model)
        able = [name for name in self.levers.by_engine if published.format in engines.get(name).formats]
        engine = able[0] if able else next(iter(self.levers.by_engine))
        return self.levers.defaults(engine) | {WEIGHTS: (published.name if able else _AS_PUBLISHED) or ""}

    def answers_as_reference(self, settings: Settings) -> bool:
        """Tell whether settings differ from the reference in nothing that may change answers."""
        return self.levers.answering(settings) == self.levers.answering(self._reference_settings())

    async def reference(self) -> Prepared:
        """Return the published model on an engine that loads it as it is, or as nearly as can be."""
        if self._reference is None:
            settings = self._reference_settings()
            deployment = await self.deployment(settings)
            config = deployment.config.model_copy(update=dict(self.levers.sooner[settings[ENGINE]]))
            self._reference = local.prepare(deployment.model_copy(update={"name": "reference", "config": config}))
        return self._reference

    def known_reference(self) -> dict[str, Any]:
        """Return the deployment that answers were held against, if any were."""
        return self._reference.deployment.to_data(units=True) if self._reference else {}

    def _asked(self, *, quick: bool) -> gate.EvaluateSpec | None:
        """Return what the gate asks: quickly, of fidelity alone; or everything. None: there is nothing to ask."""
        floor = self.floor.model_copy(update={"tasks": {}}) if self.floor and quick else self.floor
        if floor is None or not (floor.fidelity or floor.tasks):
            return None
        if quick:
            return gate.EvaluateSpec(floor, probes(samples=_QUICK_SAMPLES))
        return gate.EvaluateSpec(floor, probes(), tasks=self.tasks)

    async def glance(self, prepared: Prepared, replica: Replica) -> Evaluation | None:
        """Ask a running deployment whether its answers are plainly spoiled."""
        order = self._asked(quick=True)
        return await gate.evaluate(await self.reference(), prepared, order, running=replica) if order else None

    async def objection(self, settings: Settings) -> str:
        """Start settings, ask them everything, and return why they do not pass; nothing where they do."""
        order = self._asked(quick=False)
        if order is None or self.answers_as_reference(settings):
            return ""
        self.say(f"quality of {', '.join(settings.values())}")
        prepared = local.prepare(await self.deployment(settings))
        judged = await gate.evaluate(await self.reference(), prepared, order, progress=self._of_quality)
        return "" if judged.verdict == "pass" else f"{judged.verdict}: {judged.reason}"

    def _of_quality(self, said: str) -> None:
        self.say(f"quality: {said}")

    async def climb(
        self,
        replica: Replica,
        prepared: Prepared,
        folder: Path,
        *,
        start_per_s: float | None,
        seed: int,
        least_per_s: float | None = None,
    ) -> Measurement:
        """Find roughly where the SLO breaks; what could not be measured is not to be taken for slow."""
        slowest_per_s = (self.requests or enough(self.slo)) / self.longest_s
        least_per_s = max(least_per_s or 0.0, slowest_per_s)
        asked = {"start_per_s": start_per_s, "least_per_s": least_per_s, "rough": True}
        found = await self._bench(replica, prepared, folder, self.workload.with_seed(seed), "climb", **asked)
        if found.interrupted:
            raise asyncio.CancelledError
        if all(map(inconclusive, found.levels)):
            raise InvalidMeasurement(
                f"nothing could be measured: {'; '.join(one.sentence for one in found.levels[-1].refused)}",
                hint="make the machine quiet, and go on with --resume",
            )
        return found

    async def hold(
        self, replica: Replica, prepared: Prepared, folder: Path, *, rate_per_s: float, seed: int, blocks: int = 2
    ) -> Level:
        """Hold one rate, so many times as long as a percentile needs; or the users who set their own pace."""
        workload = self.workload.with_seed(seed).carrying(rate_per_s)
        found = await self._bench(replica, prepared, folder, workload, "level", blocks=blocks, hopeless=True)
        return found.levels[-1]

    async def crowd(self, replica: Replica, prepared: Prepared, folder: Path, *, users: int, requests: int) -> Level:
        """Let so many users ask without a pause."""
        found = await self._bench(
            replica, prepared, folder, self.workload.with_users(users), "level", amount=Amount(requests=requests)
        )
        return found.levels[-1]

    async def _bench(
        self,
        replica: Replica,
        prepared: Prepared,
        folder: Path,
        workload: Workload,
        profile: bench.Profile,
        **more: Any,
    ) -> Measurement:
        order = bench.BenchSpec(
            workload=workload,
            slo=self.slo,
            profile=profile,
            base=self.base,
            price_per_h=self.usd_per_h,
            command=f"powerband tune {self.model.source}",
            **{"amount": Amount(least=self.requests), **more},
        )
        listener = bench.Progress(on_level=lambda level: self.say(f"{level.load}: {level.verdict}"))
        found = await bench.bench(replica, prepared, order, directory=folder, stopping=self.stopping, listener=listener)
        (folder / "measurement.json").write_text(found.to_json())
        return found

    async def attempt(self, number: int, settings: Settings, *, expected: Interval | None, best: Trial | None) -> Trial:
        """Try settings; whatever goes wrong is a result."""
        began, limit = time.monotonic(), asyncio.timeout(self.patience_s)
        aside = ExcludedTime(limit)
        folder = self.folder / f"trial-{number:03d}"
        folder.mkdir(exist_ok=True)
        about: dict[str, Any] = {"number": number, "settings": settings, "expected_per_s": expected}
        try:
            async with limit:
                found = await self._attempt(settings, folder, expected, best, aside)
        except DeploymentRefused as error:
            found = {"outcome": "ruled out", "reason": error.message}
        except (EngineError, InputError) as error:
            found = {"outcome": "failed", "reason": _told(error)}
        except TimeoutError:
            found = {
                "outcome": "failed",
                "reason": f"it did not come to an end within {self.patience_s / 60:.0f} minutes",
            }
        times = {"seconds": round(time.monotonic() - began, 1), "excluded_s": round(aside.seconds, 1)}
        return Trial.model_validate(about | found | times | {"evidence": folder.name})

    async def _attempt(
        self, settings: Settings, folder: Path, expected: Interval | None, best: Trial | None, aside: ExcludedTime
    ) -> dict[str, Any]:
        alike = self.judged.get(key(self.levers.answering(settings)))
        if alike and alike.outcome == "below the floor":
            return {"outcome": "ruled out", "reason": f"trial {alike.number}, which answers alike, is below the floor"}
        with aside:
            prepared = local.prepare(await self.deployment(settings))
            if not alike and (order := self._asked(quick=True)):
                await gate.consult(await self.reference(), order, progress=self._of_quality)
        self.say("start the engine")
        async with local.launch(prepared, directory=folder, ready_timeout_s=_READY_S) as replica:
            with aside:
                judged = None if alike else await self.glance(prepared, replica)
            seen: dict[str, Any] = {}
            if alike:
                seen = {"quality": alike.quality, "kl": alike.kl, "passed": alike.passed}
            elif judged:
                seen = {"quality": judged.verdict, "kl": _kl(judged)}
                if judged.verdict == "fail":
                    return seen | {"outcome": "below the floor", "reason": judged.reason}
            least = best.max_rate_per_s if best else None
            sure = expected is not None and expected.low > 0  # without a calibration the plan ranks, and knows no rates
            start = least or (0.7 * expected.value if expected and sure else None)
            found = await self.climb(
                replica, prepared, folder, start_per_s=start, least_per_s=least, seed=self.workload.seed
            )
        if died := next((one.stopped_early for one in found.levels if "died" in (one.stopped_early or "")), None):
            return seen | {"outcome": "failed", "reason": died}
        rate = max_rate(found.levels)
        if rate is None:
            return seen | {"outcome": "too slow", "reason": _why(found), "value": self._partly(found)}
        if least and rate > least and not seen.get("passed"):  # what would lead the search is asked everything
            with aside:
                objection = await self.objection(settings)
            seen["passed"] = not objection
            if objection:
                return seen | {"outcome": "below the floor", "reason": objection}
        level = found.levels[found.best] if found.best is not None else found.levels[0]
        shown = {f"{one.metric} {one.percentile}": one.value_s for one in level.slo_checks if one.value_s is not None}
        return seen | {"outcome": "feasible", "max_rate_per_s": rate, "value": self.value(rate), "latencies_s": shown}

    def value(self, rate_per_s: float) -> float:
        """Return the objective: good requests for a dollar."""
        return rate_per_s * 3600 / self.usd_per_h

    def _partly(self, found: Measurement) -> float:
        """Return the value of what was answered in time at a rate that did not hold: it tells the search how near."""
        rates = [one for one in found.levels if one.rate_per_s] or found.levels
        good = [one.goodput_per_s.value for one in rates if one.goodput_per_s]
        return self.value(0.9 * min(good, default=0.0))


class ExcludedTime:
    """What is done once for many trials: its seconds are added up, and are not of the time that a trial may take."""

    def __init__(self, limit: asyncio.Timeout) -> None:
        self.seconds, self._limit = 0.0, limit

    def __enter__(self) -> None:
        self._began, self._due = time.monotonic(), self._limit.when()
        self._limit.reschedule(None)

    def __exit__(self, *_: object) -> None:
        spent_s = time.monotonic() - self._began
        self.seconds += spent_s
        self._limit.reschedule((self._due or 0.0) + spent_s)


def _kl(judged: Evaluation) -> float | None:
    return next((one.found.value for one in judged.figures if one.name == "kl_mean" and not one.kind), None)


def _why(found: Measurement) -> str:
    if not found.levels:
        return "nothing was measured"
    lowest = found.levels[-1]  # one at a time, where that was late already
    late = [
        f"{one.metric.upper()} {one.percentile} {one.value_s * 1e3:.0f} ms"
        for one in lowest.slo_checks
        if one.value_s is not None and one.value_s > one.limit_s
    ]
    return f"{lowest.load}: {lowest.verdict}" + (f", {', '.join(late)}" if late else "")


def _told(error: PowerbandError) -> str:
    return error.message.splitlines()[0]
