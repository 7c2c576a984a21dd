"""How far the CRD's rules are from the cost that the API server allows, as the API server itself counts it.

It estimates the cost of every rule for the largest object that the schema admits, and refuses a CRD of which one rule
is estimated at more than 10,000,000, or all together at more than 100,000,000 (`StaticEstimatedCostLimit` and
`StaticEstimatedCRDCostLimit` of apiextensions-apiserver). It doesn't tell an estimate within these bounds. So each rule
is put to it several times over, as one rule: `(rule) && (rule)` costs twice as much as `rule`.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import pytest
from kube.control_plane import ApiCallError, ControlPlane

from rljob_api.crd import definition

DRY_RUN = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions?dryRun=All"
HEADROOM = 2
GROUP = "cost.rljob.dev"
"""Another one than ours: rules of a CRD that is there already are not counted again."""

pytestmark = pytest.mark.timeout(400)


def dearer(times: int) -> dict[str, Any]:
    """The CRD under another name, with every rule as dear as so many of it."""
    crd = deepcopy(definition())
    crd["metadata"]["name"] = f"{crd['spec']['names']['plural']}.{GROUP}"
    crd["spec"]["group"] = GROUP
    for rule in rules(crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]):
        rule["rule"] = " && ".join([f"({rule['rule']})"] * times)
    return crd


def rules(node: Any) -> Iterator[dict[str, Any]]:
    """All of a schema."""
    if isinstance(node, dict):
        yield from node.get("x-kubernetes-validations", ())
        for child in node.values():
            yield from rules(child)


def test_every_rule_and_all_together_may_cost_twice_as_much(plane: ControlPlane) -> None:
    plane.call("POST", DRY_RUN, dearer(HEADROOM))


def test_a_rule_that_costs_too_much_is_what_the_api_server_refuses(plane: ControlPlane) -> None:
    with pytest.raises(ApiCallError) as refused:
        plane.call("POST", DRY_RUN, dearer(8))
    causes = refused.value.answer["details"]["causes"]
    assert {cause["reason"] for cause in causes} == {"FieldValueForbidden"}
    assert all("cost" in cause["message"] for cause in causes)
