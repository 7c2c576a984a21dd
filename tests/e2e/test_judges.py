"""A judge on engines in pods of their own: more of them, one that is lost, fewer of them, while training goes on."""

from __future__ import annotations

import base64
import re
from pathlib import Path

import pytest
from judge_models import made
from undisturbed import FOREVER, assert_undisturbed
from world import RESULTS, World

pytestmark = pytest.mark.timeout(1500)
HAS_LEFT = re.compile(r"engine judge-\S+ on (\S+) has left")
"""How the driver says that an engine has handed back what it had."""


def on_results(world: World, folder: Path) -> str:
    """Where the job finds a folder that is copied onto the results volume."""
    world.in_results("mkdir", "-p", "judge")
    for file in folder.iterdir():
        text = base64.b64encode(file.read_bytes()).decode()
        world.in_results("bash", "-c", f"base64 -d > judge/{file.name}", text=text)
    return f"pvc://{RESULTS}/judge"


def pods(world: World) -> set[str]:
    return {pod["metadata"]["name"] for pod in world.pods("judged", "judge")}


def judging(world: World) -> int:
    """How many engines answer, as the driver reports."""
    return int(world.get("rlj", "judged")["status"]["progress"].get("judgesReady", 0))


def resize(world: World, replicas: int) -> None:
    world.kubectl(
        *("patch", "rlj", "judged", "--type=merge", "--patch"),
        f'{{"spec": {{"judge": {{"replicas": {replicas}}}}}}}',
    )


def test_a_judges_engines_grow_lose_a_pod_and_shrink(world: World, tmp_path: Path) -> None:
    source = on_results(world, made(tmp_path / "model", seed=2))
    judge = {"template": "{prompt}{response}", "parser": {"high": 9}, "maxTokens": 4}
    world.apply(
        world.job_document(
            "judged",
            stop={"steps": FOREVER},
            validation={"every": FOREVER, "atStart": False},
            reward={"functions": [{"type": "judge", "judge": judge}]},
            judge={"model": {"source": source}, "engine": "torch", "replicas": 1, "pod": world.pod()},
        )
    )
    world.until_condition("judged", "Running", "True", "Training")
    world.until_step("judged", 2)
    status = world.get("rlj", "judged")["status"]
    assert (status["pools"]["judge"]["summary"], status["progress"]["judgesReady"]) == ("1/1", 1)
    (first,) = pods(world)

    resize(world, 2)
    world.until("two engines answer", lambda: judging(world) == 2)
    assert len(grown := pods(world)) == 2
    world.kubectl("delete", "pod", first, "--grace-period=0", "--force")
    world.until("the lost pod is replaced", lambda: len(pods(world)) == 2 and first not in pods(world))
    world.until("two engines answer again", lambda: judging(world) == 2)
    world.until_step("judged", world.step("judged") + 3)
    before = pods(world)
    assert len(before - grown) == 1

    resize(world, 1)
    world.until("one pod is left", lambda: len(pods(world)) == 1)
    world.until_condition("judged", "Resizing", "False", "AtSize")
    world.until_step("judged", world.step("judged") + 3)
    # The driver said which one may go, when that had handed back its questions.
    assert set(HAS_LEFT.findall(world.driver_log("judged", attempt=1))) == before - pods(world)
    assert_undisturbed(world, "judged")
    metrics = world.metrics("judged")
    assert {line["reward/error_ratio"] for line in metrics} == {0.0}
    assert sum(line["judge/judge/failures"] for line in metrics) == 0
