"""A local stand-in of the model hub: serves folders as repositories, with the protocol that huggingface_hub speaks.

Large files are redirected to another origin, as on the hub. Anything that the stand-in does not know is an error.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self
from urllib.parse import parse_qs, unquote, urlsplit

_LARGE_SUFFIXES = (".safetensors", ".gguf", ".bin", ".pth")
_HASHED_BYTES = 64 * 2**20  # of a larger file only name and size are hashed, so that a sparse one is served at once
_INFO = re.compile(r"/api/models/([^/]+/[^/]+)(?:/revision/([^/]+))?")
_TREE = re.compile(r"/api/models/([^/]+/[^/]+)/tree/([^/]+)")
_RESOLVE = re.compile(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)")
_CONTENT = re.compile(r"/content/([0-9a-f]{64})")
_RANGE = re.compile(r"bytes=(\d+)-(\d*)")


@dataclass(frozen=True)
class Request:
    """A request that the stand-in received."""

    method: str
    path: str
    range: str | None
    token: str | None


@dataclass(frozen=True)
class _File:
    path: Path
    name: str

    @cached_property
    def size(self) -> int:
        return self.path.stat().st_size

    @property
    def large(self) -> bool:
        """Return whether the hub keeps the file outside git."""
        return self.name.endswith(_LARGE_SUFFIXES)

    @cached_property
    def etag(self) -> str:
        """Return the SHA-256 of a large file, and the git id of any other."""
        if not self.large:
            content = self.path.read_bytes()
            return hashlib.sha1(b"blob %d\0%b" % (len(content), content)).hexdigest()
        described = f"{self.name} {self.size}".encode()
        content = self.path.read_bytes() if self.size <= _HASHED_BYTES else described
        return hashlib.sha256(content).hexdigest()

    def entry(self) -> dict[str, Any]:
        """Return the file as a row of `/tree`."""
        lfs = {"lfs": {"oid": self.etag, "size": self.size, "pointerSize": 134}} if self.large else {}
        return {"type": "file", "path": self.name, "size": self.size, "oid": self.etag[:40], **lfs}


@dataclass
class _Repository:
    commits: dict[str, dict[str, _File]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)

    def commit(self, revision: str) -> str | None:
        """Return the commit of a revision."""
        found = self.branches.get(revision, revision)
        return found if found in self.commits else None


class Hub:
    """Serves `folder/owner/name` as the model `owner/name` on a free port of the loopback interface.

    `gated` and `private` map a model to the token that gives access.
    """

    def __init__(
        self, folder: Path, *, gated: Mapping[str, str] | None = None, private: Mapping[str, str] | None = None
    ) -> None:
        self.gated, self.private = dict(gated or {}), dict(private or {})
        self.requests: list[Request] = []
        self.repositories: dict[str, _Repository] = {}
        self.contents: dict[str, _File] = {}
        self._cut_after_bytes: int | None = None
        self._lock = threading.Lock()
        for path in sorted(folder.glob("*/*")):
            self.add(str(path.relative_to(folder)), path)
        self._servers = [ThreadingHTTPServer(("127.0.0.1", 0), _bound(kind, self)) for kind in (_Pages, _Contents)]
        self.url, self.contents_url = (f"http://127.0.0.1:{one.server_port}" for one in self._servers)

    def __enter__(self) -> Self:
        for one in self._servers:
            threading.Thread(target=one.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        for one in self._servers:
            one.shutdown()
            one.server_close()

    def add(self, name: str, folder: Path, *, branch: str = "main") -> str:
        """Make the files of a folder a new commit of a branch, and return the commit."""
        files = [_File(path, str(path.relative_to(folder))) for path in sorted(folder.rglob("*")) if path.is_file()]
        text = json.dumps([name, [(one.name, one.etag) for one in files]])
        commit = hashlib.sha1(text.encode()).hexdigest()
        repository = self.repositories.setdefault(name, _Repository())
        repository.commits[commit] = {one.name: one for one in files}
        repository.branches[branch] = commit
        self.contents |= {one.etag: one for one in files}
        return commit

    def cut_after(self, count: int) -> None:
        """Close the connection after this many bytes of the next large file, once."""
        self._cut_after_bytes = count

    def take_cut(self) -> int | None:
        """Return after how many bytes to close the connection, and forget it."""
        with self._lock:
            found, self._cut_after_bytes = self._cut_after_bytes, None
        return found

    def downloads(self) -> list[Request]:
        """Return the requests for the contents of large files."""
        return [one for one in self.requests if _CONTENT.fullmatch(one.path)]


def _bound(kind: type[_Connection], hub: Hub) -> type[_Connection]:
    """Return the class of connections to this hub."""
    return type(kind.__name__, (kind,), {"hub": hub})


class _Connection(BaseHTTPRequestHandler):
    """Answers the requests of one connection."""

    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing: requests are kept in a list."""

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        url = urlsplit(self.path)
        token = (self.headers["Authorization"] or "").removeprefix("Bearer ") or None
        request = Request(self.command, unquote(url.path), self.headers["Range"], token)
        self.hub.requests.append(request)
        self._route(request, parse_qs(url.query))

    def _route(self, request: Request, query: Mapping[str, list[str]]) -> None:
        raise NotImplementedError

    def _send_file(self, one: _File, headers: Mapping[str, str] | None = None) -> None:
        """Send a file or the part of it that is asked for; a large one may be cut."""
        asked = _RANGE.fullmatch(self.headers["Range"] or "")
        begin = int(asked[1]) if asked else 0
        end = min(int(asked[2]) + 1, one.size) if asked and asked[2] else one.size
        if begin >= end and one.size:
            self._refuse(416, "", f"the file has {one.size} bytes")
            return
        part = {"Content-Range": f"bytes {begin}-{end - 1}/{one.size}"} if asked else {}
        length = {"Content-Length": str(end - begin), "Accept-Ranges": "bytes", "ETag": f'"{one.etag}"'}
        self._send_head(206 if asked else 200, {**(headers or {}), **part, **length})
        if self.command == "HEAD":
            return
        cut = self.hub.take_cut() if one.large else None
        count = end - begin if cut is None else min(cut, end - begin)
        with one.path.open("rb") as stream:
            self.wfile.flush()
            if count:
                self.connection.sendfile(stream, begin, count)
        self.close_connection = cut is not None

    def _send_json(self, value: Any) -> None:
        body = json.dumps(value).encode()
        self._send_head(200, {"Content-Type": "application/json", "Content-Length": str(len(body))})
        if self.command != "HEAD":
            self.wfile.write(body)

    def _refuse(self, status: int, code: str, message: str) -> None:
        headers = {"X-Error-Code": code} if code else {}
        self._send_head(status, {**headers, "X-Error-Message": message, "Content-Length": "0"})

    def _send_head(self, status: int, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()


class _Pages(_Connection):
    """Answers requests to the hub itself: the API and small files."""

    def _route(self, request: Request, query: Mapping[str, list[str]]) -> None:
        path, token = request.path, request.token
        if found := _TREE.fullmatch(path):
            if query.get("recursive", ["false"])[0].lower() != "true":
                self._refuse(501, "", "only recursive listings are implemented")
            elif files := self._files(found[1], found[2], token):
                self._send_json([one.entry() for one in files[1].values()])
        elif found := _INFO.fullmatch(path):
            if files := self._files(found[1], found[2] or "main", token):
                siblings = [{"rfilename": name} for name in files[1]]
                gated = "manual" if found[1] in self.hub.gated else False
                self._send_json({"id": found[1], "sha": files[0], "gated": gated, "siblings": siblings})
        elif found := _RESOLVE.fullmatch(path):
            self._resolve(found[1], found[2], found[3], token)
        else:
            self._refuse(501, "", f"the stand-in does not implement {path}")

    def _files(self, name: str, revision: str, token: str | None) -> tuple[str, dict[str, _File]] | None:
        """Return the commit and files of a revision, or refuse the request as the hub does."""
        repository = self.hub.repositories.get(name)
        if repository is None or self.hub.private.get(name, token) != token:
            self._refuse(404 if token else 401, "RepoNotFound", "Repository not found")
            return None
        commit = repository.commit(revision)
        if commit is None:
            self._refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
            return None
        return commit, repository.commits[commit]

    def _resolve(self, name: str, revision: str, file: str, token: str | None) -> None:
        files = self._files(name, revision, token)
        if files is None:
            return
        if self.hub.gated.get(name, token) != token:
            self._refuse(403 if token else 401, "GatedRepo", f"Access to model {name} is restricted")
        elif file not in files[1]:
            self._refuse(404, "EntryNotFound", "Entry not found")
        elif (one := files[1][file]).large:
            self._send_head(
                302,
                {
                    "Location": f"{self.hub.contents_url}/content/{one.etag}",
                    "X-Repo-Commit": files[0],
                    "X-Linked-Size": str(one.size),
                    "X-Linked-Etag": f'"{one.etag}"',
                    "Content-Length": "0",
                },
            )
        else:
            self._send_file(one, {"X-Repo-Commit": files[0]})


class _Contents(_Connection):
    """Answers requests to the storage of large files, which must not get the token of the hub."""

    def _route(self, request: Request, query: Mapping[str, list[str]]) -> None:
        found = _CONTENT.fullmatch(request.path)
        if request.token:
            self._refuse(400, "", "the token of the hub was sent to another origin")
        elif found is None or found[1] not in self.hub.contents:
            self._refuse(404, "", "no such content")
        else:
            self._send_file(self.hub.contents[found[1]])
