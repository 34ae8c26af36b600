"""Keep descriptors for a process that may die and be started again, as systemd's file descriptor store does.

`serve` keeps the control sockets of all engines here. A keeper ends its engine when the last copy of its socket closes,
so engines live on when the supervisor dies, and end with `serve`.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
from collections.abc import Mapping
from typing import Any

_MAX_BYTES = 1 << 17  # of a message: below the default buffer of a socket
StoredProcess = tuple[dict[str, Any], int]  # a process' record, and its control socket


class DescriptorStore:
    """The owner's side: descriptors with a record each, by key."""

    def __init__(self) -> None:
        self._kept: dict[str, tuple[Any, int]] = {}
        self._lock = threading.Lock()

    def connect(self) -> socket.socket:
        """Return the other end of a new connection, for a child process to inherit."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        threading.Thread(target=self._serve, args=(ours,), daemon=True).start()
        return theirs

    def close(self) -> None:
        """Close all descriptors."""
        for key in list(self._kept):
            self._drop(key)

    def _drop(self, key: str) -> None:
        with self._lock:
            _, descriptor = self._kept.pop(key, (None, None))
        if descriptor is not None:
            os.close(descriptor)

    def _serve(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            while True:
                data, descriptors, _, _ = socket.recv_fds(connection, _MAX_BYTES, 1)
                if not data:
                    return
                request = json.loads(data)
                if descriptors:
                    self._drop(request["key"])
                    with self._lock:
                        self._kept[request["key"]] = (request["record"], descriptors[0])
                elif "key" in request:
                    self._drop(request["key"])
                else:
                    with self._lock:
                        for key, (record, descriptor) in self._kept.items():
                            message = json.dumps({"key": key, "record": record}).encode()
                            socket.send_fds(connection, [message], [descriptor])
                    connection.send(b"{}")


class StoredDescriptors:
    """The child's side of a connection to the store."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def keep(self, key: str, record: Mapping[str, Any], descriptor: int) -> None:
        """Let the store keep a copy of a descriptor with its record."""
        with contextlib.suppress(OSError):  # the owner is ending
            socket.send_fds(self._connection, [json.dumps({"key": key, "record": record}).encode()], [descriptor])

    def drop(self, key: str) -> None:
        """Let the store close its copy."""
        with contextlib.suppress(OSError):
            self._connection.send(json.dumps({"key": key}).encode())

    def all(self) -> dict[str, StoredProcess]:
        """Return the record and a copy of each descriptor, by key."""
        found: dict[str, StoredProcess] = {}
        self._connection.send(b"{}")
        while True:
            data, descriptors, _, _ = socket.recv_fds(self._connection, _MAX_BYTES, 1)
            if not descriptors:
                return found
            message = json.loads(data)
            found[message["key"]] = (message["record"], descriptors[0])
