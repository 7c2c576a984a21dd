"""CEL for the rules about pod settings, volumes and code."""

from __future__ import annotations

from collections.abc import Iterator

from rljob_api.crd import expressions as cel
from rljob_api.crd.checks.check import PODS, SPEC, Check, exactly_one
from rljob_api.crd.structural import Path, text
from rljob_api.pod_template.paths import LEAVES
from rljob_api.rules.pods import RESERVED_DOMAINS
from rljob_api.rules.volumes import NOT_PLAIN, OWN_VOLUMES, RESERVED_MOUNTS, RESERVED_VOLUMES


def checks() -> Iterator[Check]:
    """In the order of the rules."""
    domains = "|".join(domain.replace(".", r"\.") for domain in RESERVED_DOMAINS)
    reserved = text(rf"^([^/]*\.)?({domains})/")
    for pod in PODS:
        variable: Path = (*pod, "env", "[]")
        toleration: Path = (*pod, "tolerations", "[]")
        yield Check(
            "variables_have_one_value",
            variable,
            "!has(self.value) || !has(self.valueFrom)",
            "has value and valueFrom, of which only one can be; keep one of them",
        )
        yield Check(
            "variables_have_one_value",
            (*variable, "valueFrom"),
            exactly_one("self.secretKeyRef", "self.configMapKeyRef", "self.fieldRef"),
            "needs exactly one of secretKeyRef, configMapKeyRef and fieldRef",
        )
        free = f"{cel.one_of(RESERVED_MOUNTS)}.all(p, self.mountPath != p && !self.mountPath.startsWith(p + '/'))"
        yield Check(
            "mount_paths_are_free",
            (*pod, "volumeMounts", "[]"),
            free,
            "is used by rljob or Ray themselves; use another path (for /dev/shm: pod.sharedMemory)",
            ".mountPath",
        )
        yield Check(
            "mount_paths_are_free",
            pod,
            # Equal paths are refused as equal keys of the list; comparing paths takes most of what CEL may cost.
            "!has(self.volumeMounts) || !self.volumeMounts.exists(m, "
            "m.mountPath.endsWith('/') && self.volumeMounts.exists(n, n.mountPath + '/' == m.mountPath))",
            "two volumes are mounted at the same path; use another path",
            ".volumeMounts",
        )
        yield Check(
            "tolerations_are_complete",
            toleration,
            "self.operator != 'Exists' || !has(self.value) || self.value == ''",
            "has no meaning with operator Exists; remove it",
            ".value",
        )
        yield Check(
            "tolerations_are_complete",
            toleration,
            "self.operator != 'Equal' || (has(self.key) && self.key != '')",
            "is required by operator Equal; add it, or use operator: Exists",
            ".key",
        )
        yield Check(
            "tolerations_are_complete",
            toleration,
            "!has(self.tolerationSeconds) || (has(self.effect) && self.effect == 'NoExecute')",
            "has a meaning for effect NoExecute only; set that",
            ".tolerationSeconds",
        )
        yield Check(
            "mount_paths_are_plain",
            (*pod, "volumeMounts", "[]"),
            f"!self.mountPath.matches({text(NOT_PLAIN)})",
            "is no plain absolute path; write it without empty, . and .. parts",
            ".mountPath",
        )
        yield Check(
            "volumes_have_names",
            (*pod, "volumes", "[]"),
            f"!self.name.startsWith({text(OWN_VOLUMES)}) && !({cel.among('self.name', RESERVED_VOLUMES)})",
            "is a name that rljob uses; choose another",
            ".name",
        )
        for kind in ("requests", "limits"):
            yield Check(
                "gpus_are_counted_once",
                pod,
                f"!has(self.resources.{kind}) || !(self.gpuResource in self.resources.{kind})",
                "gpusPerReplica counts GPUs (the head uses none); remove them here",
                f".resources.{kind}",
            )
        for kind in ("labels", "annotations"):
            yield Check(
                "own_labels_have_own_domains",
                pod,
                f"!has(self.{kind}) || self.{kind}.all(k, !k.matches({reserved}))",
                f"the domains {', '.join(RESERVED_DOMAINS)} are reserved; use a domain of your own",
                f".{kind}",
            )
        yield Check(
            "topology_needs_a_queue",
            SPEC,
            f"has(self.queueName) || !has(self.{'.'.join(pod[1:])}.topology)",
            "is Kueue's, but the job has no queue; set spec.queueName, or use affinity",
            f".{'.'.join(pod[1:])}.topology",
        )
    code: Path = ("spec", "code", "[]")
    yield Check(
        "code_has_one_origin", code, "has(self.configMap) != has(self.pvc)", "needs exactly one of configMap and pvc"
    )
    yield Check(
        "code_has_one_origin",
        code,
        "!has(self.path) || has(self.pvc)",
        "has a meaning for pvc only; remove it",
        ".path",
    )
    yield Check(
        "code_stays_in_its_volume",
        code,
        f"!has(self.path) || !self.path.matches({text(LEAVES)})",
        "must be relative and without ..",
        ".path",
    )
    yield Check(
        "code_is_mounted_once",
        SPEC,
        "!has(self.code) || self.code.all(c, self.code.filter(d, d == c).size() == 1)",
        "the same is there twice; keep one of them",
        ".code",
    )
