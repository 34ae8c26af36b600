"""A self-test's bundle: no names of its owner, what is adopted from it, and its table."""

from __future__ import annotations

import io
import json
import socket
from pathlib import Path

import pytest
import yaml
from rich.console import Console

from powerband.core.allocation import NoRoom
from powerband.core.coefficients import Coefficients
from powerband.core.engine import Gauges, Installation, Lever
from powerband.core.model import Model
from powerband.core.selftest import CheckResult, EngineFacts, GpuFacts, MachineFacts, Reason, Selftest
from powerband.errors import DeploymentRefused, DocumentError, InputError, InvalidMeasurement, PowerbandError
from powerband.plan import calibrate
from powerband.reports import selftest as report
from powerband.runtime import installations
from powerband.selftest import adopt, bundle, check, levers, models, readback
from powerband.store import documents

GPU = GpuFacts(name="NVIDIA GeForce RTX 4090", memory_bytes=24 * 2**30, driver="580.82.07", compute_capability="8.9")


def found(
    *checks: CheckResult, cpu: str = "AMD EPYC 7R13", device: str = "rtx-4090", source: str = "26 probes"
) -> Selftest:
    machine = MachineFacts(
        system="Linux",
        machine="x86_64",
        cpu=cpu,
        cores=16,
        numa_nodes=1,
        memory_bytes=2**36,
        device=device,
        gpus=(GPU,),
    )
    fitted = Coefficients(name="one", engine="vllm", devices=(device,), scheme="bf16", bandwidth=0.7, source=source)
    engine = EngineFacts(engine="vllm", version="0.32.0", architecture="LlamaForCausalLM", scheme="bf16")
    return Selftest(
        version="0.2.0",
        date="2026-11-19",
        machine=machine,
        engines=(engine,),
        checks=checks,
        calibrations=(fitted,),
    )


PASSED = CheckResult(check="start", engine="vllm", state="passed", figures={"ready_s": 41.5, "limit_s": 760})
FAILED = CheckResult(
    check="levers",
    engine="vllm",
    state="failed",
    reason="lever ignored",
    figures={"starts": 2, "kv_cache=fp8": "ignored", "batch=64": "read-back"},
)


def test_a_bundle_reads_back_as_an_equal_document(tmp_path: Path) -> None:
    one = found(PASSED, FAILED)
    bundle.write(one, tmp_path / "selftest.json")
    assert documents.read_as(Selftest, tmp_path / "selftest.json") == one


@pytest.mark.parametrize(
    ("cpu", "what"),
    [
        ("CPU of rack7-gpu3.example.org", "the host name"),
        ("a CPU, bought by alice", "the user name"),
        ("key sk-1234567890abcdef", "the value of $OPENAI_API_KEY"),
        ("ran ../secret", "a path"),
    ],
)
def test_a_planted_name_is_refused(cpu: str, what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "rack7-gpu3.example.org")
    monkeypatch.setenv("LOGNAME", "alice")
    monkeypatch.setenv("OPENAI_API_KEY", "sk-1234567890abcdef")
    with pytest.raises((InputError, ValueError), match=what.replace("$", r"\$")):
        bundle.write(found(PASSED, cpu=cpu), tmp_path / "selftest.json")
    assert not (tmp_path / "selftest.json").exists()


@pytest.mark.parametrize("path", ["/home/alice/model", "read ~/model", r"C:\models\one", "see models/alice/one"])
def test_a_planted_path_is_refused(path: str) -> None:
    with pytest.raises(InputError, match=r"'calibrations\[0\].source' of the bundle contains a path"):
        bundle.check(found(source=path), {})


def test_words_of_the_catalogue_are_no_names() -> None:
    """An owner may have named a machine after its GPU, or be called like an engine."""
    bundle.check(found(PASSED), {"the host name": "rtx-4090", "the user name": "vllm"})


def test_host_and_user_names_are_searched_in_facts_only() -> None:
    """Figures are named after GPUs, and keys after facts; a host or a user may have the same name."""
    speeds = CheckResult(check="replicas", engine="vllm", state="passed", figures={"GPU-1_tokens_per_s": 900.0})
    private = {"the host name": "gpu-1", "the user name": "driver"}
    bundle.check(found(speeds, source="probes of gpu-1"), private)
    with pytest.raises(InputError, match=r"'machine.cpu' of the bundle contains the host name"):
        bundle.check(found(speeds, cpu="a CPU of GPU-1"), private)


