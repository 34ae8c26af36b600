"""What the documentation of an engine says about weights and KV caches on each device family."""

from __future__ import annotations

import itertools
import re
from typing import Annotated, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from powerband.core.document import Document, Value
from powerband.core.family import Family

Level = Literal["native", "weight-only", "emulated", "slow", "no"]
_UNEQUAL = "unequal"  # names every pair of a K and a V format that is not listed
_Text = Annotated[str, BeforeValidator(str)]  # YAML reads 2026-08-20 as a date, and 0.32 as a number


class Source(Value):
    """Where a fact was read, and when."""

    url: str
    as_of: _Text


class Statement(Value):
    """What is documented of some schemes or KV formats on some device families."""

    names: tuple[str, ...] = Field(min_length=1)
    families: tuple[Family, ...] = Field(min_length=1)
    level: Level = Field(
        description="native; weight-only: saves memory, computes in 16 bits; emulated: computes in 16 bits, slower; "
        "slow: falls back to the CPU; no: refused, or wrong answers"
    )
    source: str = Field(description="a key of `sources`")
    note: str = ""
    experts: bool | None = Field(default=None, description="true: mixtures of experts only; false: all others")
    since: _Text = Field(default="", description="first version of the engine")
    before: _Text = Field(default="", description="first version for which it no longer holds")

    def holds_for(self, version: str, *, experts: bool) -> bool:
        """Return whether it holds for a version of the engine, the newest if the text is empty, and a kind of model."""
        if self.experts not in (None, experts):
            return False
        if not version:
            return not self.before
        number = _number(version)
        return _number(self.since) <= number and (not self.before or number < _number(self.before))

    def overlaps(self, other: Statement) -> bool:
        """Return whether both say something about the same cell and version."""
        start = max(_number(self.since), _number(other.since))
        ends = [_number(one.before) for one in (self, other) if one.before]
        same_cell = set(self.names) & set(other.names) and set(self.families) & set(other.families)
        same_kind = self.experts is None or other.experts is None or self.experts == other.experts
        return bool(same_cell) and same_kind and all(start < end for end in ends)


class Fact(Value):
    """What is documented of one scheme or KV format on one device family."""

    level: Level
    source: Source
    note: str = ""

    @property
    def usable(self) -> bool:
        """Return whether it is worth an offer."""
        return self.level not in ("slow", "no")


class Support(Document):
    """What an engine supports, by its documentation."""

    kind: ClassVar[str] = "support"

    engine: str
    sources: dict[str, Source]
    weights: tuple[Statement, ...]
    kv_cache: tuple[Statement, ...] = Field(description="KV formats; of llama.cpp equal pairs by one name, or K/V")

    @model_validator(mode="after")
    def _check(self) -> Self:
        for one in (*self.weights, *self.kv_cache):
            if one.source not in self.sources:
                raise ValueError(f"the source '{one.source}' of {', '.join(one.names)} is not in 'sources'")
        for statements in (self.weights, self.kv_cache):
            for one, other in itertools.combinations(statements, 2):
                if one.overlaps(other):
                    both = set(one.names) & set(other.names), set(one.families) & set(other.families)
                    raise ValueError(f"two statements about {sorted(both[0])} on {sorted(both[1])}")
        return self

    def of_weights(
        self, scheme: str, family: Family | None, version: str = "", *, experts: bool = False
    ) -> Fact | None:
        """Return what is documented of a scheme, for a mixture of experts or another model; None: nothing."""
        return self._find(self.weights, scheme, family, version, experts)

    def of_kv(self, kv_format: str, family: Family | None, version: str = "") -> Fact | None:
        """Return what is documented of a KV format; None: nothing."""
        listed = any(kv_format in one.names for one in self.kv_cache)
        name = _UNEQUAL if "/" in kv_format and not listed else kv_format
        return self._find(self.kv_cache, name, family, version, experts=False)

    def _find(
        self, statements: tuple[Statement, ...], name: str, family: Family | None, version: str, experts: bool
    ) -> Fact | None:
        for one in statements:
            if name in one.names and family in one.families and one.holds_for(version, experts=experts):
                return Fact(level=one.level, source=self.sources[one.source], note=one.note)
        return None


def _number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])
