"""The trainer's image, on the nodes of whatever cluster the suite runs on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from faults import own_cluster
from requirements.lock import pins
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


def trainer_archive(world: World) -> Path:
    """The archive that `trainer_image` brought into the test cluster."""
    if world.settings.image or own_cluster(world) is None:
        pytest.skip("the archive of another cluster's image isn't here")
    return building.project_image("trainer", say=print)


def python_packages(bill: str) -> dict[str, str]:
    """Names and versions of the Python packages in a bill of materials."""
    return {
        package["name"]: package["versionInfo"]
        for package in json.loads(bill)["packages"]
        if package["externalRefs"][0]["referenceLocator"].startswith("pkg:pypi/")
    }


def hashed_packages() -> set[tuple[str, str]]:
    """Names and versions that requirements/ knows hashes of, for any accelerator."""
    files = [building.ROOT / "requirements" / name for name in ("cpu.txt", "gpu.txt", "torch.txt")]
    return {(name, version) for file in files for name, (version, hashes) in pins(file.read_text()).items() if hashes}
