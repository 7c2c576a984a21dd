"""When something beside a cluster is looked for before its time: a pod waits, for that perhaps."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

from rljob_operator.memory import Memory
from rljob_operator.observed import PodView

NOW = datetime(2026, 1, 1, 12, tzinfo=UTC)


def waiting(seconds: float) -> PodView:
    created = NOW - timedelta(seconds=seconds)
    return PodView("pod", "uid", "job-c1", "rollout", ready=False, created=created)


def test_a_pod_that_waits_for_long_has_it_looked_for_once() -> None:
    memory = Memory("uid")
    assert not memory.keeps_waiting([waiting(5)], NOW), "it has just been made"
    assert memory.keeps_waiting([waiting(5), waiting(20)], NOW)
    memory.surroundings_kept = NOW
    later = NOW + timedelta(seconds=3)
    assert not memory.keeps_waiting([waiting(20)], later), "that was seen to"
    # The younger one comes to wait for as long: what was deleted between them is looked for again.
    assert memory.keeps_waiting([waiting(5), waiting(20)], NOW + timedelta(seconds=12))


def test_pods_that_are_ready_or_on_their_way_out_wait_for_nothing() -> None:
    memory = Memory("uid")
    pod = waiting(60)
    assert memory.keeps_waiting([pod], NOW)
    for other in (replace(pod, ready=True), replace(pod, ended=True), replace(pod, deleting_since=NOW)):
        assert not memory.keeps_waiting([other], NOW)
