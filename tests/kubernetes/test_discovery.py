"""Endpoints and leaders on a real API server."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("grpc")

from support import pickers
from support.clusters import POOLS, Cluster
from support.pickers import NOT_SERVING, SERVING, PickerProcess

READY = 'powerband_replicas_ready{model="golden"}'
SEEN_S = 1.0


def eventually(check: Callable[[], bool], what: str, *, within_s: float = SEEN_S) -> float:
    """Wait until a check holds; return how long it took."""
    began = time.monotonic()
    while not check():
        assert time.monotonic() - began < within_s, f"not within {within_s} s: {what}"
        time.sleep(0.02)
    return time.monotonic() - began


@contextlib.contextmanager
def running(cluster: Cluster, folder: Path, *args: str, ready: bool = True) -> Iterator[PickerProcess]:
    config = ["--kubeconfig", str(cluster.kubeconfig()), "--notice", "0.2s"]
    with pickers.picker(*config, *args, recipes=[pickers.write_recipe(folder)], ready=ready) as one:
        yield one


def endpoints(picker: PickerProcess) -> set[str]:
    """Return the names of the endpoints that the picker knows."""
    lines = [line for line in picker.metrics().splitlines() if line.startswith("powerband_running{")]
    return {line.partition('replica="')[2].partition('"')[0] for line in lines}


def test_pods_of_a_pool_come_become_unready_terminate_and_go(cluster: Cluster, tmp_path: Path) -> None:
    cluster.add_pool("pool", 8000)
    with running(cluster, tmp_path, "--pool", "pool", ready=False) as picker:
        assert picker.health() == NOT_SERVING
        for number in range(3):
            cluster.add_pod(f"pod-{number}", f"127.0.0.{10 + number}")
        cluster.add_pod("other", "127.0.0.20", labels={"app": "other"})
        eventually(lambda: picker.metric(READY) == 3, "three pods", within_s=5)
        assert picker.health() == SERVING and endpoints(picker) == {"pod-0", "pod-1", "pod-2"}
        cluster.set_ready("pod-0", False)
        eventually(lambda: picker.metric(READY) == 2, "one is not ready")
        cluster.delete_pod("pod-1", grace_s=30)
        eventually(lambda: picker.metric(READY) == 1, "one terminates")
        assert "pod-1" in endpoints(picker), "its answers in progress still count"
        cluster.delete_pod("pod-1", grace_s=0)
        eventually(lambda: endpoints(picker) == {"pod-0", "pod-2"}, "it is gone")
        cluster.set_ready("pod-0", True)
        eventually(lambda: picker.metric(READY) == 2, "one is ready again")


def test_each_target_port_is_an_endpoint_and_a_changed_pool_is_followed(cluster: Cluster, tmp_path: Path) -> None:
    cluster.add_pool("pool", 8000, 8001)
    cluster.add_pod("a", "127.0.0.10")
    cluster.add_pod("b", "127.0.0.11", labels={"app": "second"})
    with running(cluster, tmp_path, "--pool", "pool") as picker:
        assert endpoints(picker) == {"a:8000", "a:8001"}
        pool = cluster.request("GET", f"{POOLS}/pool")
        pool["spec"] |= {"targetPorts": [{"number": 9000}], "selector": {"matchLabels": {"app": "second"}}}
        cluster.request("PUT", f"{POOLS}/pool", pool)
        eventually(lambda: endpoints(picker) == {"b"}, "the other selector and port")
        cluster.request("DELETE", f"{POOLS}/pool")
        eventually(lambda: picker.health() == NOT_SERVING, "no pool, no endpoint")


def test_a_killed_api_server_changes_nothing_and_is_listed_again(cluster: Cluster, tmp_path: Path) -> None:
    cluster.add_pod("a", "127.0.0.10")
    with running(cluster, tmp_path, "--selector", "app=golden", "--target-port", "8000") as picker:
        cluster.kill_api_server()
        time.sleep(1.5)
        assert picker.metric(READY) == 1 and picker.health() == SERVING
        cluster.start_api_server()
        cluster.add_pod("b", "127.0.0.11")
        eventually(lambda: picker.metric(READY) == 2, "the new pod", within_s=3)


def test_a_follower_takes_over_when_the_leader_dies_and_at_once_when_it_ends(cluster: Cluster, tmp_path: Path) -> None:
    cluster.add_pod("a", "127.0.0.10")
    args = ("--selector", "app=golden", "--target-port", "8000", "--lease", "golden", "--lease-duration", "2s")
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(running(cluster, tmp_path, *args, "--identity", "first"))
        second = stack.enter_context(running(cluster, tmp_path, *args, "--identity", "second", ready=False))
        third = stack.enter_context(running(cluster, tmp_path, *args, "--identity", "third", ready=False))
        time.sleep(3)
        assert [one.health() for one in (first, second, third)] == [SERVING, NOT_SERVING, NOT_SERVING]
        assert third.health("liveness") == SERVING
        first.process.kill()
        eventually(lambda: SERVING in (second.health(), third.health()), "another leads", within_s=3)
        leader, follower = (second, third) if second.health() == SERVING else (third, second)
        leader.terminate()
        eventually(lambda: follower.health() == SERVING, "the follower leads at once", within_s=1)


def test_the_leader_goes_on_while_nobody_reaches_the_api_server(cluster: Cluster, tmp_path: Path) -> None:
    cluster.add_pod("a", "127.0.0.10")
    args = ("--selector", "app=golden", "--target-port", "8000", "--lease", "golden", "--lease-duration", "1s")
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(running(cluster, tmp_path, *args, "--identity", "first"))
        second = stack.enter_context(running(cluster, tmp_path, *args, "--identity", "second", ready=False))
        cluster.kill_api_server()
        until = time.monotonic() + 4
        while time.monotonic() < until:
            assert [first.health(), second.health()] == [SERVING, NOT_SERVING]
            time.sleep(0.05)
        cluster.start_api_server()
        until = time.monotonic() + 4
        while time.monotonic() < until:
            assert [first.health(), second.health()].count(SERVING) <= 1
            time.sleep(0.05)
        assert first.health() == SERVING
