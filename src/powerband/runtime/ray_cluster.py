"""Connect to a Ray cluster, to run trials and replicas on other machines."""

from __future__ import annotations

import random
from typing import Any

from powerband.errors import InputError


def connect(address: str) -> Any:
    """Connect this process to the cluster unless it is connected; return the ray module."""
    ray = library()
    ray.init(address=address, log_to_driver=False, ignore_reinit_error=True)
    return ray


def library() -> Any:
    """Return the ray module, an optional dependency."""
    try:
        import ray
    except ImportError:
        raise InputError("Ray is not installed", hint="run: pip install 'powerband[ray]'") from None
    return ray


def on_a_gpu_node() -> Any:
    """Return a scheduling strategy for a node with GPUs, chosen at random, so that the next start can get another."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    nodes = [one["NodeID"] for one in library().nodes() if one["Alive"] and one["Resources"].get("GPU")]
    return NodeAffinitySchedulingStrategy(random.choice(nodes), soft=True) if nodes else "DEFAULT"


def remote_error_message(error: Exception) -> str:
    """Return the message of the error that was raised on the other machine."""
    cause = getattr(error, "cause", None)
    return str(getattr(cause, "message", None) or str(error).splitlines()[-1])
