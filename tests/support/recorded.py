"""Public cases as fixtures of `diagnose`: two readings of a metrics page, a log, a command line, machine facts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from powerband.core.diagnosis import Diagnosis
from powerband.diagnose import DiagnoseSpec, conclude
from powerband.diagnose.collect import Reading, Readings, Target, add_log, command_words
from powerband.engines import live

FOLDER = Path(__file__).parent.parent / "fixtures" / "diagnose"


@dataclass(frozen=True)
class Case:
    """One public case."""

    name: str
    data: dict[str, Any]

    @property
    def expected(self) -> tuple[str, ...]:
        """Return the rules that name the confirmed cause; none: nothing may be found."""
        return tuple(self.data["expect"])

    def diagnosis(self) -> Diagnosis:
        """Diagnose the recorded facts as if they had been read now."""
        data, engine = self.data, self.data["engine"]
        argv, environment = command_words(data["command"])
        parsed = live.read_command(engine, argv, environment)
        found = Readings(url=f"recorded:{self.name}", engine=engine, argv=argv, model=parsed.model)
        found.settings |= parsed.settings
        found.facts["version"] = data["version"]
        add_log(found, data["log"])
        found.machine = data.get("machine", {})
        for one in data["metrics"]:
            found.readings.append(Reading(float(one["at_s"]), live.read_page(engine, one["page"])))
        return conclude(found, DiagnoseSpec(Target(found.url)))


def cases() -> list[Case]:
    """Return all cases, by name."""
    return [Case(path.stem, yaml.safe_load(path.read_text())) for path in sorted(FOLDER.glob("*.yaml"))]
