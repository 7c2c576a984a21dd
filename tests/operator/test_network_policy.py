"""Who gets through a job's network policy, read by a small evaluator of the rules as Kubernetes documents them."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import yaml
from simulation import SETTINGS, job_spec

from rljob_api import check, resolve
from rljob_operator.__main__ import options_of, parser
from rljob_operator.network_policy import network_policy
from rljob_operator.objects import ray_cluster
from rljob_operator.render import rendered
from rljob_operator.settings import Settings

IN = replace(SETTINGS, operator_namespace="ops")


def policy(settings: Settings = IN) -> dict[str, Any]:
    job, violations = check(
        {
            "apiVersion": "rljob.dev/v1alpha1",
            "kind": "RLJob",
            "metadata": {"name": "job", "namespace": "space"},
            "spec": job_spec(),
        }
    )
    assert not violations
    assert job is not None
    return network_policy(resolve(job), "uid", settings)


def selects(selector: dict[str, Any], labels: dict[str, str]) -> bool:
    assert set(selector) <= {"matchLabels"}
    return all(labels.get(name) == value for name, value in selector.get("matchLabels", {}).items())


def admits(made: dict[str, Any], namespace: str, labels: dict[str, str], port: int) -> bool:
    """Whether a pod may connect: some rule has its port (or no ports) and some peer that matches (or no peers)."""
    home = made["metadata"]["namespace"]
    for rule in made["spec"]["ingress"]:
        if rule.get("ports") and not any(item["port"] == port for item in rule["ports"]):
            continue
        for peer in rule.get("from", [{}]):
            spaces = peer.get("namespaceSelector")
            there = {"kubernetes.io/metadata.name": namespace}
            in_space = namespace == home if spaces is None else selects(spaces, there)
            if in_space and selects(peer.get("podSelector", {}), labels):
                return True
    return False


OPERATOR = {"app.kubernetes.io/name": "rljob-operator"}
OWN = {"rljob.dev/job": "job"}


@pytest.mark.parametrize(
    ("namespace", "labels", "port", "expected"),
    [
        ("space", OWN, 6379, True),
        ("space", OWN, 40001, True),
        ("ops", OPERATOR, 8265, True),
        ("ops", OPERATOR, 8470, True),
        ("ops", OPERATOR, 6379, False),
        ("ops", OPERATOR, 10001, False),
        ("ops", {}, 8265, False),
        ("space", OPERATOR, 8265, False),
        ("space", {"rljob.dev/job": "another"}, 6379, False),
        ("elsewhere", OWN, 6379, False),
        ("elsewhere", {}, 8265, False),
    ],
)
def test_the_job_itself_and_the_operator_get_in_and_nobody_else(
    namespace: str, labels: dict[str, str], port: int, expected: bool
) -> None:
    assert admits(policy(), namespace, labels, port) is expected


def test_every_pod_of_the_job_is_guarded_and_egress_stays_open() -> None:
    made = policy()
    assert made["spec"]["policyTypes"] == ["Ingress"]
    assert "egress" not in made["spec"]
    job, _ = check(
        {"apiVersion": "rljob.dev/v1alpha1", "kind": "RLJob", "metadata": {"name": "job"}, "spec": job_spec()}
    )
    assert job is not None
    cluster = ray_cluster(resolve(job), "hash", "uid", 1, 1, "key", IN)["spec"]
    templates = [cluster["headGroupSpec"]["template"], *(group["template"] for group in cluster["workerGroupSpecs"])]
    assert len(templates) == 3
    for template in templates:
        assert selects(made["spec"]["podSelector"], template["metadata"]["labels"])


def test_the_policy_goes_with_the_job() -> None:
    (owner,) = policy()["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["name"], owner["uid"], owner["controller"]) == ("RLJob", "job", "uid", True)


def test_more_may_be_let_in_by_the_command_line() -> None:
    rule = {"from": [{"namespaceSelector": {"matchLabels": {"name": "monitoring"}}}], "ports": [{"port": 8080}]}
    arguments = ["--operator-namespace=ops", f"--ingress-rule={json.dumps(rule)}"]
    settings = options_of(parser().parse_args(arguments)).settings
    assert policy(settings)["spec"]["ingress"][2:] == [rule]


@pytest.mark.parametrize("text", ["[]", "nothing", '"x"'])
def test_a_rule_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(SystemExit):
        parser().parse_args([f"--ingress-rule={text}"])


def test_without_policies_none_is_rendered() -> None:
    text = yaml.safe_dump(
        {"apiVersion": "rljob.dev/v1alpha1", "kind": "RLJob", "metadata": {"name": "job"}, "spec": job_spec()}
    )
    off = replace(SETTINGS, network_policy=False)
    assert "NetworkPolicy" not in [document["kind"] for document in rendered(text, [], off)]
    assert "NetworkPolicy" in [document["kind"] for document in rendered(text, [], SETTINGS)]
