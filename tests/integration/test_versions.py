"""The oldest Kubernetes that the chart allows, and the newest that is tested.

They take the chart, judge job files as we do, and jobs live on them. All other tests run on a version in between.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import yaml
from fakes.heads import Play
from helm import CHART, Helm
from kube.control_plane import ControlPlane
from test_cel_budget import DRY_RUN, HEADROOM, dearer
from test_verdicts import agreed
from world import World, job_document

from rljob_operator import names
from testcluster.programs import KUBERNETES_VERSION, OTHER_VERSIONS, ProgramMissingError, find

pytestmark = pytest.mark.timeout(600)
SPECS = 150


ON_THE_ONE_THAT_ALL_RUN_ON = pytest.mark.slow(
    stands_for=[
        "tests/integration/test_cel_budget.py::test_every_rule_and_all_together_may_cost_twice_as_much",
        "tests/integration/test_malformed_jobs.py::test_no_job_is_taken_by_one_and_refused_by_another",
        "tests/integration/test_life_cycle.py::test_a_job_runs_to_its_end_and_frees_its_cluster",
    ]
)
"""The same is said there on the version in the middle."""


@pytest.fixture(scope="module", params=[pytest.param(age, marks=ON_THE_ONE_THAT_ALL_RUN_ON) for age in OTHER_VERSIONS])
def age(request: pytest.FixtureRequest) -> str:
    """Which of them it is."""
    return str(request.param)


@pytest.fixture(scope="module")
def plane(age: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """A control plane with that API server. The CRD of jobs comes with the chart."""
    try:
        programs = find(build=False, api_server=age)
    except ProgramMissingError as problem:
        pytest.fail(str(problem), pytrace=False)
    folder = tmp_path_factory.mktemp(age)
    with ControlPlane(programs, folder) as running:
        running.install_crds(
            next(path for path in programs.crds if path.name == "ray.io_rayclusters.yaml").read_bytes()
        )
        Helm(running, folder)("install", "rl", str(CHART), "--create-namespace")
        running.wait_until_served(names.GROUP, names.VERSION, names.PLURAL)
        running.start_controllers()
        yield running


def minor(version: str) -> tuple[int, int]:
    """Of v1.36.3: 1 and 36."""
    first, second, _ = version.removeprefix("v").split(".")
    return int(first), int(second)


def test_the_chart_states_the_oldest_and_the_docs_the_three() -> None:
    oldest, newest = (minor(OTHER_VERSIONS[age]) for age in ("oldest", "newest"))
    assert oldest < minor(KUBERNETES_VERSION) < newest
    stated = yaml.safe_load((CHART / "Chart.yaml").read_text())["kubeVersion"]
    assert stated == f">={oldest[0]}.{oldest[1]}.0-0"
    page = (CHART.parents[1] / "docs" / "operator" / "README.md").read_text()
    versions = [f"{first}.{second}" for first, second in (oldest, minor(KUBERNETES_VERSION), newest)]
    assert "the tests run on {}, {} and {}".format(*versions) in page


def test_it_is_that_version(plane: ControlPlane, age: str) -> None:
    assert plane.call("GET", "/version")["gitVersion"] == OTHER_VERSIONS[age]


def test_every_rule_of_the_crd_and_all_together_may_cost_twice_as_much(plane: ControlPlane) -> None:
    plane.call("POST", DRY_RUN, dearer(HEADROOM))


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
