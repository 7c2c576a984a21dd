"""What every field owes its reader: a description, bounds and a class of change."""

from __future__ import annotations

import re

import pytest

from rljob_api import schema
from rljob_api.schema import Node
from rljob_api.spec.base import LIVE, NEVER, SUSPENDED

FIELDS = dict(schema.walk())
BY_PRESET = [
    path
    for path in FIELDS
    if path.startswith("spec.algorithm.") and path.count(".") <= 4 and path != "spec.algorithm.preset"
]


@pytest.mark.parametrize("path", FIELDS)
def test_field_is_described_and_bounded(path: str) -> None:
    node = FIELDS[path]
    assert len(node.description) >= 5
    assert node.description.endswith((".", ")"))
    _bounded(path, node)


def _bounded(path: str, node: Node) -> None:
    if node.kind in ("string", "quantity") and not node.choices:
        assert node.longest is not None, f"{path}: no length"
    if node.kind in ("integer", "number"):
        assert node.maximum is not None or node.below is not None, f"{path}: no upper bound"
        assert node.minimum is not None or node.above is not None, f"{path}: no lower bound"
    if node.kind in ("list", "map"):
        assert node.longest is not None, f"{path}: no number of entries"
        assert node.items is not None
        _bounded(f"{path}[]", node.items)
    if node.pattern:
        re.compile(node.pattern)


@pytest.mark.parametrize("path", FIELDS)
def test_default_lies_within_its_bounds(path: str) -> None:
    node = FIELDS[path]
    if not node.has_default:
        return
    if node.choices:
        assert node.default in node.choices
    if node.kind in ("integer", "number"):
        assert node.minimum is None or node.default >= node.minimum
        assert node.maximum is None or node.default <= node.maximum
        assert node.above is None or node.default > node.above


def test_what_a_preset_may_set_has_no_default_of_its_own() -> None:
    from rljob_api.presets import PRESETS

    for preset in PRESETS.values():
        settings = preset.algorithm.model_dump(mode="json", by_alias=True, exclude_none=True)
        for path in _leaves(settings, "spec.algorithm"):
            if path != "spec.algorithm.preset" and not path.endswith("rejection"):
                assert not FIELDS[path].has_default, path
    assert not FIELDS["spec.batch.samplesPerPrompt"].has_default


def _leaves(data: object, path: str) -> list[str]:
    if isinstance(data, dict):
        return [leaf for key, value in data.items() for leaf in _leaves(value, f"{path}.{key}")]
    return [path]


def test_no_choice_is_a_yaml_boolean_or_number() -> None:
    from rljob_api.yaml_reading import plain_scalar

    for path, node in FIELDS.items():
        for choice in node.choices:
            assert isinstance(plain_scalar(choice), str), f"{path}: {choice}"


@pytest.mark.parametrize(
    ("path", "change"),
    [
        ("spec.rollout.replicas", LIVE),
        ("spec.pipeline.staleness.maxAge", LIVE),
        ("spec.suspend", LIVE),
        ("spec.retry.limit", LIVE),
        ("spec.deadlines.runSeconds", LIVE),
        ("spec.ttlSecondsAfterFinished", LIVE),
        ("spec.image", SUSPENDED),
        ("spec.trainer.pod.resources.limits", SUSPENDED),
        ("spec.rollout.engineArgs", SUSPENDED),
        ("spec.queueName", SUSPENDED),
        ("spec.model.source", NEVER),
        ("spec.algorithm.policyLoss.clipHigh", NEVER),
        ("spec.data.train.source", NEVER),
        ("spec.checkpoint.uri", NEVER),
    ],
)
def test_classes_of_change(path: str, change: object) -> None:
    assert FIELDS[path].change == change


def test_a_path_of_a_document_finds_its_field() -> None:
    found = schema.find(("spec", "reward", "functions", 0, "type"))
    assert found is not None
    assert "gsm8k" in found.choices
    value = schema.find(("spec", "trainer", "env", "NCCL_DEBUG"))
    assert value is not None
    assert value.kind == "string"
    assert schema.find(("spec", "zzz")) is None


@pytest.mark.parametrize(
    ("path", "type_name", "bounds"),
    [
        ("spec.trainer.optimizer.learningRate", "number", "above 0, at most 1"),
        ("spec.trainer.optimizer.betas", "[]number", "2 items"),
        ("spec.reward.functions", "[]object", "1 to 32 items"),
        ("spec.trainer.env", "map[string]string", "at most 64 entries"),
        ("spec.trainer.pod.resources.limits", "map[string]quantity", "at most 32 entries"),
        ("spec.suspend", "boolean", ""),
        ("spec.seed", "integer", "0 to 2147483647"),
    ],
)
def test_types_and_bounds_in_words(path: str, type_name: str, bounds: str) -> None:
    assert (FIELDS[path].type_name, FIELDS[path].bounds) == (type_name, bounds)
