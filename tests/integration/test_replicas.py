"""The operator as it is installed: with the chart's rights, with a second replica, and without blocking its loop."""

from __future__ import annotations

import logging
import secrets
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml
from fakes.heads import Play
from operator_process import OperatorProcess
from test_chart import helm, render
from world import World, job_document

__all__ = ["helm"]

pytestmark = pytest.mark.timeout(1800)


async def test_a_job_lives_with_no_more_rights_than_the_chart_gives(world: World, helm: Path, tmp_path: Path) -> None:
    namespace = f"ops-{secrets.token_hex(4)}"
    await world.call("POST", "/api/v1/namespaces", {"metadata": {"name": namespace}})
    wanted = ("Role", "RoleBinding", "ClusterRole", "ClusterRoleBinding", "ServiceAccount")
    arguments = f"--set=watchNamespaces={{{world.namespace}}}"
    manifest = tmp_path / "roles.yaml"
    manifest.write_text(
        yaml.safe_dump_all([item for item in render(helm, arguments, namespace=namespace) if item["kind"] in wanted])
    )
    world.plane.kubectl("apply", "--server-side", "--force-conflicts", "-f", str(manifest))
    account = f"/api/v1/namespaces/{namespace}/serviceaccounts/rl-rljob-operator/token"
    token = (await world.call("POST", account, {"spec": {"expirationSeconds": 600}}))["status"]["token"]
    world.start_operator(token=token)
    await world.apply(job_document("modest", ttlSecondsAfterFinished=2), Play(steps=None, exits={1: 1}))
    await world.until("attempt 2 runs", lambda: any(driver.attempt == 2 for driver in world.drivers("modest")))
    await world.patch("modest", {"rollout": {"replicas": 1}})
    await world.until_condition("modest", "Resizing", "False", "AtSize")
    world.heads.plays["modest"].steps = 1

    async def gone() -> bool:
        return not (await world.call("GET", world.path("").rstrip("/")))["items"]

    await world.until("the job is over and deleted", gone)
    # Pods are checked with no more than these rights.
    old = {"annotations": {"seccomp.security.alpha.kubernetes.io/pod": "none"}}
    await world.apply(job_document("wrong", rollout={"pod": old}))
    await world.until_condition("wrong", "ClusterReady", "False", "ClusterRejected")
    world.plane.kubectl("delete", "--wait=false", "-f", str(manifest))


async def test_a_second_replica_takes_over_when_the_first_dies(world: World) -> None:
    first = world.start_operator(lease_namespace=world.namespace, identity="first")
    await world.until("the first leads", lambda: first.operator is not None and first.operator.leads)
    second = world.start_operator(lease_namespace=world.namespace, identity="second")
    await world.apply(job_document("inherited"), Play(steps=None))
    await world.until_condition("inherited", "Running", "True", "Training")
    assert second.operator is not None
    assert not second.operator.leads
    # As after kill -9: the lease isn't given back.
    assert first.operator is not None
    leader = first.operator._leader
    assert leader is not None
    leader._give_back = _nothing  # type: ignore[method-assign]
    await first.stop()
    died = time.monotonic()
    world.heads.plays["inherited"].steps = 1
    await world.until_condition("inherited", "Succeeded", "True")
    assert second.operator.leads
    # A bound on the protocol (10 s lease, looked at every 2 s), with room for a slow machine.
    assert time.monotonic() - died < 30
    assert len(world.drivers("inherited")) == 1


async def test_another_process_takes_over_within_fifteen_seconds_of_kill_9(world: World, tmp_path: Path) -> None:
    arguments = (
        f"--namespace={world.namespace}",
        f"--lease-namespace={world.namespace}",
        f"--head-address={world.heads.address}",
        "--probe-port=0",
        "--poll-seconds=0.2",
    )
    replicas = [OperatorProcess(world.plane, tmp_path, f"replica-{index}", arguments) for index in range(2)]
    try:
        await world.apply(job_document("bequeathed"), Play(steps=None))
        await world.until_condition("bequeathed", "Running", "True", "Training")
        before = (await _lease(world))["holderIdentity"]
        leader = next(replica for replica in replicas if f"_{replica.pid}_" in before)
        leader.kill()
        died = datetime.now(UTC)
        world.heads.plays["bequeathed"].steps = 1
        await world.until_condition("bequeathed", "Succeeded", "True")
        after = await _lease(world)
        assert after["holderIdentity"] != before
        taken = datetime.fromisoformat(after["acquireTime"])
        print(f"taken over {(taken - died).total_seconds():.1f} s after kill -9")
        assert taken - died < timedelta(seconds=15)
        assert len(world.drivers("bequeathed")) == 1
    finally:
        for replica in replicas:
            replica.stop()


async def _lease(world: World) -> dict[str, Any]:
    path = f"/apis/coordination.k8s.io/v1/namespaces/{world.namespace}/leases/rljob-operator"
    spec = (await world.call("GET", path))["spec"]
    assert isinstance(spec, dict)
    return spec


async def _nothing() -> None:
    return None


async def test_a_lease_that_is_given_back_is_taken_at_once(world: World) -> None:
    first = world.start_operator(lease_namespace=world.namespace, identity="first")
    await world.until("the first leads", lambda: first.operator is not None and first.operator.leads)
    await first.stop()
    second = world.start_operator(lease_namespace=world.namespace, identity="second")
    await world.until("the second leads", lambda: second.operator is not None and second.operator.leads)
    lease = await world.call("GET", f"/apis/coordination.k8s.io/v1/namespaces/{world.namespace}/leases/rljob-operator")
    assert lease["spec"]["holderIdentity"] == "second"
    assert lease["spec"]["leaseTransitions"] == 2


async def test_nothing_blocks_the_event_loop(world: World, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "asyncio")
    world.start_operator(debug=True)
    await world.apply(job_document("smooth"), Play(steps=3))
    await world.until_condition("smooth", "Succeeded", "True")
    # In debug mode asyncio reports every callback that holds the loop for more than 0.1 s.
    slow = [record.getMessage() for record in caplog.records if "Executing" in record.getMessage()]
    ours = [line for line in slow if "rljob_operator" in line]
    # Importing and parsing the first job take their time once; a blocked socket or file would show again and again.
    assert len(ours) <= 1, ours
