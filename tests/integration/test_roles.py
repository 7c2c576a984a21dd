"""What the operator's service account may do: the table below, and nothing else of all that the API server serves.

Every resource and subresource that the server knows is asked for with every verb (SubjectAccessReview). What any
account may do (asking what it may do, for example) is found by asking for one without roles, and doesn't count.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml
from helm import program, render
from kube.control_plane import ControlPlane
from world import PATIENCE_SECONDS

PAGE = Path(__file__).parents[2] / "docs" / "operator" / "README.md"
VERBS = ("get", "list", "watch", "create", "update", "patch", "delete", "deletecollection")
RARE_VERBS = {
    ("", "users"): ("impersonate",),
    ("", "groups"): ("impersonate",),
    ("", "serviceaccounts"): ("impersonate",),
    ("rbac.authorization.k8s.io", "roles"): ("bind", "escalate"),
    ("rbac.authorization.k8s.io", "clusterroles"): ("bind", "escalate"),
}
UNLISTED = {("rljob.dev", "rljobs/finalizers"): True, ("kueue.x-k8s.io", "workloads"): True}
"""Resources that discovery doesn't list, or not on a server without Kueue; and whether they are namespaced."""

Resource = tuple[str, str]
"""API group and resource, with subresource."""

IN_ALL_NAMESPACES: dict[Resource, set[str]] = {
    ("rljob.dev", "rljobs"): {"get", "list", "watch", "delete"},
    ("rljob.dev", "rljobs/status"): {"patch"},
    ("rljob.dev", "rljobs/finalizers"): {"update"},
    ("ray.io", "rayclusters"): {"get", "list", "watch", "create", "patch", "delete"},
    ("", "pods"): {"get", "list", "watch", "delete"},
    ("", "persistentvolumeclaims"): {"get", "list", "watch"},
    ("kueue.x-k8s.io", "workloads"): {"get", "list", "watch"},
    ("", "podtemplates"): {"create"},
    ("", "configmaps"): {"create", "patch"},
    ("networking.k8s.io", "networkpolicies"): {"create", "patch", "delete"},
    ("", "secrets"): {"create"},
    ("", "events"): {"create"},
    ("coordination.k8s.io", "leases"): {"create"},
}
IN_THE_CLUSTER: dict[Resource, set[str]] = {
    ("apiextensions.k8s.io", "customresourcedefinitions"): {"list", "watch"},
    ("", "namespaces"): {"list", "watch"},
    ("authentication.k8s.io", "tokenreviews"): {"create"},
    ("authorization.k8s.io", "subjectaccessreviews"): {"create"},
}
IN_ITS_OWN: dict[Resource, set[str]] = {
    ("coordination.k8s.io", "leases"): {"create"},
    ("", "secrets"): {"create"},
}
"""Reading and changing a lease, or the Secret of token keys, is allowed for its own alone, by name: tested below."""

pytestmark = pytest.mark.timeout(400)


class Installation:
    """The chart's roles on the server."""

    def __init__(self, plane: ControlPlane, folder: Path, *values: str) -> None:
        self._plane = plane
        self.namespace = f"ops-{secrets.token_hex(4)}"
        plane.call("POST", "/api/v1/namespaces", {"metadata": {"name": self.namespace}})
        roles = [
            document
            for document in render(program(), *values, namespace=self.namespace)
            if document["apiVersion"].startswith("rbac") or document["kind"] == "ServiceAccount"
        ]
        self._manifest = folder / "roles.yaml"
        self._manifest.write_text(yaml.safe_dump_all(roles))
        plane.kubectl("apply", "--server-side", "-f", str(self._manifest))
        self._wait_until_known(roles)

    def _wait_until_known(self, roles: list[dict[str, Any]]) -> None:
        """The server decides by copies of the roles, which come a moment later: until one thing of each is allowed."""
        rules = {(role["kind"], role["metadata"]["name"]): role["rules"][0] for role in roles if "rules" in role}
        deadline = time.monotonic() + PATIENCE_SECONDS
        for binding in [document for document in roles if "roleRef" in document]:
            rule = rules[binding["roleRef"]["kind"], binding["roleRef"]["name"]]
            resource = rule["apiGroups"][0], rule["resources"][0]
            while not self.may(rule["verbs"][0], resource, binding["metadata"].get("namespace", "")):
                assert time.monotonic() < deadline, f"{binding['metadata']['name']} is not known"
                time.sleep(0.02)

    def remove(self) -> None:
        self._plane.kubectl("delete", "--wait=false", "-f", str(self._manifest))

    def may(
        self, verb: str, resource: Resource, namespace: str, name: str = "", user: str = "rl-rljob-operator"
    ) -> bool:
        """Whether a service account of the operator's namespace may do it."""
        kind, _, sub = resource[1].partition("/")
        body = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SubjectAccessReview",
            "spec": {
                "user": f"system:serviceaccount:{self.namespace}:{user}",
                "groups": ["system:serviceaccounts", "system:authenticated"],
                "resourceAttributes": {
                    "namespace": namespace,
                    "verb": verb,
                    "group": resource[0],
                    "resource": kind,
                    "subresource": sub,
                    "name": name,
                },
            },
        }
        answer = self._plane.call("POST", "/apis/authorization.k8s.io/v1/subjectaccessreviews", body)
        return bool(answer["status"]["allowed"])

    def allowed(self, resources: dict[Resource, bool], namespace: str) -> dict[Resource, set[str]]:
        """All that it may do there and an account without roles may not."""
        asked = [
            (verb, resource, namespace if namespaced else "")
            for resource, namespaced in resources.items()
            for verb in (*VERBS, *RARE_VERBS.get(resource, ()))
        ]

        def ask(question: tuple[str, Resource, str]) -> bool:
            return self.may(*question) and not self.may(*question, user="nobody")

        found: dict[Resource, set[str]] = {}
        with ThreadPoolExecutor(4) as threads:
            for (verb, resource, _), answer in zip(asked, threads.map(ask, asked), strict=True):
                if answer:
                    found.setdefault(resource, set()).add(verb)
        return found


