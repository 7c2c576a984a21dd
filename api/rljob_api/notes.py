"""What is allowed and may still surprise: said by `rljob validate` beside "valid"."""

from __future__ import annotations

from collections.abc import Iterator

from rljob_api.resolved import ResolvedJob
from rljob_api.violations import Violation


def notes(job: ResolvedJob) -> Iterator[Violation]:
    """Where, what may happen, and what to do about it."""
    yield from _slow_tools(job)
    yield from _rows_over_pods(job)


def _slow_tools(job: ResolvedJob) -> Iterator[Violation]:
    """A trainer that waits for the slowest tool of a batch does so whenever that takes longer than maxAge steps."""
    spec = job.spec
    staleness, environment = spec.pipeline.staleness, spec.rollout.environment
    slow = [tool.label for tool in environment.tools if tool.type != "calculator"]
    if spec.pipeline.mode != "fullyAsync" or staleness.on_deadline != "wait" or not slow:
        return
    turns = environment.max_turns - 1
    calls = turns * environment.max_calls_per_turn
    if environment.max_calls is not None:
        calls = min(calls, environment.max_calls)
    if calls > 0:
        yield Violation(
            "spec.pipeline.staleness.onDeadline",
            f"an episode may make {calls} calls of up to {environment.call_seconds} s ({', '.join(slow)}); training "
            f"waits for one that takes longer than {staleness.max_age} steps (maxAge)",
            "set onDeadline: end, which trains late episodes with what they have, or lower callSeconds",
        )


def _rows_over_pods(job: ResolvedJob) -> Iterator[Violation]:
    """Ranks of one row exchange it twice in each layer, which wants the links within a machine."""
    trainer = job.spec.trainer
    context, own = trainer.parallelism.context, trainer.gpus_per_replica
    if own and context > 1 and own % context:
        yield Violation(
            "spec.trainer.parallelism.context",
            f"the {context} ranks of a row do not all stand in one pod of {own} GPUs; they exchange the row twice in "
            "each layer, over the network where they are in different pods",
            "choose a context that divides trainer.gpusPerReplica",
        )
