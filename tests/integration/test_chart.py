"""The chart, rendered by the real Helm and taken by the real API server; and its snapshots."""

from __future__ import annotations

import json
import secrets
from pathlib import Path
from typing import Any

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
    *("--set=podLabels.team=rl", "--set=podAnnotations.note=seen", "--set=extraEnv[0].name=A,extraEnv[0].value=b"),
    "--set=networkPolicy.enabled=true",
    "--set=metrics.serviceMonitor.enabled=true",
    "--set=metrics.rules.enabled=true",
    "--set=metrics.dashboard.enabled=true",
]

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="session")
def helm() -> Path:
    return program()


def pod_template(documents: list[dict[str, Any]]) -> dict[str, Any]:
    """Of the operator's pods."""
    template: dict[str, Any] = one(documents, "Deployment")["spec"]["template"]
    return template


def test_the_chart_passes_the_strict_lint(helm: Path) -> None:
    done = call(helm, "lint", "--strict", str(CHART))
    assert done.returncode == 0, done.stdout + done.stderr


def test_an_unknown_value_is_refused(helm: Path) -> None:
    done = call(helm, "template", "rl", str(CHART), "--set=replicas=3")
    assert done.returncode != 0
    assert "'replicas' not allowed" in done.stderr


def test_helm_says_nothing_but_what_was_asked(helm: Path) -> None:
    """A link in the chart, for one, is remarked upon at every call."""
    done = call(helm, "template", "rl", str(CHART))
    assert (done.returncode, done.stderr) == (0, "")


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


# What OpenShift's restricted-v2 assigns itself, and the group that goes with the user.
ASSIGNED = ("runAsUser", "runAsGroup", "fsGroup")
EMPTIED = "--set=" + ",".join(f"podSecurityContext.{name}=null" for name in ASSIGNED)


@pytest.mark.parametrize("values", [(), (EMPTIED,)], ids=["as they are", "without user and groups"])
def test_the_operators_pods_meet_the_restricted_standard(
    helm: Path, plane: ControlPlane, values: tuple[str, ...]
) -> None:
    namespace = f"restricted-{secrets.token_hex(4)}"
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    plane.call("POST", "/api/v1/namespaces", {"metadata": {"name": namespace, "labels": labels}})
    spec = pod_template(render(helm, *values))["spec"]
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "operator"}, "spec": spec}
    plane.call("POST", f"/api/v1/namespaces/{namespace}/pods?dryRun=All", pod)


