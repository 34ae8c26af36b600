"""A real control plane on this machine: etcd and kube-apiserver, with pods that the test writes itself."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import yaml

from support.golden import free_port

CRDS = Path(__file__).parents[1] / "kubernetes" / "crds"
ADMIN = "admin-token"
POOLS = "/apis/inference.networking.k8s.io/v1/namespaces/default/inferencepools"
PODS = "/api/v1/namespaces/default/pods"
_BUILD = "tests/kubernetes/build-apiserver"
_READY_S = 60.0


def missing() -> str:
    """Return why there is no control plane here; empty if there can be one."""
    if not api_server().exists():
        return f"no kube-apiserver at {api_server()}: run {_BUILD}"
    if not shutil.which("etcd"):
        return f"etcd is not installed: run {_BUILD}, or 'apt-get install etcd-server'"
    return ""


def api_server() -> Path:
    """Return where the API server is, or would be."""
    cache = Path(os.environ.get("POWERBAND_CACHE") or Path.home() / ".cache" / "powerband")
    return Path(os.environ.get("POWERBAND_KUBE_APISERVER") or cache / "kube" / "kube-apiserver")


@dataclass
class Cluster:
    """A running control plane."""

    folder: Path
    port: int
    http: httpx.Client
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    users: dict[str, str] = field(default_factory=dict)  # token by user name
    etcd_port: int = 0

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.port}"

    def kubeconfig(self, token: str = ADMIN, *, port: int | None = None) -> Path:
        """Write a kubeconfig for a token; `port` of a proxy in front of the API server."""
        path = self.folder / f"kubeconfig-{token}-{port or self.port}"
        certificate = str(self.folder / "certs" / "apiserver.crt")
        cluster = {"server": f"https://127.0.0.1:{port or self.port}", "certificate-authority": certificate}
        data = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "test",
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test", "namespace": "default"}}],
            "clusters": [{"name": "test", "cluster": cluster}],
            "users": [{"name": "test", "user": {"token": token}}],
        }
        path.write_text(yaml.safe_dump(data))
        return path

    def start_api_server(self) -> None:
        """Start the API server, and wait until it is ready."""
        argv = [
            str(api_server()),
            f"--etcd-servers=http://127.0.0.1:{self.etcd_port}",
            "--service-cluster-ip-range=10.0.0.0/24",
            f"--cert-dir={self.folder / 'certs'}",
            f"--secure-port={self.port}",
            "--bind-address=127.0.0.1",
            "--service-account-issuer=https://127.0.0.1",
            f"--service-account-key-file={self.folder / 'sa.key'}",
            f"--service-account-signing-key-file={self.folder / 'sa.key'}",
            f"--token-auth-file={self.folder / 'tokens.csv'}",
            "--authorization-mode=RBAC",
            "--disable-admission-plugins=ServiceAccount",
            "--v=0",
        ]
        with (self.folder / "apiserver.log").open("ab") as log:
            self.processes["api"] = subprocess.Popen(argv, stdout=log, stderr=log)
        until = time.monotonic() + _READY_S
        while time.monotonic() < until:
            with contextlib.suppress(httpx.HTTPError):
                if self.http.get("/readyz").status_code == 200:
                    return
            time.sleep(0.1)
        raise AssertionError(f"the API server is not ready: {self.folder / 'apiserver.log'}")

    def kill_api_server(self) -> None:
        self.processes["api"].kill()
        self.processes["api"].wait()

    def request(self, method: str, path: str, body: dict[str, Any] | None = None, **query: str) -> dict[str, Any]:
        """Send a request as the administrator; return the object."""
        answer = self.http.request(method, path, json=body, params=query)
        assert answer.status_code < 300, f"{method} {path}: {answer.status_code} {answer.text[:500]}"
        found: dict[str, Any] = answer.json()
        return found

    def kubectl(self, *args: str, stdin: str = "", token: str = ADMIN) -> str:
        """Run kubectl; return what it prints."""
        argv = ["kubectl", f"--kubeconfig={self.kubeconfig(token)}", f"--cache-dir={self.folder / 'kubectl'}", *args]
        done = subprocess.run(argv, input=stdin, text=True, capture_output=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def apply(self, manifests: str) -> str:
        """Apply manifests with kubectl; return what it says. A server this old needs `--validate=false`."""
        return self.kubectl("apply", "--validate=false", "-f", "-", stdin=manifests)

    def add_crds(self) -> None:
        """Add the resources of other projects, and wait until the API server serves them."""
        for path in sorted(CRDS.glob("*.yaml")):
            self.apply(path.read_text())
        until = time.monotonic() + 20
        while self.http.get(POOLS).status_code != 200:
            assert time.monotonic() < until, "the API server does not serve inferencepools"
            time.sleep(0.1)

    # pods, as kubelets and controllers would write them

    def add_pod(self, name: str, ip: str, *, labels: dict[str, str] | None = None, ready: bool = True) -> None:
        """Create a pod with an address."""
        spec = {"nodeName": "node-1", "containers": [{"name": "engine", "image": "engine"}]}
        metadata = {"name": name, "labels": {"app": "golden", **(labels or {})}}
        self.request("POST", PODS, {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec})
        self.set_ready(name, ready, ip=ip)

    def set_ready(self, name: str, ready: bool, *, ip: str | None = None) -> None:
        """Write a pod's condition Ready, and its address if given."""
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        condition = {"type": "Ready", "status": "True" if ready else "False", "lastTransitionTime": now}
        status: dict[str, Any] = {"phase": "Running", "conditions": [condition]}
        if ip:
            status |= {"podIP": ip, "podIPs": [{"ip": ip}], "startTime": now}
        answer = self.http.patch(
            f"{PODS}/{name}/status",
            json={"status": status},
            headers={"content-type": "application/strategic-merge-patch+json"},
        )
        assert answer.status_code == 200, answer.text

    def delete_pod(self, name: str, *, grace_s: int) -> None:
        """Begin to terminate a pod; with 0 it is gone."""
        self.request("DELETE", f"{PODS}/{name}", None, gracePeriodSeconds=str(grace_s))

    def add_pool(self, name: str, *ports: int, labels: dict[str, str] | None = None) -> None:
        """Create an InferencePool for the pods with these labels."""
        spec = {
            "selector": {"matchLabels": labels or {"app": "golden"}},
            "targetPorts": [{"number": port} for port in ports],
            "endpointPickerRef": {"name": "picker", "port": {"number": 9002}},
        }
        head = {"apiVersion": "inference.networking.k8s.io/v1", "kind": "InferencePool", "metadata": {"name": name}}
        self.request("POST", POOLS, {**head, "spec": spec})

    def clear(self) -> None:
        """Delete the pods, pools and leases of the namespace."""
        leases = "/apis/coordination.k8s.io/v1/namespaces/default/leases"
        for path in (PODS, POOLS, leases):
            self.http.delete(path, params={"gracePeriodSeconds": "0"})


