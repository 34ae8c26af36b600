"""What every engine adapter must offer; all of it pure."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Generic, TypeVar

from packaging.version import InvalidVersion, Version

from powerband.core.deployment import Deployment, EngineConfig
from powerband.core.engine import (
    Command,
    EngineSettings,
    Failure,
    Footprint,
    Gauges,
    Installation,
    InstallPlan,
    Problem,
    Scheduling,
    Space,
)
from powerband.core.host import Host
from powerband.core.model import Format, Model
from powerband.core.scoring import Answer, Exchange, TokenDistribution
from powerband.engines import knobs, rules
from powerband.errors import InputError, did_you_mean

C = TypeVar("C", bound=EngineConfig)
Messages = Sequence[Mapping[str, str]]  # role and content


class Engine(ABC, Generic[C]):
    """All that Powerband knows of one inference server. Every method is pure.

    What an engine's data file says (failures, phases, metric names) is read here for all of them.
    """

    name: ClassVar[str]
    formats: ClassVar[frozenset[Format]] = frozenset({"safetensors", "gguf"})
    programs: ClassVar[tuple[str, ...]] = ()  # what it is called on PATH
    default_version: ClassVar[str | None] = None  # what `engine install` installs; None: nothing to install
    attaches: ClassVar[bool] = False  # True: it is running already, elsewhere
    builtin: ClassVar[tuple[str, ...] | None] = None  # the program, where it comes with Powerband
    reads_weights: ClassVar[bool] = True
    help_args: ClassVar[tuple[str, ...]] = ("--help",)
    help_is_quick: ClassVar[bool] = True  # False: it takes seconds, so only an installation of ours is asked
    keeps_connections: ClassVar[bool] = True  # False: it does badly with a connection that is used again
    tells_prompts: ClassVar[bool] = False  # True: its OpenAI endpoint tells how likely a given text is
    counts_at_end: ClassVar[bool] = False  # True: a token enters its counter when its answer ends
    gauge_pages: ClassVar[tuple[str, ...]] = ("/metrics",)
    scheduling: ClassVar[Scheduling | None] = None  # None: nothing that a planner could choose
    config_type: type[C]

    @abstractmethod
    def command(self, deployment: Deployment[C], *, installation: Installation, port: int) -> Command:
        """Return what to run."""

    @abstractmethod
    def footprint(self, deployment: Deployment[C], *, model: Model, host: Host) -> Footprint:
        """Return the bytes that the deployment needs."""

    def knobs_for(self, choice: EngineSettings) -> dict[str, Any]:
        """Return the knobs that make a choice real."""
        raise NotImplementedError(self.name)

    def choice_of(self, deployment: Deployment[C], *, model: Model, host: Host) -> EngineSettings:
        """Return the choice that a deployment's knobs, and the engine's own defaults, amount to."""
        raise NotImplementedError(self.name)

    def at_once(self, deployment: Deployment[C], *, model: Model, host: Host) -> int:
        """Return how many requests it answers at once; more wait in its own queue."""
        return self.choice_of(deployment, model=model, host=host).sequences

    def space(self, *, model: Model, host: Host, context: int) -> Space:
        """Return the levers worth searching on a machine, for sequences of up to so many tokens."""
        raise NotImplementedError(self.name)

    def drafts_by_batch(self, schedule: Sequence[tuple[int, int, int]]) -> dict[str, Any] | None:
        """Return the knobs for so many drafts from so many to so many sequences at once; None: it has no such table."""
        return None

    def tokenize(self, model: str, text: str) -> Exchange[list[int]]:
        """Ask for the tokens of a text."""
        raise NotImplementedError(self.name)

    def render(self, model: str, chat: Messages) -> Exchange[list[int]]:
        """Ask for the tokens of a chat, as the server's own template makes them, ready to be answered."""
        raise NotImplementedError(self.name)

    def score(
        self, model: str, tokens: Sequence[int], places: Sequence[int], *, top: int
    ) -> Exchange[list[TokenDistribution]]:
        """Ask what the server expects at some places of a text, given all tokens before each."""
        raise NotImplementedError(self.name)

    def answer(self, model: str, tokens: Sequence[int], *, most: int, top: int) -> Exchange[Answer]:
        """Ask for a greedy answer, and what else was likely at each of its places."""
        raise NotImplementedError(self.name)

    def install_plan(self, version: str, host: Host) -> InstallPlan:
        """Return the commands that make a working engine of that version for this host."""
        raise InputError(
            f"there is nothing to install for '{self.name}'",
            hint="run 'powerband engine install vllm' or 'powerband engine install llamacpp'",
        )

    def program(self, path: str) -> tuple[str, ...]:
        """Return the argv that starts the server, given what was found on PATH or given by the user."""
        return (path,)

    def version_commands(self, path: str) -> tuple[tuple[str, ...], ...]:
        """Return the commands that tell the version, the quickest first."""
        return ((path, "--version"),)

    def read_version(self, output: str) -> str | None:
        """Find the version in what one of them printed."""
        match = re.search(r"(?:version:?\s*)?v?(\d[\w.+-]*)", output)
        return match[1] if match else None

    def files(self, deployment: Deployment[C]) -> dict[str, str]:
        """Return the local files that the config names, by knob."""
        return {}

    def check(
        self, deployment: Deployment[C], *, model: Model, host: Host, installation: Installation
    ) -> list[Problem]:
        """Refuse early, with a hint, what is known not to work."""
        return common_problems(self, deployment, model=model, host=host, installation=installation)

    def derived(self, deployment: Deployment[C], *, model: Model) -> dict[str, Any]:
        """Return what the engine's rules speak of beside knobs and facts."""
        return {}

    def base_url(self, deployment: Deployment[C], *, port: int) -> str:
        """Return the address that clients use, without a trailing slash or /v1."""
        return f"http://{deployment.placement.host}:{port}"

    def phases(self) -> tuple[rules.Phase, ...]:
        """Return the log lines that end each phase of a start, in order."""
        return rules.facts(self.name).phases

    def diagnose(self, log: str, *, ready: bool = False) -> Failure | None:
        """Turn a dying engine's log into a typed failure; of a ready one, what it gave up without a word."""
        table = rules.facts(self.name).failures
        return rules.diagnose([signature for signature in table if signature.silent or not ready], log)

    def readings(self, log: str) -> dict[str, float]:
        """Return what the log says in numbers, under our names."""
        found = {}
        for name, pattern in rules.facts(self.name).readings.items():
            if match := re.search(pattern, log):
                found[name] = float(match[1].replace(",", ""))
        return found

    def gauges(self, pages: Mapping[str, str]) -> Gauges:
        """Turn the engine's own pages into our names."""
        return rules.gauges(rules.facts(self.name).gauges, pages.get("/metrics", ""))


