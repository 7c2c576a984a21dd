"""The oldest Kubernetes that the chart allows: it takes the chart, judges job files as we do, and jobs live on it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import yaml
from fakes.heads import Play
from helm import CHART, Helm
from kube.control_plane import ControlPlane
from test_verdicts import agreed
from world import World, job_document

from rljob_operator import names
from testcluster.programs import OLDEST_KUBERNETES_VERSION, ProgramMissingError, find

pytestmark = pytest.mark.timeout(600)
SPECS = 300


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """A control plane with that API server. The CRD of jobs comes with the chart."""
    try:
        programs = find(build=False, oldest=True)
    except ProgramMissingError as problem:
        pytest.fail(str(problem), pytrace=False)
    folder = tmp_path_factory.mktemp("oldest")
    with ControlPlane(programs, folder) as running:
        running.install_crd(next(path for path in programs.crds if path.name == "ray.io_rayclusters.yaml").read_bytes())
        Helm(running, folder)("install", "rl", str(CHART), "--create-namespace")
        running.wait_until_served(names.GROUP, names.VERSION, names.PLURAL)
        running.start_controllers()
        yield running


def test_it_is_of_the_oldest_minor_version_that_the_chart_states(plane: ControlPlane) -> None:
    assert plane.call("GET", "/version")["gitVersion"] == OLDEST_KUBERNETES_VERSION
    stated = yaml.safe_load((CHART / "Chart.yaml").read_text())["kubeVersion"]
    minor = OLDEST_KUBERNETES_VERSION.removeprefix("v").rpartition(".")[0]
    assert stated == f">={minor}.0-0"


def test_generated_job_files_get_the_same_verdict_from_both(plane: ControlPlane) -> None:
    agreed(plane, SPECS)


async def test_a_job_trains_resizes_rests_and_leaves_nothing(world: World) -> None:
    world.start_operator()
    play = Play(steps=None, exits={1: 1})
    await world.apply(job_document("old", rollout={"replicas": 2}), play)
    await world.until("attempt 2 runs", lambda: any(driver.attempt == 2 for driver in world.drivers("old")))
    for replicas in (3, 1):
        await world.patch("old", {"rollout": {"replicas": replicas}})
        await world.until_condition("old", "Resizing", "False", "AtSize")
        assert len(await world.pods("rollout")) == replicas
    await world.patch("old", {"suspend": True})
    await world.until_condition("old", "Suspended", "True")
    assert (await world.clusters(), await world.pods()) == ([], [])
    await world.patch("old", {"suspend": False})
    play.steps = 2
    job = await world.until_condition("old", "Succeeded", "True")
    assert [(item["attempt"], item["incarnation"]) for item in job["status"]["attempts"]] == [(1, 1), (2, 1), (3, 2)]
    await world.delete("old")

    async def nothing_is_left() -> bool:
        return await world.owned_objects() == []

    await world.until("nothing is left", nothing_is_left)
