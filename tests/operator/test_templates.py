"""Whatever pod template a job may have, its pods stay part of its cluster."""

from __future__ import annotations

from functools import reduce
from typing import Any

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st
from simulation import SETTINGS, job_spec

from rljob_api import check, resolve
from rljob_operator import kuberay_limits, objects

WRONG: tuple[Any, ...] = (
    *(None, 3, 1.5, True, "x", [], {}, [None], [3], ["x"], {"a": "b"}, [{}], [[]]),
    *([{"name": None}], [{"name": ["x"]}], [{"name": {}}], [{"mountPath": 3}], {"name": "ray"}),
)
VOLUMES = ("a", "rljob-tokens", "rljob-shm", "shared-mem")
PATHS = (
    *("/a", "/a/", "/dev/shm", "/dev/shm/", "/dev/./shm", "/etc/rljob/tokens", "/etc/rljob/job/", "/tmp/ray/x"),
    *("/opt/rljob/code/0", "/mnt/rljob/c", "/var/run/secrets/x", "/run/secrets/x"),
)
LABELS = ("a", "example.com/a", "rljob.dev/job", "ray.io/cluster", "app.kubernetes.io/instance")
VARIABLES = ("A", "RAY_AUTH_MODE", "RLJOB_NAME", "PYTHONPATH", "RANK")
POD_FIELDS = ("restartPolicy", "automountServiceAccountToken", "hostNetwork", "nodeName", "shareProcessNamespace")
CONTAINER_FIELDS = ("command", "args", "ports", "lifecycle", "livenessProbe", "startupProbe")


def ray(**fields: Any) -> dict[str, Any]:
    return {"spec": {"containers": [{"name": "ray", **fields}]}}


def sidecar(**fields: Any) -> dict[str, Any]:
    return {"spec": {"containers": [{"name": "sidecar", "image": "x", **fields}]}}


RIGHT: list[dict[str, Any]] = [
    *({"metadata": {kind: {name: "x"}}} for kind in ("labels", "annotations") for name in LABELS),
    *({"metadata": {name: "x"}} for name in ("name", "namespace", "finalizers")),
    *({"spec": {name: "x"}} for name in (*POD_FIELDS, "hostname", "dnsPolicy")),
    *({"spec": {"volumes": [{"name": name, "emptyDir": {}}]}} for name in VOLUMES),
    *({"spec": {name: [{"name": "x"}]}} for name in ("imagePullSecrets", "tolerations")),
    *(ray(**{name: "x"}) for name in (*CONTAINER_FIELDS, "image", "workingDir")),
    *(ray(env=[{"name": name, "value": "x"}]) for name in VARIABLES),
    *(ray(volumeMounts=[{"mountPath": path, "name": name}]) for path in PATHS for name in VOLUMES[:2]),
    *(ray(volumeMounts=[{"mountPath": path, "readOnly": False}]) for path in PATHS),
    *(sidecar(volumeMounts=[{"mountPath": "/a", "name": name}]) for name in VOLUMES),
    *(ray(resources={kind: {"nvidia.com/gpu": "1"}}) for kind in ("requests", "limits")),
]
MALFORMED: list[dict[str, Any]] = [
    made
    for wrong in WRONG
    for made in (
        *({name: wrong} for name in ("metadata", "spec", "status")),
        *({"metadata": {name: wrong}} for name in ("labels", "annotations")),
        *({"metadata": {name: {"a": wrong}}} for name in ("labels", "annotations")),
        *({"spec": {name: wrong}} for name in ("containers", "volumes", "tolerations", "imagePullSecrets")),
        *({"spec": {"volumes": [{"name": "a", name: wrong}]}} for name in ("projected", "secret")),
        *(ray(**{name: wrong}) for name in ("env", "volumeMounts", "resources")),
        ray(resources={"limits": wrong}),
        {"spec": {"containers": [{"name": wrong}]}},
    )
]


def together(one: Any, other: Any) -> Any:
    """Both templates in one: maps by key, lists one after the other."""
    if isinstance(one, dict) and isinstance(other, dict):
        return {**one, **{key: together(one[key], value) if key in one else value for key, value in other.items()}}
    return [*one, *other] if isinstance(one, list) and isinstance(other, list) else other


