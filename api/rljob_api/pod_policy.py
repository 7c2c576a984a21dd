"""What whoever installed the operator lets the pods of jobs do to their nodes and to other tenants.

Whoever may create an RLJob writes pod templates, and a pod may ask for more than its author could do by himself: the
node's file system, a privileged container, the rights of another service account, a place on nodes that are kept for
others. All of it is refused unless the installation allows it (the chart's ``podPolicy``), before a pod is made. The
host's namespaces and ``nodeName`` are refused always (``rules.templates``). The namespace's Pod Security label is the
second net.
"""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import Field

from rljob_api.pod_template.located import Located
from rljob_api.pod_template.of_job import pod_template
from rljob_api.resolved import ResolvedJob
from rljob_api.spec.base import Listed, SpecModel
from rljob_api.violations import Violation

_CAPABILITIES = {
    *("AUDIT_WRITE", "CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "MKNOD", "NET_BIND_SERVICE", "SETFCAP"),
    *("SETGID", "SETPCAP", "SETUID", "SYS_CHROOT"),
    "IPC_LOCK",
}
"""Those that the baseline Pod Security Standard allows, and what RDMA needs."""
_VOLUMES = {
    *("configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "image", "persistentVolumeClaim", "projected"),
    *("secret", "hostPath"),
}
"""Kinds that the restricted standard allows; of hostPath the folder counts."""
_SELINUX = ("", "container_t", "container_init_t", "container_kvm_t", "container_engine_t")
_SYSTEM = "system-"
"""With what the names of Kubernetes' own priority classes begin, and no others may."""


class PodPolicy(SpecModel):
    """What is allowed, by the names that the chart has; nothing by default."""

    host_paths: Listed[str] = Field(default=(), description="Folders of nodes that pods may mount, and all below.")
    privileged: bool = Field(default=False, description="Privileged containers, capabilities beyond the baseline.")
    service_accounts: Listed[str] = Field(default=(), description="Beside the namespace's default one; `*`: all.")
    system_priority: bool = Field(default=False, description="Kubernetes' priority classes for its own pods.")
    tolerate_everything: bool = Field(default=False, description="Tolerations without a key.")
    longest_grace_seconds: int = Field(default=900, ge=0, description="A node that is drained waits as long.")


def disallowed(job: ResolvedJob, policy: PodPolicy) -> Iterator[Violation]:
    """What the policy does not let a job's pods do, each with the value of the chart that allows it."""
    spec = job.spec
    pools = {
        "head": spec.head,
        "rollout": None if spec.placement == "colocated" else spec.rollout,
        "trainer": spec.trainer,
        "rewardModel": spec.reward_model,
        "judge": spec.judge,
    }
    for name, pool in pools.items():
        if pool is not None:
            path = f"spec.{name}.pod"
            found = pod_template(path, pool.pod, {}, 0, "any").get("spec")
            if found is not None:
                yield from _of_pod(found, policy)


def _of_pod(pod: Located, policy: PodPolicy) -> Iterator[Violation]:
    for volume in pod.items("volumes"):
        host = volume.get("hostPath")
        if host is not None and not _is_below(host.text("path"), policy.host_paths):
            yield _refused(host.path, f"mounts {host.text('path') or 'a path'} of the node", "hostPaths")
        kinds = {kind for kind, entry in volume.value.items() if entry.value is not None} - {"name"}
        for kind in sorted(kinds - _VOLUMES) if not policy.privileged else ():
            yield _refused(volume.at(kind), f"a volume of kind {kind} reaches beyond the pod", "privileged")
    if not policy.privileged:
        yield from _of_security(pod)
        for container in pod.items("containers"):
            yield from _of_security(container)
            for port in container.items("ports"):
                if port.number("hostPort"):
                    yield _refused(port.at("hostPort"), "takes a port of the node", "privileged")
    account = pod.text("serviceAccountName") or pod.text("serviceAccount")
    if account not in ("", "default", *policy.service_accounts) and "*" not in policy.service_accounts:
        place = "serviceAccountName" if pod.text("serviceAccountName") else "serviceAccount"
        yield _refused(pod.at(place), f"runs the pods as the service account {account}", "serviceAccounts")
    priority = pod.text("priorityClassName")
    if priority.startswith(_SYSTEM) and not policy.system_priority:
        yield _refused(pod.at("priorityClassName"), f"{priority} is for Kubernetes' own pods", "systemPriority")
    for toleration in pod.items("tolerations"):
        if not toleration.text("key") and not policy.tolerate_everything:
            yield _refused(toleration.path, "tolerates every taint, for want of a key", "tolerateEverything")
    grace = pod.number("terminationGracePeriodSeconds")
    if grace is not None and grace > policy.longest_grace_seconds:
        yield _refused(
            pod.at("terminationGracePeriodSeconds"),
            f"keeps a node that is drained waiting for {grace} s, more than {policy.longest_grace_seconds} s",
            "longestGraceSeconds",
        )


def _of_security(of: Located) -> Iterator[Violation]:
    """The security context of a pod or a container."""
    security = of.get("securityContext")
    if security is None:
        return
    for name in ("seccompProfile", "appArmorProfile"):
        profile = security.get(name)
        if profile is not None and profile.text("type") == "Unconfined":
            yield _refused(profile.at("type"), "lets go of what confines the container", "privileged")
    if security.text("procMount") == "Unmasked":
        yield _refused(security.at("procMount"), "lets go of what confines the container", "privileged")
    labels = security.get("seLinuxOptions")
    if labels is not None and labels.text("type") not in _SELINUX:
        yield _refused(labels.at("type"), f"{labels.text('type')} is no type of containers", "privileged")
    if security.flag("privileged"):
        yield _refused(security.at("privileged"), "a privileged container has the whole node", "privileged")
    capabilities = security.get("capabilities")
    for path, name in capabilities.texts("add") if capabilities is not None else ():
        if name.upper().removeprefix("CAP_") not in _CAPABILITIES:
            yield _refused(path, f"the capability {name} reaches beyond the pod", "privileged")


def _is_below(path: str, folders: tuple[str, ...]) -> bool:
    parts = path.split("/")
    return ".." not in parts and any(path.rstrip("/") == f or path.startswith(f"{f}/") for f in map(_bare, folders))


def _bare(folder: str) -> str:
    return folder.rstrip("/")


def _refused(path: str, problem: str, value: str) -> Violation:
    return Violation(
        path,
        f"{problem}, which the operator refuses",
        f"remove it, or allow it by podPolicy.{value} of the operator's chart",
    )
