"""The chart, rendered by the real Helm and taken by the real API server; and what its roles allow."""

from __future__ import annotations

import secrets
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from kube.control_plane import ControlPlane

from testcluster.programs import ProgramMissingError, find

CHART = Path(__file__).parents[2] / "charts" / "rljob-operator"
EVERYTHING = [
    "--set=networkPolicy.enabled=true",
    "--set=metrics.serviceMonitor.enabled=true",
    "--set=metrics.rules.enabled=true",
]

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="session")
def helm() -> Path:
    try:
        return find(build=False, helm=True).path("helm")
    except ProgramMissingError as problem:
        pytest.fail(str(problem), pytrace=False)


def call_helm(helm: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(helm), *arguments], capture_output=True, text=True, timeout=60)


def render(helm: Path, *arguments: str, namespace: str = "default") -> list[dict[str, Any]]:
    done = call_helm(helm, "template", "rl", str(CHART), "--namespace", namespace, *arguments)
    assert done.returncode == 0, done.stderr
    return [document for document in yaml.safe_load_all(done.stdout) if document]


def one(documents: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    (found,) = [document for document in documents if document["kind"] == kind]
    return found


def test_the_chart_passes_the_strict_lint(helm: Path) -> None:
    done = call_helm(helm, "lint", "--strict", str(CHART))
    assert done.returncode == 0, done.stdout + done.stderr


def test_an_unknown_value_is_refused(helm: Path) -> None:
    done = call_helm(helm, "template", "rl", str(CHART), "--set=replicas=3")
    assert done.returncode != 0
    assert "'replicas' not allowed" in done.stderr


def test_every_object_is_taken_by_the_api_server(helm: Path, plane: ControlPlane, tmp_path: Path) -> None:
    documents = [
        document
        for document in render(helm, *EVERYTHING)
        # Prometheus' own kinds aren't served here, and our CRD is: its update is tried below.
        if not document["apiVersion"].startswith("monitoring.coreos.com")
    ]
    manifest = tmp_path / "chart.yaml"
    manifest.write_text(yaml.safe_dump_all(documents))
    done = plane.kubectl(
        "apply", "--server-side", "--dry-run=server", "--force-conflicts", "-f", str(manifest), check=False
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == len(documents)


def test_the_operators_pods_meet_the_restricted_standard(helm: Path, plane: ControlPlane) -> None:
    namespace = f"restricted-{secrets.token_hex(4)}"
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    plane.call("POST", "/api/v1/namespaces", {"metadata": {"name": namespace, "labels": labels}})
    template = one(render(helm), "Deployment")["spec"]["template"]
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "operator"}, "spec": template["spec"]}
    plane.call("POST", f"/api/v1/namespaces/{namespace}/pods?dryRun=All", pod)


def test_the_crd_is_kept_unless_told_otherwise(helm: Path) -> None:
    keep = "helm.sh/resource-policy"
    crd = one(render(helm), "CustomResourceDefinition")
    assert crd["metadata"]["annotations"][keep] == "keep"
    crd = one(render(helm, "--set=crds.keep=false"), "CustomResourceDefinition")
    assert keep not in crd["metadata"].get("annotations", {})
    kinds = [document["kind"] for document in render(helm, "--set=crds.enabled=false")]
    assert "CustomResourceDefinition" not in kinds


def test_a_digest_wins_over_the_tag(helm: Path) -> None:
    digest = "sha256:" + "a" * 64
    deployment = one(render(helm, f"--set=image.digest={digest}", "--set=image.tag=x"), "Deployment")
    assert deployment["spec"]["template"]["spec"]["containers"][0]["image"] == f"rljob/operator@{digest}"


def test_no_role_has_a_wildcard(helm: Path) -> None:
    for document in render(helm, *EVERYTHING):
        if document["kind"] in ("Role", "ClusterRole"):
            for entry in document["rules"]:
                assert "*" not in [*entry["apiGroups"], *entry["resources"], *entry["verbs"]]


