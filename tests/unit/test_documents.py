"""Documents: headers, unknown keys, line numbers, digests, and round trips."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from powerband import SLO, Deployment, Workload, engines
from powerband.core import yaml12
from powerband.errors import DocumentError, InputError
from powerband.store import documents

EXAMPLES = Path(__file__).parent.parent.parent / "examples"
DEPLOYMENT = """\
powerband: deployment/1
name: small
variant: {source: ./model.gguf, scheme: q4_1}
engine: llamacpp
config:
  ctx_size: 4096
  flash_attn: on
"""
SLO_TEXT = "powerband: slo/1\nttft: {p50: 200ms, p95: 1s}\ntpot: {p95: 50ms}\n"
WORKLOAD = """\
powerband: workload/1
arrivals: {process: poisson, rate_per_s: 2}
prompt: {shape: lognormal, median: 300, p95: 1200}
output: {shape: fixed, tokens: 64}
turns: {count: 3, think_s: 5s}
"""


def refuse(text: str) -> DocumentError:
    with pytest.raises(DocumentError) as caught:
        documents.parse(text, source="f.yaml")
    assert caught.value.hint
    return caught.value


def test_a_deployment_has_the_knobs_of_its_engine() -> None:
    document = documents.parse(DEPLOYMENT, source="f.yaml")
    assert isinstance(document, Deployment)
    assert document.config.ctx_size == 4096
    assert document.config.flash_attn == "on"  # a string, not a boolean


@pytest.mark.parametrize("key", ["1", "1.5", "~", "true", "[a]", "{a: b}"])
def test_a_key_that_is_no_text_is_refused(key: str) -> None:
    refuse(f"powerband: slo/1\nttft: {{p50: 1s}}\n? {key}\n: 2\n")
    refuse(f"powerband: slo/1\nttft:\n  p50: 1s\n  ? {key}\n  : 2\n")


def test_units_are_converted_to_base_units() -> None:
    document = documents.parse(SLO_TEXT, source="f.yaml")
    assert isinstance(document, SLO)
    assert document.ttft == {"p50": 0.2, "p95": 1.0}


@pytest.mark.parametrize("text", [DEPLOYMENT, SLO_TEXT, WORKLOAD])
def test_a_document_reads_back_as_itself(text: str) -> None:
    first = documents.parse(text, source="f.yaml")
    again = documents.parse(first.to_text(), source="g.yaml")
    assert again == first
    assert again.to_text() == first.to_text()
    assert again.digest() == first.digest()


def test_a_document_can_be_json() -> None:
    data = documents.parse(WORKLOAD, source="f.yaml").to_data()
    assert documents.parse(json.dumps(data), source="f.json").to_data() == data


def test_a_digest_ignores_names_order_and_spelled_out_defaults() -> None:
    one = documents.parse(DEPLOYMENT, source="f.yaml")
    text = DEPLOYMENT.replace("name: small\n", "").replace("engine: llamacpp\n", "")
    other = documents.parse(text + "engine: llamacpp\nplacement: {host: 127.0.0.1}\n", source="g.yaml")
    assert one.digest() == other.digest()
    assert one.digest() != documents.parse(DEPLOYMENT.replace("4096", "4097"), source="h.yaml").digest()


def test_the_digest_of_a_known_document_never_changes() -> None:
    canonical = '{"powerband":"slo/1","tpot":{"p95":0.05},"ttft":{"p50":0.2,"p95":1.0}}'
    digest = documents.parse(SLO_TEXT, source="f.yaml").digest()
    assert digest == "sha256:" + hashlib.sha256(canonical.encode()).hexdigest()


def test_the_error_of_an_unknown_key_has_its_line_and_the_nearest_known_key() -> None:
    error = refuse(DEPLOYMENT.replace("ctx_size", "ctx_sise"))
    assert "f.yaml:6" in error.message
    assert "Did you mean 'ctx_size'?" in error.message


def test_the_error_of_a_wrong_value_has_its_line() -> None:
    error = refuse(SLO_TEXT.replace("50ms", "fast"))
    assert "f.yaml:3" in error.message
    assert "250ms" in error.message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ttft: {p95: 1s}\n", "header is missing"),
        ("powerband: slo\nttft: {p95: 1s}\n", "is not <kind>/<schema>"),
        ("powerband: slow/1\n", "Did you mean 'slo'?"),
        ("powerband: slo/9\nttft: {p95: 1s}\n", "slo/9 is not supported"),
        ("powerband: slo/1\nttft: {p95: 1s}\nttft: {p95: 2s}\n", "duplicate key 'ttft'"),
        ("powerband: slo/1\nttft: {p95: [}\n", "not valid YAML"),
        ("powerband: slo/1\n", "no bound is set"),
        ("powerband: slo/1\nttft: {p950: 1s}\n", "not a percentile"),
        ("powerband: slo/1\nttft: {p50: 2s, p95: 1s}\n", "tighter bound"),
        ("powerband: deployment/1\nvariant: {source: x}\n", "'engine' is missing"),
        ("powerband: deployment/1\nengine: vllm\n", "'variant' is missing"),
        (WORKLOAD.replace("poisson", "poison"), "poisson"),
        (WORKLOAD.replace("median: 300", "median: 3000"), "median <= p95"),
    ],
)
def test_the_error_of_a_broken_document_names_the_problem(text: str, message: str) -> None:
    assert message in refuse(text).message


@pytest.mark.parametrize(
    ("text", "message", "known"),
    [
        (WORKLOAD.replace("rate_per_s: 2", "rate_per_s: 2, rat: 1"), "f.yaml:2: unknown key 'arrivals.rat'", "process"),
        (WORKLOAD.replace("poisson, rate_per_s: 2", "closed, users: 2, user: 3"), "Did you mean 'users'?", "users"),
        (DEPLOYMENT.replace("scheme: q4_1", "schem: q4_1"), "f.yaml:3: unknown key 'variant.schem'", "scheme"),
    ],
)
def test_the_error_of_a_nested_unknown_key_lists_the_keys_there(text: str, message: str, known: str) -> None:
    error = refuse(text)
    assert message in error.message
    assert known in error.hint and "variant" not in error.hint


def test_an_unknown_engine_is_refused_with_the_nearest() -> None:
    with pytest.raises(InputError, match="Did you mean 'llamacpp'"):
        documents.parse(DEPLOYMENT.replace("engine: llamacpp", "engine: llamacp"), source="f.yaml")


def test_values_are_frozen() -> None:
    document = documents.parse(SLO_TEXT, source="f.yaml")
    with pytest.raises(ValueError, match="frozen"):
        setattr(document, "name", "other")  # noqa: B010  mypy refuses the plain form, as it should


@pytest.mark.parametrize("kind", documents.KINDS)
def test_every_kind_has_a_schema(kind: str) -> None:
    schema = documents.json_schema(kind)
    assert json.loads(json.dumps(schema)) == schema
    branches = schema.get("oneOf", [schema])
    assert all(branch["properties"]["powerband"]["const"].startswith(kind + "/") for branch in branches)
    assert all(branch["additionalProperties"] is False for branch in branches)


names = st.text(alphabet="abcdefghij on yes null 1.5:#-'\"", min_size=1, max_size=12)


@given(name=names, source=names, ctx=st.none() | st.integers(0, 10**6), args=st.lists(names, max_size=3))
def test_any_deployment_reads_back_as_itself(name: str, source: str, ctx: int | None, args: list[str]) -> None:
    data: dict[str, Any] = {"name": name, "variant": {"source": source}, "engine": "llamacpp"}
    data["config"] = {"ctx_size": ctx, "extra_args": args}
    value = engines.deployment_type("llamacpp").model_validate(data)
    assert documents.parse(value.to_text(), source="f.yaml") == value


@given(rate=st.floats(1e-3, 1e4), think=st.floats(0, 1e5), seed=st.integers(0, 2**31))
def test_any_workload_reads_back_as_itself(rate: float, think: float, seed: int) -> None:
    value = Workload.model_validate(
        {
            "arrivals": {"process": "poisson", "rate_per_s": rate},
            "prompt": {"shape": "fixed", "tokens": 7},
            "output": {"shape": "uniform", "low": 1, "high": 9},
            "turns": {"count": 2, "think_s": think},
            "seed": seed,
        }
    )
    assert documents.parse(value.to_text(), source="f.yaml") == value


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_example_can_be_read(path: Path) -> None:
    if path.stem != "gate":  # a CI workflow, not a Powerband document
        assert documents.read(path).kind == path.stem


@pytest.mark.parametrize("text", ["1e1", "1E5", ".5", "0x1f", "on", "~", "null", "12:30:45", "1_000"])
def test_a_text_that_looks_like_another_type_stays_a_text(text: str) -> None:
    written = yaml.dump({"one": text}, Dumper=yaml12.Dumper)
    assert yaml12.read(written, source="f.yaml")[0] == {"one": text}
