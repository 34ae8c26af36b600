"""The interface of an engine adapter. Every method is a pure function."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Generic, TypeVar

from packaging.version import InvalidVersion, Version

from powerband.core.deployment import Deployment, EngineConfig
from powerband.core.engine import (
    Archive,
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
    """Adapter of one inference server: its command line, memory use, levers, metrics and failures.

    Methods read no files and start no processes. The engine's rules, log patterns and metric names come from
    `data/<engine>.yaml`.
    """

    name: ClassVar[str]
    formats: ClassVar[frozenset[Format]] = frozenset({"safetensors", "gguf"})
    programs: ClassVar[tuple[str, ...]] = ()  # program names to look for on PATH
    default_version: ClassVar[str | None] = None  # installed by `engine install`; None: not installable
    recorded: ClassVar[str | None] = None  # the version whose sources the adapter is written from, if nobody has run it
    attaches: ClassVar[bool] = False  # True: connects to a running server and starts nothing
    typical_start_s: ClassVar[float] = 3.0  # until it is ready, if no earlier start on the machine is known
    builtin: ClassVar[tuple[str, ...] | None] = None  # the argv of an engine that ships with Powerband
    reads_weights: ClassVar[bool] = True
    help_args: ClassVar[tuple[str, ...]] = ("--help",)
    help_is_quick: ClassVar[bool] = True  # False: takes seconds, so only managed installations run it
    keep_alive: ClassVar[bool] = True  # False: clients open a new connection for each request
    echoes_prompt_logprobs: ClassVar[bool] = False  # True: /v1/completions can return logprobs of the prompt
    counts_at_end: ClassVar[bool] = False  # True: output tokens are counted when the answer ends
    gauge_pages: ClassVar[tuple[str, ...]] = ("/metrics",)
    scheduling: ClassVar[Scheduling | None] = None  # None: the planner cannot model it
    config_type: type[C]

    @abstractmethod
    def command(self, deployment: Deployment[C], *, installation: Installation, port: int) -> Command:
        """Return the command that starts the server."""

    @abstractmethod
    def footprint(self, deployment: Deployment[C], *, model: Model, host: Host) -> Footprint:
        """Estimate the memory of a deployment."""

    def pinned(self, config: C, *, threads: Sequence[int], cores: int) -> dict[str, Any]:
        """Return the knobs that make an engine without a GPU compute on these hardware threads of some cores."""
        return {}

    def knobs_for(self, settings: EngineSettings) -> dict[str, Any]:
        """Return the knobs of this engine for engine-independent settings."""
        raise NotImplementedError(self.name)

    def default_batch(self, host: Host) -> tuple[int, int]:
        """Return the engine's defaults for sequences and tokens of a step on a host; zeros: the same as planned."""
        return 0, 0

    def settings_of(self, deployment: Deployment[C], *, model: Model, host: Host) -> EngineSettings:
        """Return the engine-independent settings of a deployment; unset knobs have the engine's defaults."""
        raise NotImplementedError(self.name)

    def max_concurrency(self, deployment: Deployment[C], *, model: Model, host: Host) -> int:
        """Return how many requests the engine runs concurrently; more wait in its queue."""
        return self.settings_of(deployment, model=model, host=host).sequences

    def space(self, *, model: Model, host: Host, context: int) -> Space:
        """Return the levers to search on a host, for sequences of up to `context` tokens."""
        raise NotImplementedError(self.name)

    def drafts_by_batch(self, schedule: Sequence[tuple[int, int, int]]) -> dict[str, Any] | None:
        """Return the knobs for rows (min batch, max batch, draft tokens); None: the engine has no such table."""
        return None

    def tokenize(self, model: str, text: str) -> Exchange[list[int]]:
        """Request the token ids of a text."""
        raise NotImplementedError(self.name)

    def render(self, model: str, chat: Messages) -> Exchange[list[int]]:
        """Request the token ids of a chat, rendered with the server's chat template and a generation prompt."""
        raise NotImplementedError(self.name)

    def score(
        self, model: str, tokens: Sequence[int], positions: Sequence[int], *, top: int
    ) -> Exchange[list[TokenDistribution]]:
        """Request the next-token distribution at each position, given the tokens before it."""
        raise NotImplementedError(self.name)

    def answer(self, model: str, tokens: Sequence[int], *, max_tokens: int, top: int) -> Exchange[Answer]:
        """Request a greedy completion, with the `top` most likely tokens at each position."""
        raise NotImplementedError(self.name)

    def install_plan(self, version: str, host: Host) -> InstallPlan:
        """Return the commands that install a version of the engine on a host."""
        raise InputError(
            f"engine '{self.name}' cannot be installed: it has no program",
            hint="run 'powerband engine install vllm' or 'powerband engine install llamacpp'",
        )

    def never_run(self) -> str:
        """Return what a user must know of an adapter that nobody has run; empty for all others."""
        if self.recorded is None:
            return ""
        return f"the adapter of {self.name} is written from the sources of {self.recorded}; it was never run on a GPU"

    def install_hint(self, version: str | None = None) -> str:
        """Return how a user gets the engine, as the end of a sentence."""
        if self.default_version is None:
            where = f"give its program with --engine-path or POWERBAND_{self.name.upper()}"
            return f"install {self.name} by its own guide, or {where}"
        return f"run 'powerband engine install {self.name}" + (f" --version {version}'" if version else "'")

    def prebuilt_plan(self, host: Host, archive: Archive | None = None) -> InstallPlan | None:
        """Return the commands that install an archive, or the published one for a host; None: there is none."""
        return None

    def program(self, path: str) -> tuple[str, ...]:
        """Return the argv that starts the server, for a program found on PATH or given by the user."""
        return (path,)

    def version_commands(self, path: str) -> tuple[tuple[str, ...], ...]:
        """Return the commands that print the version, fastest first."""
        return ((path, "--version"),)

    def read_version(self, output: str) -> str | None:
        """Return the version in the output of a version command."""
        number = r"v?(\d[\w.+-]*)"  # a program may print other numbers before its version
        match = re.search(rf"version:?\s*{number}", output, re.IGNORECASE) or re.search(number, output)
        return match[1] if match else None

    def files(self, deployment: Deployment[C]) -> dict[str, str]:
        """Return the local files that the config refers to, by knob."""
        return {}

    def check(
        self, deployment: Deployment[C], *, model: Model, host: Host, installation: Installation
    ) -> list[Problem]:
        """Return the known problems of a deployment, before it is started."""
        return common_problems(self, deployment, model=model, host=host, installation=installation)

    def derived(self, deployment: Deployment[C], *, model: Model) -> dict[str, Any]:
        """Return further names for the engine's rules, beside knobs, model and host."""
        return {}

    def base_url(self, deployment: Deployment[C], *, port: int) -> str:
        """Return the address that clients use, without a trailing slash or /v1."""
        return f"http://{deployment.placement.host}:{port}"

    def phases(self) -> tuple[rules.Phase, ...]:
        """Return the phases of a start, in order, with the log pattern that ends each."""
        return rules.facts(self.name).phases

    def diagnose(self, log: str, *, ready: bool = False) -> Failure | None:
        """Return the failure that a log shows; for a ready engine, only settings that it silently ignored."""
        table = rules.facts(self.name).failures
        return rules.diagnose([signature for signature in table if signature.silent or not ready], log)

    def readings(self, log: str) -> dict[str, float]:
        """Return the numbers in the log, such as the KV cache size, by Powerband's names."""
        found = {}
        for name, pattern in rules.facts(self.name).readings.items():
            if match := re.search(pattern, log):
                found[name] = float(match[1].replace(",", ""))
        return found

    def gauges(self, pages: Mapping[str, str]) -> Gauges:
        """Return the engine's metrics by Powerband's names, from the text of its `gauge_pages`."""
        return rules.gauges(rules.facts(self.name).gauges, pages.get("/metrics", ""))


