"""Prefix hashes: a prompt's text in fixed-size blocks, each hashed together with all text before it."""

from __future__ import annotations

BLOCK_CHARS = 256  # for routing: reusing a shorter shared prefix saves too little
FINE_BLOCK_CHARS = 64  # for captured traffic, which needs the length of shared prefixes more exactly
CHARS_PER_TOKEN = 4.0  # estimate for text that has not been tokenized
_MAX_PROMPT_CHARS = 16_384  # text beyond this is not hashed


def message_text(role: str, content: str) -> str:
    """Return a chat message as the text to hash."""
    return f"{role}\n{content}\n"


def block_hashes(text: str, size: int = BLOCK_CHARS) -> list[int]:
    """Return one hash per whole block of `size` characters; it covers the text up to the end of the block."""
    hashes, last = [], 0
    for start in range(0, min(len(text), _MAX_PROMPT_CHARS) - size + 1, size):
        last = hash((last, text[start : start + size]))
        hashes.append(last)
    return hashes
