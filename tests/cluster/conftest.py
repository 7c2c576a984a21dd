"""One cluster for the session, in a folder of its own; a cluster of the user's stays untouched."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from testcluster import life
from testcluster.addons import Kubectl
from testcluster.layout import Cluster
from testcluster.programs import ProgramMissingError, find


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    try:
        find(build=False, cluster=True)
    except ProgramMissingError as problem:
        pytest.fail(str(problem), pytrace=False)
    folder = tmp_path_factory.mktemp("cluster")
    yield life.up(folder, workers=2, say=lambda _line: None)
    life.down(folder)


@pytest.fixture
def kubectl(cluster: Cluster) -> Kubectl:
    return Kubectl(cluster)
