"""Processes, replicas, engine installations, model files and devices of this machine."""

import sys

sys.modules.setdefault("httpx._main", None)  # type: ignore[arg-type]  # importing httpx's command line takes 90 ms
