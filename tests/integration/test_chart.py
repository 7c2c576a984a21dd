"""The chart, rendered by the real Helm and taken by the real API server; and its snapshots."""

from __future__ import annotations

import json
import secrets
from pathlib import Path

import pytest
import snapshots
import yaml
from helm import CHART, call, one, program, render
from kube.control_plane import ControlPlane
from world import job_document

from rljob_operator import names
from rljob_operator.render import rendered as rendered_job
from rljob_operator.settings import Settings

EVERYTHING = [
    "--set=networkPolicy.enabled=true",
    "--set=metrics.serviceMonitor.enabled=true",
    "--set=metrics.rules.enabled=true",
    "--set=metrics.dashboard.enabled=true",
]

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="session")
def helm() -> Path:
    return program()


def test_the_chart_passes_the_strict_lint(helm: Path) -> None:
    done = call(helm, "lint", "--strict", str(CHART))
    assert done.returncode == 0, done.stdout + done.stderr


def test_an_unknown_value_is_refused(helm: Path) -> None:
    done = call(helm, "template", "rl", str(CHART), "--set=replicas=3")
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
                assert not [value for values in entry.values() for value in values if "*" in value]


def test_the_operators_arguments_are_the_programs(helm: Path) -> None:
    from rljob_operator.__main__ import options_of, parser

    deployment = one(render(helm, "--set=watchNamespaces={a,b}"), "Deployment")
    arguments = deployment["spec"]["template"]["spec"]["containers"][0]["args"]
    options = options_of(parser().parse_args(arguments))
    assert options.namespaces == ("a", "b")
    assert options.lease_namespace == "default"


def test_ingress_rules_reach_the_program_as_they_were_written(helm: Path) -> None:
    from rljob_operator.__main__ import options_of, parser

    rules = [{"from": [{"namespaceSelector": {"matchLabels": {"name": 'a "quoted" one'}}}], "ports": [{"port": 8080}]}]
    documents = render(helm, f"--set-json=trainingNetworkPolicy.extraIngress={json.dumps(rules)}", namespace="ops")
    arguments = one(documents, "Deployment")["spec"]["template"]["spec"]["containers"][0]["args"]
    settings = options_of(parser().parse_args(arguments)).settings
    assert settings.ingress == tuple(rules)
    assert (settings.network_policy, settings.operator_namespace) == (True, "ops")
    documents = render(helm, "--set=trainingNetworkPolicy.enabled=false")
    arguments = one(documents, "Deployment")["spec"]["template"]["spec"]["containers"][0]["args"]
    assert options_of(parser().parse_args(arguments)).settings.network_policy is False


@pytest.mark.parametrize("name", sorted(snapshots.SETS))
def test_the_chart_renders_what_is_committed(helm: Path, name: str) -> None:
    committed = snapshots.FOLDER / f"{name}.yaml"
    assert snapshots.rendered(helm, name) == committed.read_text(), "run make snapshots and look at the difference"


def test_every_snapshot_belongs_to_a_set_of_values() -> None:
    assert {path.stem for path in snapshots.FOLDER.iterdir()} == set(snapshots.SETS)


def test_training_pods_meet_the_restricted_standard(plane: ControlPlane) -> None:
    namespace = f"restricted-{secrets.token_hex(4)}"
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    plane.call("POST", "/api/v1/namespaces", {"metadata": {"name": namespace, "labels": labels}})
    text = yaml.safe_dump(job_document("tiny", checkpoint={"uri": "pvc://state/runs"}, code=[{"configMap": "mine"}]))
    spec = rendered_job(text, [], Settings())[-1]["spec"]
    for part in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "training"}, "spec": part["template"]["spec"]}
        plane.call("POST", f"/api/v1/namespaces/{namespace}/pods?dryRun=All", pod)


def test_network_policies_know_the_operators_pods(helm: Path) -> None:
    template = one(render(helm, namespace="ops"), "Deployment")["spec"]["template"]
    assert names.OPERATOR_LABELS.items() <= template["metadata"]["labels"].items()
    arguments = template["spec"]["containers"][0]["args"]
    assert "--operator-namespace=ops" in arguments
    assert "--no-network-policy" not in arguments


def test_the_dashboard_is_handed_on_as_it_is(helm: Path) -> None:
    documents = render(helm, "--set=metrics.dashboard.enabled=true", "--set=crds.enabled=false")
    (found,) = [item for item in documents if item["metadata"]["name"].endswith("-dashboard")]
    assert found["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert json.loads(found["data"]["rljob.json"]) == json.loads((CHART / "files" / "dashboard.json").read_text())


@pytest.mark.parametrize(
    ("version", "taken"), [("1.32.9", False), ("1.33.0", True), ("1.33.2-gke.1", True), ("1.36.3", True)]
)
def test_the_oldest_kubernetes_is_stated(helm: Path, version: str, taken: bool) -> None:
    done = call(helm, "template", "rl", str(CHART), f"--kube-version={version}")
    assert (done.returncode == 0) is taken, done.stderr
    assert taken or "kubeVersion" in done.stderr


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (["--set=image.digest=sha256:abc"], "image.digest"),
        (["--set=metrics.rules.quotaWait=soon"], "quotaWait"),
        (["--set=watchNamespaces={a,b,a}"], "watchNamespaces"),
        (['--set-json=trainingNetworkPolicy.extraIngress=[{"to":[]}]'], "'to' not allowed"),
        (['--set-json=networkPolicy.extraEgress=[{"from":[]}]'], "'from' not allowed"),
        (["--set=trainingNetworkPolicy.enable=false"], "'enable' not allowed"),
    ],
)
def test_a_wrong_value_is_refused_by_name(helm: Path, values: list[str], words: str) -> None:
    done = call(helm, "template", "rl", str(CHART), *values)
    assert done.returncode != 0
    assert words in done.stderr.replace("/", ".")


def test_the_notes_say_the_next_command(helm: Path) -> None:
    done = call(helm, "install", "rl", str(CHART), "--dry-run=client", "--set=crds.enabled=false", "--namespace=ops")
    notes = done.stdout.partition("NOTES:")[2]
    assert "kubectl -n ops rollout status deployment/rl-rljob-operator" in notes
    assert "kubectl apply -f job.yaml" in notes
