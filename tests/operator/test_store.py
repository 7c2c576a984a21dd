"""What is known of jobs: the newest, and read again only where it has changed."""

from __future__ import annotations

from typing import Any

from simulation import job_spec

from rljob_operator.store import Store


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
    store.put_job(stored(4, metadata={"resourceVersion": "4", "generation": 2}, spec={"suspend": True}))
    fourth = store.job(key)
    assert fourth is not None
    assert fourth.job is not None
    assert (fourth.generation, fourth.job.spec.suspend) == (2, True)
    store.put_job(stored(5, metadata={"resourceVersion": "5", "uid": "another"}))
    fifth = store.job(key)
    assert fifth is not None
    assert (fifth.uid, fifth.job is not None and fifth.job.spec.suspend) == ("another", False)


def test_an_older_message_about_a_job_changes_nothing() -> None:
    store = Store()
    key = store.put_job(stored(7, status={"attempt": 2}))
    store.put_job(stored(6))
    job = store.job(key)
    assert job is not None
    assert (job.version, job.status.attempt) == ("7", 2)
