"""A client of the Kubernetes API server: credentials, requests, and objects kept up to date by list and watch."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import random
import socket
import ssl
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml

from powerband.errors import InputError

_SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_TIMEOUT_S = 5.0
_WATCH_S = (240, 300)  # how long the server keeps a watch open: varied, so that clients do not return together
_PAGE = 500
_FIRST_BACKOFF_S, _MAX_BACKOFF_S = 0.05, 0.3
_TOKEN_REREAD_S = 30.0  # the kubelet replaces the token of a service account about every hour
_GONE = 410
_KEEPALIVE = [  # a server that vanished without closing its connections is noticed after 20 s
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    *(
        (socket.IPPROTO_TCP, getattr(socket, name), value)
        for name, value in (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3))
        if hasattr(socket, name)
    ),
]


@dataclass(frozen=True)
class Credentials:
    """Where the API server is, and how to talk to it."""

    url: str
    ca: str = ""  # certificates in PEM; empty: the system's
    token: str = ""
    token_file: Path | None = None
    namespace: str = "default"
    verify: bool = True
    client_cert: tuple[str, str] | None = None  # paths of certificate and key

    @classmethod
    def in_cluster(cls) -> Credentials:
        """Return those of the pod's service account."""
        host, port = os.environ.get("KUBERNETES_SERVICE_HOST"), os.environ.get("KUBERNETES_SERVICE_PORT", "443")
        if not host or not (_SERVICE_ACCOUNT / "token").exists():
            raise InputError(
                "this is not a pod with a service account", hint="outside of a cluster give --kubeconfig FILE"
            )
        return cls(
            url=f"https://{f'[{host}]' if ':' in host else host}:{port}",
            ca=(_SERVICE_ACCOUNT / "ca.crt").read_text(),
            token_file=_SERVICE_ACCOUNT / "token",
            namespace=(_SERVICE_ACCOUNT / "namespace").read_text().strip(),
        )

    @classmethod
    def from_kubeconfig(cls, path: Path) -> Credentials:
        """Return those of a kubeconfig's current context: a token or a client certificate in files."""
        try:
            data = yaml.safe_load(path.read_text())
            context = _named(data["contexts"], data["current-context"])["context"]
            cluster = _named(data["clusters"], context["cluster"])["cluster"]
            user = _named(data["users"], context["user"])["user"]
            ca = cluster.get("certificate-authority-data")
            ca_file = cluster.get("certificate-authority")
            cert = (user["client-certificate"], user["client-key"]) if "client-certificate" in user else None
            return cls(
                url=cluster["server"].rstrip("/"),
                ca=base64.b64decode(ca).decode() if ca else (path.parent / ca_file).read_text() if ca_file else "",
                token=user.get("token", ""),
                token_file=path.parent / user["tokenFile"] if "tokenFile" in user else None,
                namespace=context.get("namespace", "default"),
                verify=not cluster.get("insecure-skip-tls-verify", False),
                client_cert=cert,
            )
        except (OSError, yaml.YAMLError, LookupError, TypeError, ValueError) as error:
            raise InputError(
                f"{path} cannot be used as a kubeconfig: {type(error).__name__} {error}",
                hint="it needs a current context with a token, a tokenFile or a client-certificate file",
            ) from None


def _named(rows: list[dict[str, Any]], name: str) -> dict[str, Any]:
    return {one["name"]: one for one in rows}[name]


class ApiServer:
    """Requests to the API server; `async with` closes the connections."""

    def __init__(self, credentials: Credentials) -> None:
        self.credentials = credentials
        self._token, self._token_read_s = credentials.token, -_TOKEN_REREAD_S
        transport = httpx.AsyncHTTPTransport(verify=self._tls(), socket_options=_KEEPALIVE)
        self._http = httpx.AsyncClient(
            base_url=credentials.url, timeout=_TIMEOUT_S, trust_env=False, transport=transport
        )

    def _tls(self) -> ssl.SSLContext:
        context = ssl.create_default_context(cadata=self.credentials.ca or None)
        if not self.credentials.verify:
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        if self.credentials.client_cert:
            context.load_cert_chain(*self.credentials.client_cert)
        return context

    async def __aenter__(self) -> ApiServer:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    def _headers(self) -> dict[str, str]:
        file = self.credentials.token_file
        if file and time.monotonic() - self._token_read_s >= _TOKEN_REREAD_S:
            with contextlib.suppress(OSError):
                self._token, self._token_read_s = file.read_text().strip(), time.monotonic()
        return {"authorization": f"Bearer {self._token}"} if self._token else {}

    async def request(
        self,
        method: str,
        path: str,
        *,
        body: Mapping[str, Any] | None = None,
        timeout_s: float = _TIMEOUT_S,
        **query: Any,
    ) -> httpx.Response:
        """Send one request; raise httpx.HTTPError if there is no response."""
        return await self._http.request(
            method, path, params=query, json=body, headers=self._headers(), timeout=timeout_s
        )

    @contextlib.asynccontextmanager
    async def stream(self, path: str, **query: Any) -> AsyncIterator[httpx.Response]:
        """Open a response that has no end."""
        timeout = httpx.Timeout(_TIMEOUT_S, read=_WATCH_S[1] + 2 * _TIMEOUT_S)
        async with self._http.stream("GET", path, params=query, headers=self._headers(), timeout=timeout) as response:
            yield response


