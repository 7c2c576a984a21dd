"""What the driver says about itself, as status fields, conditions and sentences. Pure.

The driver's answer has been bounded and cleaned where it was read; it is believed about training and nothing else.
"""

from __future__ import annotations

from typing import Any

from rljob_api import ResolvedJob
from rljob_api.resolution import live_settings
from rljob_api.spec.pipeline import LiveSettings
from rljob_api.status import Desired, DriverStatus
from rljob_operator.conditions import Reason, Type, timestamp
from rljob_operator.draft import Draft


def desired(job: ResolvedJob, generation: int, attempt: int, *, suspend: bool = False) -> Desired:
    """What the operator wants of the driver under this generation of the job. `suspend`: in any case."""
    return Desired(
        generation=generation,
        attempt=attempt,
        rollout_replicas=job.spec.rollout.replicas if job.spec.placement == "separate" else None,
        suspend=suspend or job.spec.suspend,
        settings=live_settings(job.spec) or LiveSettings(),
    )


def take(draft: Draft, driver: DriverStatus) -> None:
    """Takes a driver's answer into the draft: progress, checkpoint, and the conditions that follow from both."""
    draft.set(progress=document(driver))
    if driver.checkpoint is not None:
        newest = driver.checkpoint
        draft.set(checkpoint={"uri": newest.uri, "step": newest.step, "time": timestamp(newest.time)})
    if driver.waiting is not None:
        message = f"{driver.waiting.who}: {driver.waiting.reason}"
        draft.say(Type.PROGRESSING, True, Reason.WAITING, message)
    else:
        draft.say(Type.PROGRESSING, True, Reason.MOVING, _steps(driver))
    if driver.ages is not None:
        fresh = driver.ages.max <= driver.ages.bound
        reason = Reason.WITHIN_BOUND if fresh else Reason.STALENESS_EXCEEDED
        draft.say(Type.WEIGHTS_FRESH, fresh, reason, f"largest age {driver.ages.max}, allowed {driver.ages.bound}")


def checkpoint_condition(draft: Draft) -> None:
    """Whether a retry would have something to go on from."""
    known = draft.status.checkpoint
    where = f"step {known.get('step')}: {known.get('uri')}" if known else "there is none before it"
    unsaved = draft.status.progress.get("unsaved")
    if unsaved:
        message = f"the newest checkpoint could not be written: {unsaved}; {where}"
        draft.say(Type.CHECKPOINT_AVAILABLE, bool(known), Reason.NOT_SAVED, message)
    elif known:
        draft.say(Type.CHECKPOINT_AVAILABLE, True, Reason.COMMITTED, where)
    elif draft.resolved.spec.checkpoint.uri is None:
        draft.say(Type.CHECKPOINT_AVAILABLE, False, Reason.NO_STORAGE)
    else:
        draft.say(Type.CHECKPOINT_AVAILABLE, False, Reason.NONE_YET)


def document(driver: DriverStatus) -> dict[str, Any]:
    """`status.progress`."""
    speed, ages = driver.throughput, driver.ages
    fields: dict[str, Any] = {
        "step": driver.step,
        "version": driver.version,
        "totalSteps": driver.total_steps,
        "reward": driver.rewards.mean,
        "bestReward": driver.rewards.best,
        "validation": dict(driver.rewards.validation) or None,
        "stepSeconds": speed.step_seconds if speed else None,
        "tokensPerSecond": speed.generated_tokens_per_second if speed else None,
        "trainerIdle": speed.trainer_idle if speed else None,
        "rolloutIdle": speed.rollout_idle if speed else None,
        "oldestAge": ages.max if ages else None,
        "ageBound": ages.bound if ages else None,
        "unsaved": driver.unsaved or None,
        "waitingFor": f"{driver.waiting.who}: {driver.waiting.reason}" if driver.waiting else None,
        "eta": timestamp(driver.eta) if driver.eta else None,
        "enginesReady": driver.pools.rollout.ready,
        "ranksReady": driver.pools.trainer.ready,
    }
    return {name: _rounded(value) for name, value in fields.items() if value is not None}


def _rounded(value: Any) -> Any:
    """Figures are for people: four significant digits. What decides something is never read from here."""
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, dict):
        return {name: _rounded(item) for name, item in value.items()}
    return value


def _steps(driver: DriverStatus) -> str:
    return f"step {driver.step} of {driver.total_steps}" if driver.total_steps else f"step {driver.step}"
