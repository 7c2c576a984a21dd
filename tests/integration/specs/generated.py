"""Whole job files made by chance. The same seed makes the same file.

Each starts from one of a few kinds of job and gets settings of one section or all over the place, so that rules between
fields meet; some then get what no job may have: a wrong type, a value out of bounds, a name that doesn't exist.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Sequence
from typing import Any

import yaml

from rljob_api import schema
from rljob_api.overrides import merged
from rljob_api.schema import Node
from specs.values import MALFORMED, bad, good

Document = dict[str, Any]

MINIMAL: Document = {
    "model": {"source": "org/model"},
    "data": {"train": {"source": "train.jsonl"}, "prompt": "question", "answer": "answer"},
    "reward": {"functions": [{"type": "gsm8k"}]},
    "algorithm": {"preset": "grpo"},
}
SMALL: Document = {"source": None, "random": {"tokenizer": {"characters": "abc"}, "contextLength": 64}}
KINDS: Sequence[Document] = (
    {},
    {"model": SMALL, "data": {"maxPromptTokens": 32}, "rollout": {"engine": "torch", "maxResponseTokens": 32}},
    {"algorithm": {"preset": "ppo", "critic": {}}, "stop": {"steps": 10}},
    {"pipeline": {"mode": "fullyAsync", "syncEvery": 2, "staleness": {"maxAge": 2}}, "batch": {"miniBatchGroups": 8}},
    {"placement": "separate", "rollout": {"replicas": 2, "gpusPerReplica": 4, "parallelism": {"tensor": 4}}},
    {"trainer": {"replicas": 2, "gpusPerReplica": 8, "parallelism": {"shard": 2, "replicate": 4, "context": 2}}},
    {
        "data": {
            "train": {"source": None, "parts": [{"name": "a", "source": "x"}, {"name": "b", "task": {"type": "copy"}}]}
        }
    },
    {"data": {"validation": [{"name": "v", "source": "x", "samplesPerPrompt": 4, "sampling": {"temperature": 1}}]}},
    {"algorithm": {"policyLoss": {"type": "bypassPpoClip"}, "rolloutCorrection": {"mode": "bypass"}}},
    {"algorithm": {"rolloutCorrection": {"mode": "decoupled", "weights": {}, "rejection": []}}},
    {"queueName": "q", "rollout": {"pod": {"env": [{"name": "A", "value": "b"}]}}, "checkpoint": {"uri": "pvc://c/x"}},
)
SECTIONS: Sequence[Sequence[str]] = (
    ("model", "rollout.engine", "rollout.maxResponseTokens", "data.maxPromptTokens"),
    ("data", "reward"),
    ("reward",),
    ("algorithm",),
    ("algorithm.policyLoss", "algorithm.preset", "algorithm.aggregation"),
    ("algorithm.advantage", "algorithm.preset", "algorithm.critic", "algorithm.truncated"),
    ("algorithm.rolloutCorrection", "algorithm.policyLoss.type", "pipeline.mode"),
    ("batch", "pipeline", "algorithm.preset", "trainer.replicas", "trainer.gpusPerReplica"),
    ("stop", "trainer.optimizer", "deadlines", "algorithm.critic"),
    ("placement", "rollout.replicas", "rollout.minReplicas", "rollout.maxReplicas", "pipeline.mode"),
    ("rollout.parallelism", "rollout.gpusPerReplica", "rollout.engine", "placement"),
    ("trainer.parallelism", "trainer.replicas", "trainer.gpusPerReplica"),
    ("rollout.pod", "rollout.env"),
    ("head.pod", "code", "queueName"),
    ("trainer.pod", "trainer.env"),
    ("checkpoint", "restore", "retry", "deadlines", "validation", "ttlSecondsAfterFinished", "suspend"),
    ("logging", "weights", "seed", "image", "rollout.sampling"),
)
"""Fields that rules see together."""
NAMES = ("tiny", "a", "x" * 40, "x" * 41, "head", "rljob-operator", "a.b", "1a", "a-", "A", "a_b", "job-1")
SCALARS = (
    "yes",
    "off",
    "010",
    "0x10",
    "1e3",
    "1_000",
    ".5",
    "5.",
    "+3",
    "~",
    "2001-01-01",
    "3.0",
    "1e-6",
    "0o7",
    "12e",
)
"""Unquoted texts that YAML makes something else of."""


def job_file(seed: int, more_kinds: Sequence[Document] = ()) -> str:
    """The text of one job file. `more_kinds` are specs to start from besides `KINDS`, laid over the minimal one.

    The first seeds give each of those once as it is: which rules are met does not hang on chance.
    """
    if seed < len(more_kinds):
        spec = merged(copy.deepcopy(MINIMAL), copy.deepcopy(more_kinds[seed]))
        return json.dumps(
            {"apiVersion": "rljob.dev/v1alpha1", "kind": "RLJob", "metadata": {"name": "tiny"}, "spec": spec}
        )
    dice = random.Random(seed)
    kind = dice.choice(more_kinds if more_kinds and dice.random() < 0.6 else KINDS)
    spec = merged(copy.deepcopy(MINIMAL), copy.deepcopy(kind))
    near = [section for section in SECTIONS if any(path.partition(".")[0] in kind for path in section)]
    section = dice.choice(near if near and dice.random() < 0.7 else SECTIONS)
    for _ in range(dice.choice([0, 1, 1, 2, 3, 4])):
        _set(spec, dice, section, good)
    if dice.random() < 0.2:
        _set(spec, dice, dice.choice(SECTIONS), good)
    trouble = dice.random()
    if trouble < 0.2:
        _set(spec, dice, dice.choice(SECTIONS), bad)
    elif trouble < 0.3:
        _rename_or_add(spec, dice)
    elif trouble < 0.35:
        _remove_something(spec, dice)
    metadata: Document = {"name": "tiny" if dice.random() < 0.93 else dice.choice(NAMES)}
    if dice.random() < 0.05:
        metadata["labels"] = {dice.choice(("a", "example.com/a", dice.choice(MALFORMED))): "x"}
    document = {"apiVersion": "rljob.dev/v1alpha1", "kind": "RLJob", "metadata": metadata, "spec": spec}
    text = json.dumps(document, indent=1, ensure_ascii=False)
    if dice.random() < 0.5:
        text = yaml.safe_dump(document, sort_keys=False, allow_unicode=True, width=1000)
    return _with_a_plain_scalar(text, dice) if dice.random() < 0.08 else text


def _set(spec: Document, dice: random.Random, section: Sequence[str], value: Any) -> None:
    """Sets one field at or below one of the section's paths."""
    path = dice.choice(section).split(".")
    node = schema.root().fields["spec"]
    holder: Any = spec
    for name in path[:-1]:
        node = node.fields[name]
        holder = holder.setdefault(name, {})
        if not isinstance(holder, dict):
            return
    name = path[-1]
    node = node.fields[name]
    while True:
        deeper = node.kind == "object" and dice.random() < 0.9
        into_list = node.kind == "list" and node.items is not None and node.items.kind == "object" and holder.get(name)
        if deeper:
            holder = holder.setdefault(name, {})
        elif into_list and dice.random() < 0.7:
            holder = dice.choice(holder[name])
        else:
            break
        fields = node.fields
        if not isinstance(holder, dict) or not fields:
            return
        name = dice.choice(sorted(fields))
        node = fields[name]
    holder[name] = value(node, dice)