class _Expired(Exception):
    """The server does not have the changes since our resource version any more."""


class Watched:
    """The objects of one kind below a path, kept up to date.

    `run` lists them once, and then follows the changes by resource version: after a broken connection the server sends
    those that were missed. If it does not have them any more (410 Gone), they are listed again.
    """

    def __init__(self, api: ApiServer, path: str, on_change: Callable[[], None], **selectors: str) -> None:
        self.objects: dict[str, dict[str, Any]] = {}  # by name
        self.connected = False  # what `objects` has is up to date
        self.relists = self.reconnects = 0
        self._api, self._path, self._on_change, self._selectors = api, path, on_change, selectors
        self._version = ""

    async def run(self) -> None:
        """Follow the objects until cancelled."""
        backoff_s = _FIRST_BACKOFF_S
        while True:
            try:
                if not self._version:
                    await self._list()
                async with contextlib.aclosing(self._events()) as events:
                    async for kind, one in events:
                        backoff_s = _FIRST_BACKOFF_S
                        self._apply(kind, one)
                self.reconnects += 1
                continue  # the server has ended the watch in time
            except _Expired:
                self._version = ""
                continue
            except (httpx.HTTPError, httpx.StreamError, ssl.SSLError, OSError, ValueError, KeyError) as error:
                if self.connected or backoff_s >= _MAX_BACKOFF_S:
                    print(f"warning: {self._path}: {error or type(error).__name__}", file=sys.stderr, flush=True)
            self.connected = False
            self.reconnects += 1
            self._on_change()
            await asyncio.sleep(backoff_s * random.uniform(0.5, 1))
            backoff_s = min(2 * backoff_s, _MAX_BACKOFF_S)

    async def _list(self) -> None:
        found: dict[str, dict[str, Any]] = {}
        query: dict[str, Any] = {**self._selectors, "limit": _PAGE}
        while True:
            response = await self._api.request("GET", self._path, **query)
            if response.status_code == _GONE:  # the pages of this list
                found, query = {}, {**self._selectors, "limit": _PAGE}
                continue
            data = _checked(response)
            found |= {one["metadata"]["name"]: one for one in data["items"]}
            if not (token := data["metadata"].get("continue")):
                break
            query["continue"] = token
        self.relists += 1
        self.objects, self._version, self.connected = found, data["metadata"]["resourceVersion"], True
        self._on_change()

    async def _events(self) -> AsyncGenerator[tuple[str, dict[str, Any]]]:
        query = {"watch": "1", "allowWatchBookmarks": "true", "resourceVersion": self._version, **self._selectors}
        async with self._api.stream(self._path, timeoutSeconds=random.randint(*_WATCH_S), **query) as response:
            if response.status_code == _GONE:
                raise _Expired
            if response.status_code != 200:
                await response.aread()
                _checked(response)
            if not self.connected:
                self.connected = True
                self._on_change()
            async for line in response.aiter_lines():
                event = json.loads(line)
                if event["type"] == "ERROR":
                    raise _Expired  # almost always 410; a list is right after any other error too
                yield event["type"], event["object"]

    def _apply(self, kind: str, one: dict[str, Any]) -> None:
        metadata = one["metadata"]
        self._version = metadata["resourceVersion"]
        if kind == "BOOKMARK":
            return
        if kind == "DELETED":
            self.objects.pop(metadata["name"], None)
        else:
            self.objects[metadata["name"]] = one
        self._on_change()


def _checked(response: httpx.Response) -> dict[str, Any]:
    """Return the object in a response; raise httpx.HTTPError with the server's message if it is an error."""
    try:
        data: dict[str, Any] = response.json()
    except ValueError:
        data = {}
    if response.status_code != 200:
        message = data.get("message") or f"status {response.status_code}"
        raise httpx.HTTPStatusError(message, request=response.request, response=response)
    return data
