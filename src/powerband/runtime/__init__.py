"""Running: processes, replicas, environments, devices."""

import sys

sys.modules.setdefault("httpx._main", None)  # type: ignore[arg-type]  # httpx's own command line costs 90 ms
