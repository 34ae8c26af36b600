"""What runs where: the catalogue's tables against answers from documentation, which were written down before them."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

import powerband.plan as plan
from powerband import catalog, engines
from powerband.core.family import of_gpu
from powerband.core.support import Support
from powerband.errors import PowerbandError
from powerband.plan.options import host_of
from powerband.store import documents, schemes

_FILE = Path(__file__).parent.parent / "fixtures" / "support_answers.csv"
ANSWERS = list(csv.DictReader(_FILE.read_text().splitlines()))
TABLES = ("vllm", "llamacpp", "sglang")


@pytest.mark.parametrize("row", ANSWERS, ids=lambda row: "-".join(row[key] for key in ("engine", "device", "name")))
def test_known_answers(row: dict[str, str]) -> None:
    table, family = schemes.support(row["engine"]), plan.device(row["device"]).family
    assert table is not None
    if row["kind"] == "kv":
        fact = table.of_kv(row["name"], family, row["version"])
    else:
        fact = table.of_weights(row["name"], family, row["version"], experts=row["experts"] == "yes")
    if (row["engine"], row["kind"], row["name"]) == ("vllm", "weights", "f16"):
        fact = table.of_weights("bf16", family)  # one scheme of 16 bits: vLLM serves it in the type of the device
    assert fact is not None and fact.level == row["answer"], row["quote"]


def test_every_device_has_a_family() -> None:
    for name in catalog.names("device"):
        device = plan.device(name)
        assert device.family is not None, name
        if device.vendor != "cpu":
            assert of_gpu(host_of(device, 1).gpus[0]) == device.family, name


@pytest.mark.parametrize("engine", TABLES)
def test_every_scheme_and_kv_format_is_in_a_table(engine: str) -> None:
    adapter, table = engines.get(engine), schemes.support(engine)
    assert table is not None and adapter.scheduling is not None
    known = {name for one in table.weights for name in one.names}
    assert {one.name for one in schemes.all_schemes() if one.format in adapter.formats} <= known
    assert adapter.scheduling.kv_formats.keys() <= {name for one in table.kv_cache for name in one.names}
    assert all(one.url.startswith("https://") and one.as_of for one in table.sources.values())


def test_a_version_in_the_range_of_a_statement() -> None:
    table = schemes.support("vllm")
    assert table is not None
    levels = [fact.level if (fact := table.of_kv("fp8", "ampere", one)) else None for one in ("0.11.2", "0.12.0", "")]
    assert levels == ["no", "native", "native"]


@pytest.mark.parametrize(
    ("second", "message"),
    [
        ("{names: [a], families: [ada], level: native, source: here}", "two statements"),
        ("{names: [a], families: [ada], level: native, source: here, since: '1.5'}", "two statements"),
        ("{names: [a], families: [ada], level: native, source: there, since: '2'}", "is not in 'sources'"),
        ("{names: [a], families: [ada], level: native, source: here, since: '2'}", ""),
    ],
)
def test_a_table_with_two_answers_for_one_cell_is_refused(second: str, message: str) -> None:
    text = f"""
powerband: support/1
engine: vllm
sources: {{here: {{url: "https://example.org", as_of: 2026-11-19}}}}
weights:
  - {{names: [a, b], families: [ada, hopper], level: "no", source: here, before: "2"}}
  - {second}
kv_cache: []
"""
    if message:
        with pytest.raises(PowerbandError, match=message):
            documents.parse(text, source="test")
    else:
        assert isinstance(documents.parse(text, source="test"), Support)
