"""Durations and sizes with units: parsing, and exact round trips."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from powerband.core import units


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("250ms", 0.25), ("1.5s", 1.5), ("10min", 600.0), ("2h", 7200.0), ("100us", 0.0001), ("1e-3s", 0.001)],
)
def test_durations_are_parsed(text: str, seconds: float) -> None:
    assert units.parse_seconds(text) == seconds


@pytest.mark.parametrize(
    ("text", "size"), [("80GiB", 80 * 2**30), ("1kB", 1000), ("0.5MiB", 2**19), ("3TB", 3 * 10**12), ("7B", 7)]
)
def test_sizes_are_parsed(text: str, size: int) -> None:
    assert units.parse_bytes(text) == size


@pytest.mark.parametrize("text", ["250", "fast", "3parsec", "-1s", "1 2ms", "1gib"])
def test_a_text_without_a_known_unit_is_rejected(text: str) -> None:
    with pytest.raises(ValueError, match="unit"):
        units.parse_seconds(text)


def test_a_fraction_of_a_byte_is_rejected() -> None:
    with pytest.raises(ValueError, match="whole number"):
        units.parse_bytes("0.3B")


@given(st.floats(min_value=0, max_value=1e9, allow_nan=False))
def test_durations_round_trip_exactly(value: float) -> None:
    assert units.parse_seconds(units.format_seconds(value)) == value


@given(st.integers(min_value=0, max_value=2**60))
def test_sizes_round_trip_exactly(value: int) -> None:
    assert units.parse_bytes(units.format_bytes(value)) == value
