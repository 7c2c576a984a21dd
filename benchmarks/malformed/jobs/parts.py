"""Sound jobs, put together by chance from the parts in ``parts.yaml``: kinds of training, and what a pod may hold."""

from __future__ import annotations

import copy
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

Document = dict[str, Any]

_PARTS: Document = yaml.safe_load(Path(__file__).with_name("parts.yaml").read_text())


def sound_job(dice: random.Random) -> Document:
    """A job with nothing wrong in it, or so it is meant."""
    spec = copy.deepcopy(_PARTS["whole"])
    for kind in dice.sample(_PARTS["kinds"], dice.choice([1, 2, 3])):
        _lay_over(spec, copy.deepcopy(kind))
    for role in ("rollout", "trainer", "head"):
        if dice.random() < 0.6:
            spec.setdefault(role, {})["pod"] = _pod(dice)
    return {
        "apiVersion": "rljob.dev/v1alpha1",
        "kind": "RLJob",
        "metadata": {"name": "tiny", "namespace": "default", "labels": {"team": "rl"}},
        "spec": spec,
    }


def _pod(dice: random.Random) -> Document:
    """Pod settings, often with volumes, sometimes with a template."""
    pod = _some(_PARTS["settings"], dice, 3)
    if dice.random() < 0.5:
        sources = dice.sample(_PARTS["volumes"], dice.choice([1, 2]))
        pod["volumes"] = [
            {"name": name, **copy.deepcopy(source)} for name, source in zip(("scratch", "more"), sources, strict=False)
        ]
        pod["volumeMounts"] = [
            {"name": volume["name"], "mountPath": path, **dice.choice(({}, {"readOnly": True}, {"subPath": "a/b"}))}
            for volume, path in zip(pod["volumes"], ("/scratch", "/more/data"), strict=False)
        ]
    if dice.random() < 0.5:
        pod["template"] = _template(dice, "volumes" in pod)
    return pod


def _template(dice: random.Random, has_volumes: bool) -> Document:
    spec = _some(_PARTS["pod"], dice, 2)
    containers = []
    if dice.random() < 0.5:
        containers.append({"name": "ray", **_some(_PARTS["ray"], dice, 2)})
    if dice.random() < 0.4:
        containers.append({"name": "beside", "image": "busybox:1", **_some(_PARTS["sidecar"], dice, 3)})
    for container in containers:
        if not has_volumes:
            container.pop("volumeMounts", None)
    if containers:
        spec["containers"] = containers
    template: Document = {"spec": spec}
    if dice.random() < 0.3:
        template["metadata"] = {"labels": {"from": "template"}, "annotations": {"example.com/from": "template"}}
    return template


def _some(choices: Mapping[str, Sequence[Any]], dice: random.Random, most: int) -> Document:
    names = dice.sample(sorted(choices), dice.randint(1, most))
    return {name: copy.deepcopy(dice.choice(choices[name])) for name in names}


def _lay_over(base: Document, more: Document) -> None:
    for name, value in more.items():
        if isinstance(value, dict) and isinstance(base.get(name), dict):
            _lay_over(base[name], value)
        elif value is None:
            base.pop(name, None)
        else:
            base[name] = value
