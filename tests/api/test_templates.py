"""A pod template is somebody else's schema: what is said of a wrong shape is a sentence, not a traceback."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from rljob_api import check

Make = Callable[..., dict[str, Any]]

NOT_A_MAP: tuple[Any, ...] = (None, 3, "x", True, [], [{"a": "b"}])
NOT_A_LIST: tuple[Any, ...] = (None, 3, 1.5, "x", True, {}, {"a": "b"})
NO_NAME: tuple[Any, ...] = (None, 3, "x", [], {}, {"name": None}, {"name": ""}, {"name": 3}, {"name": ["x"]})


def container(**fields: Any) -> dict[str, Any]:
    return {"spec": {"containers": [{"name": "ray", **fields}]}}


CASES: list[tuple[dict[str, Any], str]] = [
    *(({"metadata": value}, "metadata") for value in NOT_A_MAP),
    *(({"metadata": {"labels": value}}, "metadata.labels") for value in NOT_A_MAP),
    *(({"metadata": {"annotations": value}}, "metadata.annotations") for value in NOT_A_MAP),
    *(({"metadata": {"labels": {"a": value}}}, "metadata.labels.a") for value in (3, True, {}, [])),
    *(({"spec": value}, "spec") for value in NOT_A_MAP),
    *(({"spec": {"containers": value}}, "spec.containers") for value in NOT_A_LIST),
    *(({"spec": {"volumes": value}}, "spec.volumes") for value in NOT_A_LIST),
    *(({"spec": {"tolerations": value}}, "spec.tolerations") for value in NOT_A_LIST),
    *(({"spec": {"imagePullSecrets": value}}, "spec.imagePullSecrets") for value in NOT_A_LIST),
    *(({"spec": {"containers": [value]}}, "spec.containers[0]") for value in NO_NAME),
    *(({"spec": {"volumes": [value]}}, "spec.volumes[0]") for value in NO_NAME),
    *(({"spec": {"imagePullSecrets": [value]}}, "spec.imagePullSecrets[0]") for value in NO_NAME),
    *((container(env=value), "spec.containers[0].env") for value in NOT_A_LIST),
    *((container(env=[value]), "spec.containers[0].env[0]") for value in NO_NAME),
    *((container(volumeMounts=value), "spec.containers[0].volumeMounts") for value in NOT_A_LIST),
    *((container(volumeMounts=[value]), "spec.containers[0].volumeMounts[0]") for value in NO_NAME),
    *((container(volumeMounts=[{"mountPath": v}]), "spec.containers[0].volumeMounts[0]") for v in (None, 3, [])),
    *((container(resources=value), "spec.containers[0].resources") for value in NOT_A_MAP),
    *((container(resources={"limits": value}), "spec.containers[0].resources.limits") for value in NOT_A_MAP),
]


@pytest.mark.parametrize(("template", "path"), CASES, ids=[str(case[0]) for case in CASES])
def test_a_wrong_shape_is_named(document: Make, template: dict[str, Any], path: str) -> None:
    job = document()
    job["spec"]["trainer"] = {"pod": {"template": template}}
    _, violations = check(job)
    assert [violation.path for violation in violations] == [f"spec.trainer.pod.template.{path}"]
    assert violations[0].remedy


@pytest.mark.parametrize("name", ["worker", "head", "ray-worker"])
def test_a_container_that_is_meant_to_be_rays_is_told_its_name(document: Make, name: str) -> None:
    job = document()
    said = f'is required: "{name}" is a sidecar, since the container that Ray runs in is named ray'
    path = "spec.trainer.pod.template.spec.containers[0].image"
    for image in ({}, {"image": "a"}):
        container = {"name": name, "resources": {"limits": {"cpu": 1}}, **image}
        job["spec"]["trainer"] = {"pod": {"template": {"spec": {"containers": [container]}}}}
        _, violations = check(job)
        told = [] if image else [f"{path}: {said}; add it, or name the container ray"]
        assert [str(violation) for violation in violations] == told


@pytest.mark.parametrize("name", [None, 3, [], ["a"], {"a": "b"}])
def test_a_volume_that_is_named_by_something_else_than_text(document: Make, name: Any) -> None:
    job = document()
    mounts = [{"name": "a", "mountPath": "/a"}]
    job["spec"]["head"] = {"pod": {"volumes": [{"name": name}], "volumeMounts": mounts}}
    _, violations = check(job)
    assert {violation.path for violation in violations} == {
        "spec.head.pod.volumes[0].name",
        "spec.head.pod.volumeMounts[0].name",
    }


@pytest.mark.parametrize(
    ("projected", "below"),
    [(3, ""), ("x", ""), ([], ""), ({"sources": "x"}, ".sources"), ({"sources": [3]}, ".sources[0]")],
)
def test_the_shape_of_a_volumes_kind_is_judged(document: Make, projected: Any, below: str) -> None:
    job = document()
    job["spec"]["head"] = {"pod": {"template": {"spec": {"volumes": [{"name": "a", "projected": projected}]}}}}
    _, violations = check(job)
    path = f"spec.head.pod.template.spec.volumes[0].projected{below}"
    assert [violation.path for violation in violations] == [path]


@pytest.mark.parametrize("projected", [None, {"sources": None}])
def test_what_is_null_in_a_volume_counts_as_absent(document: Make, projected: Any) -> None:
    job = document()
    job["spec"]["head"] = {"pod": {"volumes": [{"name": "a", "projected": projected}]}}
    assert check(job)[1] == []
