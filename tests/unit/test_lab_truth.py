"""The lab's step times: they reproduce measured rows, and scale as the hardware does where no row exists."""

from __future__ import annotations

import csv
import math
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import pytest

from powerband import catalog
from powerband.testing.lab import truth
from powerband.testing.lab.batching import Batching, Latencies, PagedCache, closed_loop
from powerband.testing.lab.truth import Curve, Row, StepTimes, read_rows, step_times, step_times_from

SOURCE = Path(__file__).parents[2] / "proofs" / "data" / "silicon" / "silicon_clean.csv"
ROW = Row("m", "h200-sxm", "vllm", "fp8", 1, isl=1000, osl=1000, concurrency=1, ttft_s=0.1, tpot_s=0.01)


def rows_of(model: str, system: str, precision: str, tp: int) -> list[Row]:
    wanted = (model, system, precision, tp)
    return [row for row in read_rows() if (row.model, row.system, row.precision, row.tp) == wanted]


def simulate(times: StepTimes, row: Row, *, rounds: int = 3) -> Latencies:
    cache = PagedCache(blocks=row.concurrency * (row.isl + row.osl + 16) // 16, prefix_caching=False)
    batching = Batching(times, cache, max_batched_tokens=8192, max_sequences=row.concurrency)
    users, requests = row.concurrency, rounds * row.concurrency
    return closed_loop(batching, users=users, requests=requests, prompt_tokens=row.isl, output_tokens=row.osl)


def test_every_row_of_the_table_was_measured() -> None:
    with SOURCE.open() as stream:
        measured = {
            (one["model_path"], one["system"], one["backend"], int(one["tp_size"]), int(one["isl"]), int(one["osl"]),
             int(float(one["conc"] or one["batch_size"])), f"{float(one['silicon_tpot_ms']):.5g}")
            for one in csv.DictReader(stream)
            if one["scored"] == "True" and one["pp_size"] == "1"
        }  # fmt: skip
    for row in read_rows():
        key = (row.model, row.system.replace("-", "_"), row.backend, row.tp, row.isl, row.osl, row.concurrency)
        assert (*key, f"{1e3 * row.tpot_s:.5g}") in measured


def test_the_table_covers_systems_models_and_whole_series() -> None:
    series = defaultdict(set)
    for row in read_rows():
        assert row.system in catalog.names("device") and row.model in truth.ACTIVE_PARAMETERS
        series[row.model, row.system, row.precision, row.tp, row.isl, row.osl].add(row.concurrency)
    assert all(len(one) >= 4 for one in series.values())
    assert len({key[1] for key in series}) >= 4 and len({key[0] for key in series}) >= 6
    assert 300 <= len(read_rows()) <= 800


def test_one_user_sees_the_measured_tpot_as_step_time() -> None:
    assert step_times_from([ROW]).step_s(1, 0, 1500) == pytest.approx(0.01)


def test_prefills_of_other_users_are_taken_out_of_the_tpot() -> None:
    loaded = replace(ROW, concurrency=11, ttft_s=0.15, tpot_s=0.012)
    times = step_times_from([ROW, loaded])
    share = 12 / 12.15  # of its time a request decodes
    assert times.step_s(round(11 * share), 0, 1500) == pytest.approx(
        0.012 - 10 * share / 1000 * 1000 * times.prefill_s_per_token, rel=0.01
    )


def test_durations_are_interpolated_in_log_space_and_between_contexts() -> None:
    logs = (0.0, math.log(4))
    curves = tuple(Curve(at, logs, (math.log(s), math.log(4 * s))) for at, s in ((1000.0, 0.01), (3000.0, 0.02)))
    times = StepTimes(curves, prefill_s_per_token=1e-5)
    assert times.step_s(2, 0, 1000) == pytest.approx(0.02)
    assert times.step_s(1, 0, 2000) == pytest.approx(0.015)
    assert times.step_s(1, 100, 1000) == pytest.approx(0.011)
    assert times.step_s(8, 0, 1000) == pytest.approx(0.08), "the slope goes on"
    assert times.step_s(1, 0, 5000) == pytest.approx(0.03)
    assert times.step_s(1, 0, 0) == pytest.approx(0.005), "at least half of the shortest context's"


@pytest.mark.parametrize(
    ("model", "system", "precision", "tp"),
    [
        ("meta-llama/Llama-3.1-70B", "h200-sxm", "fp8", 2),
        ("openai/gpt-oss-120b", "h100-sxm", "fp4", 2),
        ("MiniMaxAI/MiniMax-M2.5", "b300-sxm", "fp8", 4),
    ],
)
def test_a_left_out_row_is_predicted(model: str, system: str, precision: str, tp: int) -> None:
    rows = rows_of(model, system, precision, tp)
    row = next(one for one in rows if one.concurrency == 16 and one.isl == min(one.isl for one in rows))
    found = simulate(step_times_from([one for one in rows if one is not row]), row)
    assert found.tpot_s == pytest.approx(row.tpot_s, rel=0.1)


def times(seed: int = 1, **changes: object) -> StepTimes:
    facts = {"system": "h200-sxm", "active_bytes": 70.6e9, "devices": 2, "precision": "fp8", "seed": seed}
    return step_times(**(facts | {"model": "meta-llama/Llama-3.1-70B"} | changes))  # type: ignore[arg-type]


def test_draws_depend_on_the_seed_only_and_are_a_few_percent() -> None:
    assert times() == times()
    exact = step_times_from(rows_of("meta-llama/Llama-3.1-70B", "h200-sxm", "fp8", 2))
    ratios = [times(seed).step_s(12, 100, 2000) / exact.step_s(12, 100, 2000) for seed in range(200)]
    assert len(set(ratios)) == 200
    assert 0.9 < min(ratios) < 0.98 and 1.02 < max(ratios) < 1.1
    assert sum(ratios) / 200 == pytest.approx(1, abs=0.01)


def test_a_model_is_found_by_its_family_and_a_system_by_its_name_in_the_rows() -> None:
    same = times(model="meta-llama/Meta-Llama-3.1-70B-Instruct-FP8", system="h200_sxm", active_bytes=1e9)
    assert same == times()


def test_without_rows_decode_time_scales_with_bytes_over_bandwidth() -> None:
    full, less = (times(model=None, active_bytes=size).step_s(1, 0, 1500) for size in (70.6e9, 60.0e9))
    assert 60 / 70.6 < less / full < 60 / 70.6 + 0.05, "the host's part of a step stays"
    slow = times(system="l40s", devices=8)  # 864 GB/s on each of 8 devices
    assert 1.1 < slow.step_s(1, 0, 1500) / times().step_s(1, 0, 1500) < 1.6, "2 x 4.8 TB/s over 8 x 0.864 TB/s is 1.39"


def test_a_system_that_the_catalogue_does_not_know_is_an_h100() -> None:
    assert times(system="new-gpu", model=None) == times(system="h100-sxm", model=None)
