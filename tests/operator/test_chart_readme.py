"""The chart's table of values is made from its values, every one of which is explained and checked by the schema."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
CHART = ROOT / "charts" / "rljob-operator"


@pytest.fixture(scope="module")
def readme() -> ModuleType:
    spec = importlib.util.spec_from_file_location("chart_readme", ROOT / "scripts" / "chart_readme.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_committed_page_is_up_to_date(readme: ModuleType) -> None:
    assert (CHART / "README.md").read_text() == readme.page(), "run make generate"


def test_every_value_is_in_the_table_with_its_default(readme: ModuleType) -> None:
    found = {name: default for name, _, default in readme.rows(CHART)}
    assert found["replicaCount"] == "2"
    assert found["trainingNetworkPolicy.enabled"] == "true"
    assert found["resources"] == '{"requests": {"cpu": "100m", "memory": "192Mi"}, "limits": {"memory": "512Mi"}}'
    assert found.keys() >= {"metrics.dashboard.labels", "crds.keep", "image.digest"}


def test_a_value_without_explanation_is_refused(readme: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "values.yaml").write_text("# -- Explained.\na: 1\nb:\n  # -- So is this.\n  c: 2\n  d: 3\n")
    with pytest.raises(ValueError, match=r"b\.d has no comment"):
        list(readme.rows(tmp_path))


def test_the_schema_knows_exactly_the_values() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    schema = json.loads((CHART / "values.schema.json").read_text())

    def compare(value: dict[str, Any], node: dict[str, Any], path: str) -> None:
        # Maps of the user's own names: labels, annotations, affinity.
        if "properties" not in node:
            return
        assert node["additionalProperties"] is False, path
        assert set(value) == set(node["properties"]) - {"global"}, path
        for name, item in value.items():
            if isinstance(item, dict):
                compare(item, node["properties"][name], f"{path}.{name}")

    compare(values, schema, "values")
