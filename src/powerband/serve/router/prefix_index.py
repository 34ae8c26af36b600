"""An index of prompt prefixes: which replica has processed which prefix. It stores hashes only, and is bounded."""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from typing import Generic, TypeVar

Replica = TypeVar("Replica", bound=Hashable)


class PrefixIndex(Generic[Replica]):
    """An LRU map from block hashes to the replicas that processed them; it may know replicas that are gone."""

    def __init__(self, max_blocks: int = 100_000) -> None:
        self.max_blocks = max_blocks
        self._holders: OrderedDict[int, dict[Replica, None]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._holders)

    def holders(self, blocks: Sequence[int]) -> list[Mapping[Replica, None]]:
        """Return for each leading block the replicas that have processed it, up to a block that none has."""
        found: list[Mapping[Replica, None]] = []
        for block in blocks:
            if not (holders := self._holders.get(block)):
                break
            found.append(holders)
        return found

    def learn(self, blocks: Sequence[int], replica: Replica) -> None:
        """Record that a replica processes these blocks."""
        for block in blocks:
            self._holders.setdefault(block, {})[replica] = None
            self._holders.move_to_end(block)
        while len(self._holders) > self.max_blocks:
            self._holders.popitem(last=False)


def matched(holders: Sequence[Mapping[Replica, None]], replica: Replica) -> int:
    """Return the number of leading blocks that a replica has processed: one that has a block has those before it."""
    return bisect_left(holders, True, key=lambda one: replica not in one)
