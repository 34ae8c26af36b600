"""Every engine adapter fulfils the contract of `powerband.testing`."""

import pytest

from powerband import engines
from powerband.testing.engine_contract import check_engine


@pytest.mark.parametrize("name", engines.names())
def test_engine_fulfils_the_contract(name: str) -> None:
    check_engine(engines.get(name))
