"""A Ray cluster, for whatever runs on other machines."""

from __future__ import annotations

from typing import Any

from powerband.errors import InputError


def connect(address: str) -> Any:
    """Join the cluster, unless this process has; return Ray."""
    ray = library()
    ray.init(address=address, log_to_driver=False, ignore_reinit_error=True)
    return ray


def library() -> Any:
    """Return Ray, which only some need."""
    try:
        import ray
    except ImportError:
        raise InputError("Ray is not installed", hint="run: pip install 'powerband[ray]'") from None
    return ray


def told(error: Exception) -> str:
    """Return what went wrong on the other machine, in a sentence."""
    cause = getattr(error, "cause", None)
    return str(getattr(cause, "message", None) or str(error).splitlines()[-1])
