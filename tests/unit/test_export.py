"""A recipe as Compose, Kubernetes, Ray Serve, ...: every target has the same engine options."""

from __future__ import annotations

import json
import shlex

import pytest
import yaml

from powerband import export
from powerband.errors import InputError
from powerband.export import grafana
from support.recipes import recipe


def test_every_target_writes_files_and_containers_start_with_the_measured_options() -> None:
    own = recipe(parallel=8, ctx_size=8192)
    measured = shlex.split(own.command)
    found = {target: export.export(own, target) for target in export.TARGETS if target != "ray-serve"}
    assert all(text.strip() for files in found.values() for text in files.values())
    service = yaml.safe_load(found["compose"]["compose.yaml"])["services"]["smollm2"]
    manifests = list(yaml.safe_load_all(found["kubernetes"]["kubernetes.yaml"]))
    pod = manifests[0]["spec"]["template"]["spec"]["containers"][0]
    for args in (service["command"], pod["args"]):
        for option in ("--parallel", "--ctx-size"):
            assert args[args.index(option) + 1] == measured[measured.index(option) + 1]
        assert args[args.index("--model") + 1] == "/models/SmolLM2.gguf"
        assert args[args.index("--host") + 1] == "0.0.0.0"
    assert service["image"] == pod["image"] == "ghcr.io/ggml-org/llama.cpp:server-b9603"
    assert service["volumes"] == ["/data/variants/SmolLM2.gguf:/models/SmolLM2.gguf:ro"]
    assert [one["kind"] for one in manifests] == [
        "Deployment", "Service", "PodDisruptionBudget", "HorizontalPodAutoscaler", "InferencePool", "HTTPRoute",
        "NetworkPolicy", "PersistentVolumeClaim", "ConfigMap", "ServiceAccount", "Role", "RoleBinding", "Deployment",
        "Service", "NetworkPolicy", "ServiceMonitor", "ServiceMonitor",
    ]  # fmt: skip
    scaler = manifests[3]["spec"]
    assert scaler["metrics"][0]["external"]["metric"]["name"] == "powerband_replicas_wanted"
    limits = ["--min-replicas", str(scaler["minReplicas"]), "--max-replicas", str(scaler["maxReplicas"])]
    assert manifests[12]["spec"]["template"]["spec"]["containers"][0]["args"][-4:] == limits
    (name, text), *_ = manifests[8]["data"].items()
    label = manifests[0]["spec"]["template"]["metadata"]["labels"]["powerband.dev/recipe"]
    assert name == f"{label}.yaml" and yaml.safe_load(text)["promise"]["in_flight"] == 6
    assert "powerband serve" in found["systemd"]["powerband-smollm2.service"]
    assert found["command"]["serve.sh"].rstrip().endswith(own.command)


def test_ray_serve_is_for_vllm_only() -> None:
    with pytest.raises(InputError):
        export.export(recipe(), "ray-serve")
    text = export.export(recipe("vllm", max_num_seqs=32), "ray-serve")["serve.yaml"]
    model = yaml.safe_load(text)["applications"][0]["args"]["llm_configs"][0]
    assert model["engine_kwargs"] == {"max_num_seqs": 32}


def test_an_unknown_target_is_rejected_with_a_suggestion() -> None:
    with pytest.raises(InputError, match="kubernetes"):
        export.export(recipe(), "kubernete")


def test_the_dashboard_has_every_panel_once() -> None:
    board = json.loads(export.export(recipe(), "grafana")["dashboard.json"])
    positions = [(one["gridPos"]["x"], one["gridPos"]["y"]) for one in board["panels"]]
    assert len(set(positions)) == len(board["panels"]) == len(grafana.PANELS)
    assert all(target["expr"] for one in board["panels"] for target in one["targets"])
