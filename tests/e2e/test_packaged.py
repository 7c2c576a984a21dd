"""The trainer's image trains: nothing of the checkout is mounted into its pods."""

from __future__ import annotations

from dataclasses import replace

import pytest
from ledger import assert_every_prompt_once
from packaged import trainer_image
from world import World

# Six gigabytes are built, packed and unpacked.
pytestmark = pytest.mark.timeout(2700)


def test_a_job_trains_from_the_trainers_image(world: World) -> None:
    image, nodes = trainer_image(world)
    packaged = replace(world, settings=replace(world.settings, image=image))
    pools = {role: {"pod": packaged.pod() | {"nodeSelector": nodes}} for role in ("head", "rollout", "trainer")}
    packaged.apply(
        packaged.job_document("packaged", **pools, stop={"steps": 6}, validation={"every": 6, "atStart": False})
    )
    packaged.until_condition("packaged", "Running", "True", "Training")
    pods = packaged.pods("packaged")
    assert {container["image"] for pod in pods for container in pod["spec"]["containers"]} == {image}
    mounted = {mount["mountPath"] for pod in pods for mount in pod["spec"]["containers"][0]["volumeMounts"]}
    assert world.environment_path not in mounted
    packaged.until_finished("packaged")
    assert_every_prompt_once(packaged, "packaged", 6)
