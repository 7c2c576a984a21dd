"""What the driver says about itself, as status fields, conditions and sentences. Pure.

The driver's answer has been bounded and cleaned where it was read; it is believed about training and nothing else.
"""

from __future__ import annotations

from rljob_api import ResolvedJob
from rljob_api.job_status import ProgressStatus
from rljob_api.resolution import live_settings
from rljob_api.spec.pipeline import LiveSettings
from rljob_api.status import Desired, DriverStatus
from rljob_operator.conditions import Reason, Type
from rljob_operator.draft import Draft
from rljob_operator.endings import failures_since_checkpoint


def desired(job: ResolvedJob, generation: int, attempt: int, *, suspend: bool = False) -> Desired:
    """What the operator wants of the driver under this generation of the job. `suspend`: in any case."""
    return Desired(
        generation=generation,
        attempt=attempt,
        rollout_replicas=job.spec.rollout.replicas if job.spec.placement == "separate" else None,
        reward_model_replicas=None if job.spec.reward_model is None else job.spec.reward_model.replicas,
        judge_replicas=None if job.spec.judge is None else job.spec.judge.replicas,
        suspend=suspend or job.spec.suspend,
        settings=live_settings(job.spec) or LiveSettings(),
    )


def take(draft: Draft, driver: DriverStatus) -> None:
    """Takes a driver's answer into the draft: progress, checkpoint, and the conditions that follow from both."""
    if driver.checkpoint is not None:
        newest = driver.checkpoint
        # As it comes back from the API server.
        draft.set(checkpoint=newest.changed(time=newest.time.replace(microsecond=0)))
        draft.set(failures=failures_since_checkpoint(draft))
    # A driver says step 0 until it has read the checkpoint from which it goes on.
    known = draft.status.checkpoint
    step = driver.step or (known.step if known is not None else 0)
    draft.set(progress=ProgressStatus.of(driver).changed(step=step))
    if driver.waiting is not None:
        message = f"{driver.waiting.who}: {driver.waiting.reason}"
        draft.say(Type.PROGRESSING, True, Reason.WAITING, message)
    else:
        of = f" of {driver.total_steps}" if driver.total_steps else ""
        draft.say(Type.PROGRESSING, True, Reason.MOVING, f"step {step}{of}")
    if driver.ages is not None:
        fresh = driver.ages.max <= driver.ages.bound
        reason = Reason.WITHIN_BOUND if fresh else Reason.STALENESS_EXCEEDED
        draft.say(Type.WEIGHTS_FRESH, fresh, reason, f"maximum age {driver.ages.max}, allowed {driver.ages.bound}")


def checkpoint_condition(draft: Draft) -> None:
    """Whether a retry would have something to go on from."""
    known, progress = draft.status.checkpoint, draft.status.progress
    where = f"step {known.step}: {known.uri}" if known is not None else "there is no earlier one"
    if progress is not None and progress.unsaved:
        message = f"the newest checkpoint could not be written: {progress.unsaved}; {where}"
        draft.say(Type.CHECKPOINT_AVAILABLE, known is not None, Reason.NOT_SAVED, message)
    elif known is not None:
        draft.say(Type.CHECKPOINT_AVAILABLE, True, Reason.COMMITTED, where)
    elif draft.resolved.spec.checkpoint.uri is None:
        draft.say(Type.CHECKPOINT_AVAILABLE, False, Reason.NO_STORAGE)
    else:
        draft.say(Type.CHECKPOINT_AVAILABLE, False, Reason.NONE_YET)
