"""Jobs with mistakes by chance get the same verdict from `rljob validate`, `kubectl apply` and the pods' dry run."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from pathlib import Path

import pytest
from kube.control_plane import ControlPlane

from rljob_api.pod_template.fields import FILE, KUBERNETES, compact

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.environments import ROOT
from benchmarks.malformed import jobs
from benchmarks.malformed.jobs.mistakes import KINDS

pytestmark = pytest.mark.timeout(600)
JOBS = int(os.environ.get("RLJOB_MALFORMED_JOBS", "500"))


def test_no_job_is_taken_by_one_and_refused_by_another(plane: ControlPlane) -> None:
    records = jobs.run(plane, JOBS, seed=2026)
    faults = [str(record) for record in records if record.outcome == jobs.FAULT]
    assert not faults, f"{len(faults)} disagreements, the first ones:\n" + "\n".join(faults[:5])
    outcomes = Counter(record.outcome for record in records)
    # Nobody may be right by always saying the same.
    assert min(outcomes[jobs.ACCEPTED], outcomes[jobs.REFUSED], outcomes[jobs.BY_PODS]) > JOBS / 20, outcomes
    assert len({record.kind for record in records}) > len(KINDS) / 2
    # Parts that are sound alone may contradict each other: some jobs are refused without a mistake, but not many.
    sound = Counter(record.outcome for record in records if not record.mistakes)
    assert sound[jobs.ACCEPTED] > sound.total() / 2, sound


def test_the_fields_of_a_pod_are_those_that_the_api_server_publishes(plane: ControlPlane) -> None:
    version = plane.call("GET", "/version")
    if f"{version['major']}.{version['minor'].rstrip('+')}" != KUBERNETES:
        pytest.skip(f"the file is of Kubernetes {KUBERNETES}")
    assert compact(plane.call("GET", "/openapi/v3/api/v1")) == json.loads(FILE.read_text())


def test_the_record_of_five_thousand_has_every_kind_of_mistake_and_no_fault() -> None:
    record = json.loads((ROOT / "benchmarks/malformed/results/jobs.json").read_text())
    assert record["count"] >= 5000
    assert record["faults"] == []
    assert set(record["outcomes"]) == {*KINDS, "none"}
