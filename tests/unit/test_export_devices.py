"""Exports of a recipe: the GPUs of a replica, shared memory, and the image of the measured build."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from powerband import export
from powerband.cli.main import app
from powerband.core.recipe import Recipe
from powerband.errors import InputError
from support.recipes import recipe

NVIDIA = {"gpus": 4, "device_vendor": "nvidia", "device_name": "NVIDIA H100 80GB HBM3"}
AMD = {"gpus": 4, "device_vendor": "amd", "device_name": "AMD Instinct MI300X"}


def on_gpus(devices: dict[str, Any]) -> Recipe:
    return recipe("vllm", tensor_parallel_size=4).model_copy(update=devices)


def pod(own: Recipe) -> dict[str, Any]:
    text = export.export(own, "kubernetes")["kubernetes.yaml"]
    spec: dict[str, Any] = next(yaml.safe_load_all(text))["spec"]["template"]["spec"]
    return spec


def service(own: Recipe) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(export.export(own, "compose")["compose.yaml"])["services"]["smollm2"]
    return found


@pytest.mark.parametrize(("devices", "resource"), [(NVIDIA, "nvidia.com/gpu"), (AMD, "amd.com/gpu")])
def test_a_pod_gets_the_gpus_of_its_vendor_and_shared_memory(devices: dict[str, Any], resource: str) -> None:
    spec = pod(on_gpus(devices))
    engine = spec["containers"][0]
    assert engine["resources"]["limits"] == {resource: "4"}
    mounts = {one["mountPath"]: one["name"] for one in engine["volumeMounts"]}
    volumes = {one["name"]: one for one in spec["volumes"]}
    assert volumes[mounts["/dev/shm"]]["emptyDir"] == {"medium": "Memory", "sizeLimit": "16Gi"}
    assert "persistentVolumeClaim" in volumes[mounts["/models"]]


def test_a_compose_service_reserves_nvidia_gpus() -> None:
    found = service(on_gpus(NVIDIA))
    reserved = found["deploy"]["resources"]["reservations"]["devices"]
    assert reserved == [{"driver": "nvidia", "count": 4, "capabilities": ["gpu"]}]
    assert found["shm_size"] == "16gb"
    assert "devices" not in found


def test_a_compose_service_gets_the_devices_and_groups_of_amd_gpus() -> None:
    found = service(on_gpus(AMD))
    assert found["devices"] == ["/dev/kfd", "/dev/dri"]
    assert [one.partition(":")[0] for one in found["group_add"]] == ["${VIDEO_GID", "${RENDER_GID"]
    assert found["environment"]["HIP_VISIBLE_DEVICES"] == "0,1,2,3"
    assert found["environment"]["HF_HUB_OFFLINE"] == "1", "the engine's own variables are kept"
    assert found["shm_size"] == "16gb"
    assert "deploy" not in found


def test_other_targets_name_the_gpus() -> None:
    files = {target: export.export(on_gpus(AMD), target) for target in ("command", "ray-serve", "systemd")}
    model = yaml.safe_load(files["ray-serve"]["serve.yaml"])["applications"][0]["args"]["llm_configs"][0]
    assert model["placement_group_config"] == {"bundles": [{"CPU": 1, "GPU": 1}] * 4, "strategy": "STRICT_PACK"}
    assert model["engine_kwargs"]["tensor_parallel_size"] == 4
    assert "SupplementaryGroups=video render\n" in files["systemd"]["powerband-smollm2.service"]
    served = yaml.safe_load(files["systemd"]["recipe.yaml"])
    assert (served["gpus"], served["deployment"]["config"]["tensor_parallel_size"]) == (4, 4)
    assert "# measured on: 4 x AMD Instinct MI300X\n" in files["command"]["serve.sh"]


def test_a_cpu_recipe_gets_no_gpu_and_no_cuda_image() -> None:
    own = recipe("vllm", max_num_seqs=8)
    engine, found = pod(own)["containers"][0], service(own)
    assert engine["image"] == found["image"] == "vllm/vllm-openai-cpu:v0.32.0"
    assert "limits" not in engine["resources"]
    assert not {"deploy", "devices", "shm_size"} & found.keys()
    text = export.export(own, "ray-serve")["serve.yaml"]
    model = yaml.safe_load(text)["applications"][0]["args"]["llm_configs"][0]
    assert model["placement_group_config"]["bundles"] == [{"CPU": 1}]


def test_every_image_of_compose_has_a_fixed_version() -> None:
    services = yaml.safe_load(export.export(recipe(), "compose")["compose.yaml"])["services"]
    assert all(re.search(r":[\w-]*v?\d", one["image"]) for one in services.values())


def test_workers_on_the_sockets_of_a_cpu_get_shared_memory() -> None:
    assert service(recipe("vllm", tensor_parallel_size=2))["shm_size"] == "16gb"


@pytest.mark.parametrize(
    ("engine", "version", "build", "devices", "image"),
    [
        ("vllm", "0.32.0", "cuda", NVIDIA, "vllm/vllm-openai:v0.32.0"),
        ("vllm", "0.32.0+cu130", None, NVIDIA, "vllm/vllm-openai:v0.32.0"),
        ("vllm", "0.32.0+rocm721", None, AMD, "vllm/vllm-openai-rocm:v0.32.0"),
        ("vllm", "0.32.0.post1", "cpu-torch-2.9.0", {}, "vllm/vllm-openai-cpu:v0.32.0.post1"),
        ("llamacpp", "9603", None, NVIDIA, "ghcr.io/ggml-org/llama.cpp:server-cuda-b9603"),
        ("llamacpp", "9603", None, AMD, "ghcr.io/ggml-org/llama.cpp:server-rocm-b9603"),
        ("llamacpp", "0.5.0", None, {}, "ghcr.io/ggml-org/llama.cpp:server-v0.5.0"),
    ],
)
def test_the_image_is_that_of_the_measured_build(
    engine: str, version: str, build: str | None, devices: dict[str, Any], image: str
) -> None:
    changes = {"engine_version": version, "provenance": {"engine_build": build}, **devices}
    own = recipe(engine).model_copy(update=changes)
    assert service(own)["image"] == pod(own)["containers"][0]["image"] == image


@pytest.mark.parametrize(
    ("engine", "changes", "found"),
    [
        ("vllm", {"engine_version": "0.33.0.dev12+g1a2b3c"}, "version '0.33.0.dev12'"),
        ("vllm", {"engine_version": "unknown"}, "version 'unknown'"),
        ("vllm", {"provenance": {"engine_build": "cuda"}}, "the cuda build of vLLM"),
        ("vllm", {**AMD, "device_vendor": "apple"}, "apple"),
        (
            "llamacpp",
            {"engine_version": "0.3.36", "provenance": {"engine_build": "avx2+fma"}},
            "llama-cpp-python 0.3.36",
        ),
        ("llamacpp", {"engine_version": "0.5.0-dev"}, "version '0.5.0-dev'"),
    ],
)
def test_without_a_published_image_the_export_asks_for_one(engine: str, changes: dict[str, Any], found: str) -> None:
    own = recipe(engine).model_copy(update=changes)
    for target in ("compose", "kubernetes"):
        with pytest.raises(InputError, match=found) as error:
            export.export(own, target)
        assert "--image" in error.value.hint
        assert export.export(own, target, image="registry.local/engine:1")
    assert export.export(own, "systemd") and export.export(own, "command")


def test_the_command_line_accepts_an_image(tmp_path: Any) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(recipe().to_text())
    arguments = ["export", str(path), "--to", "kubernetes", "--image", "registry.local/engine:1", "--json"]
    outcome = CliRunner().invoke(app, arguments)
    assert "image: registry.local/engine:1" in outcome.stdout


def test_containers_wait_as_long_as_a_start_may_take() -> None:
    slow = recipe("vllm")
    slow = slow.model_copy(update={"deployment": {**slow.deployment, "start_timeout": "30min"}})
    assert service(slow)["healthcheck"]["start_period"] == "1800s"
    probe = pod(slow)["containers"][0]["startupProbe"]
    assert probe["failureThreshold"] * probe["periodSeconds"] == 1800


def test_recipes_without_device_fields_stay_readable() -> None:
    data = recipe("vllm", tensor_parallel_size=2).to_data()
    data.pop("powerband")
    assert Recipe.model_validate(data).device_vendor == "cpu"
    data["deployment"]["placement"] = {"gpus": [0, 1]}
    old = Recipe.model_validate(data)
    assert (old.gpus, old.device_vendor, old.devices) == (2, "nvidia", "2 x GPU")
    new = on_gpus(AMD)
    written = {key: value for key, value in new.to_data().items() if key != "powerband"}
    assert Recipe.model_validate(written) == new
