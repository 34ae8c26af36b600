"""Real engines on a real small model; what is missing is installed, into the cache that users have."""

import asyncio
import tomllib
from pathlib import Path

import pytest

from powerband import engines
from powerband.errors import EngineMissing
from powerband.runtime import devices, installations
from support import models

VERSIONS = {
    name: entry["version"]
    for name, entry in tomllib.loads(Path(__file__).with_name("engines.toml").read_text()).items()
}


@pytest.fixture(scope="session", autouse=True)
def engines_and_model() -> None:
    for name, version in VERSIONS.items():
        try:
            installations.find(name, version=version)
        except EngineMissing:
            asyncio.run(installations.install(engines.get(name), host=devices.this_host(), version=version))
    models.make_all()