@contextlib.contextmanager
def cluster(folder: Path, *, users: dict[str, str] | None = None) -> Iterator[Cluster]:
    """Run a control plane; `users` are further tokens by user name."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "certs").mkdir(exist_ok=True)
    subprocess.run(["openssl", "genrsa", "-out", str(folder / "sa.key"), "2048"], check=True, capture_output=True)
    rows = [f"{ADMIN},admin,admin,system:masters"]
    rows += [f"{token},{name},{name}" for name, token in (users or {}).items()]
    (folder / "tokens.csv").write_text("\n".join(rows) + "\n")
    client, peer, port = free_port(), free_port(), free_port()
    urls = [f"http://127.0.0.1:{number}" for number in (client, peer)]
    etcd = ["etcd", "--data-dir", str(folder / "etcd"), "--listen-client-urls", urls[0]]
    etcd += ["--advertise-client-urls", urls[0], "--listen-peer-urls", urls[1], "--unsafe-no-fsync"]
    etcd += ["--initial-advertise-peer-urls", urls[1], "--initial-cluster", f"default={urls[1]}"]
    headers = {"authorization": f"Bearer {ADMIN}"}
    with (
        httpx.Client(
            base_url=f"https://127.0.0.1:{port}", verify=False, headers=headers, trust_env=False, timeout=20
        ) as http,
        (folder / "etcd.log").open("wb") as log,
    ):
        found = Cluster(folder, port, http, users=users or {}, etcd_port=client)
        found.processes["etcd"] = subprocess.Popen(etcd, stdout=log, stderr=log)
        try:
            found.start_api_server()
            found.add_crds()
            yield found
        finally:
            for one in reversed(found.processes.values()):
                one.kill()
                one.wait()
