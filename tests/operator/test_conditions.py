"""The words of the status are a closed list, documented from the code."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path

from simulation import World, job_spec

from rljob_api.job_status import ProgressStatus
from rljob_api.status import DriverStatus, LastCheckpoint, Pools, RolloutStatus, Scores, TrainerStatus
from rljob_operator.conditions import LONGEST_MESSAGE, Reason, Type, condition, merge
from rljob_operator.draft import Draft
from rljob_operator.progress import take
from rljob_operator.reference import page
from rljob_operator.settings import Settings
from rljob_operator.status import JobStatus

DESIGNED = (
    "Accepted Admitted ClusterReady Running Progressing Resizing WeightsFresh CheckpointAvailable "
    "Suspended Succeeded Failed Finished"
)
NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)


def test_the_types_are_those_of_the_design() -> None:
    assert [kind.title for kind in Type] == DESIGNED.split()


def test_every_reason_is_a_word_with_a_meaning_and_a_remedy() -> None:
    for reason in Reason:
        assert re.fullmatch(r"[A-Z][A-Za-z]+", reason.title)
        assert reason.meaning.endswith(".")
        assert reason.remedy.endswith((".", ").")) or reason.remedy.endswith("namespace.")
    assert len({reason.title for reason in Reason}) == len(list(Reason))


def test_the_page_of_conditions_is_up_to_date() -> None:
    committed = Path(__file__).parents[2] / "docs" / "operator" / "conditions.md"
    assert committed.read_text() == page(), "run python -m rljob_operator.reference"


def test_the_time_moves_only_with_the_status() -> None:
    (first,) = merge({}, [condition(Type.RUNNING, False, Reason.PENDING)], 1, NOON)
    later = NOON + timedelta(minutes=1)
    (second,) = merge({"Running": first}, [condition(Type.RUNNING, False, Reason.STARTING)], 2, later)
    (third,) = merge({"Running": second}, [condition(Type.RUNNING, True, Reason.TRAINING)], 2, later)
    assert (second.since, second.reason, second.observed_generation) == (NOON, "Starting", 2)
    assert third.since == later


def test_what_is_not_said_stays() -> None:
    first = merge({}, [condition(Type.ADMITTED, True, Reason.NO_QUEUE)], 1, NOON)
    assert merge({"Admitted": first[0]}, [], 2, NOON + timedelta(hours=1)) == first


def test_conditions_survive_the_api_server() -> None:
    made = merge({}, [condition(Type.FAILED, True, Reason.BAD_DATA, "x" * 5000)], 3, NOON)
    assert len(made[0].message) == LONGEST_MESSAGE
    stored = JobStatus(conditions=made).document()
    assert stored["conditions"][0]["lastTransitionTime"] == "2026-01-01T12:00:00Z"
    assert JobStatus.read(json.loads(json.dumps(stored))).conditions == made


def test_what_a_driver_says_is_the_same_after_the_api_server_and_bounded() -> None:
    world = World(spec=job_spec())
    draft = Draft(world.observed(), world.status, NOON, Settings())
    moment = NOON + timedelta(microseconds=1)
    driver = DriverStatus(
        generation=1,
        attempt=1,
        time=moment,
        pools=Pools(rollout=RolloutStatus(desired=1, ready=1), trainer=TrainerStatus(desired=1, ready=1)),
        rewards=Scores(mean=-1e30, best=0.123456),
        checkpoint=LastCheckpoint(uri="/state", step=2, time=moment),
        eta=moment,
    )
    take(draft, driver)
    stored = json.loads(json.dumps(draft.status.document()))
    assert JobStatus.read(stored) == draft.status
    assert (stored["progress"]["reward"], stored["progress"]["bestReward"]) == (-1e18, 0.1235)


def test_a_step_more_is_only_progress_and_a_new_reason_is_not() -> None:
    def after(step: int, reason: Reason = Reason.MOVING, ready: str = "") -> JobStatus:
        said = [
            condition(Type.PROGRESSING, True, reason, f"step {step}"),
            condition(Type.CLUSTER_READY, True, Reason.POOLS_READY, ready),
        ]
        return JobStatus(conditions=merge({}, said, 1, NOON), progress=ProgressStatus(step=step))

    assert after(2).is_only_progress(after(1))
    assert not after(2, Reason.WAITING).is_only_progress(after(1))
    assert not after(2, ready="all of them").is_only_progress(after(1))
    assert not after(2).changed(checkpoint=LastCheckpoint(uri="/state", step=2, time=NOON)).is_only_progress(after(1))
