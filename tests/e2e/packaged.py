"""The trainer's image, on the nodes of whatever cluster the suite runs on."""

from __future__ import annotations

import pytest
from faults import own_cluster
from world import World

from testcluster import building, life


def trainer_image(world: World) -> tuple[str, dict[str, str]]:
    """Name of the trainer's image, and labels of nodes that have it.

    The test cluster gets it here: it is built (minutes; kept while nothing of it changes) and imported into one node.
    """
    if world.settings.image:
        return world.settings.image, {}
    cluster = own_cluster(world)
    if cluster is None:
        pytest.skip("RLJOB_E2E_IMAGE names no image, and one can be built for the test cluster only")
    node = cluster.nodes[-1]
    life.bring(cluster, node, building.project_image("trainer", say=print))
    return building.image_name("trainer"), {"kubernetes.io/hostname": node.name}
