"""The contract of every engine adapter; the suite itself is shipped, for adapters outside this repository."""

import pytest

from powerband import engines
from powerband.testing.engine_contract import check_engine


@pytest.mark.parametrize("name", engines.names())
def test_engine_keeps_the_contract(name: str) -> None:
    check_engine(engines.get(name))
