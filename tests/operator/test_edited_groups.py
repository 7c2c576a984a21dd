"""What somebody has changed in the groups of a RayCluster is put back, and what others add to them stays."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from simulation import SETTINGS, job_spec

from rljob_api import check, resolve
from rljob_operator.edited_groups import restoring
from rljob_operator.objects import ray_cluster

Document = dict[str, Any]


def made(image: str = "registry.example/rljob:1", **sections: object) -> Document:
    pod = {
        "tolerations": [{"key": "gpu", "operator": "Exists"}],
        "env": [{"name": "LEVEL", "value": "info"}],
        "resources": {"limits": {"cpu": "4", "memory": "8Gi"}},
        "volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "data"}}],
        "volumeMounts": [{"name": "data", "mountPath": "/data"}],
    }
    sections = {"trainer": {"replicas": 2, "pod": pod}, **sections}
    job, violations = check(
        {"apiVersion": "rljob.dev/v1alpha1", "kind": "RLJob", "metadata": {"name": "job"}, "spec": job_spec(**sections)}
    )
    assert job is not None, violations
    settings = replace(SETTINGS, default_image=image)
    return json.loads(json.dumps(ray_cluster(resolve(job), "hash", "uid", 3, 1, "key", settings)))


def stored(cluster: Document) -> Document:
    """As an API server has it, with defaults of RayCluster's schema."""
    there = copy.deepcopy(cluster)
    there["metadata"]["resourceVersion"] = "7"
    for group in (there["spec"]["headGroupSpec"], *there["spec"]["workerGroupSpecs"]):
        for container in group["template"]["spec"]["containers"]:
            for port in container.get("ports", ()):
                port["protocol"] = "TCP"
    return there


def patched(there: Document, operations: list[Any]) -> Document:
    """RFC 6902, as far as it is used here."""
    after = copy.deepcopy(there)
    for operation in operations:
        *path, last = operation["path"].split("/")[1:]
        at: Any = after
        for part in path:
            at = at[int(part)] if isinstance(at, list) else at[part]
        if operation["op"] == "test":
            assert at[last] == operation["value"]
        else:
            assert operation["op"] == "add"
            at[last] = operation["value"]
    return after


def trainer(cluster: Document) -> Document:
    return next(group for group in cluster["spec"]["workerGroupSpecs"] if group["groupName"] == "trainer")


def pod(cluster: Document) -> Document:
    return trainer(cluster)["template"]["spec"]


def container(cluster: Document) -> Document:
    return pod(cluster)["containers"][0]


def item(items: list[Document], name: str) -> Document:
    return next(found for found in items if found["name"] == name)


EDITS: dict[str, Callable[[Document], object]] = {
    "image": lambda there: container(there).update(image="elsewhere/other:2"),
    "resources": lambda there: container(there)["resources"]["limits"].update(cpu="64"),
    "resources-gone": lambda there: container(there).pop("resources"),
    "command-line": lambda there: trainer(there)["rayStartParams"].update({"include-log-monitor": "1"}),
    "node-labels": lambda there: trainer(there).pop("labels"),
    "pod-labels": lambda there: trainer(there)["template"]["metadata"]["labels"].pop("rljob.dev/job"),
    "policy": lambda there: pod(there).update(restartPolicy="Always"),
    "token": lambda there: pod(there).update(automountServiceAccountToken=True),
    "security": lambda there: container(there)["securityContext"].update(
        privileged=True, allowPrivilegeEscalation=True
    ),
    "toleration": lambda there: pod(there)["tolerations"].pop(0),
    "env-value": lambda there: item(container(there)["env"], "LEVEL").update(value="debug"),
    "env-kind": lambda there: (
        item(container(there)["env"], "LEVEL").pop("value"),
        item(container(there)["env"], "LEVEL").update(valueFrom={"fieldRef": {"fieldPath": "metadata.name"}}),
    ),
    "env-twice": lambda there: container(there)["env"].append({"name": "LEVEL", "value": "debug"}),
    "volume-kind": lambda there: item(pod(there)["volumes"], "data").update(hostPath={"path": "/"}),
    "volume-gone": lambda there: pod(there)["volumes"].remove(item(pod(there)["volumes"], "data")),
    "mount": lambda there: item(container(there)["volumeMounts"], "data").update(mountPath="/elsewhere"),
    "mount-read-only": lambda there: item(container(there)["volumeMounts"], "data").update(readOnly=True),
    "containers": lambda there: pod(there).update(containers=[]),
    "template": lambda there: trainer(there).update(template={}),
    "no-object": lambda there: pod(there).update(containers="none"),
    "head": lambda there: there["spec"]["headGroupSpec"]["template"]["spec"]["containers"][0].update(image="other:2"),
    "head-ports": lambda there: there["spec"]["headGroupSpec"]["template"]["spec"]["containers"][0]["ports"].pop(),
}


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS.keys())
def test_what_is_changed_by_hand_is_put_back(edit: Callable[[Document], object]) -> None:
    cluster = made()
    there = stored(cluster)
    edit(there)
    operations = restoring(cluster, there)
    assert operations[0] == {"op": "test", "path": "/metadata/resourceVersion", "value": "7"}
    after = patched(there, operations)
    # What others have added beside it may stay; what the operator wrote is there, and that is an end of it.
    assert restoring(cluster, after) == []
    assert contains(after["spec"], cluster["spec"])


