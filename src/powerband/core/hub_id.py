"""A hub id: `owner/name`, optionally with a revision and a GGUF file, as in `owner/name@main:model-q4_k_m.gguf`."""

from __future__ import annotations

import re

from powerband.core.document import Value

_PART = r"[A-Za-z0-9](?:[A-Za-z0-9_.-]*[A-Za-z0-9_])?"
_HUB_ID = re.compile(rf"({_PART}/{_PART})(?:@([\w./-]+))?(?::([\w./ -]+\.gguf))?")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_OTHER_SUFFIXES = (".gguf", ".safetensors", ".git")  # of files and folders, and not of a repository
_MAX_LETTERS = 96


class HubId(Value):
    """A repository of the hub, the revision of it, and the GGUF file of a repository that has several."""

    repo: str
    revision: str | None = None
    file: str | None = None

    def __str__(self) -> str:
        """Return the id as it is written on the command line."""
        return self.repo + (f"@{self.revision}" if self.revision else "") + (f":{self.file}" if self.file else "")

    @property
    def pinned(self) -> bool:
        """Return whether the revision is a commit, which never changes, and not a branch or a tag."""
        return bool(self.revision and _COMMIT.fullmatch(self.revision))

    @property
    def short(self) -> str:
        """Return the id for messages: a commit has seven digits."""
        return str(self.at(self.revision[:7]) if self.revision and self.pinned else self)

    def at(self, revision: str | None) -> HubId:
        """Return the id with another revision."""
        return self.model_copy(update={"revision": revision})


def parse(source: str) -> HubId | None:
    """Return the hub id that a model source is; None for a path."""
    found = _HUB_ID.fullmatch(source)
    if found is None:
        return None
    repo = found[1]
    if repo.endswith(_OTHER_SUFFIXES) or "--" in repo or ".." in repo or len(repo) > _MAX_LETTERS:
        return None  # the hub has no such name
    return HubId(repo=repo, revision=found[2], file=found[3])


def model_name(source: str) -> str:
    """Return the name of the model at a path or hub id: its last component, without revision and `.gguf`."""
    found = parse(source)
    path = source.rstrip("/") if found is None else found.file or found.repo
    return path.rpartition("/")[2].removesuffix(".gguf")
