"""The check of the exports: every target writes files for the deployment that was started."""

from __future__ import annotations

import yaml

import powerband
from powerband import export
from powerband.core.recipe import Recipe
from powerband.errors import PowerbandError
from powerband.launchers import local
from powerband.selftest.check import Check, Outcome, failed, not_run, passed
from powerband.selftest.engine_run import EngineRun

_PORT = 8000


async def _exports(run: EngineRun) -> Outcome:
    if run.prepared is None:
        return not_run("no engine start")
    recipe, details = _recipe(run), []
    verdicts: dict[str, str] = {}
    for target in export.TARGETS:
        try:
            for name, text in export.export(recipe, target).items():
                _check_file(name, text)
            verdicts[target] = "written"
        except PowerbandError:  # the target does not support this engine or version
            verdicts[target] = "not-possible"
        except (yaml.YAMLError, ValueError) as error:
            verdicts[target] = "failed"
            details.append(f"{target}: {error}")
    written = list(verdicts.values()).count("written")
    figures: dict[str, float | str] = {"written": written, "targets": len(verdicts), **verdicts}
    return failed("target fails", figures, detail="; ".join(details)) if details else passed(figures)


def _check_file(name: str, text: str) -> None:
    """Raise if a file is empty or not what its name says."""
    if not text.strip():
        raise ValueError(f"{name} is empty")
    if name.endswith((".yaml", ".yml", ".json")):
        list(yaml.safe_load_all(text))


def _recipe(run: EngineRun) -> Recipe:
    """Return a recipe of the started deployment, with a rate that promises nothing."""
    assert run.prepared is not None
    command = run.prepared.command(_PORT)
    fixed = {"shape": "fixed", "tokens": 8}
    return Recipe.model_validate(
        {
            "name": "selftest",
            "summary": "a self-test",
            "model": run.model.source,
            "model_digest": "unknown",
            "scheme": "unknown",
            "weights_digest": "unknown",
            "engine_version": run.installation.version,
            "deployment": run.prepared.deployment.to_data(),
            "settings": {"engine": run.engine},
            "promise": {
                "slo": {"ttft": {"p95": 1.0}},
                "rate_per_s": 1.0,
                "attainment": {"value": 1.0, "low": 0.9, "high": 1.0},
                "memory_bytes": run.prepared.footprint.start_bytes(),
            },
            "workload": {"arrivals": {"process": "poisson", "rate_per_s": 1}, "prompt": fixed, "output": fixed},
            "validity": {},
            "gpus": run.prepared.footprint.devices,
            "usd_per_h": 1.0,
            "usd_per_1m_tokens": 1.0,
            "command": local.shell_line(command) if command else "",
            "provenance": {"powerband": powerband.__version__},
        }
    )


CHECK = Check("export", "every export target that supports the engine writes its files", _exports)
