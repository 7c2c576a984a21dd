"""What the installation does not allow makes no pods, and says so."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import simulation
from simulation import World, job_spec

from rljob_api.pod_policy import PodPolicy
from rljob_operator.__main__ import options_of, parser

POD = {"volumes": [{"name": "host", "hostPath": {"path": "/etc"}}], "serviceAccountName": "admin"}


def test_nothing_is_created_and_the_status_names_each_place() -> None:
    world = World(spec=job_spec(trainer={"pod": POD}))
    assert world.look().actions == ()
    accepted = world.status.by_type["Accepted"]
    assert (accepted.status, accepted.reason) == ("False", "InvalidSpec")
    assert (
        "spec.trainer.pod.volumes[0].hostPath: mounts /etc of the node, which the operator refuses" in accepted.message
    )
    assert "podPolicy.serviceAccounts of the operator's chart" in accepted.message


def test_with_the_values_of_the_chart_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"hostPaths": ["/etc"], "serviceAccounts": ["admin"], "longestGraceSeconds": 900}
    policy = options_of(parser().parse_args([f"--pod-policy={json.dumps(values)}"])).settings.pod_policy
    assert policy == PodPolicy.model_validate(values)
    monkeypatch.setattr(simulation, "SETTINGS", replace(simulation.SETTINGS, pod_policy=policy))
    world = World(spec=job_spec(trainer={"pod": POD}))
    assert world.look().actions != ()
    assert world.value("Accepted") == "True"


@pytest.mark.parametrize("text", ["[]", "nothing", '{"hostPath": ["/"]}', '{"privileged": "yes"}'])
def test_a_policy_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(SystemExit):
        parser().parse_args([f"--pod-policy={text}"])
