"""What `kubectl get` prints of a job: how it is going, on one line."""

from __future__ import annotations

import pytest
from fakes.heads import Play
from world import World, job_document

pytestmark = pytest.mark.timeout(400)


async def test_kubectl_get_says_how_a_job_is_going(world: World) -> None:
    world.start_operator()
    await world.apply(job_document("shown", rollout={"replicas": 3}), Play(steps=None))

    async def is_trained() -> bool:
        return "progress" in (await world.job("shown")).get("status", {})

    await world.until("a step is done", is_trained)
    await world.until_condition("shown", "ClusterReady", "True", "PoolsReady")
    header, row = world.plane.kubectl("get", "rlj", "shown", "-n", world.namespace).stdout.splitlines()
    titles = "NAME ALGORITHM STATUS STEP REWARD ROLLOUT OF TRAINER OF SAMPLE-AGE ATTEMPT AGE"
    assert " ".join(header.split()) == titles
    name, algorithm, status, step, reward, *numbers = row.split()
    assert (name, algorithm, status) == ("shown", "grpo", "Training")
    assert float(reward) == int(step) / 4
    assert [int(number) for number in numbers[:-1]] == [3, 3, 1, 1, 1, 1]
