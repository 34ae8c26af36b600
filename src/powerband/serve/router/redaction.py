"""Redact URLs, email and IP addresses, keys and long numbers in a text. Names of people are not redacted."""

from __future__ import annotations

import re

_PATTERNS = {
    "[url]": r"\b(?:https?|ftp)://\S+",
    "[email]": r"[\w.+-]+@[\w-]+(?:\.[\w-]+)+",
    "[key]": r"\b(?=[\w-]*\d)(?=[\w-]*[A-Za-z])[\w-]{20,}",
    "[ip]": r"\b\d{1,3}(?:\.\d{1,3}){3}\b|\b(?:[0-9a-fA-F]{1,4}:){3,7}[0-9a-fA-F]{1,4}\b",
    "[number]": r"\+?\d(?:[ ().-]{0,2}\d){6,}",
}
_ANY = re.compile("|".join(f"({pattern})" for pattern in _PATTERNS.values()))


def redacted(text: str) -> str:
    """Return the text with each match replaced by its placeholder."""
    placeholders = list(_PATTERNS)
    return _ANY.sub(lambda found: placeholders[(found.lastindex or 1) - 1], text)