def test_the_operators_arguments_are_the_programs(helm: Path) -> None:
    from rljob_operator.__main__ import options_of, parser

    deployment = one(render(helm, "--set=watchNamespaces={a,b}"), "Deployment")
    arguments = deployment["spec"]["template"]["spec"]["containers"][0]["args"]
    options = options_of(parser().parse_args(arguments))
    assert options.namespaces == ("a", "b")
    assert options.lease_namespace == "default"


ALLOWED = [
    ("list", "rljob.dev", "rljobs", ""),
    ("watch", "rljob.dev", "rljobs", ""),
    ("patch", "rljob.dev", "rljobs", "status"),
    ("delete", "rljob.dev", "rljobs", ""),
    ("create", "ray.io", "rayclusters", ""),
    ("patch", "ray.io", "rayclusters", ""),
    ("delete", "", "pods", ""),
    ("create", "", "secrets", ""),
    ("patch", "", "configmaps", ""),
    ("create", "events.k8s.io", "events", ""),
]
REFUSED = [
    ("get", "", "secrets", ""),
    ("list", "", "secrets", ""),
    ("watch", "", "secrets", ""),
    ("create", "", "pods", ""),
    ("create", "", "pods", "exec"),
    ("patch", "rljob.dev", "rljobs", ""),
    ("create", "rljob.dev", "rljobs", ""),
    ("create", "rbac.authorization.k8s.io", "rolebindings", ""),
    ("get", "", "nodes", ""),
    ("impersonate", "", "users", ""),
    ("create", "apps", "deployments", ""),
    ("create", "", "serviceaccounts", "token"),
    ("get", "", "configmaps", ""),
]


@pytest.fixture
def installed(helm: Path, plane: ControlPlane, tmp_path: Path) -> Iterator[str]:
    """The chart's roles on the server; the name of the operator's user."""
    namespace = f"ops-{secrets.token_hex(4)}"
    plane.call("POST", "/api/v1/namespaces", {"metadata": {"name": namespace}})
    roles = [
        document
        for document in render(helm, namespace=namespace)
        if document["apiVersion"].startswith("rbac") or document["kind"] == "ServiceAccount"
    ]
    manifest = tmp_path / "roles.yaml"
    manifest.write_text(yaml.safe_dump_all(roles))
    plane.kubectl("apply", "--server-side", "-f", str(manifest))
    yield f"system:serviceaccount:{namespace}:rl-rljob-operator"
    plane.kubectl("delete", "--wait=false", "-f", str(manifest))


def test_the_operator_may_what_it_must_and_nothing_else(installed: str, plane: ControlPlane) -> None:
    for expected, table in ((True, ALLOWED), (False, REFUSED)):
        for verb, group, resource, sub in table:
            attributes = {"namespace": "default", "verb": verb, "group": group, "resource": resource}
            body = {
                "apiVersion": "authorization.k8s.io/v1",
                "kind": "SubjectAccessReview",
                "spec": {"user": installed, "resourceAttributes": {**attributes, "subresource": sub}},
            }
            answer = plane.call("POST", "/apis/authorization.k8s.io/v1/subjectaccessreviews", body)
            assert answer["status"]["allowed"] is expected, (verb, group, resource, sub)


def test_the_lease_is_the_only_one_it_may_touch(installed: str, plane: ControlPlane) -> None:
    namespace = installed.split(":")[2]
    for name, expected in (("rl-rljob-operator", True), ("someone-elses", False)):
        attributes = {"namespace": namespace, "verb": "update", "group": "coordination.k8s.io", "resource": "leases"}
        body = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SubjectAccessReview",
            "spec": {"user": installed, "resourceAttributes": {**attributes, "name": name}},
        }
        answer = plane.call("POST", "/apis/authorization.k8s.io/v1/subjectaccessreviews", body)
        assert answer["status"]["allowed"] is expected
