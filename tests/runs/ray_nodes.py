"""A Ray cluster of several nodes on this machine, labelled as KubeRay labels the nodes of an RLJob's RayCluster."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from rljob_api import cluster as contract


class RayNodes:
    """Nodes by pod name. Only processes that were started here are ended."""

    def __init__(self, folder: str) -> None:
        os.environ.setdefault("RAY_AUTH_MODE", "disabled")
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        from ray.cluster_utils import Cluster

        self._folder = folder
        self._cluster = Cluster(initialize_head=False)
        self._nodes: dict[str, Any] = {}

    @property
    def address(self) -> str:
        return str(self._cluster.address)

    def add(self, pod: str, role: str, cpus: int = 1) -> None:
        # Ray notes the newest cluster's address in a folder of the whole machine, which need not be there.
        with patch.dict(os.environ, RAY_TMPDIR=self._folder):
            Path(self._folder, "ray").mkdir(exist_ok=True)
            self._nodes[pod] = self._cluster.add_node(
                num_cpus=cpus,
                labels={contract.ROLE_LABEL: role},
                env_vars={"RAY_CLOUD_INSTANCE_ID": pod, "OMP_NUM_THREADS": "1"},
                temp_dir=self._folder,
                include_dashboard=False,
                # As in our pods.
                no_monitor=True,
                include_log_monitor=False,
            )

    def remove(self, pod: str) -> None:
        """The pod goes: every process of its node is killed."""
        self._cluster.remove_node(self._nodes.pop(pod), allow_graceful=False)

    def actors(self, pod: str) -> list[int]:
        """The processes of the actors that are alive there, as Ray's own table has them: forked ones (``warm_workers``)
        are not below their raylet, and all call themselves by what they are at."""
        table = self._cluster.global_state.actor_table(None)
        place = self._nodes[pod].node_id
        return [
            int(actor["Pid"])
            for actor in table.values()
            if actor["State"] == "ALIVE" and actor["Address"]["NodeID"] == place
        ]

    def close(self) -> None:
        self._cluster.shutdown()


@contextmanager
def ray_nodes() -> Iterator[RayNodes]:
    """A head without room for actors; workers are the test's to add."""
    folder = tempfile.mkdtemp(prefix="rljob-nodes-", dir="/tmp")  # paths of sockets have to be short
    nodes = RayNodes(folder)
    try:
        nodes.add("head", contract.HEAD, cpus=0)
        yield nodes
    finally:
        nodes.close()
        shutil.rmtree(folder, ignore_errors=True)
