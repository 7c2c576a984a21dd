"""The operator is upgraded, removed, installed again and confined to namespaces while jobs train."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from installation import CHART, release
from ledger import assert_every_prompt_once
from namespaces import fresh_namespace
from undisturbed import assert_undisturbed, endless, identities
from world import World

pytestmark = pytest.mark.timeout(1500)
LATER_COLUMN = "ATTEMPT"


def test_helm_upgrade_does_not_disturb_a_job_that_trains(world: World, tmp_path: Path) -> None:
    with release(world) as installed:
        installed.install(chart=older_chart(tmp_path / "older"))
        world.apply(endless(world, "upgraded"))
        world.until_condition("upgraded", "CheckpointAvailable", "True")
        assert LATER_COLUMN not in _columns(world)
        pods, running = identities(world, "upgraded"), world.condition("upgraded", "Running")
        # Another CRD, another operator, and an object that was not there.
        installed.install(logLevel="debug", networkPolicy={"enabled": True})
        world.until("the CRD is today's", lambda: LATER_COLUMN in _columns(world))
        policies = ("get", "networkpolicies", "--namespace", installed.namespace, "-o", "name")
        assert world.kubectl(*policies).split() == [f"networkpolicy.networking.k8s.io/{installed.name}"]
        world.until_step("upgraded", world.step("upgraded") + 5)
        assert identities(world, "upgraded") == pods
        # (A new CRD ends every watch: what happened meanwhile is seen by the age of the condition.)
        assert world.condition("upgraded", "Running")["lastTransitionTime"] == running["lastTransitionTime"]
        assert_undisturbed(world, "upgraded")


def test_helm_uninstall_keeps_jobs_and_what_they_do(world: World) -> None:
    world.apply(endless(world, "orphaned"))
    world.until_condition("orphaned", "CheckpointAvailable", "True")
    pods = identities(world, "orphaned")
    with release(world) as installed:
        installed.uninstall()
        # `crds.keep` is the default: the CRD stays, and with it every job.
        kept = world.kubectl("get", "crd", "rljobs.rljob.dev", "-o", "jsonpath={.metadata.annotations}")
        assert '"helm.sh/resource-policy":"keep"' in kept
        assert identities(world, "orphaned") == pods
        done = len(world.metrics("orphaned"))
        world.until("training goes on without an operator", lambda: len(world.metrics("orphaned")) > done)
        installed.install()
        assert_undisturbed(world, "orphaned")


def test_an_operator_confined_to_namespaces_leaves_others_alone(world: World) -> None:
    with (
        fresh_namespace(world.settings) as beside,
        fresh_namespace(world.settings) as elsewhere,
        release(world) as installed,
    ):
        watched = [world.namespace, beside.namespace]
        installed.install(watchNamespaces=watched)
        roles = world.kubectl("get", "clusterrolebindings", "-o", "name").split()
        assert f"clusterrolebinding.rbac.authorization.k8s.io/{installed.name}" not in roles
        for place in (elsewhere, world, beside):
            place.apply(place.job_document("confined", stop={"steps": 4}))
        for place in (world, beside):
            place.until_finished("confined")
            assert_every_prompt_once(place, "confined", 4)
        assert "status" not in elsewhere.get("rlj", "confined")
        assert not elsewhere.list("rayclusters")


def older_chart(folder: Path) -> Path:
    """A chart like ours from before the CRD had one of its columns."""
    shutil.copytree(CHART, folder)
    crd = folder / "files" / "rljob.yaml"
    today = crd.read_text()
    column = re.compile(r"\{name: " + LATER_COLUMN + r", [^}]*\}, ", re.IGNORECASE)
    before, removed = column.subn("", today)
    assert removed == 1
    crd.write_text(before)
    return folder


def _columns(world: World) -> list[str]:
    return world.kubectl("get", "rlj", "-o", "wide").splitlines()[0].split()
