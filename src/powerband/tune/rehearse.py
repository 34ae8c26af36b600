"""Rehearse a study in virtual time before any machine is rented: its duration, its cost, and how sure it will be.

The plan predicts what every configuration does. Each play of the study draws random errors of these predictions, and
runs the real search and validation on them.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

import powerband.plan as plan
import powerband.tune as stage
from powerband import engines
from powerband.core.engine import Installation
from powerband.core.host import Host
from powerband.core.model import Model
from powerband.core.rehearsal import LikelyWinner, Play, Rehearsal
from powerband.core.statistics import Interval, quantile
from powerband.core.study import Settings, best
from powerband.errors import InvalidMeasurement, RequirementNotMet
from powerband.runtime import devices, model_files
from powerband.store.schemes import published_scheme
from powerband.tune import budget, device_pool, validation, virtual_time
from powerband.tune.device_pool import DevicePool
from powerband.tune.predicted_world import ASSUMPTIONS, PredictedWorld, Predictions
from powerband.tune.search import Search
from powerband.tune.search_space import SearchSpace
from powerband.tune.spec import TuneSpec, shared_fields
from powerband.tune.virtual_runner import VirtualRunner

_PLAYS, _MIN_PLAYS, _TIME_S = 8, 2, 50.0  # plays of the study, and the time in which they have to end
_PR_SET_PDEATHSIG = 1
_PROPOSALS = 8  # of Optuna for each trial, which take most of the time
_DRAWS, _SHOWN = 400, 3  # of the best configuration; of which these are shown


def rehearse(
    spec: TuneSpec,
    *,
    host: Host,
    earlier: budget.Earlier | None = None,
    report: Callable[[str], None] = lambda _: None,
) -> Rehearsal:
    """Play a study on a host that need not exist; no engine is needed. `earlier` is what studies on that host took."""
    began, model = time.monotonic(), with_weight_bytes(model_files.architecture(spec.model))
    able = [
        one for one in plan.this_machine(host)[0].engines if model.format in ("safetensors", *engines.get(one).formats)
    ]
    fields = shared_fields(spec, model, host, wanted=spec.engines or able, find=installation)
    space: SearchSpace = fields["space"]
    requests = plan.sample_requests(spec.workload, model, base=spec.base)
    report(f"predict the max rates of {len(space)} configurations")
    expected = stage.expectations(model, host, space, requests, spec.slo)
    predictions = Predictions(model, host, space, expected)
    checked = bool(spec.floor and (spec.floor.fidelity or spec.floor.tasks))
    if not predictions.rate_per_s.any():
        raise RequirementNotMet(
            "the plan predicts that no configuration meets the SLO",
            hint="choose longer bounds, a smaller model, or more devices",
        )

    def make(number: int, folder: Path) -> tuple[VirtualRunner, Search]:
        """Return the runner and the search of one play."""
        seed = spec.seed + number
        world = PredictedWorld(predictions, seed, checked=checked)
        runner = VirtualRunner(**fields, folder=folder, world=world, sampled=requests)
        search = Search(
            space, expected=expected, devices=runner.devices, seed=seed, usd_per_h=runner.usd_per_h,
            proposals=_PROPOSALS,
        )  # fmt: skip
        runner.durations = stage.durations(spec, runner, search, earlier=earlier or {})
        return runner, search

    def play(number: int) -> Play:
        with tempfile.TemporaryDirectory(prefix="rehearsal-") as folder:
            return virtual_time.run(_play(spec, *make(number, Path(folder))))

    runner, _ = make(0, Path())
    budget.check(runner.durations, spec.budget_s)
    plays = _in_batches(play, began, report)
    drawn = _best_of_draws(predictions, runner.usd_per_h, seed=spec.seed, checked=checked)
    share = fmean([one.found for one in plays if one.winner] or [1.0])
    count = max(1, len(host.gpus))
    return Rehearsal(
        model=spec.model,
        first_line=budget.first_line(runner.durations, spec.budget_s, spec.max_trials),
        devices=count,
        usd_per_h=runner.usd_per_h,
        plays=tuple(plays),
        likely=tuple(
            LikelyWinner(settings=predictions.candidates[number], share=wins / _DRAWS)
            for number, wins in drawn.wins.most_common(_SHOWN)
        ),
        max_rate_per_s=_interval([one * share for one in drawn.rates_per_s]),
        usd_per_1m_requests=_interval([1e6 * one / share for one in drawn.usd_per_request]),
        defaults=space.all_defaults,
        assumptions=ASSUMPTIONS,
    )


@dataclass
class Best:
    """The best configurations of many draws: how often each wins, and what it does."""

    wins: Counter[int] = field(default_factory=Counter)  # by the configuration's number
    rates_per_s: list[float] = field(default_factory=list)
    usd_per_request: list[float] = field(default_factory=list)


def _in_batches(play: Callable[[int], Play], began: float, report: Callable[[str], None]) -> list[Play]:
    """Return the plays that the time allows; as many run at once as there are cores."""
    able = "fork" in multiprocessing.get_all_start_methods()
    side_by_side = min(_PLAYS, len(devices.this_host().cores)) if able else 1
    plays: list[Play] = []
    longest_s = 0.0
    while len(plays) < min(_MIN_PLAYS, _PLAYS) or time.monotonic() - began + longest_s < _TIME_S:
        numbers = range(len(plays), min(_PLAYS, len(plays) + side_by_side))
        if not numbers:
            break
        report(f"play the study {_PLAYS} times at most: {numbers[0] + 1} to {numbers[-1] + 1}")
        batch_began = time.monotonic()
        plays += _fork(play, numbers) if len(numbers) > 1 else map(play, numbers)
        longest_s = max(longest_s, time.monotonic() - batch_began)
    return plays


def _fork(play: Callable[[int], Play], numbers: Sequence[int]) -> list[Play]:
    """Return plays of processes that share what is known so far."""
    global _played
    _played = play
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(len(numbers), mp_context=context, initializer=_begin_worker) as pool:
        return list(pool.map(_play_one, numbers))


def _begin_worker() -> None:
    """Leave Ctrl-C to the parent, and end with it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _play_one(number: int) -> Play:
    return _played(number)


