"""Two installations whose leases differ watch the same namespace: the second says so and acts on nothing there."""

from __future__ import annotations

import logging
import time

import pytest
from fakes.bad_network import BadNetwork
from fakes.heads import Play
from prometheus_client import generate_latest
from world import Object, World, job_document

from rljob_operator import claims

pytestmark = pytest.mark.timeout(400)


async def test_the_second_operator_says_so_acts_on_nothing_and_takes_over_when_the_first_is_gone(
    world: World,
    other_world: World,
    network: BadNetwork,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    for name, seconds in (("LEASE", 9.0), ("HOLD", 6.0), ("RENEW", 1.0), ("LOOK", 0.5), ("PAUSE", 0.2)):
        monkeypatch.setattr(claims, f"{name}_SECONDS", seconds)
    writes: list[tuple[str, str]] = []

    def note(_number: int, method: str, path: str) -> int | None:
        writes.append((method, path.partition("?")[0]))
        return None

    network.before = note
    first = world.start_operator(lease_namespace=world.namespace)
    await world.apply(job_document("ours"), Play(steps=None))
    await world.until_condition("ours", "Running", "True", "Training")

    caplog.set_level(logging.WARNING, "rljob_operator.claims")
    second = other_world.start_operator(
        network.address, lease_namespace=other_world.namespace, also_watches=(world.namespace,)
    )
    assert second.operator is not None
    # It leads, in its own installation, and does its work where nobody else is.
    await other_world.apply(job_document("theirs"), Play(steps=1))
    await other_world.until_condition("theirs", "Succeeded", "True")

    async def told() -> list[Object]:
        return [event for event in await world.events("ours") if event["reason"] == "OtherOperator"]

    (event,) = await world.until("it is told on the job", told)
    holder = f"{world.namespace}/rljob-operator"
    assert event["type"] == "Warning"
    assert f"another operator ({holder}) manages the RLJobs of this namespace" in event["message"]
    assert f"another operator ({holder}) manages the RLJobs of the namespace {world.namespace}" in caplog.text
    second.operator._refresh_metrics()
    page = generate_latest(second.operator.metrics.registry).decode()
    assert f'rljob_other_operator{{namespace="{world.namespace}",operator="{holder}"}} 1.0' in page
    assert 'job="ours"' not in page

    # What is wanted of the job is the first one's affair: the second has seen it, too, and written an event alone.
    await world.patch("ours", {"rollout": {"replicas": 1}})
    await world.until_condition("ours", "Resizing", "False", "AtSize")
    there = {path for _, path in writes if f"/namespaces/{world.namespace}/" in path}
    assert there == {f"/api/v1/namespaces/{world.namespace}/events"}

    await first.stop()
    gone = time.monotonic()
    world.heads.plays["ours"].steps = 1
    await world.until_condition("ours", "Succeeded", "True")
    assert time.monotonic() - gone > claims.LEASE_SECONDS - claims.RENEW_SECONDS - 1
    assert len(world.drivers("ours")) == 1
    assert second.operator.acts_in(world.namespace)
