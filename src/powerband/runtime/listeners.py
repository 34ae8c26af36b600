"""Find the local processes that listen on a port."""

from __future__ import annotations

import contextlib

import psutil


def listening(port: int) -> list[psutil.Process]:
    """Return the local processes that listen on a port, as far as permissions allow."""
    found = []
    with contextlib.suppress(psutil.Error):
        for one in psutil.net_connections("tcp"):
            if one.status == psutil.CONN_LISTEN and one.laddr and one.laddr.port == port and one.pid:
                found.append(psutil.Process(one.pid))
    return found