def _objects(value: Any, node: Node | None) -> list[tuple[Document, Node]]:
    """Every object in a document that has named fields."""
    if node is None:
        return []
    found = []
    if isinstance(value, dict) and node.kind == "object":
        found.append((value, node))
        for name, item in value.items():
            found += _objects(item, node.fields.get(name))
    elif isinstance(value, list) and node.kind == "list":
        for item in value:
            found += _objects(item, node.items)
    return found


def _rename_or_add(spec: Document, dice: random.Random) -> None:
    """A field that doesn't exist: misspelled, in snake_case, or made up."""
    holder, _ = dice.choice(_objects(spec, schema.root().fields["spec"]))
    name = dice.choice(sorted(holder)) if holder else "x"
    wrong = dice.choice([name + "s", name.upper(), f"my_{name}", "learning_rate", "phase"])
    if holder and dice.random() < 0.5:
        holder[wrong] = holder.pop(name)
    else:
        holder[wrong] = 3


def _remove_something(spec: Document, dice: random.Random) -> None:
    """A field goes, or becomes null."""
    holder, _ = dice.choice(_objects(spec, schema.root().fields["spec"]))
    if holder:
        name = dice.choice(sorted(holder))
        if dice.random() < 0.5:
            del holder[name]
        else:
            holder[name] = None


def _with_a_plain_scalar(text: str, dice: random.Random) -> str:
    """Puts an unquoted scalar in the place of some value at the end of a line."""
    lines = text.splitlines()
    places = [index for index, line in enumerate(lines) if ": " in line and not line.rstrip(",").endswith(("{", "["))]
    index = dice.choice(places)
    head, _, rest = lines[index].partition(": ")
    if '"name": "tiny"' in lines[index] or rest.startswith(("rljob.dev", '"rljob.dev', "RLJob", '"RLJob')):
        return text
    lines[index] = f"{head}: {dice.choice(SCALARS)}{',' if rest.endswith(',') else ''}"
    return "\n".join(lines) + "\n"
