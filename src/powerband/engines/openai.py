"""Adapter of a running OpenAI-compatible server: connects to its URL and starts nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from powerband.core.deployment import Deployment, EngineConfig
from powerband.core.engine import Command, Footprint, Gauges, Installation, Problem
from powerband.core.host import Host
from powerband.core.model import Model
from powerband.engines import rules
from powerband.engines.base import Engine
from powerband.errors import InputError


class OpenAIConfig(EngineConfig):
    """URL of the server, and the environment variable with its API key."""

    base_url: str = "http://127.0.0.1:8000"
    api_key_env: str | None = None


class OpenAI(Engine[OpenAIConfig]):
    """An OpenAI-compatible server that Powerband did not start."""

    name: ClassVar[str] = "openai"
    attaches: ClassVar[bool] = True
    builtin: ClassVar[tuple[str, ...] | None] = ("attach",)
    reads_weights: ClassVar[bool] = False
    config_type = OpenAIConfig

    def check(
        self, deployment: Deployment[OpenAIConfig], *, model: Model, host: Host, installation: Installation
    ) -> list[Problem]:
        """Reject anything but an http(s) base URL without /v1."""
        url = deployment.config.base_url
        if url.startswith(("http://", "https://")) and not url.rstrip("/").endswith("/v1"):
            return []
        hint = "write it like http://127.0.0.1:8000, without /v1"
        return [Problem(rule="bad-url", sentence=f"'{url}' is not the base URL of a server", hint=hint)]

    def footprint(self, deployment: Deployment[OpenAIConfig], *, model: Model, host: Host) -> Footprint:
        """Return an empty footprint: the server is not started here."""
        return Footprint()

    def command(self, deployment: Deployment[OpenAIConfig], *, installation: Installation, port: int) -> Command:
        """Raise InputError: there is no process to start."""
        raise InputError(
            "engine 'openai' only connects to running servers",
            hint="use --engine vllm or --engine llamacpp to start a server",
        )

    def base_url(self, deployment: Deployment[OpenAIConfig], *, port: int) -> str:
        """Return the configured URL."""
        return deployment.config.base_url.rstrip("/")

    def gauges(self, pages: Mapping[str, str]) -> Gauges:
        """Detect the engine behind the URL by the prefix of its metric names."""
        text = pages.get("/metrics", "")
        for engine in ("vllm", "llamacpp", "fake"):
            if f"\n{engine}:" in "\n" + text:
                return rules.gauges(rules.facts(engine).gauges, text)
        return Gauges()


ENGINE = OpenAI()