@pytest.mark.parametrize(
    ("architecture", "recorded"),
    [("Qwen3ForCausalLM", "Qwen3ForCausalLM"), ("AcmeChatForCausalLM", None), ("A" * 50, None), (None, None)],
)
def test_only_architectures_of_the_catalogue_are_recorded(architecture: str | None, recorded: str | None) -> None:
    installation = Installation(engine="vllm", version="0.32.0", origin="given", program=("vllm",))
    model = Model(source="one", format="safetensors", architecture=architecture)
    assert bundle.engine_facts(installation, model).architecture == recorded


@pytest.mark.parametrize(
    ("model", "generates"),
    [
        (Model(source="one", format="safetensors", architecture="LlamaForCausalLM", weight_bytes=1), True),
        (Model(source="one", format="safetensors", architecture="T5ForConditionalGeneration", weight_bytes=1), True),
        (Model(source="one", format="safetensors", architecture="LlamaForCausalLM"), False),
        (Model(source="one", format="safetensors", architecture="BertModel", weight_bytes=1), False),
        (Model(source="one", format="gguf", architecture="llama", weight_bytes=1), True),
        (Model(source="one", format="gguf", architecture="nomic-bert", weight_bytes=1), False),
    ],
)
def test_the_default_model_generates_text(model: Model, generates: bool) -> None:
    assert models._generates(model) == generates


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (NoRoom("no GPU is free", hint="wait"), "no free devices"),
        (DeploymentRefused("it is known to fail", hint="change it"), "cannot start"),
        (InputError("no such file", hint="give one"), "internal error"),
        (InvalidMeasurement("no answers", hint="try again"), "requests failed"),
    ],
)
async def test_the_reason_of_a_check_that_raises(error: PowerbandError, reason: Reason) -> None:
    async def run(_: None) -> check.Outcome:
        raise error

    result, detail = await check.perform(check.Check("start", "", run), None, engine="vllm")
    assert (result.state, result.reason) == ("failed", reason) and error.message in detail


async def test_an_invalid_result_is_an_internal_error() -> None:
    async def run(_: None) -> check.Outcome:
        return check.passed({"/home/alice": 1.0})

    result, _ = await check.perform(check.Check("start", "", run), None, engine="vllm")
    assert (result.state, result.reason) == ("failed", "internal error")


def test_the_bundle_has_no_field_for_free_text() -> None:
    with pytest.raises(ValueError, match="pattern"):
        CheckResult(check="start", state="failed", figures={"log": "could not open /home/alice"})
    with pytest.raises(ValueError, match="pattern"):
        CheckResult(check="start", state="failed", figures={"/home/alice": 1.0})


def test_a_calibration_expires_with_the_version_of_its_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POWERBAND_STATE", str(tmp_path))
    monkeypatch.setenv("POWERBAND_CACHE", str(tmp_path))
    calibrate.save(Coefficients(engine="vllm", engine_version="0.31.0", scheme="bf16"))
    calibrate.save(Coefficients(engine="vllm", scheme="fp8"))
    assert len(calibrate.saved()) == 2 and not calibrate.expired(), "no engine is installed: the plan is for elsewhere"
    installed = Installation(engine="vllm", version="0.32.0", origin="managed", program=("vllm",))
    marker = tmp_path / "engines" / "vllm" / "0.32.0" / installations.MARKER
    marker.parent.mkdir(parents=True)
    marker.write_text(installed.model_dump_json())
    assert [one.scheme for one in calibrate.saved()] == ["fp8"]
    (sentence,) = calibrate.expired()
    assert "calibration of vllm 0.31.0 is not used: 0.32.0 is installed" in sentence


def test_adopted_rows_are_those_that_plan_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POWERBAND_STATE", str(tmp_path))
    own = Coefficients(engine="vllm", devices=("rtx-4090",), scheme="fp8", bandwidth=0.9, source="this machine")
    calibrate.save(own)
    one = found(PASSED, FAILED)
    written = adopt.adopt(one)
    assert [row.source for row in calibrate.saved()] == ["this machine", "26 probes"], "its own rows come first"
    entry = yaml.safe_load(written.support[0].read_text())
    assert entry["evidence"] == "measured by a user on NVIDIA GeForce RTX 4090, vllm 0.32.0"
    assert entry["checks"] == {"start": "passed", "levers": "failed"} and entry["date"] == "2026-11-19"
    (fixture,) = written.fixtures
    assert documents.read_as(Selftest, fixture).checks == (FAILED,)


def test_rehearsed_rows_are_for_the_lab_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POWERBAND_STATE", str(tmp_path))
    written = adopt.adopt(found(PASSED).model_copy(update={"rehearsed": True}))
    assert not written.calibrations and "simulated host" in written.notes[0]
    assert "rehearsed in the lab" in written.support[0].read_text()


