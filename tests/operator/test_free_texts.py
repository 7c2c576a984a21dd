"""No text of a job file gets near a shell: it is data, or the job is refused."""

from __future__ import annotations

import copy
import json
import shlex
from collections.abc import Iterator, Sequence
from functools import reduce
from typing import Annotated, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import Field, TypeAdapter, ValidationError
from simulation import SETTINGS, job_spec

from rljob_api import Violation, check, resolve, schema
from rljob_api.overrides import merged
from rljob_operator import names, objects
from rljob_operator.entrypoint import driver_command

MARK = "zmark"
"""Stands for any text; it occurs nowhere else."""
NAME = "yname"
"""Stands where a text would not be taken for a name, and the job be refused."""
HOSTILE = (
    *("; rm -rf /tmp/x", "$(id)", "`id`", "a\nid\n", "'", '"', "' ; id #", '" && id "', "|id", "&id", ">x", "$HOME"),
    *("$(RAY_AUTH_TOKEN)", "${IFS}id", "--address=x", "%s{a}", "\u2028id", "\t", "é", "a\rid", "!!", "~root", "a*"),
)
POD: dict[str, Any] = {
    "tolerations": [{"key": MARK, "operator": "Exists"}],
    "affinity": {
        "podAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": [
                {"topologyKey": MARK, "labelSelector": {"matchLabels": {"x": MARK}}}
            ]
        }
    },
    "topologySpreadConstraints": [{"topologyKey": MARK, "maxSkew": 1, "whenUnsatisfiable": "ScheduleAnyway"}],
    "topology": {"mode": "required", "level": MARK},
    "env": [
        {"name": "A", "value": MARK},
        {"name": "B", "valueFrom": {"secretKeyRef": {"name": "s", "key": MARK}}},
        {"name": "C", "valueFrom": {"configMapKeyRef": {"name": "s", "key": MARK}}},
        {"name": "D", "valueFrom": {"fieldRef": {"fieldPath": f"metadata.labels['{MARK}']"}}},
        {"name": "PYTHONPATH", "value": MARK},
    ],
    "volumes": [{"name": "a", "hostPath": {"path": MARK}}],
    "volumeMounts": [{"name": "a", "mountPath": f"/a/x{MARK}", "subPath": MARK}],
    "annotations": {"example.com/a": MARK},
    "template": {"metadata": {"annotations": {"example.com/b": MARK}}, "spec": {"hostname": MARK}},
}
GYM_TASK = {"type": "reasoningGym", "name": "a", "size": 9, "python": MARK, "config": {MARK: [MARK]}}
SPEC: dict[str, Any] = {
    "image": MARK,
    "model": {"source": MARK, "revision": MARK, "tokenizer": MARK, "chatTemplate": MARK},
    "data": {
        "train": {"source": MARK, "split": MARK},
        "validation": [{"name": "v", "source": MARK, "split": MARK}],
        "answer": MARK,
        "prompt": MARK,
        "systemPrompt": MARK,
    },
    "reward": {
        "functions": [
            {"type": "custom", "function": "my.rewards:score", "params": {MARK: [MARK]}},
            {"type": "pattern", "pattern": MARK},
        ]
    },
    "rollout": {"engineArgs": {"download_dir": MARK}, "env": {"E": MARK}, "pod": POD},
    "trainer": {"env": {"E": MARK}, "pod": POD},
    "head": {"pod": POD},
    "checkpoint": {"uri": MARK},
    "restore": {"from": MARK},
    "logging": {
        "wandb": {"project": MARK, "entity": MARK, "name": MARK},
        "mlflow": {"experiment": MARK, "trackingUri": MARK},
    },
    "queueName": "q",
    "code": [{"pvc": "code", "path": MARK}],
}
JUDGE: dict[str, Any] = {
    "baseUrl": "http://judge/v1",
    "model": MARK,
    "template": f"{{response}} {MARK}",
    "system": MARK,
}
LAYERS: list[dict[str, Any]] = [
    {},
    {"model": {"source": f"pvc://claim/{MARK}"}, "checkpoint": {"uri": f"pvc://claim/{MARK}"}},
    {
        "data": {
            "train": {
                "source": None,
                "split": None,
                "sourceColumn": MARK,
                "parts": [{"name": "p", "source": MARK, "split": MARK, "prompt": MARK, "answer": MARK}],
            }
        }
    },
    {
        "model": {
            **dict.fromkeys(SPEC["model"]),
            "random": {
                "tokenizer": {"source": MARK},
                "contextLength": 4096,
                "hiddenSize": 64,
                "heads": 1,
                "kvHeads": 1,
            },
        }
    },
    {
        "reward": {
            "functions": [
                {"type": "judge", "name": kind, "judge": {**JUDGE, "parser": {"type": kind, **parser}}}
                for kind, parser in (
                    ("pattern", {"pattern": f"({MARK})"}),
                    ("json", {"field": MARK}),
                    ("label", {"labels": [{"label": f"x{MARK}x", "score": 1}]}),
                )
            ]
        }
    },
    {
        "reward": {
            "functions": [
                {"type": "rewardModel", "name": name, "rewardModel": {"source": source, "revision": MARK}}
                for name, source in (("hub", MARK), ("volume", f"pvc://claim/{MARK}"))
            ]
        },
        "rewardModel": {"env": {"E": MARK}, "pod": POD},
    },
    *(
        {
            "reward": {"functions": [{"type": "judge", "judge": {"template": f"{{response}} {MARK}", "system": MARK}}]},
            "judge": {
                "model": {"source": source, "revision": MARK, "chatTemplate": MARK},
                "engineArgs": {"hf_overrides": {MARK: MARK}},
                "env": {"E": MARK},
                "pod": POD,
            },
        }
        for source in (MARK, f"pvc://claim/{MARK}")
    ),
    *(
        {"algorithm": {"preset": "ppo", "critic": {"model": {"source": source, "revision": MARK}}}}
        for source in (MARK, f"pvc://claim/{MARK}")
    ),
    {"rollout": {"environment": {"type": "tools", "tools": [{"type": "calculator", "description": MARK}]}}},
    *(
        {
            "rollout": {
                "environment": {
                    "type": "tools",
                    "tools": [
                        {
                            "type": "search",
                            "description": MARK,
                            "corpus": {"source": source, "split": MARK, "text": MARK, "title": MARK},
                        }
                    ],
                }
            }
        }
        for source in (MARK, f"pvc://claim/{MARK}")
    ),
    *(
        {
            "data": {
                "train": {"source": None, "split": None, **train},
                "validation": [{"name": "v", "source": None, "split": None, "task": GYM_TASK}],
                "answer": "answer",
                "prompt": "question",
            },
            "reward": {"functions": [{"type": "reasoningGym", "params": {"tag": MARK}}]},
        }
        for train in ({"task": GYM_TASK}, {"parts": [{"name": "p", "task": GYM_TASK}]})
    ),
]
"""Further settings, for texts that can't be in one job with all others."""
IS_DATA = ("image", "value", "key", "fieldPath", "path", "subPath", "mountPath", "topologyKey", "hostname", "x")
"""Fields of a RayCluster that hold such a text: none is a command, an argument or a parameter of `ray start`."""
HAVE_A_FORM = {
    *("image", "key", "fieldPath", "path", "subPath", "mountPath", "topologyKey", "level", "hostname", "x"),
    *("template", "pattern"),
}
"""Fields of a job that Kubernetes gives a form, or we: names in braces, one group. What has none is carried as it is.
"""


