"""A job's pipeline section as what it comes down to: the settings of its schedule."""

from __future__ import annotations

from rljob_api.resolved import ResolvedSpec
from rljob_trainer.pipeline.schedule import ScheduleSettings


def schedule_settings(spec: ResolvedSpec) -> ScheduleSettings:
    """The three modes as three settings of one schedule (``schedule.py``)."""
    pipeline, batch = spec.pipeline, spec.batch
    pull = batch.groups
    if pipeline.mode == "fullyAsync":
        pull = pipeline.require_batches * batch.mini_batch_groups
    return ScheduleSettings(
        groups_per_version=batch.groups,
        groups_per_pull=pull,
        max_age=pipeline.staleness.max_age,
        fraction=pipeline.staleness.fraction,
        on_deadline=pipeline.staleness.on_deadline,
        ordered=pipeline.mode != "fullyAsync",
    )
