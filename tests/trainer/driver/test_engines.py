"""How a run's ranks and engines share a host."""

from __future__ import annotations

import pytest
import yaml
from tiny_job import copy_job

from rljob_api import load_jobs, resolve
from rljob_trainer.driver.engines import learner_lanes

SYNC = {"pipeline": {"mode": "sync"}, "placement": "separate"}
ONE_STEP_OFF = {"pipeline": {"mode": "oneStepOff"}, "placement": "separate"}


@pytest.mark.parametrize(
    ("spec", "cores", "lanes"),
    [
        pytest.param(SYNC, 2, 2, id="the engine waits while an update runs"),
        pytest.param(SYNC, 1, 1, id="a single core"),
        pytest.param(ONE_STEP_OFF, 2, 1, id="the second core is the engine's"),
        pytest.param(ONE_STEP_OFF, 3, 2, id="a core for the engine and two for the rank"),
        pytest.param(ONE_STEP_OFF | {"rollout": {"replicas": 2, "maxResponseTokens": 3}}, 3, 1, id="two engines"),
        pytest.param(ONE_STEP_OFF, None, 2, id="hosts of their own"),
        pytest.param(SYNC | {"trainer": {"env": {"OMP_NUM_THREADS": "1"}}}, 8, 1, id="told to use one thread"),
    ],
)
def test_an_update_takes_a_second_core_only_where_it_is_free(
    spec: dict[str, object], cores: int | None, lanes: int
) -> None:
    [job] = load_jobs(yaml.safe_dump(copy_job(**spec)))
    assert learner_lanes(resolve(job).spec, cores) == lanes
