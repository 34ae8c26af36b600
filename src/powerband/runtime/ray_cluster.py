"""Connect to a Ray cluster, to run trials and replicas on other machines."""

from __future__ import annotations

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


def remote_error_message(error: Exception) -> str:
    """Return the message of the error that was raised on the other machine."""
    cause = getattr(error, "cause", None)
    return str(getattr(cause, "message", None) or str(error).splitlines()[-1])
