"""Values of environment variables, which may be keys and passwords, are for the run's owner alone."""

from __future__ import annotations

import stat
from pathlib import Path

import yaml
from tiny_job import copy_job

from rljob_api import resolve
from rljob_api.loading import load_jobs
from rljob_trainer.record.written_job import write_job
from rljob_trainer.telemetry.trackers import without_env_values


def test_trackers_are_told_the_names_of_variables_alone() -> None:
    containers = [{"name": "ray", "env": [{"name": "TOKEN", "value": "secret"}, {"name": "A"}], "image": "x"}]
    document = {
        "spec": {
            "trainer": {"env": {"KEY": "secret"}, "replicas": 2},
            "rollout": {"env": {}},
            "cluster": {"podTemplate": {"spec": {"containers": containers}}},
        }
    }
    told = without_env_values(document)
    assert "secret" not in repr(told)
    assert told["spec"]["trainer"] == {"env": ["KEY"], "replicas": 2}
    assert told["spec"]["rollout"] == {"env": []}
    assert told["spec"]["cluster"]["podTemplate"]["spec"]["containers"] == [
        {"name": "ray", "env": ["TOKEN", "A"], "image": "x"}
    ]


def test_the_job_in_the_output_folder_is_for_its_owner_alone(tmp_path: Path) -> None:
    document = copy_job(rollout={"engine": "torch", "maxResponseTokens": 3, "env": {"KEY": "secret"}})
    (job,) = load_jobs(yaml.safe_dump(document))
    path = tmp_path / "job.yaml"
    path.write_text("of an earlier run, which anybody could read")
    path.chmod(0o644)
    write_job(path, resolve(job), tmp_path)
    assert "secret" in path.read_text()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
