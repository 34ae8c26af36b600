"""Download models from the hub into its cache, pinned to a commit; huggingface_hub does the transfers."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from powerband.core import hub_id
from powerband.core.hub_id import HubId
from powerband.core.units import about_bytes
from powerband.errors import InputError
from powerband.runtime import hub_files

if TYPE_CHECKING:
    from huggingface_hub import HfApi

Report = Callable[[str], None]
OnBytes = Callable[[int, int], None]  # downloaded and total bytes
_LARGE_BYTES = 2**30

# Read when huggingface_hub is imported; without it, the library describes this machine in its requests.
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")


@dataclass(frozen=True)
class _File:
    """A file of a repository: its size, and the name of its content in the cache."""

    bytes: int
    blob: str


class _Stopped(Exception):
    """The caller gave up while files were being downloaded."""


async def fetch(source: str, *, report: Report = lambda _: None, progress: OnBytes = lambda *_: None) -> str:
    """Download a model as `local` does, in a thread that ends when this is cancelled."""
    stopping = threading.Event()
    try:
        return await asyncio.to_thread(local, source, report=report, progress=progress, stopping=stopping)
    finally:
        stopping.set()


def local(
    source: str,
    *,
    report: Report = lambda _: None,
    progress: OnBytes = lambda *_: None,
    stopping: threading.Event | None = None,
) -> str:
    """Download what is missing of a hub id and return the id with its commit; return a path unchanged.

    There is no request if the commit is known and all its files are in the cache.
    """
    asked = hub_id.parse(source)
    if asked is None or Path(source).expanduser().exists():
        return source
    wanted = asked.at(_commit(asked))
    files = _listing(wanted)
    ggufs = hub_files.first_shards(files)
    if wanted.file is None and len(ggufs) == 1 and not hub_files.loaded(files):
        wanted = wanted.model_copy(update={"file": ggufs[0]})
    names = hub_files.needed(files, wanted)
    folder = hub_files.repository(wanted)
    missing = [name for name in names if not (folder / "snapshots" / str(wanted.revision) / name).exists()]
    if missing and hub_files.offline():
        raise _not_cached(wanted, missing[0])
    if missing:
        absent_bytes = sum(files[name].bytes for name in missing if not (folder / "blobs" / files[name].blob).exists())
        total = about_bytes(sum(files[name].bytes for name in names))
        report(f"{wanted.short}: {total}, {about_bytes(absent_bytes)} to download to {_in_home(hub_files.cache())}")
        _check_disk(wanted, absent_bytes)
        _download(wanted, names, _amounts(wanted, absent_bytes, report, progress), stopping)
    return str(wanted)


def _amounts(wanted: HubId, total_bytes: int, report: Report, progress: OnBytes) -> Callable[[int], None]:
    """Return a callback that reports the downloaded bytes, and each tenth of a large download in a message."""
    most = tenths = 0

    def on_bytes(done: int) -> None:
        nonlocal most, tenths
        most = min(max(most, done), total_bytes)  # there are several counters, and one can be behind
        progress(most, total_bytes)
        if total_bytes >= _LARGE_BYTES and tenths < 10 * most // total_bytes < 10:
            tenths = 10 * most // total_bytes
            report(f"{wanted.short}: {10 * tenths} % of {about_bytes(total_bytes)}")

    return on_bytes


def _commit(wanted: HubId) -> str:
    """Return the commit of a revision: from the hub, or from the cache if the hub may not or cannot be asked."""
    with _translated(wanted):
        found = _api().resolve_revision(
            wanted.repo,
            revision=wanted.revision,
            cache_dir=hub_files.cache(),
            local_files_only=hub_files.offline(),
        )
    return found.resolved


def _listing(wanted: HubId) -> dict[str, _File]:
    """Return the files of a commit: from the list in the cache, from the hub, or else those in the snapshot."""
    from huggingface_hub import get_cached_repo_tree
    from huggingface_hub.errors import CachedRepoTreeNotFoundError
    from huggingface_hub.hf_api import RepoFile

    try:
        tree = get_cached_repo_tree(wanted.repo, revision=wanted.revision, cache_dir=hub_files.cache())
    except CachedRepoTreeNotFoundError:
        if hub_files.offline():
            return _listing_of_snapshot(wanted)
        try:
            with _translated(wanted):
                found = _api().list_repo_tree(wanted.repo, revision=wanted.revision, recursive=True)
                tree = [one for one in found if isinstance(one, RepoFile)]
        except _Unreachable:
            if hub_files.snapshot(wanted.model_copy(update={"file": None})) is None:
                raise
            return _listing_of_snapshot(wanted)
    return {one.path: _File(one.size, one.lfs.sha256 if one.lfs else one.blob_id) for one in tree}


def _listing_of_snapshot(wanted: HubId) -> dict[str, _File]:
    """Return the files in a snapshot that another program downloaded, and the shards that its index names."""
    folder = hub_files.snapshot(wanted.model_copy(update={"file": None}))
    if folder is None:
        raise _not_cached(wanted, "its snapshot")
    names = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names |= hub_files.indexed(index)
    return {name: _File(0, "") for name in names}


def _download(
    wanted: HubId, names: list[str], progress: Callable[[int], None], stopping: threading.Event | None
) -> None:
    from huggingface_hub import snapshot_download

    with _translated(wanted):
        snapshot_download(
            wanted.repo,
            revision=wanted.revision,
            endpoint=hub_files.endpoint(),
            cache_dir=hub_files.cache(),
            token=os.environ.get("HF_TOKEN") or None,  # None: the token that `hf auth login` saved
            allow_patterns=[_literal(name) for name in names],
            tqdm_class=_bar(progress, stopping or threading.Event()),
        )


def _literal(name: str) -> str:
    """Return the pattern that matches only this file name."""
    return "".join(f"[{letter}]" if letter in "[*?" else letter for letter in name)


def _bar(progress: Callable[[int], None], stopping: threading.Event) -> type[Any]:
    """Return a progress bar for huggingface_hub that draws nothing and reports bytes; it ends a stopped download."""
    from huggingface_hub.utils.tqdm import tqdm

    lock = threading.Lock()

    class Bar(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self._in_bytes = kwargs.get("unit") == "B"
            super().__init__(*args, **{**kwargs, "disable": True})  # type: ignore[no-untyped-call]

        def update(self, n: float | None = 1) -> None:
            if stopping.is_set():
                raise _Stopped
            if self._in_bytes:
                with lock:
                    self.n += n or 0
                    progress(int(self.n))

    return Bar


def _api() -> HfApi:
    from huggingface_hub import HfApi

    return HfApi(endpoint=hub_files.endpoint(), token=os.environ.get("HF_TOKEN") or None)


def _check_disk(wanted: HubId, absent_bytes: int) -> None:
    cache = hub_files.cache()
    existing = next(path for path in (cache, *cache.parents) if path.exists())
    free_bytes = shutil.disk_usage(existing).free
    if absent_bytes > free_bytes:
        raise InputError(
            f"{wanted.short} needs {about_bytes(absent_bytes)} in {cache}; {about_bytes(free_bytes)} is free",
            hint="free some space ('hf cache ls' lists models), or set HF_HOME to a directory on a larger disk",
        )


def _in_home(path: Path) -> str:
    return f"~/{path.relative_to(Path.home())}" if path.is_relative_to(Path.home()) else str(path)


class _Unreachable(InputError):
    """The hub did not answer, or answered with an error."""


def _not_cached(wanted: HubId, what: str) -> InputError:
    variable = hub_files.offline_variable()
    return InputError(
        f"{wanted.short} is not in the cache {hub_files.cache()} ({what} is missing), and {variable} is set",
        hint=f"unset {variable}, or run 'hf download {wanted.repo}' on a machine with the same HF_HOME",
    )


@contextlib.contextmanager
def _translated(wanted: HubId) -> Iterator[None]:
    """Raise the errors of huggingface_hub as ours."""
    from huggingface_hub import errors

    where, page = hub_files.endpoint(), f"{hub_files.endpoint()}/{wanted.repo}"
    given = "HF_TOKEN has no access to it" if os.environ.get("HF_TOKEN") else "HF_TOKEN is not set"
    try:
        yield
    except errors.GatedRepoError:
        raise InputError(
            f"{wanted.short} is gated, and {given}",
            hint=f"accept its terms at {page}, and set HF_TOKEN to a token of that account",
        ) from None
    except errors.RepositoryNotFoundError:
        raise InputError(
            f"the hub at {where} has no model {wanted.repo}, or it is private and {given}",
            hint="check the spelling; for a private model set HF_TOKEN",
        ) from None
    except errors.RevisionNotFoundError:
        raise InputError(
            f"{wanted.repo} has no revision {wanted.revision}", hint=f"see its branches and commits at {page}/tree/main"
        ) from None
    except errors.HfHubHTTPError as error:
        raise _answered(wanted, error.response.status_code, given) from None
    except (errors.HTTPError, errors.LocalEntryNotFoundError, errors.RevisionResolutionError) as error:  # type: ignore[attr-defined]
        if hub_files.offline():
            raise _not_cached(wanted, "its commit") from None
        if isinstance(error.__cause__, errors.HfHubHTTPError):
            raise _answered(wanted, error.__cause__.response.status_code, given) from None
        raise _unreachable(where, error) from None
    except (OSError, RuntimeError) as error:  # hf_xet, which transfers large files, raises RuntimeError
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            raise InputError(
                f"no disk space left in {hub_files.cache()}", hint="free some space and run it again"
            ) from None
        raise InputError(
            f"the download of {wanted.short} to {hub_files.cache()} failed: {_first_line(error)}",
            hint="check the network, the free space and the permissions of the cache, and run it again: "
            "complete files are kept",
        ) from None


def _answered(wanted: HubId, status: int, given: str) -> InputError:
    """Return the error of an HTTP status, without the library's text: it can contain a signed address."""
    if status in (401, 403):
        return InputError(
            f"the hub refuses {wanted.short} (HTTP {status}), and {given}",
            hint="set HF_TOKEN to a valid token with read access",
        )
    return _Unreachable(
        f"the hub at {hub_files.endpoint()} answered HTTP {status} for {wanted.short}",
        hint="run it again later: complete files are kept",
    )


def _unreachable(where: str, error: Exception) -> _Unreachable:
    return _Unreachable(
        f"the hub at {where} cannot be reached ({_first_line(error.__cause__ or error)})",
        hint="check the network and HF_ENDPOINT, and run it again: complete files are kept; or give a local directory",
    )


def _first_line(error: BaseException) -> str:
    """Return the first line of an error, else its class; without the query of an address, which can be a signature."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return re.sub(r"(https?://[^\s?]+)\?[^\s)]*", r"\1", lines[0])
