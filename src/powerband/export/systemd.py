"""A systemd unit that serves the recipe as a fleet, and restarts it when it exits."""

from __future__ import annotations

from powerband.core.recipe import Recipe
from powerband.export.container import deployment, service_name

_UNIT = """\
[Unit]
Description={name}, served by Powerband
After=network-online.target
Wants=network-online.target

[Service]
ExecStart=/usr/bin/env powerband serve /etc/powerband/recipe.yaml --port 8080
Restart=always
RestartSec=1
KillSignal=SIGTERM
TimeoutStopSec=660
DynamicUser=yes
StateDirectory=powerband
CacheDirectory=powerband
Environment=XDG_STATE_HOME=/var/lib/powerband XDG_CACHE_HOME=/var/cache/powerband
{groups}NoNewPrivileges=yes
ProtectSystem=strict
ProtectHome=read-only

[Install]
WantedBy=multi-user.target
"""


def files(recipe: Recipe) -> dict[str, str]:
    """Return the unit and the recipe that it serves; `powerband serve` chooses the recipe's number of GPUs."""
    name = service_name(deployment(recipe))
    groups = "SupplementaryGroups=video render\n" if recipe.device_vendor == "amd" else ""
    return {f"powerband-{name}.service": _UNIT.format(name=name, groups=groups), "recipe.yaml": recipe.to_text()}