def names_for_rules(engine: Engine[Any], deployment: Deployment[Any], *, model: Model, host: Host) -> dict[str, Any]:
    """Return what a rule may speak of: every knob, the model's facts and the host's."""
    return {
        **{field: getattr(deployment.config, field) for field in type(deployment.config).model_fields},
        **{f"model_{field}": getattr(model, field) for field in type(model).model_fields},
        "gpus": len(host.gpus),
        "cores": len(host.cores),
        "last_core": host.cores[-1],
        "compiler": host.compiler,
        **engine.derived(deployment, model=model),
    }


def common_problems(
    engine: Engine[Any],
    deployment: Deployment[Any],
    *,
    model: Model,
    host: Host,
    installation: Installation,
) -> list[Problem]:
    """Return what is wrong for any engine: the weights' format, the engine's age, flags it does not know, its rules."""
    found = []
    if model.format and model.format not in engine.formats:
        found.append(
            Problem(
                rule="wrong-format",
                sentence=f"{engine.name} cannot load {model.format} weights ({deployment.variant.source})",
                hint=f"give it {' or '.join(sorted(engine.formats))}, or use another --engine",
            )
        )
    table = rules.facts(engine.name)
    if table.minimum_version and _older(installation.version, table.minimum_version):
        found.append(
            Problem(
                rule="engine-too-old",
                sentence=f"{engine.name} {installation.version} is older than {table.minimum_version}, "
                "the oldest that Powerband speaks to",
                hint=f"run 'powerband engine install {engine.name}'",
            )
        )
    if installation.flags is not None:
        found += _unknown_flags(deployment, installation.flags, installation)
    names = names_for_rules(engine, deployment, model=model, host=host)
    return found + rules.problems(table.conflicts, names)


def _unknown_flags(deployment: Deployment[Any], known: frozenset[str], installation: Installation) -> list[Problem]:
    problems = []
    own = knobs.flags(type(deployment.config))
    for argument in knobs.arguments(deployment.config):
        flag = argument.partition("=")[0]
        if not flag.startswith("--") or flag in known:
            continue
        if flag in own:
            sentence = f"{installation.engine} {installation.version} does not know {flag}: it is too old or too new"
            hint = f"leave that knob away, or run 'powerband engine install {installation.engine}'"
        else:
            sentence = f"unknown flag {flag} in extra_args.{did_you_mean(flag, known)}"
            hint = f"see '{' '.join(installation.program)} --help'"
        problems.append(Problem(rule="unknown-flag", sentence=sentence, hint=hint))
    return problems


def _older(version: str, minimum: str) -> bool:
    try:
        return Version(version) < Version(minimum)
    except InvalidVersion:
        return False
