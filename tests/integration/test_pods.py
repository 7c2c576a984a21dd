"""The pods of a job as the API server sees them: good ones pass a dry run, bad ones are said before all else."""

from __future__ import annotations

from typing import Any

import pytest
from fakes.heads import Play
from kube.control_plane import ApiCallError, ControlPlane
from world import World, job_document

from rljob_api import check, resolve
from rljob_operator import objects
from rljob_operator.settings import Settings

pytestmark = pytest.mark.timeout(1800)

EVERYTHING: dict[str, Any] = {
    "resources": {"requests": {"cpu": 2, "memory": "8Gi"}, "limits": {"memory": "16Gi", "example.com/nic": 1}},
    "sharedMemory": "2Gi",
    "nodeSelector": {"kubernetes.io/arch": "amd64"},
    "tolerations": [
        {"key": "gpu", "operator": "Exists", "effect": "NoSchedule"},
        {"key": "spot", "value": "yes", "effect": "NoExecute", "tolerationSeconds": 60},
        {"operator": "Exists"},
    ],
    "affinity": {
        "nodeAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": {
                "nodeSelectorTerms": [{"matchExpressions": [{"key": "gpu", "operator": "In", "values": ["h100"]}]}]
            }
        },
        "podAntiAffinity": {
            "preferredDuringSchedulingIgnoredDuringExecution": [
                {
                    "weight": 10,
                    "podAffinityTerm": {
                        "topologyKey": "kubernetes.io/hostname",
                        "labelSelector": {"matchLabels": {"a": "b"}},
                    },
                }
            ]
        },
    },
    "topologySpreadConstraints": [
        {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway", "labelSelector": {}}
    ],
    "topology": {"mode": "preferred", "level": "topology.kubernetes.io/zone"},
    "env": [
        {"name": "PLAIN", "value": "x"},
        {"name": "SECRET", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}},
        {"name": "CONFIG", "valueFrom": {"configMapKeyRef": {"name": "c", "key": "k", "optional": True}}},
        {"name": "ADDRESS", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
    ],
    "volumes": [
        {"name": "scratch", "emptyDir": {"sizeLimit": "10Gi"}},
        {"name": "data", "persistentVolumeClaim": {"claimName": "data", "readOnly": True}},
        {"name": "host", "hostPath": {"path": "/srv", "type": "Directory"}},
    ],
    "volumeMounts": [
        {"name": "scratch", "mountPath": "/scratch"},
        {"name": "data", "mountPath": "/data", "readOnly": True, "subPath": "tiny"},
    ],
    "labels": {"team": "rl", "example.com/team": "rl"},
    "annotations": {"example.com/note": "anything at all: {}"},
    "priorityClassName": "high",
    "runtimeClassName": "nvidia",
    "serviceAccountName": "trainer",
    "imagePullSecrets": [{"name": "registry"}],
    "template": {
        "metadata": {"labels": {"from": "template"}},
        "spec": {
            "hostname": "a",
            "terminationGracePeriodSeconds": 90,
            "securityContext": {"runAsUser": 1000, "fsGroup": 1000},
            "containers": [
                {"name": "ray", "securityContext": {"readOnlyRootFilesystem": True}, "workingDir": "/work"},
                {"name": "sidecar", "image": "busybox", "command": ["sleep", "1d"]},
            ],
        },
    },
}


def job(**spec: Any) -> dict[str, Any]:
    whole = job_document("pods", queueName="q", **spec)
    whole["metadata"]["namespace"] = "default"
    return whole


