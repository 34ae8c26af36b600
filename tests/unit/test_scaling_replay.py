"""The replay of a trace for `powerband scale simulate`: fitted replica, table, page, command."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from typer.testing import CliRunner

from powerband.cli.main import app
from powerband.core.workload import Trace
from powerband.errors import InputError
from powerband.load import recorded
from powerband.serve.autoscaling import fitting, simulation
from powerband.serve.autoscaling.policy import ScalingPolicy
from powerband.serve.autoscaling.replay import replay
from powerband.serve.autoscaling.replica_model import Arrival
from support.recipes import recipe


def trace(seconds: float = 1800.0) -> list[Arrival]:
    rng, now_s, found = random.Random(4), 0.0, list[Arrival]()
    while (now_s := now_s + rng.expovariate(6.0 if now_s % 900 < 450 else 1.0)) < seconds:
        found.append(Arrival(now_s, rng.randint(50, 400), rng.randint(20, 80)))
    return found


def test_the_fitted_replica_sustains_the_promised_rate_and_not_a_third_more() -> None:
    like = trace()
    speed = fitting.fitted_speed(like, rate_per_s=2.0, slots=8, attainment=0.95, ttft_s=1.0, queue_timeout_s=0.5)
    assert fitting.rate_within_slo(like, speed, attainment=0.95) == pytest.approx(2.0, rel=0.1)
    assert speed.saturated_rate_per_s(like) > 2.0


def test_a_replay_starts_with_the_autoscaler_and_its_timeline_adds_up() -> None:
    like = trace()
    speed = fitting.fitted_speed(like, rate_per_s=1.0, slots=8, attainment=0.95, ttft_s=2.0, queue_timeout_s=1.0)
    found = replay(like, speed, ScalingPolicy(1.0, 8, start_s=10.0), spans=60)
    assert found.rows[0].name == "autoscaler" and found.rows[1].name.startswith("best fixed")
    assert found.requests == len(like) and found.policy.max_replicas > 1
    assert found.spans[-1].replica_hours == pytest.approx(found.rows[0].replica_hours, rel=0.02)
    assert sum(one.late for one in found.spans) == found.rows[0].late
    assert sum(one.rate_per_s for one in found.spans) * found.span_s / 60 == pytest.approx(len(like), rel=0.01)
    again = simulation.simulate(
        like,
        speed,
        simulation.fixed(found.policy.max_replicas),
        initial_replicas=found.policy.max_replicas,
        start_s=1.0,
    )
    assert found.rows[2].attainment == again.attainment


def test_the_timeline_of_a_fleet_that_cannot_change_is_flat() -> None:
    like = trace(611.0)  # a span is no multiple of the interval of decisions
    speed = fitting.fitted_speed(like, rate_per_s=1.0, slots=8, attainment=0.95, ttft_s=2.0, queue_timeout_s=1.0)
    found = replay(like, speed, ScalingPolicy(1.0, 8, start_s=10.0, min_replicas=3), max_replicas=3, spans=50)
    *most, last = (one.replicas for one in found.spans)
    assert most == pytest.approx([3.0] * 49)
    assert 2.7 < last <= 3.0, "the last decision is up to an interval before the end"


def test_the_command_reads_a_csv_prints_80_columns_and_writes_a_page(tmp_path: Path) -> None:
    rows = "".join(f"{one.at_s:.3f},{one.prompt_tokens},{one.output_tokens}\n" for one in trace(600.0))
    (tmp_path / "week.csv").write_text("arrived_s,prompt_tokens,output_tokens\n" + rows)
    (tmp_path / "recipe.yaml").write_text(recipe().to_text())
    asked = ["scale", "simulate", "--recipe", str(tmp_path / "recipe.yaml"), "--trace", str(tmp_path / "week.csv")]
    result = CliRunner().invoke(app, [*asked, "--output", str(tmp_path / "page.html")], env={"COLUMNS": "80"})
    assert result.exit_code == 0, result.output
    assert "autoscaler" in result.stdout and "best fixed" in result.stdout and "would have been late" in result.stdout
    assert all(len(line) <= 80 for line in result.stdout.splitlines())
    page = (tmp_path / "page.html").read_text()
    assert page.count("<svg") == 4 and "Late requests" in page
    data = json.loads(CliRunner().invoke(app, [*asked, "--json"]).stdout)
    assert data["usd_per_replica_hour"] == 1.0 and data["policy"]["start_s"] == 3.0
    assert data["rows"][0]["name"] == "autoscaler"


def test_traces_are_read_in_each_format_and_a_wrong_column_is_named(tmp_path: Path) -> None:
    (tmp_path / "azure.csv").write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.97,10,2\n")
    (tmp_path / "plain.csv").write_text("arrived_s,prompt_tokens,output_tokens\n1.5,10,2\n")
    (tmp_path / "captured.jsonl").write_text('{"timestamp": 1500, "input_length": 10, "output_length": 2}\n')
    for name in ("azure.csv", "plain.csv", "captured.jsonl"):
        assert [row[1:3] for row in recorded.request_rows(Trace(path=name), tmp_path)] == [(10, 2)]
    (tmp_path / "wrong.csv").write_text("when,tokens\n1,2\n")
    with pytest.raises(InputError, match="request 1 is not usable: it has no 'TIMESTAMP'"):
        list(recorded.request_rows(Trace(path="wrong.csv"), tmp_path))
