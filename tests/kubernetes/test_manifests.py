"""The export and the chart: the same objects, valid by the schemas and by a real API server, with the least rights."""

from __future__ import annotations

import shutil
from pathlib import Path

import httpx
import pytest
import yaml

from powerband import export
from powerband.export import kubernetes
from support import manifests, pickers
from support.clusters import Cluster

RECIPES = manifests.recipes()
each_recipe = pytest.mark.parametrize("name", list(RECIPES))


def exported(name: str) -> list[manifests.Object]:
    return list(yaml.safe_load_all(export.export(RECIPES[name], "kubernetes")["kubernetes.yaml"]))


@each_recipe
def test_the_schemas_accept_every_object(name: str) -> None:
    objections = [manifests.schema_objections(one) for one in exported(name) if one["kind"] not in manifests.OTHERS]
    assert len(objections) >= 13 and not any(objections), objections


@each_recipe
def test_pods_are_restricted(name: str) -> None:
    pods = manifests.pod_templates(exported(name))
    assert len(pods) == (3 if RECIPES[name].gpus else 2)
    assert [manifests.restricted_objections(pod) for pod in pods] == [[]] * len(pods)
    pods[0]["volumes"].append({"name": "x", "hostPath": {"path": "/"}})
    assert manifests.restricted_objections(pods[0])


@each_recipe
@pytest.mark.skipif(not shutil.which("go"), reason="no Go: run 'apt-get install golang-go'")
def test_the_chart_has_the_same_objects(name: str) -> None:
    wanted = yaml.safe_load(export.export(RECIPES[name], "kubernetes")["values.yaml"])
    chart = manifests.by_name(manifests.render_chart(wanted))
    ours = manifests.by_name(exported(name))
    assert chart.keys() == ours.keys()
    for key, one in ours.items():
        assert chart[key] == one, key


@pytest.mark.skipif(not shutil.which("go"), reason="no Go: run 'apt-get install golang-go'")
def test_the_charts_own_values_are_complete() -> None:
    own = yaml.safe_load((manifests.TEMPLATES.parent / "values.yaml").read_text())
    assert own.keys() == kubernetes.values(RECIPES["cpu"]).keys()
    assert manifests.by_name(manifests.render_chart(own)).keys() == manifests.by_name(kubernetes.objects(own)).keys()


@each_recipe
def test_the_api_server_accepts_every_object(cluster: Cluster, name: str) -> None:
    for one in exported(name):
        assert "created" in cluster.apply(yaml.safe_dump(manifests.for_old_server(one))), one["kind"]
    every = yaml.safe_dump_all(map(manifests.for_old_server, exported(name)))
    assert cluster.kubectl("delete", "--wait=false", "-f", "-", stdin=every)  # nobody removes the claim's finalizer


def test_the_picker_runs_with_its_rights_and_has_no_others(cluster: Cluster, tmp_path: Path) -> None:
    recipe = pickers.write_recipe(tmp_path)
    wanted = kubernetes.values(pickers.read_recipe(recipe))
    objects = kubernetes.objects(wanted)
    rbac = [one for one in objects if one["kind"] in ("ServiceAccount", "Role", "RoleBinding", "InferencePool")]
    cluster.apply(yaml.safe_dump_all(rbac))
    labels = {"app.kubernetes.io/name": "golden", "app.kubernetes.io/component": "engine"}
    cluster.add_pod("a", "127.0.0.10", labels=labels)
    cluster.add_pool("another", 8000)
    deployment = manifests.by_name(objects)["Deployment", "golden-picker"]
    args = deployment["spec"]["template"]["spec"]["containers"][0]["args"][1:]
    args[args.index("--recipe") + 1] = str(tmp_path)  # where the ConfigMap would be mounted
    config = cluster.kubeconfig("picker-token")
    with pickers.picker(*args, "--kubeconfig", str(config), "--notice", "0s", recipes=[]) as picker:
        assert picker.metric('powerband_replicas_ready{model="golden"}') == 1
    lease = cluster.request("GET", "/apis/coordination.k8s.io/v1/namespaces/default/leases/golden-picker")
    leases, pools = (
        "coordination.k8s.io/v1/namespaces/default/leases",
        "inference.networking.k8s.io/v1/namespaces/default",
    )
    forbidden = [
        ("GET", "/api/v1/namespaces/default/secrets"),
        ("GET", "/api/v1/namespaces/kube-system/pods"),
        ("GET", "/api/v1/namespaces/default/configmaps/golden-recipes"),
        ("DELETE", "/api/v1/namespaces/default/pods/a"),
        ("PATCH", "/api/v1/namespaces/default/pods/a"),
        ("GET", f"/apis/{pools}/inferencepools/another"),
        ("GET", f"/apis/{pools}/inferencepools"),
        ("PUT", f"/apis/{pools}/inferencepools/golden-pool"),
        ("GET", f"/apis/{leases}/another"),
        ("DELETE", f"/apis/{leases}/golden-picker"),
    ]
    headers = {"authorization": "Bearer picker-token"}
    with httpx.Client(base_url=cluster.url, verify=False, headers=headers, trust_env=False) as http:
        for method, path in forbidden:
            assert http.request(method, path, json=lease if method == "PUT" else None).status_code == 403, (
                method,
                path,
            )
        assert http.get("/api/v1/namespaces/default/pods").status_code == 200
