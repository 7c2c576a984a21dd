"""The CustomResourceDefinition: up to date, structural, bounded, and with the rules that CEL can express."""

from __future__ import annotations

import json
import pkgutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from rljob_api import rules, schema
from rljob_api.crd import definition, rendered
from rljob_api.crd.__main__ import FILES
from rljob_api.rules import RULES

CHECKOUT = Path(__file__).parents[2]
FILE = CHECKOUT / "crds" / "rljob.yaml"
VERSION = definition()["spec"]["versions"][0]
ROOT = VERSION["schema"]["openAPIV3Schema"]


def parts(node: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every schema with its path; ``[]`` and ``{}`` stand for items and values."""
    yield path, node
    for name, child in node.get("properties", {}).items():
        yield from parts(child, f"{path}.{name}".lstrip("."))
    if "items" in node:
        yield from parts(node["items"], f"{path}[]")
    if isinstance(node.get("additionalProperties"), dict):
        yield from parts(node["additionalProperties"], f"{path}{{}}")


PARTS = [(path, node) for path, node in parts(ROOT) if path.startswith(("spec", "status"))]


@pytest.mark.parametrize("name", FILES)
def test_the_committed_file_is_up_to_date_and_no_link(name: str) -> None:
    file = CHECKOUT / name
    assert file.read_text(encoding="utf-8") == rendered(), f"run `python -m rljob_api.crd` and commit {name}"
    assert not file.is_symlink()


def test_the_file_is_small_enough_and_plain_yaml() -> None:
    # `kubectl apply` puts all of it, as compact JSON, into an annotation, and those have 262,144 bytes.
    compact = json.dumps(definition(), separators=(",", ":"), ensure_ascii=False).encode()
    assert len(compact) < 240_000
    assert yaml.safe_load(FILE.read_text(encoding="utf-8")) == definition()


def test_every_rule_is_in_cel_or_says_why_not() -> None:
    assert [name for name, rule in RULES.items() if not rule.cel and not rule.not_in_cel] == []
    both = {name for name, rule in RULES.items() if rule.cel and rule.not_in_cel}
    assert both == {"patterns_compile"}, "CEL expresses these only in part"
    assert sum(1 for rule in RULES.values() if rule.cel) >= 90


def test_every_file_of_rules_is_read() -> None:
    files = {name for _, name, _ in pkgutil.iter_modules(rules.__path__)} - {"cel", "registry"}
    assert {topic.__name__.rpartition(".")[2] for topic in rules.TOPICS} == files


@pytest.mark.parametrize(("path", "node"), PARTS, ids=[path for path, _ in PARTS])
def test_schema_is_structural_and_bounded(path: str, node: dict[str, Any]) -> None:
    if node.get("x-kubernetes-int-or-string"):
        assert node["maxLength"]
        return
    assert node["type"] in ("object", "array", "string", "integer", "number", "boolean")
    if node["type"] == "string":
        assert "maxLength" in node or "enum" in node
    if node["type"] == "array":
        assert "maxItems" in node
        assert node["x-kubernetes-list-type"] in ("atomic", "map")
        for key in node.get("x-kubernetes-list-map-keys", []):
            assert key in node["items"]["required"]
    if node["type"] == "object" and "properties" not in node:
        assert "maxProperties" in node
        assert "additionalProperties" in node or node["x-kubernetes-preserve-unknown-fields"]
    assert not {"oneOf", "allOf", "not", "nullable"} & set(node)


def test_every_field_of_the_models_is_there_with_its_description() -> None:
    described = {path: node.get("description") for path, node in parts(ROOT)}
    for path, node in schema.walk():
        if path.startswith("spec."):
            found = next(value for key, value in described.items() if key.replace("[]", "").replace("{}", "") == path)
            assert found == node.description, path


def test_rules_blame_fields_that_exist() -> None:
    known = {path.replace("[]", "").replace("{}", "") for path, _ in parts(ROOT)}
    for path, node in parts(ROOT):
        for rule in node.get("x-kubernetes-validations", []):
            assert len(rule["message"]) > 10
            if "fieldPath" in rule:
                blamed = f"{path}{rule['fieldPath']}".lstrip(".").replace("[]", "").replace("{}", "")
                assert blamed in known, f"{path}: {rule['fieldPath']}"


def test_defaults_are_those_of_the_models() -> None:
    nodes = dict(parts(ROOT))
    assert nodes["spec.trainer.optimizer.learningRate"]["default"] == 1e-6
    assert nodes["spec.rollout"]["default"]["sampling"] == {"temperature": 1.0, "topP": 1.0, "topK": 0}
    assert "default" not in nodes["spec.algorithm.policyLoss.clipHigh"]
    assert "default" not in nodes["spec.batch.samplesPerPrompt"]
    assert "default" not in nodes["spec.stop"]


@pytest.mark.parametrize(
    ("at", "field", "expected"),
    [
        ("spec", ".model", "self.model == oldSelf.model"),
        ("spec", ".image", "oldSelf.suspend || has(self.image) == has(oldSelf.image)"),
        ("spec", ".trainer.microBatchTokens", "oldSelf.suspend || self.trainer.microBatchTokens =="),
        ("spec", ".stop", "oldSelf.suspend || has(self.stop) == has(oldSelf.stop)"),
        ("spec", ".rewardModel", "oldSelf.suspend || has(self.rewardModel) == has(oldSelf.rewardModel)"),
        (
            "spec",
            ".rewardModel.pod",
            "oldSelf.suspend || !has(self.rewardModel) || !has(oldSelf.rewardModel) || self.rewardModel.pod ==",
        ),
        ("spec.judge", ".model", "self.model == oldSelf.model"),
        (
            "spec",
            ".judge.pod",
            "oldSelf.suspend || !has(self.judge) || !has(oldSelf.judge) || self.judge.pod ==",
        ),
        ("spec.pipeline", ".mode", "self.mode == oldSelf.mode"),
        ("spec.checkpoint", ".uri", "has(self.uri) == has(oldSelf.uri) && (!has(self.uri) || self.uri == oldSelf.uri)"),
    ],
)
def test_what_may_not_change(at: str, field: str, expected: str) -> None:
    rules = dict(parts(ROOT))[at]["x-kubernetes-validations"]
    (found,) = (rule for rule in rules if rule.get("fieldPath") == field and "oldSelf" in rule["rule"])
    assert found["rule"].startswith(expected)


@pytest.mark.parametrize(
    "live",
    [
        *("rollout.replicas", "rewardModel.replicas", "judge.replicas"),
        *("pipeline.staleness", "pipeline.syncEvery", "suspend", "retry"),
    ],
)
def test_what_may_change_at_any_time(live: str) -> None:
    for _, node in parts(ROOT):
        for rule in node.get("x-kubernetes-validations", []):
            if "oldSelf" in rule["rule"]:
                assert not rule["fieldPath"].endswith(f".{live}")


def test_subresources_and_columns() -> None:
    assert set(VERSION["subresources"]) == {"status", "scale"}
    columns = {column["name"] for column in VERSION["additionalPrinterColumns"]}
    assert {
        "Algorithm",
        "Status",
        "Step",
        "Reward",
        "Ready",
        "Rollout",
        "Trainer",
        "Oldest-Age",
        "Attempt",
        "Age",
    } <= columns


def test_times_of_the_status_are_checked_as_times() -> None:
    status = VERSION["schema"]["openAPIV3Schema"]["properties"]["status"]["properties"]
    assert status["startTime"]["format"] == "date-time"
    assert status["conditions"]["items"]["properties"]["lastTransitionTime"]["format"] == "date-time"
    assert status["progress"]["properties"]["eta"]["format"] == "date-time"


def test_the_names() -> None:
    assert definition()["spec"]["names"]["shortNames"] == ["rlj"]
