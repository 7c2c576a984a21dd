"""The objects of a job: what is in them, and what never is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from simulation import SETTINGS, job_spec

from rljob_api import JobInvalid, ResolvedJob, check, resolve
from rljob_api.pod_template.located import Located
from rljob_api.pod_template.of_job import cpus_of_ray, pod_template
from rljob_operator import names, objects, quantities
from rljob_operator.merging import merge
from rljob_operator.render import rendered
from rljob_operator.tokens import JobTokens, TokenKey


def job(**sections: object) -> ResolvedJob:
    document = {
        "apiVersion": "rljob.dev/v1alpha1",
        "kind": "RLJob",
        "metadata": {"name": "job", "namespace": "space"},
        "spec": job_spec(**sections),
    }
    found, violations = check(document)
    assert not violations, violations
    assert found is not None
    return resolve(found)


def cluster(**sections: object) -> dict[str, object]:
    made = job(**sections)
    return objects.ray_cluster(made, "hash", "uid", 3, 1, "key", SETTINGS)


def test_the_longest_job_name_gives_a_cluster_name_that_kuberay_takes() -> None:
    assert len(names.cluster("j" * 40, 10_000_000_000)) <= names.MAX_CLUSTER_NAME


def test_pools_become_groups_and_gpus_become_limits() -> None:
    made = cluster(
        rollout={"replicas": 3, "maxReplicas": 8, "gpusPerReplica": 2, "parallelism": {"tensor": 2}},
        trainer={"replicas": 2, "gpusPerReplica": 4},
    )
    rollout, trainer = made["spec"]["workerGroupSpecs"]  # type: ignore[index]
    assert (rollout["groupName"], rollout["replicas"], rollout["minReplicas"], rollout["maxReplicas"]) == (
        "rollout",
        3,
        0,
        8,
    )
    assert (trainer["groupName"], trainer["replicas"], trainer["minReplicas"]) == ("trainer", 2, 2)
    limits = [group["template"]["spec"]["containers"][0]["resources"]["limits"] for group in (rollout, trainer)]
    assert limits == [{"nvidia.com/gpu": "2"}, {"nvidia.com/gpu": "4"}]


def test_reward_models_have_a_group_of_their_own() -> None:
    scored = {"functions": [{"type": "rewardModel", "rewardModel": {"source": "pvc://models/scores"}}]}
    pod = {"nodeSelector": {"disk": "fast"}, "resources": {"requests": {"cpu": 4}}}
    made = cluster(reward=scored, rewardModel={"replicas": 3, "gpusPerReplica": 1, "env": {"A": "b"}, "pod": pod})
    rollout, trainer, scorers = made["spec"]["workerGroupSpecs"]  # type: ignore[index]
    names_and_sizes = [(group["groupName"], group["replicas"], group["minReplicas"]) for group in (trainer, scorers)]
    assert names_and_sizes == [("trainer", 1, 1), ("reward-model", 3, 0)]
    assert scorers["labels"] == {"rljob.dev/role": "reward-model"}
    template = scorers["template"]
    assert template["metadata"]["labels"]["rljob.dev/role"] == "reward-model"
    assert template["spec"]["nodeSelector"] == {"disk": "fast"}
    (container,) = template["spec"]["containers"]
    assert container["resources"] == {"requests": {"cpu": "4"}, "limits": {"nvidia.com/gpu": "1"}}
    assert {"name": "A", "value": "b"} in container["env"]
    # The model's volume is there, and everywhere.
    assert "/mnt/rljob/models" in {mount["mountPath"] for mount in container["volumeMounts"]}
    assert "A" not in {item["name"] for item in rollout["template"]["spec"]["containers"][0]["env"]}
    # The driver finds the pods' Ray nodes by the label, and asks for all CPUs that Ray counts in one.
    spec = job(reward=scored, rewardModel={"pod": pod}).spec
    assert spec.reward_model is not None
    assert cpus_of_ray("spec.rewardModel.pod", spec.reward_model.pod, 0) == 4


def test_a_judges_engines_have_a_group_of_their_own() -> None:
    judged = {"functions": [{"type": "judge", "judge": {"template": "{response}"}}]}
    pool = {
        "model": {"source": "pvc://models/judge"},
        "replicas": 2,
        "gpusPerReplica": 4,
        "parallelism": {"tensor": 4},
        "env": {"A": "b"},
    }
    made = cluster(reward=judged, judge=pool)
    *_, judges = made["spec"]["workerGroupSpecs"]  # type: ignore[index]
    assert (judges["groupName"], judges["replicas"], judges["minReplicas"]) == ("judge", 2, 0)
    assert judges["labels"] == {"rljob.dev/role": "judge"}
    (container,) = judges["template"]["spec"]["containers"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "4"}
    assert {"name": "A", "value": "b"} in container["env"]
    assert "/mnt/rljob/models" in {mount["mountPath"] for mount in container["volumeMounts"]}


@pytest.mark.parametrize(
    ("pod", "cpus"),
    [
        ({}, None),
        ({"resources": {"requests": {"cpu": "500m"}}}, 1),
        ({"resources": {"requests": {"cpu": 1}, "limits": {"cpu": "2500m", "memory": "1Gi"}}}, 3),
        (
            {
                "resources": {"requests": {"cpu": 1}},
                "template": {"spec": {"containers": [{"name": "ray", "resources": {"requests": {"cpu": "6"}}}]}},
            },
            6,
        ),
    ],
)
def test_cpus_are_counted_as_kuberay_does(pod: dict[str, object], cpus: int | None) -> None:
    """By hand: the limit, else the request, rounded up."""
    scored = {"functions": [{"type": "rewardModel", "rewardModel": {"source": "/models/scores"}}]}
    pool = job(reward=scored, rewardModel={"pod": pod}).spec.reward_model
    assert pool is not None
    assert cpus_of_ray("spec.rewardModel.pod", pool.pod, pool.gpus_per_replica) == cpus


def test_no_pod_runs_processes_of_rays_that_nobody_listens_to() -> None:
    spec = cluster()["spec"]
    head, *groups = [spec["headGroupSpec"], *spec["workerGroupSpecs"]]  # type: ignore[index]
    quiet = {"include-log-monitor": "0"}
    # "0" and not "false": KubeRay takes that for the absence of a flag.
    assert head["rayStartParams"] == {"num-cpus": "0", "no-monitor": "true"} | quiet
    assert [group["rayStartParams"] for group in groups] == [quiet] * 2


def test_the_head_has_no_cpu_for_actors_and_alone_carries_the_drivers_token() -> None:
    spec = cluster()["spec"]
    head = spec["headGroupSpec"]  # type: ignore[index]
    assert head["rayStartParams"]["num-cpus"] == "0"
    groups = spec["workerGroupSpecs"]  # type: ignore[index]
    volumes = [[v["name"] for v in part["template"]["spec"]["volumes"]] for part in (head, *groups)]
    assert ["rljob-tokens" in found for found in volumes] == [True, False, False]


def test_every_pod_is_without_api_credentials_and_privileges() -> None:
    spec = cluster()["spec"]
    for part in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):  # type: ignore[index]
        pod = part["template"]["spec"]
        assert pod["automountServiceAccountToken"] is False
        assert pod["restartPolicy"] == "Never"
        assert pod["containers"][0]["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
        }


def test_no_cluster_waits_long_for_the_pods_of_the_one_before_unless_the_job_says_so() -> None:
    slow = {"pod": {"template": {"spec": {"terminationGracePeriodSeconds": 90}}}}
    spec = cluster(trainer=slow)["spec"]
    parts = (spec["headGroupSpec"], *spec["workerGroupSpecs"])  # type: ignore[index]
    assert [part["template"]["spec"]["terminationGracePeriodSeconds"] for part in parts] == [5, 5, 90]


def test_pods_are_not_root_unless_the_job_says_so() -> None:
    override = {"pod": {"template": {"spec": {"securityContext": {"runAsNonRoot": False, "runAsUser": 0}}}}}
    head, rollout, trainer = (
        part["template"]["spec"]["securityContext"]
        for spec in [cluster(trainer=override)["spec"]]
        for part in (spec["headGroupSpec"], *spec["workerGroupSpecs"])  # type: ignore[index]
    )
    seccomp = {"seccompProfile": {"type": "RuntimeDefault"}}
    assert head == rollout == {"runAsNonRoot": True, **seccomp}
    assert trainer == {"runAsNonRoot": False, "runAsUser": 0, **seccomp}


def test_shared_memory_is_a_share_of_the_limit() -> None:
    made = cluster(trainer={"pod": {"resources": {"limits": {"memory": "10Gi"}}}})
    trainer = made["spec"]["workerGroupSpecs"][1]["template"]["spec"]  # type: ignore[index]
    (memory,) = [volume for volume in trainer["volumes"] if volume["name"] == "rljob-shm"]
    assert memory["emptyDir"] == {"medium": "Memory", "sizeLimit": "3072Mi"}


def test_claims_of_the_job_file_are_mounted_and_only_checkpoints_writable() -> None:
    made = cluster(model={"source": "pvc://models/tiny"}, checkpoint={"uri": "pvc://state/here"})
    head = made["spec"]["headGroupSpec"]["template"]["spec"]  # type: ignore[index]
    mounts = {m["mountPath"]: m["readOnly"] for m in head["containers"][0]["volumeMounts"] if "claim" in m["name"]}
    assert mounts == {"/mnt/rljob/models": True, "/mnt/rljob/state": False}


def test_a_template_is_merged_and_cannot_take_our_labels() -> None:
    template = {
        "metadata": {"labels": {"team": "rl", "app.kubernetes.io/instance": "other"}},
        "spec": {"dnsPolicy": "Default", "containers": [{"name": "sidecar", "image": "x"}]},
    }
    made = cluster(trainer={"pod": {"template": template}})
    trainer = made["spec"]["workerGroupSpecs"][1]["template"]  # type: ignore[index]
    assert trainer["metadata"]["labels"]["team"] == "rl"
    assert trainer["metadata"]["labels"]["app.kubernetes.io/instance"] == "job"
    assert [item["name"] for item in trainer["spec"]["containers"]] == ["ray", "sidecar"]
    assert trainer["spec"]["dnsPolicy"] == "Default"


def test_pods_carry_the_jobs_labels_but_for_those_that_are_orders() -> None:
    labels = {"team": "rl", "kueue.x-k8s.io/queue-name": "q", "ray.io/is-ray-node": "no"}
    document = {
        "apiVersion": "rljob.dev/v1alpha1",
        "kind": "RLJob",
        "metadata": {"name": "job", "labels": labels},
        "spec": job_spec(queueName="q"),
    }
    made = rendered(json.dumps(document) + "\n", [], SETTINGS)[-1]["spec"]
    for part in (made["headGroupSpec"], *made["workerGroupSpecs"]):
        assert {name for name in part["template"]["metadata"]["labels"] if name in labels} == {"team"}


def test_the_job_file_is_carried_verbatim() -> None:
    made = job()
    spec = {"anything": ["as", "the user wrote it"]}
    config = objects.config_map(made, spec, "uid", 7)
    file = json.loads(config["data"]["job.json"])
    assert file["spec"] == spec
    assert file["metadata"]["annotations"] == {"rljob.dev/uid": "uid", "rljob.dev/generation": "7"}


def test_suspend_is_never_set_because_it_belongs_to_the_queue() -> None:
    made = cluster(queueName="rl")
    assert "suspend" not in made["spec"]  # type: ignore[operator]
    assert made["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "rl"  # type: ignore[index]


def test_live_fields_leave_the_fingerprint_alone() -> None:
    def fingerprint(**sections: object) -> str:
        return objects.spec_hash(job(**sections).spec)

    before = fingerprint()
    assert fingerprint(rollout={"replicas": 5}, suspend=True, deadlines={"startSeconds": 9}) == before
    assert fingerprint(trainer={"microBatchTokens": 77}) != before


def test_the_first_live_field_of_a_section_leaves_the_fingerprint_alone() -> None:
    def fingerprint(**rollout: int) -> str:
        return objects.spec_hash(job(rollout=rollout).spec)

    assert fingerprint() == fingerprint(replicas=5) == fingerprint(replicas=5, maxReplicas=8)
    assert fingerprint(maxConcurrent=7) != fingerprint()


def test_rendering_shows_the_same_objects_and_no_tokens() -> None:
    text = json.dumps(
        {"apiVersion": "rljob.dev/v1alpha1", "kind": "RLJob", "metadata": {"name": "job"}, "spec": job_spec()}
    )
    kinds = [document["kind"] for document in rendered(text + "\n", [], SETTINGS)]
    assert kinds == ["ConfigMap", "Secret", "NetworkPolicy", "RayCluster"]


def test_tokens_are_stable_distinct_and_not_printed() -> None:
    key = TokenKey(b"k" * 32)
    first = key.tokens("uid", 1)
    assert first == key.tokens("uid", 1)
    assert len({first.ray, first.driver, key.tokens("uid", 2).ray, key.tokens("other", 1).ray}) == 4
    assert first.ray not in repr(first)
    assert "kkkk" not in repr(key)
    assert repr(JobTokens("a", "b", "id")) == "JobTokens(key='id')"


def test_a_short_key_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 32"):
        TokenKey(b"short")


@pytest.mark.parametrize(
    ("text", "value"), [("500m", "1/2"), ("1Gi", "1073741824"), ("2k", "2000"), ("1e3", "1000"), ("1.5", "3/2")]
)
def test_quantities(text: str, value: str) -> None:
    from fractions import Fraction

    assert quantities.parse(text) == Fraction(value)


def test_lists_are_merged_by_their_keys() -> None:
    ours = {"env": [{"name": "A", "value": "1"}], "tolerations": [{"key": "a"}], "other": [1]}
    theirs = {"env": [{"name": "A", "value": "2"}, {"name": "B"}], "tolerations": [{"key": "b"}], "other": [2]}
    assert merge(ours, theirs) == {
        "env": [{"name": "A", "value": "2"}, {"name": "B"}],
        "tolerations": [{"key": "a"}, {"key": "b"}],
        "other": [2],
    }


TEMPLATES: list[dict[str, object]] = [
    {},
    {"metadata": {"labels": {"a": "b"}}, "spec": {"hostname": "a", "securityContext": {"runAsUser": 5}}},
    {"spec": {"tolerations": [{"key": "b", "value": "c"}], "nodeSelector": {"b": "c"}}},
    {"spec": {"containers": [{"name": "ray", "env": [{"name": "A", "value": "2"}]}, {"name": "b", "image": "c"}]}},
    {"spec": {"containers": [{"name": "ray", "resources": {"limits": {"cpu": "3"}}, "securityContext": {}}]}},
]


@pytest.mark.parametrize("template", TEMPLATES)
def test_validate_looks_at_the_pod_that_is_made(template: dict[str, object]) -> None:
    settings = {
        "nodeSelector": {"a": "b"},
        "tolerations": [{"key": "a", "value": "b"}],
        "resources": {"limits": {"cpu": "1", "memory": "2Gi"}},
        "env": [{"name": "A", "value": "1"}],
        "volumes": [{"name": "a", "hostPath": {"path": "/a"}}],
        "volumeMounts": [{"name": "a", "mountPath": "/a"}],
        "template": template,
    }
    trainer = {"gpusPerReplica": 2, "env": {"B": "2"}, "pod": settings}
    pool = job(trainer=trainer).spec.trainer
    looked_at = pod_template("spec.trainer.pod", pool.pod, pool.env, 2, SETTINGS.default_image)
    groups = cluster(trainer=trainer)["spec"]["workerGroupSpecs"]  # type: ignore[index]
    assert is_in(looked_at, next(group["template"] for group in groups if group["groupName"] == "trainer"))


def is_in(part: Located, whole: object) -> bool:
    """Whether all that a part says is said by the whole, too."""
    if isinstance(part.value, dict):
        return isinstance(whole, dict) and all(is_in(item, whole.get(name, {})) for name, item in part.value.items())
    if isinstance(part.value, list):
        return isinstance(whole, list) and all(any(is_in(item, other) for other in whole) for item in part.value)
    return part.value == whole


@pytest.mark.parametrize("absent", ["job", "overlay"])
def test_a_file_that_is_not_there_is_named(absent: str, tmp_path: Path) -> None:
    present = tmp_path / "present.yaml"
    present.write_text("{}")
    missing = tmp_path / "missing.yaml"
    with pytest.raises(JobInvalid, match=f"{missing}: cannot be read .No such file or directory.; check the path"):
        rendered(str(missing if absent == "job" else present), [], SETTINGS, [missing] if absent == "overlay" else [])
