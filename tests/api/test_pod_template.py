"""What Kubernetes would say of a pod is said before, at the place in the job file where its author wrote it."""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
from pydantic import ValidationError

from rljob_api import check
from rljob_api.pod_template.quantities import parse
from rljob_api.spec.base import IMAGE
from rljob_api.spec.pod import Resources

Make = Callable[..., dict[str, Any]]
POD = "spec.head.pod"
VOLUME = f"{POD}.volumes[0]"
SIDECAR = f"{POD}.template.spec.containers[0]"

BAD = [
    # resources
    ("resources: {requests: {cpu: 2}, limits: {cpu: 1500m}}", f"{POD}.resources.requests.cpu"),
    ("resources: {requests: {example.com/nic: 1}}", f"{POD}.resources.limits"),
    ("resources: {limits: {example.com/nic: 1500m}}", f"{POD}.resources.limits[example.com/nic]"),
    ("resources: {limits: {gpu: 1}}", f"{POD}.resources.limits.gpu"),
    ("resources: {limits: {hugepages-2Mi: 3Mi, memory: 1Gi}}", f"{POD}.resources.limits[hugepages-2Mi]"),
    # volumes and mounts
    ("volumes: [{name: a, emptyDir: {}, hostPath: {path: /}}]", f"{VOLUME}.hostPath"),
    ("volumes: [{name: a, emptyDirs: {}}]", f"{VOLUME}.emptyDirs"),
    ("volumes: [{name: a, configMap: {name: b, items: [{key: k, path: ../k}]}}]", f"{VOLUME}.configMap.items[0].path"),
    ("volumes: [{name: a, secret: {secretName: b, defaultMode: 512}}]", f"{VOLUME}.secret.defaultMode"),
    ("volumes: [{name: a, nfs: {server: b, path: c}}]", f"{VOLUME}.nfs.path"),
    ("volumes: [{name: a, persistentVolumeClaim: {}}]", f"{VOLUME}.persistentVolumeClaim.claimName"),
    ("{volumes: [{name: a}], volumeMounts: [{name: a, mountPath: /a, subPath: ../b}]}",
     f"{POD}.volumeMounts[0].subPath"),
    ("template: {spec: {containers: [{name: ray, volumeMounts: [{name: a, mountPath: /a}]}]}}",
     f"{SIDECAR}.volumeMounts[0].name"),
    # variables
    ("env: [{name: A, valueFrom: {fieldRef: {fieldPath: status.phase}}}]",
     f"{POD}.env[0].valueFrom.fieldRef.fieldPath"),
    ("env: [{name: A, valueFrom: {fieldRef: {fieldPath: \"metadata.labels['a b']\"}}}]",
     f"{POD}.env[0].valueFrom.fieldRef.fieldPath"),
    ("env: [{name: A, valueFrom: {secretKeyRef: {name: b, key: a/b}}}]", f"{POD}.env[0].valueFrom.secretKeyRef.key"),
    # scheduling
    ("affinity: {nodeAffinity: {requiredDuringSchedulingIgnoredDuringExecution: {nodeSelectorTerms: []}}}",
     f"{POD}.affinity.nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution.nodeSelectorTerms"),
    ("affinity: {podAffinity: {preferredDuringSchedulingIgnoredDuringExecution: "
     "[{weight: 101, podAffinityTerm: {topologyKey: zone}}]}}",
     f"{POD}.affinity.podAffinity.preferredDuringSchedulingIgnoredDuringExecution[0].weight"),
    ("topologySpreadConstraints: [{maxSkew: 0, topologyKey: zone, whenUnsatisfiable: DoNotSchedule}]",
     f"{POD}.topologySpreadConstraints[0].maxSkew"),
    ("topologySpreadConstraints: [{maxSkew: 1, topologyKey: zone, whenUnsatisfiable: Never}]",
     f"{POD}.topologySpreadConstraints[0].whenUnsatisfiable"),
    # the template
    ("template: {spec: {hostName: a}}", f"{POD}.template.spec.hostName"),
    ("template: {spec: {priority: high}}", f"{POD}.template.spec.priority"),
    ("template: {spec: {dnsPolicy: None}}", f"{POD}.template.spec.dnsPolicy"),
    ("template: {spec: {securityContext: {runAsUser: -1}}}", f"{POD}.template.spec.securityContext.runAsUser"),
    ("template: {spec: {containers: [{name: ray, securityContext: {privileged: true}}]}}",
     f"{SIDECAR}.securityContext.privileged"),
    ("template: {spec: {containers: [{name: b}]}}", f"{SIDECAR}.image"),
    ("template: {spec: {containers: [{name: b, image: c, livenessProbe: {httpGet: {port: 0}}}]}}",
     f"{SIDECAR}.livenessProbe.httpGet.port"),
]  # fmt: skip


