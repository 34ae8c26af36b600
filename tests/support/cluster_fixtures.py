"""A control plane for the whole session, and for each test an empty namespace of it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support import clusters
from support.clusters import Cluster

USERS = {"system:serviceaccount:default:golden-picker": "picker-token"}


@pytest.fixture(scope="session")
def control_plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Run etcd and the API server; skip with the command that builds them if they are missing."""
    if reason := clusters.missing():
        pytest.skip(reason)
    with clusters.cluster(tmp_path_factory.mktemp("cluster"), users=USERS) as found:
        yield found


@pytest.fixture
def cluster(control_plane: Cluster) -> Cluster:
    control_plane.clear()
    return control_plane
