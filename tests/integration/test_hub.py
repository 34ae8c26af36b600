"""Hub ids against a stand-in of the hub: pinned, sized, resumed, gated, offline, and in the stages."""

import asyncio
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from powerband import engines, inputs
from powerband.core.engine import Installation
from powerband.errors import DeploymentRefused, InputError
from powerband.launchers import local
from powerband.runtime import hub, hub_files, installations, model_files
from powerband.testing.hub import Hub
from powerband.tune.spec import TuneSpec, make_runner

NAME = "acme/tiny-1b"
SHARD_BYTES = 24 * 2**20
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_hidden_layers": 30,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "vocab_size": 49152,
    "dtype": "bfloat16",
}
NEEDED = {
    "config.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "model-00001-of-00002.safetensors",
    "model-00002-of-00002.safetensors",
    "model.safetensors.index.json",
}


def publish(folder: Path, *, context: int = 8192) -> None:
    """Write a model with the copies in other formats that real repositories have."""
    (folder / "original").mkdir(parents=True)
    shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    (folder / "config.json").write_text(json.dumps({**CONFIG, "max_position_embeddings": context}))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": shards[0], "b": shards[1]}}))
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    for name in shards:
        (folder / name).write_bytes(os.urandom(SHARD_BYTES))
    for name in ("README.md", "pytorch_model.bin", "consolidated.safetensors", "original/consolidated.00.pth"):
        (folder / name).write_bytes(b"a copy")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hub")
    publish(folder / NAME)
    return folder


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("HF_TOKEN", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("POWERBAND_CACHE", str(tmp_path / "cache"))
    return tmp_path


@pytest.fixture
def stand_in(models: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with Hub(models) as found:
        monkeypatch.setenv("HF_ENDPOINT", found.url)
        yield found


def snapshot(reference: str) -> Path:
    found = model_files.location(reference)
    assert found is not None
    return found


def test_a_model_is_pinned_and_only_the_needed_files_are_downloaded(stand_in: Hub, models: Path) -> None:
    said: list[str] = []
    amounts: list[tuple[int, int]] = []
    reference = hub.local(NAME, report=said.append, progress=lambda *amount: amounts.append(amount))
    assert {one.path.split("/")[2] for one in stand_in.requests if one.path.startswith("/api/")} == {"models"}
    commit = stand_in.repositories[NAME].branches["main"]
    assert reference == f"{NAME}@{commit}"
    assert {path.name for path in snapshot(reference).iterdir()} == NEEDED
    for path in snapshot(reference).iterdir():
        assert path.read_bytes() == (models / NAME / path.name).read_bytes()
    assert said == [f"{NAME}@{commit[:7]}: 48.0 MiB, 48.0 MiB to download to {hub_files.cache()}"]
    total = sum((models / NAME / name).stat().st_size for name in NEEDED)
    assert amounts[-1] == (total, total) and max(amounts) == amounts[-1]


def test_a_large_download_reports_each_tenth(stand_in: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "_LARGE_BYTES", SHARD_BYTES)
    said: list[str] = []
    short = f"{NAME}@{stand_in.repositories[NAME].branches['main'][:7]}"
    hub.local(NAME, report=said.append)
    tenths = [int(line.removeprefix(f"{short}: ").removesuffix(" % of 48.0 MiB")) for line in said[1:]]
    assert tenths and tenths == sorted(set(tenths)) and set(tenths) <= set(range(10, 100, 10))


def test_a_complete_snapshot_needs_no_request_and_no_message(stand_in: Hub) -> None:
    reference = hub.local(NAME)
    stand_in.requests.clear()
    said: list[str] = []
    assert hub.local(reference, report=said.append) == reference
    assert not stand_in.requests and not said


def test_what_is_in_the_cache_is_not_downloaded_again(stand_in: Hub) -> None:
    path = snapshot(hub.local(NAME)) / "model-00001-of-00002.safetensors"
    path.resolve().unlink()
    path.unlink()
    stand_in.requests.clear()
    said: list[str] = []
    hub.local(NAME, report=said.append)
    assert len(stand_in.downloads()) == 1 and "48.0 MiB, 24.0 MiB to download" in said[0]


def test_a_cut_download_resumes_where_it_was_cut(stand_in: Hub, models: Path) -> None:
    stand_in.cut_after(15 * 2**20)
    reference = hub.local(NAME)
    ranges = [int(one.range.removeprefix("bytes=").removesuffix("-")) for one in stand_in.requests if one.range]
    assert len(ranges) == 1 and 0 < ranges[0] <= 15 * 2**20
    for number in (1, 2):
        name = f"model-0000{number}-of-00002.safetensors"
        assert (snapshot(reference) / name).read_bytes() == (models / NAME / name).read_bytes()


def test_a_revision_is_downloaded_beside_the_main_branch(stand_in: Hub, tmp_path: Path) -> None:
    publish(tmp_path / "longer", context=32768)
    commit = stand_in.add(NAME, tmp_path / "longer", branch="v2")
    reference = hub.local(f"{NAME}@v2")
    assert reference == f"{NAME}@{commit}"
    assert model_files.inspect(reference).context_tokens == 32768
    assert model_files.inspect(hub.local(NAME)).context_tokens == 8192
    with pytest.raises(InputError, match="has no revision v3"):
        hub.local(f"{NAME}@v3")


def test_a_pinned_model_stays_when_the_branch_moves(stand_in: Hub, tmp_path: Path) -> None:
    first = hub.local(NAME)
    publish(tmp_path / "longer", context=32768)
    stand_in.add(NAME, tmp_path / "longer")
    assert hub.local(first) == first
    assert hub.local(NAME) != first


@pytest.mark.parametrize(("token", "hint"), [(None, "HF_TOKEN is not set"), ("other", "HF_TOKEN has no access")])
def test_a_gated_model_needs_a_token(
    models: Path, monkeypatch: pytest.MonkeyPatch, token: str | None, hint: str
) -> None:
    with Hub(models, gated={NAME: "hf_secret"}) as gated:
        monkeypatch.setenv("HF_ENDPOINT", gated.url)
        if token:
            monkeypatch.setenv("HF_TOKEN", token)
        with pytest.raises(InputError, match=f"is gated, and {hint}") as error:
            hub.local(NAME)
        assert f"{gated.url}/{NAME}" in error.value.hint
        monkeypatch.setenv("HF_TOKEN", "hf_secret")
        assert model_files.inspect(hub.local(NAME)).layers == 30


@pytest.mark.parametrize("token", [None, "other"])
def test_an_unknown_and_a_private_model_are_not_found(
    models: Path, monkeypatch: pytest.MonkeyPatch, token: str | None
) -> None:
    with Hub(models, private={NAME: "hf_secret"}) as private:
        monkeypatch.setenv("HF_ENDPOINT", private.url)
        if token:
            monkeypatch.setenv("HF_TOKEN", token)
        for name in (NAME, "acme/nothing"):
            with pytest.raises(InputError, match=f"has no model {name}"):
                hub.local(name)


def test_offline_uses_the_cache(stand_in: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    reference = hub.local(NAME)
    stand_in.requests.clear()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert hub.local(NAME) == hub.local(reference) == reference
    assert not stand_in.requests


def test_offline_without_the_model_is_an_error(stand_in: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = stand_in.repositories[NAME].branches["main"]
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for name in (NAME, f"{NAME}@{commit}"):
        with pytest.raises(InputError, match="HF_HUB_OFFLINE is set") as error:
            hub.local(name)
        assert "hf download" in error.value.hint
    assert not stand_in.requests


def test_offline_with_a_part_of_the_model_is_an_error(stand_in: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    reference = hub.local(NAME)
    (snapshot(reference) / "model-00002-of-00002.safetensors").unlink()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(InputError, match="model-00002-of-00002"):
        hub.local(NAME)
    shutil.rmtree(snapshot(reference).parents[1] / "trees")  # as another program's download
    with pytest.raises(InputError, match="model-00002-of-00002"):
        hub.local(NAME)


def test_another_programs_download_is_used_when_the_hub_is_down(stand_in: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    reference = hub.local(NAME)
    shutil.rmtree(snapshot(reference).parents[1] / "trees")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert hub.local(reference) == reference


def test_a_hub_that_is_down_is_an_error_unless_the_model_is_cached(stand_in: Hub, models: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
        with pytest.raises(InputError, match=r"the hub at http://127.0.0.1:9 cannot be reached"):
            hub.local(NAME)
    reference = hub.local(NAME)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
        assert hub.local(NAME) == reference


def test_a_full_disk_is_found_before_the_download(stand_in: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage("/")._replace(free=30 * 2**20)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(InputError, match=r"needs 48.0 MiB in .*; 30.0 MiB is free"):
        hub.local(NAME)
    assert not stand_in.downloads()


def test_a_repository_of_ggufs(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "ggufs"
    folder.mkdir()
    for name in ("tiny-q4_k_m.gguf", "tiny-q8_0-00001-of-00002.gguf", "tiny-q8_0-00002-of-00002.gguf", "mmproj.gguf"):
        (folder / name).write_bytes(name.encode())
    with Hub(models) as stand_in:
        monkeypatch.setenv("HF_ENDPOINT", stand_in.url)
        commit = stand_in.add("acme/tiny-GGUF", folder)
        with pytest.raises(InputError, match="has 2 GGUF files and no safetensors") as error:
            hub.local("acme/tiny-GGUF")
        assert "acme/tiny-GGUF:tiny-q4_k_m.gguf" in error.value.hint
        with pytest.raises(InputError, match=r"has no file tiny-q2_k.gguf"):
            hub.local("acme/tiny-GGUF:tiny-q2_k.gguf")
        reference = hub.local("acme/tiny-GGUF:tiny-q8_0-00001-of-00002.gguf")
        assert reference == f"acme/tiny-GGUF@{commit}:tiny-q8_0-00001-of-00002.gguf"
        assert len(stand_in.downloads()) == 2 and snapshot(reference).is_file()
        for name in ("tiny-q8_0-00001-of-00002.gguf", "tiny-q8_0-00002-of-00002.gguf"):
            (folder / name).unlink()
        stand_in.add("acme/tiny-GGUF", folder)
        assert hub.local("acme/tiny-GGUF").endswith(":tiny-q4_k_m.gguf")


def test_a_sparse_model_is_served_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "models" / "acme" / "huge"
    publish(folder)
    with (folder / "model-00001-of-00002.safetensors").open("r+b") as stream:
        stream.truncate(600 * 10**9)
    usage = shutil.disk_usage("/")._replace(free=10**9)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with Hub(tmp_path / "models") as stand_in:
        monkeypatch.setenv("HF_ENDPOINT", stand_in.url)
        with pytest.raises(InputError, match=r"needs 558.8 GiB"):
            hub.local("acme/huge")


def test_the_digest_of_a_hub_id_is_that_of_the_same_files_in_a_directory(stand_in: Hub, tmp_path: Path) -> None:
    reference = hub.local(NAME)
    shutil.copytree(snapshot(reference), tmp_path / "copy")
    assert model_files.digest(reference) == model_files.digest(str(tmp_path / "copy"))
    (snapshot(reference) / "consolidated.safetensors").write_bytes(b"another program's download")
    assert model_files.digest(reference) == model_files.digest(str(tmp_path / "copy"))


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def find(name: str, **_: object) -> Installation:
        return Installation(engine=name, version="0.30.0", origin="given", program=(f"/opt/{name}", "serve"))

    monkeypatch.setattr(installations, "find", find)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("key", ["source", "revision"])
def test_vllm_gets_the_snapshot_and_the_document_keeps_the_hub_id(stand_in: Hub, key: str) -> None:
    commit = stand_in.repositories[NAME].branches["main"]
    variant = {"source": f"{NAME}@{commit}"} if key == "source" else {"source": NAME, "revision": commit}
    deployment = engines.deployment_of({"engine": "vllm", "variant": variant})
    prepared = local.prepare(deployment, force=True)
    kept = prepared.deployment.variant
    assert (kept.source, kept.revision, prepared.deployment.served_name) == (NAME, commit, "tiny-1b")
    assert prepared.model.weight_bytes == 2 * SHARD_BYTES
    command = prepared.command(8000)
    assert command is not None
    argv = list(command.argv)
    assert str(snapshot(f"{NAME}@{commit}")) in argv and "--revision" not in argv
    assert argv[argv.index("--served-model-name") + 1] == "tiny-1b"
    assert command.env["HF_HUB_OFFLINE"] == "1"


@pytest.mark.usefixtures("installed")
def test_llamacpp_refuses_safetensors_of_a_hub_id(stand_in: Hub) -> None:
    deployment = engines.deployment_of({"engine": "llamacpp", "variant": {"source": NAME}})
    with pytest.raises(DeploymentRefused, match="cannot load safetensors"):
        local.prepare(deployment)


@pytest.mark.usefixtures("installed")
async def test_tune_finds_the_engines_of_a_hub_id(stand_in: Hub, tmp_path: Path) -> None:
    commit = stand_in.repositories[NAME].branches["main"]
    spec = TuneSpec(f"{NAME}@{commit}", inputs.workload("chat"), inputs.slo("interactive"))
    runner = make_runner(spec, tmp_path)
    assert set(runner.space.by_engine) == {"vllm", "llamacpp"}
    assert runner.model.source == f"{NAME}@{commit}" and runner.model.name == "tiny-1b"
    published = {**runner.space.defaults("vllm"), "weights": "bf16"}
    variant = (await runner.deployment(published)).variant
    assert (variant.source, variant.revision) == (NAME, commit)


async def test_a_cancelled_download_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    huge = tmp_path / "models" / "acme" / "huge"
    publish(huge)
    with (huge / "model-00001-of-00002.safetensors").open("r+b") as stream:
        stream.truncate(40 * 10**9)
    usage = shutil.disk_usage("/")._replace(free=10**12)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with Hub(tmp_path / "models") as stand_in:
        monkeypatch.setenv("HF_ENDPOINT", stand_in.url)
        moving, loop = asyncio.Event(), asyncio.get_running_loop()

        def progress(*_: int) -> None:
            loop.call_soon_threadsafe(moving.set)

        task = asyncio.create_task(hub.fetch("acme/huge", progress=progress))
        await asyncio.wait_for(moving.wait(), 30)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.wait_for(loop.shutdown_default_executor(), 30)  # as asyncio.run does: the thread has ended
    assert not list((tmp_path / "hf").rglob("*.incomplete"))


@pytest.mark.usefixtures("installed")
def test_a_check_downloads_nothing(stand_in: Hub) -> None:
    deployment = engines.deployment_of({"engine": "vllm", "variant": {"source": NAME}})
    assert local.prepare(deployment, force=True, download=False).deployment == deployment
    assert not stand_in.requests


def test_plan_downloads_only_the_config(stand_in: Hub) -> None:
    assert model_files.architecture(NAME).layers == 30
    assert [one.path for one in stand_in.requests] == [f"/{NAME}/resolve/main/config.json"]


def test_two_revisions_in_one_variant_are_an_error() -> None:
    with pytest.raises(ValueError, match="give one of them"):
        engines.deployment_of({"engine": "vllm", "variant": {"source": f"{NAME}@v1", "revision": "v2"}})