def test_file_names_do_not_leave_the_folder(tmp_path: Path) -> None:
    one = found()
    evil = one.calibrations[0].model_copy(update={"engine": "..\\..\\x", "scheme": ".. .."})
    written = adopt.adopt(one.model_copy(update={"calibrations": (evil,)}), tmp_path / "out")
    assert all(path.resolve().is_relative_to(tmp_path / "out") for path in written.calibrations)


@pytest.mark.parametrize(
    ("device", "why"),
    [("this-machine", "another CPU (AMD EPYC 7R13)"), ("h100-sxm", "the catalogue has more measurements of h100-sxm")],
)
def test_rows_that_would_make_plans_worse_are_left_out(
    device: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POWERBAND_STATE", str(tmp_path / "state"))
    written = adopt.adopt(found(device=device))
    assert not written.calibrations and why in written.notes[0]
    assert adopt.adopt(found(device=device), tmp_path / "out").calibrations, "a given folder gets all of them"


def test_the_table_fits_80_columns_and_names_what_failed() -> None:
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(report.table(found(PASSED, FAILED)))
    text = console.export_text()
    assert "self-test: 1 passed, 1 failed" in text
    assert "accepted and not applied: kv_cache=fp8" in text and "batch=64" not in text
    assert all(len(line.rstrip()) <= 80 for line in text.splitlines())


@pytest.mark.parametrize("reason", Reason.__args__)  # type: ignore[attr-defined]
def test_every_reason_has_a_sentence(reason: Reason) -> None:
    assert reason in report._REASONS
    without_figures = CheckResult(check="start", state="failed", reason=reason)
    assert report.sentence(without_figures)


def test_every_allowed_setting_of_every_lever_is_in_one_group() -> None:
    space = [
        Lever(name="batch", settings={"default": {}, "8": {}, "16": {}, "32": {}}),
        Lever(name="kv", settings={"auto": {}, "fp8": {}}),
        Lever(name="tp", settings={"1": {}, "2": {}, "64": {}}),
    ]

    def allowed(settings: levers.Settings) -> bool:
        return settings.get("tp") != "64" and not (settings.get("kv") == "fp8" and settings.get("tp") == "2")

    together, refused = levers.groups(space, allowed)
    assert together == [{"batch": "8", "kv": "fp8"}, {"batch": "16", "tp": "2"}, {"batch": "32"}]
    assert refused == [{"tp": "64"}]


ARGS = "INFO non-default args: {'model': 'm', 'max_num_seqs': 64, 'enforce_eager': True, " \
    "'speculative_config': {'method': 'ngram', 'num_speculative_tokens': 3}}\n"  # fmt: skip


@pytest.mark.parametrize(
    ("knobs", "log", "verdict"),
    [
        ({"max_num_seqs": 64}, ARGS, "read-back"),
        ({"max_num_seqs": 128}, ARGS, "ignored"),
        ({"kv_cache_dtype": "fp8"}, ARGS, "ignored"),
        ({"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}, ARGS, "read-back"),
        ({"speculative_config": {"method": "ngram", "num_speculative_tokens": 6}}, ARGS, "ignored"),
        ({"enforce_eager": True}, ARGS + "config: enforce_eager=False, seed=0\n", "ignored"),
        ({"VLLM_CPU_NUM_OF_RESERVED_CPU": 0}, ARGS, "accepted"),
        ({"max_num_seqs": 64}, "no such line\n", "accepted"),
    ],
)
def test_what_the_log_says_of_a_setting(knobs: dict[str, object], log: str, verdict: str) -> None:
    evidence = readback.Evidence("vllm", log, Gauges(), devices=1, kv_ratio=None)
    assert readback.verdict(knobs, evidence) == verdict


def test_a_kv_cache_of_another_size_contradicts_the_log() -> None:
    log = "non-default args: {'kv_cache_dtype': 'fp8'}"
    assert readback.verdict({"kv_cache_dtype": "fp8"}, readback.Evidence("vllm", log, Gauges(), 1, 1.04)) == "read-back"
    assert readback.verdict({"kv_cache_dtype": "fp8"}, readback.Evidence("vllm", log, Gauges(), 1, 0.5)) == "ignored"


def test_an_unknown_key_is_an_error(tmp_path: Path) -> None:
    data = found(PASSED).to_data() | {"hostname": "rack7"}
    (tmp_path / "one.json").write_text(json.dumps(data))
    with pytest.raises(DocumentError, match="unknown key 'hostname'"):
        documents.read(tmp_path / "one.json")