_played: Callable[[int], Play]


async def played(spec: TuneSpec, runner: VirtualRunner, search: Search) -> tuple[Settings | None, int]:
    """Search and validate in virtual time; return the winner and how many configurations were started."""
    count = runner.durations.side_by_side
    if count > 1:
        runner.begin_side_by_side([], DevicePool(device_pool.free_devices(runner.host)), count)
    trials = await stage.search_trials(spec, runner, search, stage.Progress(), [runner.run_trial] * count)
    looked = sum(one.outcome != "ruled out" for one in trials)
    if best(trials):
        with contextlib.suppress(RequirementNotMet, InvalidMeasurement):
            return (await validation.compare(runner, trials, budget_s=spec.budget_s)).winner.settings, looked
    return None, looked


async def _play(spec: TuneSpec, runner: VirtualRunner, search: Search) -> Play:
    winner, looked = await played(spec, runner, search)
    assert isinstance(runner.world, PredictedWorld)
    found = runner.world.found(winner) if winner else 0.0
    return Play(duration_s=runner.now(), looked=looked, winner=winner, found=found)


def _best_of_draws(predictions: Predictions, usd_per_h: float, *, seed: int, checked: bool) -> Best:
    """Return the best configurations of many draws."""
    found = Best()
    for number in range(_DRAWS):
        values = PredictedWorld(predictions, seed * _DRAWS + number, checked=checked).values
        first = int(values.argmax())
        if values[first]:
            found.wins[first] += 1
            found.rates_per_s.append(float(values[first] * predictions.devices[first]))
            found.usd_per_request.append(usd_per_h / 3600 / float(values[first]))
    return found


def _interval(values: Sequence[float]) -> Interval:
    """Return the median, and 80 % of the values around it."""
    ordered = sorted(values)
    return Interval(*(quantile(ordered, share) for share in (0.5, 0.1, 0.9)))


def with_weight_bytes(model: Model) -> Model:
    """Return the model with the size of its published weights, if only its architecture is known."""
    if model.weight_bytes or model.shape is None:
        return model
    known = model.model_copy(update={"format": model.format or "safetensors"})
    return known.model_copy(update={"weight_bytes": int(published_scheme(known).weight_bytes(model.shape))})


def installation(engine: str) -> Installation:
    """Return what an installation of the engine's default version would be."""
    version = engines.get(engine).default_version or engines.get(engine).recorded or ""
    return Installation(engine=engine, version=version, origin="given", program=(engine,))
