"""What pods may do to their nodes is refused unless the installation allows it, with the value that does."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from rljob_api import load_jobs, resolve
from rljob_api.on_cluster import cluster_notes
from rljob_api.pod_policy import PodPolicy, disallowed
from rljob_api.resolved import ResolvedJob

JOB = """
apiVersion: rljob.dev/v1alpha1
kind: RLJob
metadata: {name: test}
spec:
  model: {source: pvc://models/small}
  data: {train: {source: "pvc://data/train.jsonl"}, answer: answer}
  algorithm: {preset: grpo}
  reward: {functions: [{type: exactMatch}]}
  head: {pod: {resources: {requests: {cpu: 1}}}}
  trainer: {pod: {resources: {requests: {cpu: 1}}}}
  checkpoint: {uri: "pvc://results/runs"}
  stop: {steps: 1}
"""
ACCOUNT, TOLERATION = {"serviceAccountName": "admin"}, {"tolerations": [{"operator": "Exists"}]}
HOST = {"volumes": [{"name": "host", "hostPath": {"path": "/var/log"}}]}


def job_with(pod: dict[str, Any], pool: str = "trainer") -> ResolvedJob:
    document = yaml.safe_load(JOB)
    document["spec"].setdefault(pool, {}).setdefault("pod", {}).update(pod)
    (job,) = load_jobs(yaml.safe_dump(document))
    return resolve(job)


def template(**spec: Any) -> dict[str, Any]:
    return {"template": {"spec": spec}}


def container(security: dict[str, Any], name: str = "ray") -> dict[str, Any]:
    image = {} if name == "ray" else {"image": "sidecar:1"}
    return template(containers=[{"name": name, "securityContext": security, **image}])


@pytest.mark.parametrize(
    ("pod", "path", "value", "allows"),
    [
        (HOST, "volumes[0].hostPath", "hostPaths", {"hostPaths": ["/var/log"]}),
        (HOST, "volumes[0].hostPath", "hostPaths", {"hostPaths": ["/var/"]}),
        (template(**HOST), "template.spec.volumes[0].hostPath", "hostPaths", {"hostPaths": ["/"]}),
        (
            container({"privileged": True, "allowPrivilegeEscalation": True}),
            "template.spec.containers[0].securityContext.privileged",
            "privileged",
            {"privileged": True},
        ),
        (
            container({"capabilities": {"add": ["NET_ADMIN"]}}, "sidecar"),
            "template.spec.containers[0].securityContext.capabilities.add[0]",
            "privileged",
            {"privileged": True},
        ),
        (
            template(volumes=[{"name": "code", "nfs": {"server": "nfs", "path": "/"}}]),
            "template.spec.volumes[0].nfs",
            "privileged",
            {"privileged": True},
        ),
        (
            template(
                containers=[{"name": "sidecar", "image": "s:1", "ports": [{"containerPort": 443, "hostPort": 443}]}]
            ),
            "template.spec.containers[0].ports[0].hostPort",
            "privileged",
            {"privileged": True},
        ),
        (
            container({"seccompProfile": {"type": "Unconfined"}}),
            "template.spec.containers[0].securityContext.seccompProfile.type",
            "privileged",
            {"privileged": True},
        ),
        (
            template(securityContext={"appArmorProfile": {"type": "Unconfined"}}),
            "template.spec.securityContext.appArmorProfile.type",
            "privileged",
            {"privileged": True},
        ),
        (
            template(securityContext={"seLinuxOptions": {"type": "spc_t"}}),
            "template.spec.securityContext.seLinuxOptions.type",
            "privileged",
            {"privileged": True},
        ),
        (ACCOUNT, "serviceAccountName", "serviceAccounts", {"serviceAccounts": ["other", "admin"]}),
        (template(**ACCOUNT), "template.spec.serviceAccountName", "serviceAccounts", {"serviceAccounts": ["*"]}),
        (
            {"priorityClassName": "system-node-critical"},
            "priorityClassName",
            "systemPriority",
            {"systemPriority": True},
        ),
        (TOLERATION, "tolerations[0]", "tolerateEverything", {"tolerateEverything": True}),
        (template(**TOLERATION), "template.spec.tolerations[0]", "tolerateEverything", {"tolerateEverything": True}),
        (
            template(terminationGracePeriodSeconds=10**6),
            "template.spec.terminationGracePeriodSeconds",
            "longestGraceSeconds",
            {"longestGraceSeconds": 10**6},
        ),
    ],
)
@pytest.mark.parametrize("pool", ["head", "trainer"])
def test_what_is_refused_and_what_allows_it(
    pod: dict[str, Any], path: str, value: str, allows: dict[str, Any], pool: str
) -> None:
    job = job_with(pod, pool)
    (found,) = disallowed(job, PodPolicy())
    assert found.path == f"spec.{pool}.pod.{path}"
    assert found.remedy == f"remove it, or allow it by podPolicy.{value} of the operator's chart"
    assert list(disallowed(job, PodPolicy.model_validate(allows))) == []
    assert [note.path for note in cluster_notes(job)] == [found.path]


@pytest.mark.parametrize(
    "pod",
    [
        {"nodeSelector": {"accelerator": "h200"}, "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}]},
        {"priorityClassName": "high", "runtimeClassName": "nvidia", "serviceAccountName": "default"},
        container({"capabilities": {"add": ["IPC_LOCK", "CAP_CHOWN"]}}),
        template(terminationGracePeriodSeconds=600),
        {"volumes": [{"name": "cache", "emptyDir": {}}, {"name": "s", "secret": {"secretName": "s"}}]},
    ],
)
def test_what_gpu_nodes_need_is_allowed(pod: dict[str, Any]) -> None:
    assert list(disallowed(job_with(pod), PodPolicy())) == []


@pytest.mark.parametrize("path", ["/var/logs", "/var", "/", "//var/log"])
def test_a_folder_that_is_allowed_is_no_other(path: str) -> None:
    pod = {"volumes": [{"name": "host", "hostPath": {"path": path}}]}
    assert len(list(disallowed(job_with(pod), PodPolicy(host_paths=("/var/log",))))) == 1


def test_a_pool_that_makes_no_pods_is_not_looked_at() -> None:
    job = job_with(ACCOUNT, "rollout")
    assert job.spec.placement == "colocated"
    assert list(disallowed(job, PodPolicy())) == []


def test_a_value_that_the_policy_does_not_have_is_an_error() -> None:
    with pytest.raises(ValidationError, match="hostPath\n"):
        PodPolicy.model_validate({"hostPath": ["/"]})
