"""The words of the status are a closed list, documented from the code."""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

from rljob_operator.conditions import LONGEST_MESSAGE, Reason, Type, condition, merge, read
from rljob_operator.reference import page
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
    first = merge({}, [condition(Type.RUNNING, False, Reason.PENDING)], 1, NOON)
    later = NOON + timedelta(minutes=1)
    second = merge(first, [condition(Type.RUNNING, False, Reason.STARTING)], 2, later)
    third = merge(second, [condition(Type.RUNNING, True, Reason.TRAINING)], 2, later)
    assert second["Running"].since == NOON
    assert (second["Running"].reason, second["Running"].observed_generation) == ("Starting", 2)
    assert third["Running"].since == later


def test_what_is_not_said_stays() -> None:
    first = merge({}, [condition(Type.ADMITTED, True, Reason.NO_QUEUE)], 1, NOON)
    assert merge(first, [], 2, NOON + timedelta(hours=1)) == first


def test_conditions_survive_the_api_server() -> None:
    made = merge({}, [condition(Type.FAILED, True, Reason.BAD_DATA, "x" * 5000)], 3, NOON)
    assert len(made["Failed"].message) == LONGEST_MESSAGE
    assert read([item.document() for item in made.values()]) == made


def test_a_step_more_is_only_progress_and_a_new_reason_is_not() -> None:
    def after(step: int, reason: Reason = Reason.MOVING, ready: str = "") -> JobStatus:
        said = [
            condition(Type.PROGRESSING, True, reason, f"step {step}"),
            condition(Type.CLUSTER_READY, True, Reason.POOLS_READY, ready),
        ]
        return JobStatus(conditions=merge({}, said, 1, NOON), progress={"step": step})

    assert after(2).is_only_progress(after(1))
    assert not after(2, Reason.WAITING).is_only_progress(after(1))
    assert not after(2, ready="all of them").is_only_progress(after(1))
    assert not replace(after(2), checkpoint={"step": 2}).is_only_progress(after(1))
