"""Claims that pods of several nodes can or can't share, and what the status says about them.

The access modes mean what Kubernetes documents: ReadWriteOnce is one node, ReadWriteOncePod one pod, ReadOnlyMany and
ReadWriteMany are many nodes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from simulation import World, job_spec

from rljob_api import check, resolve
from rljob_operator import actions as do
from rljob_operator.observed import ClaimView
from rljob_operator.storage import claims, used_claims
from rljob_operator.store import Store

RWX, ROX, RWO, RWOP = "ReadWriteMany", "ReadOnlyMany", "ReadWriteOnce", "ReadWriteOncePod"
PIN = {"pod": {"nodeSelector": {"kubernetes.io/hostname": "one"}}}


def world(*existing: ClaimView, **sections: Any) -> World:
    made = World(spec=job_spec(**sections))
    made.claims = {claim.name: claim for claim in existing}
    return made


def bound(name: str, *modes: str) -> ClaimView:
    return ClaimView(name, "Bound", modes)


def creates(made: World) -> bool:
    return any(isinstance(action, do.CreateCluster) for action in made.look().actions)


STATE = {"checkpoint": {"uri": "pvc://state/runs"}}
MODEL = {"model": {"source": "pvc://models/tiny"}, "checkpoint": {"uri": None}}
CODE = {"code": [{"pvc": "mine"}]}
JUDGED = {
    "reward": {"functions": [{"type": "judge", "judge": {"template": "{response}"}}]},
    "judge": {"model": {"source": "pvc://judges/v1"}},
}
SEARCHED = {
    "rollout": {
        "environment": {"type": "tools", "tools": [{"type": "search", "corpus": {"source": "pvc://corpora/a.jsonl"}}]}
    }
}
VALUED = {"algorithm": {"preset": "ppo", "critic": {"model": {"source": "pvc://critics/v1"}}}}
SCORED = {"reward": {"functions": [{"type": "rewardModel", "rewardModel": {"source": "pvc://scores/v1"}}]}}


@pytest.mark.parametrize(
    ("sections", "claim", "reason"),
    [
        (STATE, bound("state", RWX), ""),
        (STATE, bound("state", RWO, RWX), ""),
        (STATE, bound("state", RWO), "VolumeNotShared"),
        (STATE, bound("state", RWOP), "VolumeNotShared"),
        (STATE, bound("state", ROX), "VolumeNotShared"),
        (STATE, bound("state", RWO, ROX), "VolumeNotShared"),
        (STATE, None, "VolumeMissing"),
        (STATE, ClaimView("state", "Lost", (RWX,)), "VolumeMissing"),
        (STATE, ClaimView("state", "Bound", (RWX,), deleting=True), "VolumeMissing"),
        # A claim without a volume may get one when pods ask for it.
        (STATE, ClaimView("state", "Pending", (RWX,)), ""),
        (STATE, ClaimView("state", "Pending", (RWO,)), "VolumeNotShared"),
        (MODEL, bound("models", ROX), ""),
        (MODEL, bound("models", RWX), ""),
        (MODEL, bound("models", RWO), "VolumeNotShared"),
        (CODE, bound("mine", ROX), ""),
        (CODE, bound("mine", RWO), "VolumeNotShared"),
        (CODE, None, "VolumeMissing"),
        (SCORED, bound("scores", ROX), ""),
        (JUDGED, bound("judges", ROX), ""),
        (JUDGED, None, "VolumeMissing"),
        (SEARCHED, bound("corpora", ROX), ""),
        (SEARCHED, None, "VolumeMissing"),
        (VALUED, bound("critics", ROX), ""),
        (VALUED, bound("critics", RWO), "VolumeNotShared"),
        (VALUED, None, "VolumeMissing"),
        (SCORED, bound("scores", RWO), "VolumeNotShared"),
        (SCORED, None, "VolumeMissing"),
    ],
)
def test_pods_are_created_only_where_all_can_mount_the_claim(
    sections: dict[str, Any], claim: ClaimView | None, reason: str
) -> None:
    made = world(*([claim] if claim else []), **sections)
    assert creates(made) is (reason == "")
    if reason:
        assert (made.value("Accepted"), made.reason("Accepted"), made.reason("Running")) == ("False", reason, reason)


def test_the_message_names_field_claim_modes_and_what_would_do() -> None:
    made = world(bound("state", RWO), **STATE)
    made.look()
    # head, two engines, one trainer pod
    assert made.status.by_type["Accepted"].message == (
        "spec.checkpoint.uri: PersistentVolumeClaim state is ReadWriteOnce, but 4 pods on arbitrary nodes mount it: "
        "it must be ReadWriteMany, or the nodeSelector of head and pools must name one kubernetes.io/hostname"
    )


def test_one_node_for_all_pods_makes_read_write_once_do_but_not_once_pod() -> None:
    pinned = {**STATE, "head": PIN, "rollout": PIN, "trainer": PIN}
    assert creates(world(bound("state", RWO), **pinned))
    assert not creates(world(bound("state", RWOP), **pinned))
    elsewhere = {"pod": {"nodeSelector": {"kubernetes.io/hostname": "two"}}}
    assert not creates(world(bound("state", RWO), **{**pinned, "trainer": elsewhere}))
    assert not creates(world(bound("state", RWO), **{**STATE, "head": PIN, "rollout": PIN}))


def test_a_job_goes_on_by_itself_when_its_claim_appears() -> None:
    made = world(**STATE)
    made.settle(3)
    assert made.clusters == {}
    made.claims["state"] = bound("state", RWX)
    made.settle(8)
    assert (made.reason("Accepted"), made.reason("Running")) == ("Valid", "Training")


def test_a_claim_without_volume_is_named_while_pods_wait() -> None:
    made = world(ClaimView("state", "Pending", (RWX,), "fast"), **STATE)
    made.look()
    made.kuberay()
    for name, pod in made.pods.items():
        made.pods[name] = replace(pod, trouble="unschedulable", message="pod has unbound PersistentVolumeClaims")
    made.look()
    said = made.status.by_type["ClusterReady"]
    assert (said.status, said.reason) == ("False", "VolumeUnbound")
    assert said.message.startswith(
        "spec.checkpoint.uri: PersistentVolumeClaim state waits for a volume of class fast; head: 1 of 1 pod waits"
    )
    made.claims["state"] = bound("state", RWX)
    made.kubelet()
    made.look()
    assert made.reason("ClusterReady") == "PoolsReady"


def test_a_running_job_is_left_alone_when_a_claim_changes() -> None:
    made = world(bound("state", RWX), **STATE)
    made.settle(8)
    made.claims = {}
    made.settle(3)
    assert (made.reason("Running"), made.reason("ClusterReady")) == ("Training", "PoolsReady")


def document(**sections: Any) -> dict[str, Any]:
    metadata = {"name": "job", "namespace": "space", "uid": "j1", "resourceVersion": "1", "generation": 1}
    return {
        "apiVersion": "rljob.dev/v1alpha1",
        "kind": "RLJob",
        "metadata": metadata,
        "spec": job_spec(**sections),
    }


def test_every_field_that_may_name_a_claim_is_looked_at() -> None:
    job, violations = check(
        document(
            model={"source": "pvc://a/x", "tokenizer": "pvc://b/x"},
            data={
                "train": {"source": "pvc://c/x"},
                "validation": [{"name": "v", "source": "pvc://d/x"}],
            },
            checkpoint={"uri": "pvc://e/x"},
            restore={"from": "pvc://f/x"},
            code=[{"pvc": "g"}, {"configMap": "files"}],
        )
    )
    assert not violations, violations
    assert job is not None
    found = used_claims(resolve(job))
    assert [claim.name for claim in found] == list("abcdefg")
    assert [claim.name for claim in found if claim.written] == ["e"]
    # Code is mounted by its own path.
    assert [claim.name for claim in claims(resolve(job))] == list("abcdef")


def claim(name: str, version: int, **status: Any) -> dict[str, Any]:
    return {
        "metadata": {
            "name": name,
            "namespace": "space",
            "uid": f"uid-{name}",
            "resourceVersion": str(version),
            "managedFields": [{"much": "text"}],
        },
        "spec": {"accessModes": [RWO], "storageClassName": "fast"},
        "status": status,
    }


def test_a_claim_wakes_exactly_the_jobs_that_name_it() -> None:
    store, key = Store(), ("space", "job")
    store.put_job(document(**STATE))
    assert store.put_claim(claim("state", 5)) == set(), "nobody has looked at the job yet"
    assert store.job(key) is not None
    assert store.claims(key) == (ClaimView("state", "Pending", (RWO,), "fast"),)
    assert store.put_claim(claim("other", 6)) == set()
    assert store.put_claim(claim("state", 7, phase="Bound", accessModes=[RWO, RWX])) == {key}
    assert store.claims(key) == (ClaimView("state", "Bound", (RWO, RWX), "fast"),)
    assert store.drop_claim(claim("state", 8)) == {key}
    assert store.claims(key) == ()
    store.drop_job(document(**STATE))
    assert store.put_claim({**claim("state", 9), "metadata": {**claim("state", 9)["metadata"], "uid": "new"}}) == set()


def test_a_random_model_needs_a_place_where_all_pods_find_it() -> None:
    random = {"model": {"source": None, "random": {"tokenizer": {"characters": "ab"}, "contextLength": 64}}}
    short = {"data": {"maxPromptTokens": 32}, "rollout": {"engine": "torch", "maxResponseTokens": 32}}
    made = world(**random, **short, checkpoint={"uri": None})
    assert not creates(made)
    accepted = made.status.by_type["Accepted"]
    assert (accepted.status, accepted.reason) == ("False", "InvalidSpec")
    assert "spec.checkpoint.uri" in accepted.message
    assert "pvc://claim/path or s3://bucket/path" in accepted.message
    for uri in ("pvc://state/runs", "s3://bucket/runs"):
        assert creates(world(bound("state", RWX), **random, **short, checkpoint={"uri": uri}))
