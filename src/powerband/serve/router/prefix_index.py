"""Which replica has read which beginning of a prompt: hashes of text, never the text, and a bounded number of them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence


class PrefixIndex:
    """What each replica holds, as far as it was told; the oldest is forgotten first."""

    def __init__(self, most: int = 100_000) -> None:
        self.most = most
        self._holders: OrderedDict[int, dict[str, None]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._holders)

    def matched(self, blocks: Sequence[int]) -> Mapping[str, int]:
        """Return for each replica how many of the first blocks it has read."""
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
        """Note that a replica reads these."""
        for block in blocks:
            self._holders.setdefault(block, {})[replica] = None
            self._holders.move_to_end(block)
        while len(self._holders) > self.most:
            self._holders.popitem(last=False)

    def forget(self, replica: str) -> None:
        """A replica is gone, and its cache with it."""
        for block in [block for block, holders in self._holders.items() if holders.pop(replica, 0) is None]:
            if not self._holders[block]:
                del self._holders[block]
