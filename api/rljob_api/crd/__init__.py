"""The CustomResourceDefinition, made from the models: ``python -m rljob_api.crd`` writes ``crds/rljob.yaml``
and the chart's copy of it.

A structural schema with bounds and defaults, CEL for the rules between fields and for what may change, the scale and
status subresources, and printer columns. A test fails when the committed file is out of date.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import yaml

from rljob_api import schema
from rljob_api.crd.changes import transitions
from rljob_api.crd.structural import Schema, structural
from rljob_api.job_status import RLJobStatus
from rljob_api.rules import RULES
from rljob_api.rules.cel import Path
from rljob_api.schema import Node
from rljob_api.spec.job import API_VERSION, KIND, MAX_NAME

GROUP, VERSION = API_VERSION.split("/")
PLURAL = "rljobs"
HEADER = "# Made by `python -m rljob_api.crd` from api/rljob_api: change it there.\n"

# What `kubectl get rlj` shows; with `-o wide` the columns of priority 1 too. The others have room in 120 characters,
# with the longest name, reason and figures, and steps below ten million.
_COLUMNS: tuple[tuple[str, str, str, int, str], ...] = (
    (
        "Status",
        "string",
        '.status.conditions[?(@.type=="Running")].reason',
        0,
        "Current state of the job, in one word.",
    ),
    ("Step", "integer", ".status.progress.step", 0, "Completed steps."),
    ("Reward", "number", ".status.progress.reward", 0, "Mean score of the last step."),
    ("Ready", "string", ".status.ready", 0, "Ready and wanted replicas of all pools."),
    (
        "Checkpoint",
        "string",
        '.status.conditions[?(@.type=="CheckpointAvailable")].reason',
        0,
        "Whether a retry can resume from a checkpoint, in one word.",
    ),
    ("Age", "date", ".metadata.creationTimestamp", 0, "Time since creation."),
    ("Rollout", "string", ".status.pools.rollout.summary", 1, "Ready and wanted rollout replicas."),
    ("Trainer", "string", ".status.pools.trainer.summary", 1, "Ready and wanted trainer replicas."),
    ("Reward-Models", "string", ".status.pools.reward-model.summary", 1, "Ready reward model replicas."),
    ("Judges", "string", ".status.pools.judge.summary", 1, "Ready judge engines."),
    ("Oldest-Age", "integer", ".status.progress.oldestAge", 1, "Largest age in the last trained groups, in versions."),
    ("Attempt", "integer", ".status.attempt", 1, "Number of the newest attempt."),
    ("Algorithm", "string", ".spec.algorithm.preset", 1, "Preset of the job."),
    ("Waiting-For", "string", ".status.progress.waitingFor", 1, "What the run waits for."),
)


def definition() -> dict[str, Any]:
    """The CustomResourceDefinition as plain data."""
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{PLURAL}.{GROUP}"},
        "spec": {
            "group": GROUP,
            "names": {
                "kind": KIND,
                "listKind": f"{KIND}List",
                "plural": PLURAL,
                "singular": KIND.lower(),
                "shortNames": ["rlj"],
                "categories": ["all"],
            },
            "scope": "Namespaced",
            "versions": [
                {
                    "name": VERSION,
                    "served": True,
                    "storage": True,
                    "schema": {"openAPIV3Schema": _root()},
                    "subresources": {
                        "status": {},
                        "scale": {
                            "specReplicasPath": ".spec.rollout.replicas",
                            "statusReplicasPath": ".status.pools.rollout.replicas",
                            "labelSelectorPath": ".status.pools.rollout.selector",
                        },
                    },
                    "additionalPrinterColumns": [_column(*entry) for entry in _COLUMNS],
                }
            ],
        },
    }


def rendered() -> str:
    """The file's text: one line a field or rule, which keeps it short and its changes readable."""
    node = _Dumper("").represent_data(definition())
    _one_line_leaves(node)
    return HEADER + yaml.serialize(node, Dumper=_Dumper, width=1_000_000, allow_unicode=True)


def _one_line_leaves(node: yaml.Node) -> bool:
    """Puts every part that has neither fields nor rules in it on one line; returns whether this one is such a part."""
    if isinstance(node, yaml.ScalarNode):
        return True
    mapping = isinstance(node, yaml.MappingNode)
    parts = [pair[1] for pair in node.value] if mapping else node.value
    small = [_one_line_leaves(part) for part in parts]
    names = {pair[0].value for pair in node.value} if mapping else set()
    leaf = all(small) and not names & {"properties", "rule"}
    if isinstance(node, yaml.CollectionNode):
        node.flow_style = leaf or "rule" in names
    return leaf


def _root() -> Schema:
    rules = _rules()
    fields = schema.root().fields
    status = Node(name="status", kind="object", description=schema.documentation(RLJobStatus), model=RLJobStatus)
    name = {"type": "string", "maxLength": MAX_NAME, "pattern": "^[a-z]([-a-z0-9]*[a-z0-9])?$"}
    return {
        "type": "object",
        "description": schema.root().description,
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string", "description": fields["apiVersion"].description},
            "kind": {"type": "string", "description": fields["kind"].description},
            # Only bounds of the name may stand here; all else of metadata is Kubernetes' own.
            "metadata": {"type": "object", "properties": {"name": name}},
            "spec": structural(fields["spec"], rules, ("spec",)),
            "status": _without_defaults(structural(status, {}, ("status",))),
        },
        "x-kubernetes-validations": rules[()],
    }


def _rules() -> dict[Path, list[Schema]]:
    """CEL by place: the rules between fields, then what may change."""
    found: dict[Path, list[Schema]] = defaultdict(list)
    for cel in (cel for rule in RULES.values() for cel in rule.cel):
        entry: Schema = {"rule": cel.expression, "message": cel.message}
        if cel.field:
            entry["fieldPath"] = cel.field
        found[cel.at].append(entry)
    for path, rules in transitions().items():
        found[path] += rules
    return found


def _without_defaults(schema: Schema) -> Schema:
    """The status is written whole: what it lacks isn't known, and the API server shall not make it up."""
    return {
        name: _without_defaults(part) if isinstance(part, dict) else part
        for name, part in schema.items()
        if name != "default"
    }


def _column(name: str, kind: str, path: str, priority: int, description: str) -> Schema:
    column: Schema = {"name": name, "type": kind, "jsonPath": path, "description": description}
    return column | ({"priority": priority} if priority else {})


class _Dumper(yaml.SafeDumper):
    """Keeps the order of fields; no anchors (kubectl reads them, people don't like to)."""

    def __init__(self, stream: Any, **options: Any) -> None:
        super().__init__(stream, **{**options, "sort_keys": False})

    def ignore_aliases(self, data: Any) -> bool:
        return True
