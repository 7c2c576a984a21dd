"""The models in Python: strict, frozen, both spellings of names; and what is sent between operator and driver."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta

import pytest
from pydantic import ValidationError

from rljob_api import RLJob, schema
from rljob_api.loading import check_text
from rljob_api.schema import Node
from rljob_api.spec.algorithm import Advantage, CriticSpec
from rljob_api.spec.pipeline import LiveSettings
from rljob_api.spec.pod import Pod, Resources
from rljob_api.spec.pools import OptimizerSpec
from rljob_api.status import (
    CurrentWait,
    Desired,
    DriverStatus,
    End,
    Pools,
    ReplicaStatus,
    RolloutStatus,
    TrainerStatus,
)
from rljob_api.violations import Violation, path_of

NOW = datetime(2026, 11, 21, 5, 8, tzinfo=UTC)


def test_python_takes_both_spellings() -> None:
    assert OptimizerSpec(learning_rate=0.1) == OptimizerSpec.model_validate({"learningRate": 0.1})
    assert Advantage(lambda_=0.5) == Advantage.model_validate({"lambda": 0.5})


def test_a_file_takes_camel_case_only() -> None:
    with pytest.raises(ValidationError):
        OptimizerSpec.model_validate({"learning_rate": 0.1}, by_alias=True, by_name=False)


def test_models_are_frozen() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        OptimizerSpec().learning_rate = 0.1  # type: ignore[misc]


@pytest.mark.parametrize("value", ["0.1", True, None, float("nan"), float("inf")])
def test_numbers_are_strict(value: object) -> None:
    with pytest.raises(ValidationError):
        OptimizerSpec(betas=(0.9, value))  # type: ignore[arg-type]


def test_whole_numbers_are_numbers_but_not_the_other_way() -> None:
    assert CriticSpec(value_clip=1).value_clip == 1
    with pytest.raises(ValidationError):
        CriticSpec(warmup_steps=1.0)  # type: ignore[arg-type]


def test_quantities_are_text_or_numbers() -> None:
    resources = Resources.model_validate({"limits": {"cpu": 4, "memory": "16Gi", "example.com/x": "0.5"}})
    assert resources.limits == {"cpu": "4", "memory": "16Gi", "example.com/x": "0.5"}
    with pytest.raises(ValidationError):
        Pod.model_validate({"sharedMemory": True})
    with pytest.raises(ValidationError):  # as the API server: int-or-string takes no fraction
        Pod.model_validate({"sharedMemory": 0.5})


def test_a_job_as_plain_data_says_only_what_was_written(minimal_text: str) -> None:
    from rljob_api import load_jobs

    (job,) = load_jobs(minimal_text)
    assert set(job.document()["spec"]) == {"model", "data", "reward", "algorithm"}
    assert RLJob.model_validate(job.document()) == job


def test_paths_are_written_and_taken_apart() -> None:
    parts = ("spec", "pod", "nodeSelector", "kubernetes.io/arch", "list", 0, "name")
    assert path_of(parts) == "spec.pod.nodeSelector[kubernetes.io/arch].list[0].name"
    assert Violation(path_of(parts), "", "").parts == parts


def status() -> DriverStatus:
    return DriverStatus(
        generation=3,
        attempt=2,
        time=NOW,
        step=10,
        version=10,
        total_steps=100,
        waiting=CurrentWait(
            who="trainer",
            reason="412 of 512 samples; oldest running 38 s on engine 3",
            since=NOW,
            until=NOW + timedelta(minutes=5),
        ),
        pools=Pools(
            rollout=RolloutStatus(
                desired=2,
                ready=1,
                engines=(ReplicaStatus(name="engine-0", pod="tiny-rollout-x", state="serving", version=10, running=7),),
            ),
            trainer=TrainerStatus(desired=4, ready=4),
        ),
        eta=NOW + timedelta(hours=1),
    )


def test_status_goes_over_the_wire_unchanged() -> None:
    sent = status()
    received = DriverStatus.model_validate(json.loads(sent.model_dump_json(by_alias=True)))
    assert received == sent
    assert received.seconds_left(NOW) == 3600
    assert received.seconds_left(NOW + timedelta(hours=2)) == 0


def test_a_newer_drivers_status_is_read_and_a_wrong_one_is_not() -> None:
    data = json.loads(status().model_dump_json(by_alias=True))
    assert DriverStatus.model_validate({**data, "invented": 1}) == status()
    for wrong in ({"time": 3}, {"time": "2026-11-21T05:08:00"}, {"step": -1}, {"step": "1"}, {"attempt": 0}):
        with pytest.raises(ValidationError):
            DriverStatus.model_validate({**data, **wrong})


def test_a_command_with_unknown_parts_is_refused() -> None:
    desired = Desired(generation=3, attempt=2, rollout_replicas=4, settings=LiveSettings(max_age=2))
    assert Desired.model_validate(json.loads(desired.model_dump_json(by_alias=True))) == desired
    with pytest.raises(ValidationError):
        Desired.model_validate({"generation": 1, "attempt": 1, "stop": True})


def test_every_live_setting_of_the_pipeline_reaches_the_driver() -> None:
    nodes = schema.walk(schema.root().fields["spec"].fields["pipeline"])
    live = [node for _, node in nodes if node.change.when == "live" and not node.fields]
    sent = Node(name="", kind="object", model=LiveSettings).fields
    assert {node.name: (node.bounds, node.fallback) for node in live} == {
        name: (node.bounds, node.fallback) for name, node in sent.items()
    }


def test_ends_carry_exit_codes() -> None:
    assert End(kind="failed", reason="rank 3 was killed", exit_code=75, time=NOW).exit_code == 75
    with pytest.raises(ValidationError):
        End(kind="failed", reason="x", exit_code=256, time=NOW)


def test_what_kubectl_get_prints_can_be_checked_again(minimal_text: str) -> None:
    """With what the server adds, and the manifest that kubectl apply keeps in an annotation, of any length."""
    kept = json.dumps({"spec": "x" * 30_000})
    annotations = f"  annotations: {{kubectl.kubernetes.io/last-applied-configuration: '{kept}'}}\n"
    added = annotations + "  uid: 1-2\n  generation: 3\n  managedFields: [{manager: kubectl}]\n"
    text = minimal_text.replace("  name: tiny\n", "  name: tiny\n" + added) + "status: {phase: Running}\n"
    (checked,) = check_text(text)
    assert checked.violations == []
    assert checked.job is not None
    assert list(checked.job.metadata.annotations.values()) == [kept]