@pytest.mark.parametrize(
    "spec",
    [
        {"rollout": {"pod": {"labels": {"a": "b"}}}, "trainer": {"pod": {"labels": {"a": "b"}}}},
        {
            "head": {"pod": EVERYTHING},
            "rollout": {
                "pod": EVERYTHING,
                "gpusPerReplica": 8,
                "parallelism": {"tensor": 8},
                "env": {"A": "b"},
            },
            "trainer": {"pod": EVERYTHING, "gpusPerReplica": 8},
            "code": [{"configMap": "rewards"}, {"pvc": "code", "path": "src"}],
            "checkpoint": {"uri": "pvc://checkpoints/x"},
            "image": "example.com/rljob/trainer:1@sha256:" + "0" * 64,
        },
    ],
    ids=["little", "everything"],
)
def test_the_pods_pass_a_dry_run_as_pod_templates(plane: ControlPlane, spec: dict[str, Any]) -> None:
    read, violations = check(job(**spec))
    assert (read is not None, violations) == (True, [])
    assert read is not None
    resolved = resolve(read)
    cluster = objects.ray_cluster(resolved, "0", "uid", 1, 1, "key", Settings())
    templates = objects.pod_templates(resolved, cluster)
    assert [item["metadata"]["name"] for item in templates] == [
        *(["pods-head"] if "head" in spec else []),
        "pods-rollout",
        "pods-trainer",
    ]
    for template in templates:
        path = "/api/v1/namespaces/default/podtemplates?dryRun=All&fieldValidation=Strict"
        stored = plane.call("POST", path, template)["template"]["spec"]
        # Nothing was dropped on the way: a field that Kubernetes doesn't know would have been.
        assert stored["containers"][0]["name"] == "ray"
        assert len(stored["containers"]) == len(template["template"]["spec"]["containers"])
    cluster["metadata"] |= {"namespace": "default", "ownerReferences": []}
    path = "/apis/ray.io/v1/namespaces/default/rayclusters?dryRun=All&fieldValidation=Strict"
    plane.call("POST", path, cluster)


BAD: list[tuple[dict[str, Any], str]] = [
    ({"template": {"spec": {"hostnam": "a"}}}, "template.spec.hostnam: Kubernetes 1.36 pods have no such field"),
    ({"affinity": {"nodeAffinty": {}}}, "affinity.nodeAffinty: Kubernetes 1.36 pods have no such field"),
    (
        {"template": {"spec": {"terminationGracePeriodSeconds": "long"}}},
        "template.spec.terminationGracePeriodSeconds: must",
    ),
    ({"resources": {"requests": {"cpu": 4}, "limits": {"cpu": 2}}}, "resources.requests.cpu: 4 is more than the limit"),
    ({"template": {"spec": {"containers": [{"name": "sidecar"}]}}}, "template.spec.containers[0].image: is required"),
]
UNKNOWN_TO_US = {"annotations": {"seccomp.security.alpha.kubernetes.io/pod": "none"}}
"""What only the API server says: it still reads annotations from before there were fields."""


@pytest.mark.parametrize(("pod", "words"), BAD, ids=[words for _, words in BAD])
async def test_a_bad_override_is_an_invalid_job(world: World, pod: dict[str, Any], words: str) -> None:
    world.start_operator()
    await world.apply(job_document("wrong", rollout={"pod": pod}), Play(steps=1))
    said = await world.until_condition("wrong", "Accepted", "False", "InvalidSpec")
    message = next(item["message"] for item in said["status"]["conditions"] if item["type"] == "Accepted")
    assert f"spec.rollout.pod.{words}" in message
    assert await world.owned_objects() == []


async def test_what_only_the_api_server_knows_is_said_before_anything_is_created(world: World) -> None:
    world.start_operator()
    await world.apply(job_document("wrong", rollout={"pod": UNKNOWN_TO_US}), Play(steps=1))
    said = await world.until_condition("wrong", "ClusterReady", "False", "ClusterRejected")
    message = next(item["message"] for item in said["status"]["conditions"] if item["type"] == "ClusterReady")
    assert message.startswith("the API server refuses the pods of rollout: ")
    assert "must be a valid seccomp profile" in message
    assert await world.owned_objects() == []


async def test_a_mended_override_is_taken_up(world: World) -> None:
    world.start_operator()
    await world.apply(job_document("mended", rollout={"pod": UNKNOWN_TO_US}), Play(steps=1))
    await world.until_condition("mended", "ClusterReady", "False", "ClusterRejected")
    with pytest.raises(ApiCallError, match="while the job is suspended"):
        await world.patch("mended", {"rollout": {"pod": {"annotations": None}}})
    await world.patch("mended", {"suspend": True})
    await world.until_condition("mended", "Suspended", "True")
    await world.patch("mended", {"rollout": {"pod": {"annotations": None, "template": {"spec": {"hostname": "a"}}}}})
    await world.patch("mended", {"suspend": False})
    await world.until_condition("mended", "Succeeded", "True")
    # Nothing was left behind by the dry runs.
    assert (await world.call("GET", f"/api/v1/namespaces/{world.namespace}/podtemplates"))["items"] == []