def laid_in(value: Any, text: str) -> Any:
    """The same with the text in the mark's place."""
    if isinstance(value, dict):
        return {key.replace(MARK, text): laid_in(item, text) for key, item in value.items()}
    if isinstance(value, list):
        return [laid_in(item, text) for item in value]
    return value.replace(MARK, text) if isinstance(value, str) else value


def leaves(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from leaves(item, (*path, key))
    elif isinstance(value, list):
        for item in value:
            yield from leaves(item, (*path, "[]"))
    else:
        yield path, value


def spec_with(layer: dict[str, Any], text: str) -> dict[str, Any]:
    whole: dict[str, Any] = reduce(merged, [job_spec(), SPEC, layer])
    return laid_in(copy.deepcopy(whole), text)


def checked(spec: dict[str, Any]) -> tuple[Any, list[Violation]]:
    return check({"apiVersion": "rljob.dev/v1alpha1", "kind": "RLJob", "metadata": {"name": "job"}, "spec": spec})


def named(value: Any, refused: Sequence[str], path: str = "spec") -> Any:
    """The same with a name in place of each mark that one of the refused paths leads to."""
    if isinstance(value, dict):
        return {key: named(item, refused, f"{path}.{key}") for key, item in value.items()}
    if isinstance(value, list):
        return [named(item, refused, f"{path}[{index}]") for index, item in enumerate(value)]
    if not isinstance(value, str) or MARK not in value or not path.startswith(tuple(refused)):
        return value
    assert path.rpartition(".")[2] in HAVE_A_FORM, f"{path} is refused"
    return value.replace(MARK, NAME)


def taken(layer: dict[str, Any], text: str) -> dict[str, Any]:
    """The spec with marks wherever the text is taken; where it is refused, which the job is told, with a name."""
    marked = spec_with(layer, MARK)
    _, violations = checked(laid_in(marked, text))
    return named(marked, [violation.path for violation in violations]) if violations else marked


def made(spec: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """RayCluster and job file."""
    job, violations = checked(spec)
    assert violations == []
    assert job is not None
    cluster = objects.ray_cluster(resolve(job), "hash", "uid", 1, 1, "key", SETTINGS)
    # A digest of all texts, which changes with each.
    cluster["metadata"]["annotations"].pop(names.MADE_AS_ANNOTATION)
    carried = objects.config_map(resolve(job), job.spec.document(), "uid", 1)["data"]["job.json"]
    return cluster, json.loads(carried)


def is_carried(layer: dict[str, Any], text: str) -> bool:
    """Verbatim, wherever it is taken, and nothing else is changed by it."""
    marked = taken(layer, text)
    return made(laid_in(marked, text)) == tuple(laid_in(part, text) for part in made(marked))


@pytest.mark.parametrize("layer", LAYERS, ids=range(len(LAYERS)))
@pytest.mark.parametrize("text", HOSTILE)
def test_a_text_is_carried_verbatim_and_changes_nothing_else(layer: dict[str, Any], text: str) -> None:
    assert is_carried(layer, text)


@settings(max_examples=100, deadline=None)
@given(st.text(st.characters(codec="utf-8", exclude_characters="\0/:{}()[]*+?\\|"), min_size=1, max_size=40))
def test_any_text_is(text: str) -> None:
    assert is_carried({}, text)


@pytest.mark.parametrize("layer", LAYERS, ids=range(len(LAYERS)))
def test_no_text_of_a_job_is_in_a_command(layer: dict[str, Any]) -> None:
    cluster, _ = made(spec_with(layer, MARK))
    places = {path for path, value in leaves(cluster) if MARK in str(value)}
    assert places
    assert not {path for path in places if path[-1] not in IS_DATA and "annotations" not in path}
    assert not {path for path, _ in leaves(cluster) if {"command", "args", "lifecycle", "exec"} & set(path)}
    params = [cluster["spec"]["headGroupSpec"]["rayStartParams"]]
    params += [group["rayStartParams"] for group in cluster["spec"]["workerGroupSpecs"]]
    ours = {"num-cpus": "0", "no-monitor": "true", "include-log-monitor": "0"}
    assert all(given.items() <= ours.items() for given in params)


def test_the_drivers_command_is_made_of_numbers() -> None:
    assert shlex.split(driver_command(3, 7)) == [
        *("rljob", "drive", "/etc/rljob/job/job.json", "--attempt", "3", "--generation", "7"),
        *("--token-file", "/etc/rljob/tokens/driver_token", "--mirror-log", "/proc/1/fd/1"),
    ]


def test_every_field_that_takes_any_text_was_asked() -> None:
    free = {path for path, node in schema.walk() if node.kind == "string" and not node.pattern and not node.choices}
    # A tokenizer of single characters has no room for a text, and is in the job file only.
    free -= {"spec.model.random.tokenizer.characters"}
    asked = {
        ".".join(part for part in ("spec", *path) if part != "[]")
        for layer in LAYERS
        for path, value in leaves(spec_with(layer, MARK))
        if MARK in str(value)
    }
    assert {path for path in free if path.startswith("spec.")} <= asked


NAMED = {
    path: node.pattern
    for path, node in schema.walk()
    if path.startswith("spec.") and node.kind == "string" and node.pattern and not path.endswith("mountPath")
}


@pytest.mark.parametrize("pattern", sorted(set(NAMED.values())))
def test_a_name_cannot_be_hostile(pattern: str) -> None:
    name = TypeAdapter(Annotated[str, Field(pattern=pattern)])
    for text in HOSTILE:
        for hostile in (text, f"a{text}a", f"a{text}"):
            with pytest.raises(ValidationError):
                name.validate_python(hostile)