def contains(there: Any, ours: Any) -> bool:
    """Whether everything of `ours` is there, items of lists in any order."""
    if isinstance(ours, dict):
        return isinstance(there, dict) and all(key in there and contains(there[key], ours[key]) for key in ours)
    if isinstance(ours, list):
        return isinstance(there, list) and all(any(contains(found, wanted) for found in there) for wanted in ours)
    return bool(there == ours)


def test_an_edited_variable_is_there_once_and_as_it_was_written() -> None:
    cluster = made()
    for name in ("env-value", "env-kind", "env-twice"):
        there = stored(cluster)
        EDITS[name](there)
        after = patched(there, restoring(cluster, there))
        found = [variable for variable in container(after)["env"] if variable["name"] == "LEVEL"]
        assert found == [{"name": "LEVEL", "value": "info"}]


def test_a_cluster_that_nobody_has_touched_is_left_alone() -> None:
    cluster = made()
    assert restoring(cluster, stored(cluster)) == []


def test_what_kueue_and_others_add_is_left_alone() -> None:
    cluster = made(rollout={"pod": {"nodeSelector": {"pool": "a"}}})
    there = stored(cluster)
    for group in (there["spec"]["headGroupSpec"], *there["spec"]["workerGroupSpecs"]):
        template = group["template"]
        template["metadata"]["labels"]["kueue.x-k8s.io/podset"] = "trainer"
        template["metadata"]["annotations"]["kueue.x-k8s.io/workload"] = "raycluster-job-c1"
        template["spec"]["nodeSelector"] = {**template["spec"].get("nodeSelector", {}), "instance": "h100"}
        template["spec"]["tolerations"].insert(0, {"key": "spot", "operator": "Exists"})
        template["spec"]["schedulingGates"] = [{"name": "kueue.x-k8s.io/topology"}]
        template["spec"]["containers"].append({"name": "mesh", "image": "mesh:1"})
        template["spec"]["containers"][0]["env"].insert(0, {"name": "HTTP_PROXY", "value": "proxy"})
    assert restoring(cluster, there) == []
    # And it is still there when something else is put back.
    container(there)["image"] = "elsewhere/other:2"
    (_, operation) = restoring(cluster, there)
    assert (
        operation["path"]
        == f"/spec/workerGroupSpecs/{there['spec']['workerGroupSpecs'].index(trainer(there))}/template"
    )
    container(there)["image"] = container(cluster)["image"]
    assert operation["value"] == trainer(there)["template"]


def test_sizes_are_not_its_business() -> None:
    cluster = made()
    there = stored(cluster)
    trainer(there).update(
        replicas=5, minReplicas=0, maxReplicas=9, numOfHosts=2, scaleStrategy={"workersToDelete": ["x"]}
    )
    assert restoring(cluster, there) == []


def test_groups_in_another_order_or_gone_are_found_by_name() -> None:
    cluster = made()
    there = stored(cluster)
    there["spec"]["workerGroupSpecs"].reverse()
    container(there)["image"] = "elsewhere/other:2"
    assert contains(patched(there, restoring(cluster, there))["spec"], cluster["spec"])
    there = stored(cluster)
    there["spec"]["workerGroupSpecs"].remove(trainer(there))
    assert restoring(cluster, there) == []


def test_a_cluster_that_was_made_otherwise_is_left_alone() -> None:
    # An operator with another default image: its pods would not find together with those that run.
    there = stored(made("registry.example/rljob:1"))
    container(there)["image"] = "elsewhere/other:2"
    assert restoring(made("registry.example/rljob:2"), there) == []
    del there["metadata"]["annotations"]["rljob.dev/made-as"]
    assert restoring(made("registry.example/rljob:1"), there) == []


def test_the_size_of_a_pool_does_not_change_what_a_cluster_was_made_as() -> None:
    before, after = made(rollout={"replicas": 1}), made(rollout={"replicas": 3})
    assert (
        before["metadata"]["annotations"]["rljob.dev/made-as"] == after["metadata"]["annotations"]["rljob.dev/made-as"]
    )
