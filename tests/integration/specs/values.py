"""Values for one field of the job file: good ones, within its type and bounds, and bad ones just outside."""

from __future__ import annotations

import random
import re
from typing import Any

from rljob_api.schema import Node

TEXTS = (
    *("a", "abc", "my-name", "x1", "train", "tiny.jsonl", "org/model", "main", "q", "rack", "A", "FOO", "GPU_COUNT"),
    *("my_rewards:score", "pkg.mod:fn", "/data", "/data/", "/mnt/x", "example.com/team", "cpu", "memory"),
    *("nvidia.com/gpu", "4", "500m", "16Gi", "1.5", "2e3", "s3://bucket/x", "pvc://claim/x", "hf://org/data:en"),
    *("question", "Add: {question}", "answer", "[0-9]+", "topology.kubernetes.io/zone", "x" * 40, "x" * 63, "é" * 20),
    *("http://judge.team-a.svc:8000/v1", "http://[::1]:65535", "Judge {response}", "(a|b)"),
)
"""What a pattern lets through is taken from here."""
TROUBLE = (
    *("RAY_ADDRESS", "RLJOB_X", "RANK", "/dev/shm", "/dev/shm/x", "/tmp/ray", "/etc/rljob/job", "/var/run/secrets/a"),
    *("ray.io/cluster", "rljob.dev/job", "sub.rljob.dev/x", "kueue.x-k8s.io/queue-name", "pvc://", "pvc:///x"),
    *("pvc://Claim/x", "pvc://claim/../x", "pvc://claim", "pvc://a..b/x", "ftp://host/x", "S3://b/x", "file:///x"),
    *("rljob-job", "gs+x://y", "../x", "pvc://claim/..", "pvc://claim/a..b"),
)
"""Well-formed, but several rules look at them."""
MALFORMED = (
    *("", " ", "-a", "a-", "A B", "a\n", "\na", "a b", "é", "a/b/c", ":x", "x:", "a:b:c", "a..b", ".a", "a.", "_"),
    *("relative/path", "/a:b", "1A", "a=b", "１２", "x" * 64, "x" * 254, "x" * 318, "y" * 1025, "z" * 17000),
    *("Foo.com/x", "foo..com/x", "-1", "1 Gi", "1gi", "0x10", "+5", "-5", "1e", "1Ki5", "🙂"),
    *("http://user:key@host/v1", "https://host/v1?key=x", "http://", "http://host:70000/v1"),
    *("http://host:0", "http://[::1/v1", "http://::1"),
)
FREE: dict[str, tuple[Any, ...]] = {
    "affinity": ({"nodeAffinity": {}}, {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": []}}),
    "topologySpreadConstraints": ({"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"},),
    "volumes": (
        {"name": "a", "emptyDir": {}},
        {"name": "my-name", "hostPath": {"path": "/x"}},
        {"name": "rljob-x"},
        {"emptyDir": {}},
        {"name": 3},
        {"name": "b", "projected": {"sources": [{"serviceAccountToken": {"path": "a"}}]}},
    ),
    "template": (
        {"spec": {"hostname": "a"}},
        {"metadata": {"labels": {"a": "b"}}, "spec": {"containers": [{"name": "sidecar", "image": "x"}]}},
        {"spec": {"restartPolicy": "Always"}},
        {"spec": {"containers": [{"name": "ray", "command": ["x"]}]}},
        {"spec": 3},
        {"status": {}},
        {"metadata": None},
        {"metadata": {"annotations": {"ray.io/overwrite-container-cmd": "true"}}},
        {"spec": {"volumes": "a", "nodeName": "a"}},
        {"spec": {"containers": [{"name": "ray", "env": {"A": "b"}, "volumeMounts": [{"mountPath": "/dev/shm"}]}]}},
        {"spec": {"containers": [{"name": "ray", "env": [{"name": "RAY_AUTH_MODE", "value": "disabled"}]}]}},
    ),
    "engineArgs": (
        {"gpu_memory_utilization": 0.8},
        {"enforce_eager": True, "max_num_seqs": 8},
        {"gpuMemoryUtilization": 0.8},
        {"tensor_parallel_size": 2},
    ),
    "params": ({"partial": True}, {"x": [1, {"y": None}]}, {}),
}
"""Content that the schema doesn't look into, by the name of the field."""
LIKELY_NUMBERS = (0, 1, 2, 3, 4, 6, 8, 16, 32, 100, 128, 512, 0.0, 0.1, 0.5, 0.9, 1.0, 1.5, 2.0, 1e-6)


def good(node: Node, dice: random.Random, depth: int = 0) -> Any:
    """A value that the field's type and bounds allow. Rules between fields may still refuse it."""
    if node.choices:
        return dice.choice(node.choices)
    if node.kind == "string":
        return _text(node, dice)
    if node.kind == "quantity":
        return dice.choice([1, 4, "4", "500m", "16Gi", "1.5", "2e3", "+3"])
    if node.kind in ("integer", "number"):
        return _number(node, dice)
    if node.kind == "boolean":
        return dice.random() < 0.5
    if node.kind == "list":
        return _list(node, dice, depth)
    if node.kind == "map":
        return _map(node, dice, depth)
    if node.kind == "object":
        share = 0.3 if depth < 2 else 0.15
        return {
            name: good(child, dice, depth + 1)
            for name, child in node.fields.items()
            if child.required or dice.random() < share
        }
    return dice.choice([True, 3, "x", {"a": 1}])


def bad(node: Node, dice: random.Random) -> Any:
    """A value of the wrong type or just outside the field's bounds."""
    wrong: list[Any] = [value for value in ("text", 3, 1.5, True, [], {}, [1], {"a": 1}) if not _is_kind(value, node)]
    if node.choices:
        choice = dice.choice(node.choices)
        wrong += [choice.upper(), choice + "x", choice[:-1], ""]
    elif node.kind in ("integer", "number"):
        step = 1 if node.kind == "integer" else 1e-3
        wrong += [node.minimum - step] if node.minimum is not None else []
        wrong += [node.maximum + step] if node.maximum is not None else []
        wrong += [edge for edge in (node.above, node.below) if edge is not None]
        wrong += [-1e300, 1e300, 2**63, 2**64, -(2**63) - 1]
    elif node.kind == "string":
        wrong += [text for text in MALFORMED if not _allows(node, text)]
        wrong += ["é" * (node.longest + 1)] if node.longest and node.longest < 2000 else []
    elif node.kind == "quantity":
        wrong += ["", "1gi", "1 Gi", "-1", "x", "1" * 33, -1]
    elif node.kind == "list" and node.items is not None:
        if node.longest is not None:
            wrong += [[good(node.items, dice, 3) for _ in range(node.longest + 1)]]
        wrong += [[]] if node.shortest else []
        wrong += [[bad(node.items, dice)]]
    elif node.kind == "map" and node.items is not None and node.items.kind != "any":
        wrong += [{"a": bad(node.items, dice)}]
        wrong += [{text: good(node.items, dice) for text in (dice.choice(MALFORMED),)}]
        wrong += [{f"k{index}": good(node.items, dice) for index in range((node.longest or 0) + 1)}]
    return dice.choice(wrong)


def _allows(node: Node, text: str) -> bool:
    if node.pattern is not None and not re.fullmatch(node.pattern.removesuffix("$"), text):
        return False
    return (node.shortest or 0) <= len(text) <= (node.longest or len(text))


def _is_kind(value: Any, node: Node) -> bool:
    """Whether the type alone is right."""
    kinds: dict[str, tuple[type, ...]] = {
        "string": (str,),
        "quantity": (str, int),
        "integer": (int,),
        "number": (int, float),
        "boolean": (bool,),
        "list": (list,),
        "map": (dict,),
        "object": (dict,),
        "any": (object,),
    }
    if isinstance(value, bool):
        return node.kind in ("boolean", "any")
    if isinstance(value, float) and value.is_integer():
        # YAML knows no difference between 3 and 3.0.
        return node.kind in ("integer", "number", "quantity")
    return isinstance(value, kinds[node.kind])


def _text(node: Node, dice: random.Random) -> str:
    pool = TROUBLE if dice.random() < 0.25 else TEXTS
    fitting = [text for text in pool if _allows(node, text)] or [text for text in TEXTS if _allows(node, text)]
    return dice.choice(fitting)


def _number(node: Node, dice: random.Random) -> int | float:
    low = node.minimum if node.minimum is not None else node.above
    high = node.maximum if node.maximum is not None else node.below
    assert low is not None
    assert high is not None
    edges = [edge for edge in (node.minimum, node.maximum) if edge is not None]
    likely = [value for value in LIKELY_NUMBERS if low <= value <= high and value not in (node.above, node.below)]
    value = dice.choice([*likely, *likely, *edges])
    return int(value) if node.kind == "integer" else value


def _list(node: Node, dice: random.Random, depth: int) -> list[Any]:
    assert node.items is not None
    shortest = node.shortest or 0
    length = max(shortest, min(dice.choice([0, 1, 1, 2, 3]), node.longest or 3))
    if node.items.kind == "map" and node.name in FREE:
        return [dice.choice(FREE[node.name]) for _ in range(length)]
    return [good(node.items, dice, depth + 1) for _ in range(length)]


def _map(node: Node, dice: random.Random, depth: int) -> dict[str, Any]:
    assert node.items is not None
    if node.name in FREE:
        return dict(dice.choice(FREE[node.name]))
    if node.items.kind == "any" or node.keys is None:
        return {}
    keys = [text for text in (*TEXTS, *TROUBLE) if _allows(node.keys, text)]
    return {dice.choice(keys): good(node.items, dice, depth + 1) for _ in range(dice.choice([0, 1, 1, 2]))}
