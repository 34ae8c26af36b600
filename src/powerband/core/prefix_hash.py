"""How a prompt is compared with others: as text, cut into blocks, each hashed with all that stands before it."""

from __future__ import annotations

BLOCK = 256  # characters; shorter beginnings are not worth remembering
FINE = 64  # where traffic is noted, so that little of a shared beginning is lost
CHARACTERS_PER_TOKEN = 4.0  # where nobody has counted
_DEEPEST = 16_384  # characters of one prompt


def said(role: str, content: str) -> str:
    """Return one message of a chat as text."""
    return f"{role}\n{content}\n"


def block_hashes(text: str, size: int = BLOCK) -> list[int]:
    """Return a hash for each whole block, each of all the text up to its end."""
    found, last = [], 0
    for start in range(0, min(len(text), _DEEPEST) - size + 1, size):
        last = hash((last, text[start : start + size]))
        found.append(last)
    return found
