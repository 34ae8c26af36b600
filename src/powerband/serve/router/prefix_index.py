"""An index of prompt prefixes: which replica has processed which prefix. It stores hashes only, and is bounded."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence


class PrefixIndex:
    """An LRU map from block hashes to the replicas that processed them."""

    def __init__(self, max_blocks: int = 100_000) -> None:
        self.max_blocks = max_blocks
        self._holders: OrderedDict[int, dict[str, None]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._holders)

    def matched(self, blocks: Sequence[int]) -> Mapping[str, int]:
        """Return for each replica the number of leading blocks that it has processed."""
        found: dict[str, int] = {}
        for depth, block in enumerate(blocks, 1):
            holders = self._holders.get(block)
            if not holders:
                break
            for name in holders:
                if found.get(name, 0) == depth - 1:
                    found[name] = depth
        return found

    def learn(self, blocks: Sequence[int], replica: str) -> None:
        """Record that a replica processes these blocks."""
        for block in blocks:
            self._holders.setdefault(block, {})[replica] = None
            self._holders.move_to_end(block)
        while len(self._holders) > self.max_blocks:
            self._holders.popitem(last=False)

    def forget(self, replica: str) -> None:
        """Remove a replica from all blocks: its cache is gone."""
        for block in [block for block, holders in self._holders.items() if holders.pop(replica, 0) is None]:
            if not self._holders[block]:
                del self._holders[block]