def test_user_and_groups_can_be_left_to_the_cluster(helm: Path) -> None:
    context = pod_template(render(helm, EMPTIED))["spec"]["securityContext"]
    assert context == {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
    spec = pod_template(render(helm, "--set=podSecurityContext=null,securityContext=null"))["spec"]
    assert "securityContext" not in spec
    assert "securityContext" not in spec["containers"][0]


def test_values_of_an_older_chart_keep_the_security_contexts(helm: Path) -> None:
    """`helm upgrade --reuse-values` hands them over without what is new here: it is missing there, and not emptied."""
    missing = "serviceAccount.create", "podSecurityContext", "securityContext", "podLabels", "extraEnv", "nameOverride"
    assert render(helm, "--set=" + ",".join(f"{name}=null" for name in missing)) == render(helm)
    # And a field that is set beside them counts.
    known = yaml.safe_load((CHART / "values.yaml").read_text())["podSecurityContext"]
    fields = dict.fromkeys(known) | {"runAsUser": 1000}
    older = render(helm, "--set=serviceAccount.create=null", f"--set-json=podSecurityContext={json.dumps(fields)}")
    assert older == render(helm, "--set=podSecurityContext.runAsUser=1000")


def test_labels_annotations_and_variables_are_added_to_the_operators_own(helm: Path) -> None:
    plain = pod_template(render(helm))
    template = pod_template(
        render(
            helm,
            "--set=podLabels.team=rl,podAnnotations.note=seen",
            '--set-json=extraEnv=[{"name":"A","value":"1"},{"name":"B","valueFrom":{"fieldRef":{"fieldPath":"x"}}}]',
        )
    )
    assert template["metadata"]["labels"] == plain["metadata"]["labels"] | {"team": "rl"}
    assert template["metadata"]["annotations"] == {"note": "seen"}
    assert template["spec"]["containers"][0]["env"] == [
        {"name": "A", "value": "1"},
        {"name": "B", "valueFrom": {"fieldRef": {"fieldPath": "x"}}},
    ]


@pytest.mark.parametrize(
    ("value", "name"),
    [
        ("nameOverride=jobs", "rl-jobs"),
        ("nameOverride=r", "rl"),
        ("fullnameOverride=jobs", "jobs"),
        ("fullnameOverride=jobs,nameOverride=other", "jobs"),
    ],
)
def test_what_is_installed_is_called_as_it_is_to_be(helm: Path, value: str, name: str) -> None:
    """Everything but the CRD, and the labels by which the policies of training pods know the operator."""
    documents = render(helm, f"--set={value},crds.enabled=false", *EVERYTHING)
    assert all(f"{item['metadata']['name']}-".startswith(f"{name}-") for item in documents)
    template = pod_template(documents)
    assert {f"--lease-name={name}", f"--key-secret={name}-keys"} <= set(template["spec"]["containers"][0]["args"])
    assert template["spec"]["serviceAccountName"] == name
    assert names.OPERATOR_LABELS.items() <= template["metadata"]["labels"].items()


@pytest.mark.parametrize(
    ("value", "account", "made"),
    [
        ("", "rl-rljob-operator", ["rl-rljob-operator"]),
        ("serviceAccount.name=mine", "mine", ["mine"]),
        ("serviceAccount.create=false,serviceAccount.name=mine", "mine", []),
    ],
)
@pytest.mark.parametrize("namespaces", ["", "watchNamespaces={a,b}"], ids=["everywhere", "two namespaces"])
def test_pods_run_as_the_account_that_the_roles_are_bound_to(
    helm: Path, value: str, account: str, made: list[str], namespaces: str
) -> None:
    documents = render(helm, f"--set={value}", f"--set={namespaces}", namespace="ops")
    assert pod_template(documents)["spec"]["serviceAccountName"] == account
    assert [item["metadata"]["name"] for item in documents if item["kind"] == "ServiceAccount"] == made
    bindings = [item for item in documents if item["kind"].endswith("RoleBinding")]
    assert len(bindings) >= 3
    for binding in bindings:
        assert binding["subjects"] == [{"kind": "ServiceAccount", "name": account, "namespace": "ops"}]


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


def test_the_pod_policy_reaches_the_program(helm: Path) -> None:
    from rljob_api.pod_policy import PodPolicy
    from rljob_operator.__main__ import options_of, parser

    for values in ((), ("--set=podPolicy.hostPaths={/data}", "--set=podPolicy.privileged=true")):
        arguments = one(render(helm, *values), "Deployment")["spec"]["template"]["spec"]["containers"][0]["args"]
        allowed = PodPolicy(host_paths=("/data",), privileged=True) if values else PodPolicy()
        assert options_of(parser().parse_args(arguments)).settings.pod_policy == allowed


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
    ("version", "taken"), [("1.32.9", False), ("1.33.0", True), ("1.33.2-gke.1", True), ("1.37.2", True)]
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
        (["--set=serviceAccount.create=false"], "serviceAccount.name is empty"),
        (["--set=podSecurityContext.runAsuser=1"], "'runAsuser' not allowed"),
        (["--set=securityContext.fsGroup=1"], "'fsGroup' not allowed"),
        (["--set=podLabels.helm\\.sh/chart=x"], "podLabels.helm.sh"),
        (["--set=extraEnv[0].name=A,extraEnv[0].value=1"], "extraEnv.0.value"),
        (["--set=nameOverride=a_b"], "nameOverride"),
        (["--set=metrics.rules.enabled=true"], "metrics.rules.enabled needs metrics.serviceMonitor.enabled"),
        (["--set=trainerImage=null"], "trainerImage"),
        (["--set=trainerImage="], "trainerImage"),
        (["--set=rayVersion=null"], "rayVersion"),
        (["--set=pollSeconds=null"], "pollSeconds"),
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
    assert "helm upgrade rl CHART --namespace ops --reuse-values --set 'watchNamespaces={NAMESPACE,...}'" in notes


def test_the_notes_of_a_confined_operator_name_its_namespaces(helm: Path) -> None:
    values = ("--set=crds.enabled=false", "--set=watchNamespaces={team-a,team-b}")
    done = call(helm, "install", "rl", str(CHART), "--dry-run=client", *values, "--namespace=ops")
    notes = done.stdout.partition("NOTES:")[2]
    assert "watches team-a, team-b" in notes
    assert "kubectl -n team-a apply -f job.yaml" in notes
    assert "--reuse-values" not in notes
