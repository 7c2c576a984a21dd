"""Reward models in pods of their own: more of them, one that is lost, fewer of them, while training goes on."""

from __future__ import annotations

import base64
import re
from pathlib import Path

import pytest
from reward_models import made
from undisturbed import FOREVER, assert_undisturbed
from world import RESULTS, World

pytestmark = pytest.mark.timeout(1500)
HAS_LEFT = re.compile(r"replica \S+ of the reward model pool on (\S+) has left")
"""How the driver says that a replica has finished what it had."""


def on_results(world: World, folder: Path) -> str:
    """Where the job finds a folder that is copied onto the results volume."""
    world.in_results("mkdir", "-p", "reward-model")
    for file in folder.iterdir():
        text = base64.b64encode(file.read_bytes()).decode()
        world.in_results("bash", "-c", f"base64 -d > reward-model/{file.name}", text=text)
    return f"pvc://{RESULTS}/reward-model"


def pods(world: World) -> set[str]:
    return {pod["metadata"]["name"] for pod in world.pods("scored", "reward-model")}


def scoring(world: World) -> int:
    """How many replicas score, as the driver reports."""
    return int(world.get("rlj", "scored")["status"]["progress"].get("scorersReady", 0))


def resize(world: World, replicas: int) -> None:
    world.kubectl(
        *("patch", "rlj", "scored", "--type=merge", "--patch"),
        f'{{"spec": {{"rewardModel": {{"replicas": {replicas}}}}}}}',
    )


def test_a_pool_of_reward_models_grows_loses_a_pod_and_shrinks(world: World, tmp_path: Path) -> None:
    source = on_results(world, made(tmp_path / "model", characters="0123456789+=\n"))
    world.apply(
        world.job_document(
            "scored",
            stop={"steps": FOREVER},
            validation={"every": FOREVER, "atStart": False},
            reward={"functions": [{"type": "rewardModel", "rewardModel": {"source": source}}]},
            rewardModel={"replicas": 1, "pod": world.pod()},
        )
    )
    world.until_condition("scored", "Running", "True", "Training")
    world.until_step("scored", 2)
    status = world.get("rlj", "scored")["status"]
    assert (status["pools"]["reward-model"]["summary"], status["progress"]["scorersReady"]) == ("1/1", 1)
    (first,) = pods(world)

    resize(world, 2)
    world.until("two replicas score", lambda: scoring(world) == 2)
    assert len(grown := pods(world)) == 2
    world.kubectl("delete", "pod", first, "--grace-period=0", "--force")
    world.until("the lost pod is replaced", lambda: len(pods(world)) == 2 and first not in pods(world))
    world.until("two replicas score again", lambda: scoring(world) == 2)
    world.until_step("scored", world.step("scored") + 3)
    before = pods(world)
    assert len(before - grown) == 1

    resize(world, 1)
    world.until("one pod is left", lambda: len(pods(world)) == 1)
    world.until_condition("scored", "Resizing", "False", "AtSize")
    world.until_step("scored", world.step("scored") + 3)
    # The driver said which one may go, when that had nothing more to score.
    assert set(HAS_LEFT.findall(world.driver_log("scored", attempt=1))) == before - pods(world)
    assert_undisturbed(world, "scored")
    assert {line["reward/error_ratio"] for line in world.metrics("scored")} == {0.0}