def names_for_rules(engine: Engine[Any], deployment: Deployment[Any], *, model: Model, host: Host) -> dict[str, Any]:
    """Return the names that a rule can use: every knob, and facts of the model and the host."""
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
    """Return the problems that are checked for every engine: weight format, version, unknown flags, rules."""
    found = []
    if model.format and model.format not in engine.formats:
        found.append(
            Problem(
                rule="wrong-format",
                sentence=f"{engine.name} cannot load {model.format} weights ({deployment.variant.source})",
                hint=f"give {' or '.join(sorted(engine.formats))} weights, or use another --engine",
            )
        )
    table = rules.facts(engine.name)
    if table.minimum_version and _older(installation.version, table.minimum_version):
        found.append(
            Problem(
                rule="engine-too-old",
                sentence=f"{engine.name} {installation.version} is older than {table.minimum_version}, "
                "the oldest supported version",
                hint=engine.install_hint(),
            )
        )
    if never_run := engine.never_run():
        hint = "check its answers and its metrics before you rely on them"
        found.append(Problem(rule="never-run", sentence=never_run, hint=hint, severity="warn"))
    if installation.flags is not None:
        found += _unknown_flags(engine, deployment, installation)
    names = names_for_rules(engine, deployment, model=model, host=host)
    return found + rules.problems(table.conflicts, names)


def _unknown_flags(engine: Engine[Any], deployment: Deployment[Any], installation: Installation) -> list[Problem]:
    problems, known = [], installation.flags or frozenset()
    knob_flags = knobs.flags(type(deployment.config))
    for argument in knobs.arguments(deployment.config):
        flag = argument.partition("=")[0]
        if not flag.startswith("--") or flag in known:
            continue
        if flag in knob_flags:
            sentence = (
                f"{installation.engine} {installation.version} has no flag {flag}: this version is too old or too new"
            )
            hint = f"omit that knob, or {engine.install_hint()}"
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
