"""The contract of engine adapters; call `check_engine` in a test of your adapter."""

from __future__ import annotations

import re
from typing import Any

from powerband.core.deployment import Deployment, EngineConfig, Variant
from powerband.core.engine import Footprint, Gauges, Installation
from powerband.core.host import Gpu, Host
from powerband.core.model import Model
from powerband.engines import knobs, rules
from powerband.engines.base import Engine
from powerband.metrics import GAUGES

HOST = Host(
    system="Linux",
    machine="x86_64",
    cpu_name="a CPU",
    cores=(0, 1),
    memory_bytes=24 * 2**30,
    available_bytes=20 * 2**30,
    instruction_sets=frozenset({"avx2"}),
)
GPU_HOST = HOST.model_copy(
    update={
        "gpus": tuple(
            Gpu(index=n, name="a GPU", memory_bytes=80 * 2**30, free_bytes=80 * 2**30, driver="") for n in (0, 1)
        )
    }
)
MODEL = Model(
    source="/models/small",
    layers=30,
    hidden=576,
    heads=9,
    kv_heads=3,
    head_dim=64,
    vocabulary=49152,
    context_tokens=8192,
    weight_bytes=269_000_000,
)


def check_engine(engine: Engine[Any]) -> None:
    """Raise AssertionError if the adapter violates the contract."""
    _identity(engine)
    _config(engine)
    if not engine.attaches:
        _command(engine)
    _footprint(engine)
    _log_patterns(engine)
    _gauges(engine)
    if not engine.attaches:
        for host in (HOST, GPU_HOST):
            _space(engine, host)


def _deployment(engine: Engine[Any], **config: Any) -> Deployment[Any]:
    typed = engine.config_type.model_validate(config)
    return Deployment(variant=Variant(source=MODEL.source), engine=engine.name, config=typed)


def _installation(engine: Engine[Any]) -> Installation:
    return Installation(engine=engine.name, version="99", origin="given", program=("/bin/engine",))


def _identity(engine: Engine[Any]) -> None:
    assert type(engine).__module__.rpartition(".")[2] == engine.name, "the module must have the engine's name"
    assert engine.formats, "it must load at least one weight format"


def _config(engine: Engine[Any]) -> None:
    assert issubclass(engine.config_type, EngineConfig)
    engine.config_type()  # every knob is optional
    spelled = [knobs.spelling(field, knob) for field, knob in knobs.knobs(engine.config_type)]
    assert len(spelled) == len(set(spelled)), "two knobs have the same flag"
    assert knobs.arguments(engine.config_type()) == (), "an empty config must emit no flags"


def _command(engine: Engine[Any]) -> None:
    deployment, installation = _deployment(engine, extra_args=["--last"]), _installation(engine)
    command = engine.command(deployment, installation=installation, port=12345)
    assert command == engine.command(deployment, installation=installation, port=12345), "command() must be pure"
    assert command.argv[0] == "/bin/engine"
    assert command.argv[-1] == "--last", "extra_args must come last, so that they override"
    assert "12345" in command.argv and "127.0.0.1" in command.argv
    assert engine.base_url(deployment, port=12345) == "http://127.0.0.1:12345"


def _footprint(engine: Engine[Any]) -> None:
    footprint = engine.footprint(_deployment(engine), model=MODEL, host=HOST)
    assert isinstance(footprint, Footprint)
    assert footprint.start_bytes() >= 0


def _log_patterns(engine: Engine[Any]) -> None:
    table = rules.facts(engine.name)
    for signature in table.failures:
        re.compile(signature.pattern)
        groups = set(re.findall(r"\{(\w+)\}", signature.message + signature.hint))
        assert groups <= set(re.compile(signature.pattern).groupindex), signature.pattern
        assert signature.hint and not signature.message.endswith("."), signature.message
    for phase in engine.phases():
        re.compile(phase.pattern)
    assert engine.diagnose("") is None, "an empty log shows no failure"
    assert engine.diagnose("INFO: everything is fine\n") is None


def _space(engine: Engine[Any], host: Host) -> None:
    space = engine.space(model=MODEL, host=host, context=2048)
    assert len({one.name for one in space.levers}) == len(space.levers), "two levers have the same name"
    engine.config_type.model_validate(space.always | space.fast_start)
    for lever in space.levers:
        assert len(lever.settings) > 1, f"{lever.name} must have at least two settings"
        assert next(iter(lever.settings.values())) == {}, (
            f"{lever.name}: the first setting must be the engine's default"
        )
        for knobs_set in lever.settings.values():
            engine.config_type.model_validate(space.always | knobs_set)


def _gauges(engine: Engine[Any]) -> None:
    assert engine.gauges({}) == Gauges(), "without pages all gauges must be None"
    assert set(Gauges.model_fields) == set(GAUGES), "every gauge must be described in GAUGES"
    assert set(rules.facts(engine.name).gauges) <= set(GAUGES)