def job(template: dict[str, Any]) -> dict[str, Any]:
    spec = job_spec(
        head={"pod": {"template": template}},
        trainer={"gpusPerReplica": 4, "pod": {"template": template}},
        checkpoint={"uri": "pvc://c/x"},
        code=[{"configMap": "rewards"}],
    )
    return {"apiVersion": "rljob.dev/v1alpha1", "kind": "RLJob", "metadata": {"name": "job"}, "spec": spec}


def pods(template: dict[str, Any]) -> list[dict[str, Any]] | None:
    """The templates of head and trainer; None: the job is refused."""
    read, violations = check(job(template))
    if violations:
        return None
    assert read is not None
    cluster = objects.ray_cluster(resolve(read), "hash", "uid", 1, 1, "key", SETTINGS)
    kuberay_limits.problems(cluster)
    spec = cluster["spec"]
    return [spec["headGroupSpec"]["template"], spec["workerGroupSpecs"][1]["template"]]


def ours(pod: dict[str, Any]) -> dict[str, Any]:
    """What makes a pod part of its cluster."""
    spec, container = pod["spec"], pod["spec"]["containers"][0]
    labels, annotations = pod["metadata"]["labels"], pod["metadata"]["annotations"]
    mounts = [mount for other in spec["containers"][1:] for mount in other.get("volumeMounts", ())]
    return {
        "parts": (set(pod), set(pod["metadata"])),
        "labels": {name: value for name, value in labels.items() if "/" in name and name != "example.com/a"},
        "annotations": {name: value for name, value in annotations.items() if name in LABELS[2:4]},
        "pod": {name: spec.get(name) for name in POD_FIELDS},
        "container": {name: container.get(name) for name in ("name", *CONTAINER_FIELDS)},
        "env": [item for item in container["env"] if item["name"] != "A"],
        "gpus": [container["resources"].get(kind, {}).get("nvidia.com/gpu") for kind in ("requests", "limits")],
        "volumes": [item for item in spec["volumes"] if item["name"] != "a"],
        "mounts": [item for item in container["volumeMounts"] if item["mountPath"].rstrip("/") != "/a"],
        "mounts of ours by sidecars": [mount for mount in mounts if mount["name"].startswith("rljob-")],
    }


AS_WITHOUT = [ours(pod) for pod in pods({}) or ()]


def test_a_template_is_refused_or_leaves_ours_alone() -> None:
    for template in [*RIGHT, *MALFORMED]:
        made = pods(template)
        assert made is None or [ours(pod) for pod in made] == AS_WITHOUT, template


HARMLESS = [template for template in (*RIGHT, *MALFORMED) if pods(template) is not None]


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(HARMLESS), min_size=2, max_size=6))
def test_what_is_harmless_alone_is_harmless_together(parts: list[dict[str, Any]]) -> None:
    made = pods(reduce(together, parts))
    event("refused" if made is None else "accepted")
    assert made is None or [ours(pod) for pod in made] == AS_WITHOUT


def test_what_a_template_is_for_is_let_through() -> None:
    other = {
        "name": "sidecar",
        "image": "x",
        "env": [{"name": "RAY_X"}],
        "volumeMounts": [{"name": "a", "mountPath": "/a"}],
    }
    main = {"name": "ray", "env": [{"name": "A", "value": "x"}], "volumeMounts": [{"name": "a", "mountPath": "/a"}]}
    spec = {"containers": [other, main], "volumes": [{"name": "a", "emptyDir": {}}], "hostUsers": False}
    head, trainer = pods({"metadata": {"annotations": {"example.com/a": "b"}}, "spec": spec}) or pytest.fail("refused")
    assert [ours(head), ours(trainer)] == AS_WITHOUT
    assert head["spec"]["containers"][1] == other
    assert {"name": "A", "value": "x"} in trainer["spec"]["containers"][0]["env"]
    assert trainer["spec"]["volumes"][-1] == {"name": "a", "emptyDir": {}}
    assert trainer["spec"]["hostUsers"] is False
    assert trainer["metadata"]["annotations"]["example.com/a"] == "b"
