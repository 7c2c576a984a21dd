"""What is known of jobs: the newest, and read again only where it has changed."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from simulation import SETTINGS, job_spec

from rljob_operator.objects import ray_cluster
from rljob_operator.store import Store
from rljob_operator.views import cluster_view, job_view, trimmed_cluster, trimmed_job

WRITERS = {"managedFields": [{"manager": "rljob", "fieldsV1": {"f:spec": {}}}]}


def stored(version: int, **changes: Any) -> dict[str, Any]:
    """An RLJob as the API server sends it."""
    metadata = {"name": "job", "namespace": "space", "uid": "uid", "generation": 1, "resourceVersion": str(version)}
    whole: dict[str, Any] = {"metadata": metadata, "spec": job_spec(), "status": {}}
    for section, values in changes.items():
        whole[section] = {**whole[section], **values}
    return whole


def test_what_has_changed_of_a_job_is_read_and_nothing_else() -> None:
    store = Store()
    key = store.put_job(stored(1))
    assert key is not None
    first = store.job(key)
    assert first is not None
    store.put_job(stored(2, status={"attempt": 3}))
    second = store.job(key)
    assert second is not None
    assert (second.version, second.status.attempt) == ("2", 3)
    assert second.job is first.job
    # A label travels to the pods, and counts without a new generation.
    store.put_job(stored(3, metadata={"resourceVersion": "3", "labels": {"team": "rl"}}))
    third = store.job(key)
    assert third is not None
    assert third.job is not None
    assert third.job.metadata.labels == {"team": "rl"}
    # So does an annotation by which somebody wants something of Kueue: it would have no effect.
    elastic = {"resourceVersion": "4", "annotations": {"kueue.x-k8s.io/elastic-job": "true", "example.com/a": "b"}}
    store.put_job(stored(4, metadata=elastic))
    refused = store.job(key)
    assert refused is not None
    assert [problem.partition(":")[0] for problem in refused.problems] == [
        "metadata.annotations[kueue.x-k8s.io/elastic-job]"
    ]
    store.put_job(stored(5, metadata={"resourceVersion": "5", "generation": 2}, spec={"suspend": True}))
    fourth = store.job(key)
    assert fourth is not None
    assert fourth.job is not None
    assert (fourth.generation, fourth.job.spec.suspend) == (2, True)
    store.put_job(stored(6, metadata={"resourceVersion": "6", "uid": "another"}))
    fifth = store.job(key)
    assert fifth is not None
    assert (fifth.uid, fifth.job is not None and fifth.job.spec.suspend) == ("another", False)


def test_an_older_message_about_a_job_changes_nothing() -> None:
    store = Store()
    key = store.put_job(stored(7, status={"attempt": 2}))
    assert key is not None
    store.put_job(stored(6))
    job = store.job(key)
    assert job is not None
    assert (job.version, job.status.attempt) == ("7", 2)


def cluster_of_every_kind() -> dict[str, Any]:
    """A RayCluster with all that a view of it can show, as the API server would send it."""
    job = job_view(stored(1)).job
    assert job is not None
    made = ray_cluster(job, "hash", "job-uid", 3, 2, "key", SETTINGS)
    made["metadata"] |= {"uid": "cluster-uid", "resourceVersion": "9", "namespace": "space", "deletionTimestamp": "now"}
    made["metadata"] |= WRITERS
    made["metadata"]["annotations"] |= {"rljob.dev/attempt": "4", "rljob.dev/attempt-head": "head-pod"}
    made["spec"]["suspend"] = True
    made["spec"]["workerGroupSpecs"][0] |= {
        "numOfHosts": 2,
        "suspend": True,
        "scaleStrategy": {"workersToDelete": ["pod-1"]},
    }
    failure = {"type": "ReplicaFailure", "status": "True", "reason": "FailedCreatePod", "message": "a quota"}
    return {**made, "status": {"conditions": [failure], "state": "failed"}}


def test_a_view_of_what_is_kept_of_a_cluster_is_that_of_the_whole() -> None:
    whole = cluster_of_every_kind()
    kept = trimmed_cluster(whole)
    seen = cluster_view(kept)
    assert seen == cluster_view(whole)
    # All that can be seen was there, so that nothing can have been lost unnoticed.
    assert (seen.attempt, seen.attempt_head, seen.suspended, seen.deleting) == (4, "head-pod", True, True)
    assert (seen.groups[0].hosts, seen.groups[0].suspended, seen.groups[0].removing) == (2, True, ("pod-1",))
    assert seen.problem == "FailedCreatePod: a quota"
    assert "template" not in json.dumps(kept)
    assert "managedFields" not in json.dumps(kept)


@pytest.mark.parametrize("written", ["", "x", "-1", "²", "9" * 5000])
def test_an_annotation_that_somebody_has_changed_is_no_number(written: str) -> None:
    cluster = cluster_of_every_kind()
    cluster["metadata"]["annotations"] |= dict.fromkeys(
        ("rljob.dev/attempt", "rljob.dev/incarnation", "rljob.dev/generation"), written
    )
    seen = cluster_view(cluster)
    assert (seen.attempt, seen.incarnation, seen.generation) == (0, 0, 0)


def test_a_cluster_finds_its_job_by_what_is_kept_of_it() -> None:
    store, whole = Store(), cluster_of_every_kind()
    key = store.put_cluster(whole)
    assert key == ("space", "job")
    assert store.clusters(key, "job-uid") == (cluster_view(whole),)
    assert store.put_cluster({**whole, "metadata": {**whole["metadata"], "resourceVersion": "8", "labels": {}}}) is None
    assert store.drop_cluster(whole) == key
    assert store.clusters(key, "job-uid") == ()


@pytest.mark.parametrize("status", [{}, {"attempt": 3}])
def test_a_view_of_what_is_kept_of_a_job_is_that_of_the_whole(status: dict[str, Any]) -> None:
    whole = stored(1, metadata=WRITERS | {"name": "job", "uid": "uid", "labels": {"team": "rl"}}, status=status)
    kept = trimmed_job(whole)
    assert replace(job_view(kept), job=None) == replace(job_view(whole), job=None)
    assert job_view(kept).job == job_view(whole).job
    assert "managedFields" not in kept["metadata"]
    assert "managedFields" in whole["metadata"]


def test_views_of_more_jobs_than_are_remembered_are_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rljob_operator.store.REMEMBERED_VIEWS", 2)
    store = Store()
    for name in ("one", "two", "three"):
        store.put_job(stored(1, metadata={"name": name, "uid": name}))
    first = store.job(("space", "one"))
    assert store.job(("space", "one")) is first
    assert store.job(("space", "two")) is not None
    assert store.job(("space", "three")) is not None
    again = store.job(("space", "one"))
    assert again is not first
    assert again == first


def test_what_is_known_already_is_no_news() -> None:
    store, cluster = Store(), cluster_of_every_kind()
    assert store.put_job(stored(5)) == ("space", "job")
    assert store.put_job(stored(5)) is None
    assert store.put_job(stored(4, status={"attempt": 9})) is None
    assert store.put_cluster(cluster) == ("space", "job")
    assert store.put_cluster(cluster) is None
    assert store.drop_cluster(cluster) == ("space", "job")
    assert store.put_cluster(cluster) is None, "late news of what is gone"


def test_what_has_lost_its_label_is_news_again_with_it_and_what_was_deleted_is_not() -> None:
    """A sweep lists by the label; a watch tells of a deletion."""
    store, whole = Store(), cluster_of_every_kind()

    def version(number: int) -> dict[str, Any]:
        return {**whole, "metadata": {**whole["metadata"], "resourceVersion": str(number)}}

    assert (key := store.put_cluster(version(5))) is not None
    store.drop("rayclusters", version(5))
    assert store.clusters(key, "job-uid") == ()
    assert store.put_cluster(version(4)) is None
    assert store.put_cluster(version(5)) is None
    assert store.put_cluster(version(6)) == key
    assert len(store.clusters(key, "job-uid")) == 1
    store.drop_cluster(version(6))
    assert store.put_cluster(version(7)) is None
