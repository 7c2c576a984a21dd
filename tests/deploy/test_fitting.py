"""Job files of users, fitted to a cluster whose jobs mount the checkout: examples/cluster runs there as it stands."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from rljob_api.spec.job import RLJob
from testcluster.__main__ import main
from testcluster.building import MOUNTED_IMAGE
from testcluster.fitting import fitted

CHECKOUT = Path("/somewhere/rljob")
EXAMPLES = Path(__file__).parents[2] / "examples" / "cluster"
CLAIM = {"name": "environment", "persistentVolumeClaim": {"claimName": "environment", "readOnly": True}}
MOUNT = {"name": "environment", "mountPath": str(CHECKOUT), "readOnly": True}


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((EXAMPLES / name).read_text()))


def test_the_pods_of_the_quick_start_mount_the_checkout_where_it_is_on_the_host() -> None:
    (written,) = documents("quickstart.yaml")
    claim, job = fitted([written], CHECKOUT)
    assert (claim["kind"], claim["spec"]["storageClassName"]) == ("PersistentVolumeClaim", "rljob-environment")
    assert claim["metadata"]["name"] == "environment"
    for section in ("head", "rollout", "trainer"):
        pod = job["spec"][section].pop("pod")
        assert (pod.pop("volumes"), pod.pop("volumeMounts")) == ([CLAIM], [MOUNT])
        assert pod == written["spec"][section].pop("pod")
    assert job == written, "all else is the example's"


def test_what_a_job_mounts_itself_it_keeps_and_the_api_takes_it() -> None:
    (job,) = documents("quickstart.yaml")
    job["spec"]["head"] = {"pod": {"volumes": [{"name": "a", "emptyDir": {}}], "volumeMounts": []}}
    del job["spec"]["trainer"]["pod"]
    _, fit = fitted([job], CHECKOUT)
    assert fit["spec"]["head"]["pod"]["volumes"] == [{"name": "a", "emptyDir": {}}, CLAIM]
    assert fit["spec"]["trainer"]["pod"]["volumeMounts"] == [MOUNT]
    RLJob.model_validate(fit)


def test_a_pool_that_a_job_need_not_have_is_fitted_where_it_is() -> None:
    (job,) = documents("quickstart.yaml")
    _, fit = fitted([job], CHECKOUT)
    assert {"rewardModel", "judge"}.isdisjoint(fit["spec"])
    job["spec"] |= {"rewardModel": {"replicas": 2}, "judge": {"replicas": 3}}
    _, fit = fitted([job], CHECKOUT)
    pod = {"volumes": [CLAIM], "volumeMounts": [MOUNT]}
    assert fit["spec"]["rewardModel"] == {"replicas": 2, "pod": pod}
    assert fit["spec"]["judge"] == {"replicas": 3, "pod": pod}


def test_each_namespace_with_a_job_has_a_claim_of_its_own() -> None:
    jobs = []
    for name, namespace in (("a", None), ("b", "team-b"), ("c", "team-b"), ("d", "team-d")):
        (job,) = documents("quickstart.yaml")
        job["metadata"] = {"name": name} if namespace is None else {"name": name, "namespace": namespace}
        jobs.append(job)
    fit = fitted(jobs, CHECKOUT)
    claims = [document["metadata"] for document in fit if document["kind"] == "PersistentVolumeClaim"]
    assert claims == [
        {"name": "environment"},
        {"name": "environment", "namespace": "team-b"},
        {"name": "environment", "namespace": "team-d"},
    ]
    assert [document["metadata"] for document in fit[3:]] == [job["metadata"] for job in jobs]


def test_a_job_with_an_image_of_its_own_stays_as_it_is() -> None:
    (job,) = documents("quickstart.yaml")
    job["spec"]["image"] = "registry.example.com/trainer:1"
    assert fitted([job], CHECKOUT) == [job]


def test_the_pod_that_reads_the_results_starts_from_the_image_that_is_there() -> None:
    claim, reader = documents("storage.yaml")
    fit = fitted([claim, reader], CHECKOUT)
    reader["spec"]["containers"][0]["image"] = MOUNTED_IMAGE
    assert fit == [claim, reader]


def test_without_a_cluster_nothing_is_applied(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([f"--folder={tmp_path}", "apply", str(EXAMPLES / "storage.yaml")]) == 1
    assert capsys.readouterr().err == f"testcluster: no cluster was started in {tmp_path}\n"