@pytest.mark.parametrize(("pod", "path"), BAD, ids=[path.removeprefix(f"{POD}.") for _, path in BAD])
def test_what_kubernetes_refuses_is_refused_where_it_is_written(document: Make, pod: str, path: str) -> None:
    _, violations = check(document(f"spec: {{head: {{pod: {pod if pod.startswith('{') else f'{{{pod}}}'}}}}}"))
    assert [violation.path for violation in violations] == [path]


def test_a_template_is_judged_together_with_what_it_is_laid_over(document: Make) -> None:
    limited = "resources: {limits: {cpu: 1}}"
    asking = "template: {spec: {containers: [{name: ray, resources: {requests: {cpu: %s}}}]}}"
    _, violations = check(document(f"spec: {{head: {{pod: {{{limited}, {asking % 1}}}}}}}"))
    assert violations == []
    _, violations = check(document(f"spec: {{head: {{pod: {{{limited}, {asking % 2}}}}}}}"))
    assert [violation.path for violation in violations] == [f"{SIDECAR}.resources.requests.cpu"]


def test_settings_of_pods_that_a_job_does_not_have_are_not_judged(document: Make) -> None:
    unused = "spec: {placement: colocated, rollout: {pod: {affinity: {nodeAffinty: {}}}}}"
    _, violations = check(document(unused))
    assert violations == []
    _, violations = check(document(unused.replace("colocated", "separate")))
    assert [violation.path for violation in violations] == ["spec.rollout.pod.affinity.nodeAffinty"]


def test_an_entry_that_is_null_counts_as_absent(document: Make) -> None:
    data = document()
    data["spec"]["rollout"] = {"env": {"A": None, "B": "b"}}
    data["spec"]["head"] = {"pod": {"labels": {"a": None}, "resources": {"limits": {"cpu": None}}}}
    job, violations = check(data)
    assert violations == []
    assert job is not None
    assert (job.spec.rollout.env, job.spec.head.pod.labels, job.spec.head.pod.resources.limits) == ({"B": "b"}, {}, {})


@pytest.mark.parametrize(
    ("text", "value"),
    [("4", 4), (4, 4), ("500m", Fraction(1, 2)), ("1.5Gi", 1610612736), ("2e3", 2000), ("-1k", -1000),
     (".5", Fraction(1, 2)),
     ("1E", 10**18), ("+3u", Fraction(3, 10**6))],
)  # fmt: skip
def test_quantities_are_exact(text: Any, value: Any) -> None:
    assert parse(text) == value


@pytest.mark.parametrize("text", ["1e9223372036854775808", "1E-99999999999999999999"])
def test_an_exponent_that_kubernetes_cannot_read_makes_no_quantity(text: str) -> None:
    with pytest.raises(ValueError, match="is not a Kubernetes quantity"):
        parse(text)
    with pytest.raises(ValidationError):
        Resources.model_validate({"limits": {"cpu": text}})


@pytest.mark.parametrize(
    ("image", "taken"),
    [
        ("busybox", True),
        ("library/busybox:1.36.1-glibc", True),
        ("localhost:5000/a/b_c__d-e.f:Tag_1", True),
        ("[2001:db8::1]:5000/a", True),
        ("a@sha256:" + "0" * 64, True),
        ("Example.COM/a:1@sha512:" + "f" * 128, True),
        ("", False),
        ("A", False),
        ("a b", False),
        (" a", False),
        ("a:b:c", False),
        ("a//b", False),
        ("a/B", False),
        ("a:", False),
        ("a:" + "x" * 129, False),
        ("a@sha256:" + "0" * 63, False),
        ("a@md5:" + "0" * 32, False),
        ("-a", False),
        ("https://example.com/a", False),
    ],
)
def test_images_are_references_as_distribution_defines_them(image: str, taken: bool) -> None:
    assert bool(re.fullmatch(IMAGE[1:-1], image)) is taken


def test_what_stands_beside_a_mount_that_cannot_be_read_is_judged_too(document: Make) -> None:
    """Of the volumes one cannot be read either, so nobody can say whether there is one that is mounted."""
    data = document("spec: {head: {pod: {volumes: [{name: a.b}]}}}")
    mounts: list[tuple[dict[str, str], list[str]]] = [
        ({}, ["name", "mountPath"]),
        ({"name": "a", "mountPath": "a"}, ["mountPath"]),
    ]
    for mount, paths in mounts:
        data["spec"]["head"]["pod"]["volumeMounts"] = [mount]
        _, violations = check(data)
        wrong = [f"{POD}.volumeMounts[0].{name}" for name in paths]
        assert {violation.path for violation in violations} == {*wrong, f"{VOLUME}.name"}