@pytest.fixture
def installed(plane: ControlPlane, tmp_path: Path) -> Iterator[Installation]:
    made = Installation(plane, tmp_path)
    yield made
    made.remove()


@pytest.fixture
def installed_for_default(plane: ControlPlane, tmp_path: Path) -> Iterator[Installation]:
    """Watching one namespace only."""
    made = Installation(plane, tmp_path, "--set=watchNamespaces={default}")
    yield made
    made.remove()


@pytest.fixture(scope="module")
def resources(plane: ControlPlane) -> dict[Resource, bool]:
    """Everything the server serves, and whether it lives in namespaces."""
    found = dict(UNLISTED) | dict.fromkeys(RARE_VERBS, False)
    lists = [("", plane.call("GET", "/api/v1"))]
    for group in plane.call("GET", "/apis")["groups"]:
        lists += [(group["name"], plane.call("GET", f"/apis/{item['groupVersion']}")) for item in group["versions"]]
    for name, served in lists:
        found |= {(name, item["name"]): item["namespaced"] for item in served["resources"]}
    assert len(found) > 100
    assert {("", "pods/exec"), ("", "serviceaccounts/token"), ("ray.io", "rayclusters")} <= found.keys()
    return found


def test_the_operator_may_what_it_must_and_nothing_else(
    installed: Installation, resources: dict[Resource, bool]
) -> None:
    assert installed.allowed(resources, "default") == IN_ALL_NAMESPACES | IN_THE_CLUSTER
    assert installed.allowed(resources, installed.namespace) == IN_ALL_NAMESPACES | IN_THE_CLUSTER | IN_ITS_OWN


def test_watching_one_namespace_it_may_nothing_in_others(
    installed_for_default: Installation, resources: dict[Resource, bool]
) -> None:
    assert installed_for_default.allowed(resources, "default") == IN_ALL_NAMESPACES | IN_THE_CLUSTER
    assert installed_for_default.allowed(resources, "kube-system") == IN_THE_CLUSTER


@pytest.mark.parametrize(
    ("resource", "own"),
    [
        (("coordination.k8s.io", "leases"), "rl-rljob-operator"),
        (("", "secrets"), "rl-rljob-operator-keys"),
    ],
)
def test_its_lease_and_its_keys_are_the_only_ones_it_may_touch(
    installed: Installation, resource: Resource, own: str
) -> None:
    for verb, name, expected in (
        ("get", own, True),
        ("update", own, True),
        ("delete", own, False),
        ("get", "someone-elses", False),
        ("update", "someone-elses", False),
    ):
        assert installed.may(verb, resource, installed.namespace, name) is expected, (verb, name)
    assert not installed.may("update", resource, "default", own)


def test_of_other_leases_it_may_touch_the_claims_of_namespaces_alone(installed_for_default: Installation) -> None:
    leases = ("coordination.k8s.io", "leases")
    for verb in ("get", "update", "delete"):
        assert installed_for_default.may(verb, leases, "default", "rljobs.rljob.dev"), verb
        assert not installed_for_default.may(verb, leases, "default", "someone-elses"), verb
        assert not installed_for_default.may(verb, leases, "kube-system", "rljobs.rljob.dev"), verb


def test_the_page_says_the_same() -> None:
    table = PAGE.read_text().partition("## What the operator may do")[2].partition("\n\n## ")[0]
    said = {
        objects: set(re.findall(rf"\b({'|'.join(VERBS)})\b", verbs.partition("never")[0]))
        for row in re.findall(r"(?m)^\| (.+?) \| (.+?) \|$", table)
        for objects, verbs in [row]
        if objects not in ("objects", "---")
    }
    expected: dict[str, set[str]] = {}
    for resource, verbs in (IN_ALL_NAMESPACES | IN_THE_CLUSTER).items():
        expected.setdefault(resource[1].partition("/")[0], set()).update(verbs)
    written: dict[str, set[str]] = {}
    for objects, verbs in said.items():
        for name in objects.replace(" (Kueue's)", "").split(", "):
            written[name] = verbs
    assert written.pop("its claim of a namespace") == {"get", "update", "delete"}
    assert written.pop("its own lease") == {"create", "get", "update"}
    assert written.pop("its own Secret of token keys") == {"create", "get", "update"}
    assert written == expected
