"""What is allowed and may still surprise: said by `rljob validate` beside "valid"."""

from __future__ import annotations

from collections.abc import Iterator

from rljob_api.memory import MemoryHolder, ModelShape, gib, known_shape, plan_memory, untold
from rljob_api.resolved import ResolvedJob
from rljob_api.violations import Violation

_QUICK_TOOLS = ("calculator", "search")
"""Their calls take milliseconds."""


def notes(job: ResolvedJob, shape: ModelShape | None = None) -> Iterator[Violation]:
    """Where, what may happen, and what to do about it. ``shape``: of the job's model, where its files are at hand;
    None: as the job says it, or as it is known by the model's name."""
    yield from _slow_tools(job)
    yield from _rows_over_pods(job)
    yield from _memory(job, shape)


def _slow_tools(job: ResolvedJob) -> Iterator[Violation]:
    """A trainer that waits for the slowest tool of a batch does so whenever that takes longer than maxAge steps."""
    spec = job.spec
    staleness, environment = spec.pipeline.staleness, spec.rollout.environment
    slow = [tool.label for tool in environment.tools if tool.type not in _QUICK_TOOLS]
    if spec.pipeline.mode != "fullyAsync" or staleness.on_deadline != "wait" or not slow:
        return
    turns = environment.max_turns - 1
    calls = turns * environment.max_calls_per_turn
    if environment.max_calls is not None:
        calls = min(calls, environment.max_calls)
    if calls > 0:
        yield Violation(
            "spec.pipeline.staleness.onDeadline",
            f"an episode can make {calls} calls of up to {environment.call_seconds} s ({', '.join(slow)}); training "
            f"waits for an episode that takes longer than {staleness.max_age} steps (maxAge)",
            "set onDeadline: end, which truncates late episodes and trains on them, or lower callSeconds",
        )


def _memory(job: ResolvedJob, shape: ModelShape | None) -> Iterator[Violation]:
    """Of devices and pods whose memory the job says (node selectors, limits), those whose peak is above it."""
    model = job.spec.model
    if shape is None:
        shape = known_shape(model.source or "") if model.random is None else ModelShape.of_random(model.random)
    critic = job.spec.algorithm.critic
    own = None if critic is None else critic.model
    critic_shape = None if own is None else known_shape(own.source)
    if shape is None or (own is not None and critic_shape is None) or untold(job, shape, critic_shape) is not None:
        return
    plan = plan_memory(job, shape, critic_shape=critic_shape)
    if job.spec.rollout.engine == "vllm" and job.spec.trainer.gpus_per_replica and not plan.inputs.engine_gpus:
        yield Violation(
            "spec.rollout.gpusPerReplica",
            "engines sample on CPUs, although the trainer has GPUs",
            "set it to 1, or to parallelism.tensor, unless this is intended",
        )
    for device in plan.devices:
        if device.missing:
            change = plan.remedies.get(device.name)
            remedy = f"set {change}" if change else "use larger GPUs or a smaller model"
            yield Violation(_field_of(device), _exceeds(device), f"{remedy} (rljob plan JOB --memory shows the parts)")


def _field_of(device: MemoryHolder) -> str:
    if not device.on_gpus:
        return "spec.trainer.pod.resources.limits.memory"
    return "spec.rollout.gpusPerReplica" if device.name.startswith("engine") else "spec.trainer.gpusPerReplica"


def _exceeds(device: MemoryHolder) -> str:
    if device.short:
        return f"{device.name}: {device.notes[0]}"
    peak, capacity = device.peak, device.capacity or 0
    largest = max(peak.parts, key=lambda part: peak.parts[part])
    return (
        f"{device.name}: needs {gib(peak.total)} GiB at its peak ({peak.name}; {largest}: "
        f"{gib(peak.parts[largest])}), but has only {gib(capacity)}"
    )


def _rows_over_pods(job: ResolvedJob) -> Iterator[Violation]:
    """Ranks of one row exchange it twice in each layer, those of one layer add it up twice: both want the links within
    a machine."""
    trainer = job.spec.trainer
    tensor, own = trainer.parallelism.tensor, trainer.gpus_per_replica
    if own and own % tensor:
        yield Violation(
            "spec.trainer.parallelism.tensor",
            f"the {tensor} tensor-parallel ranks do not all fit in one pod of {own} GPUs; they all-reduce "
            "activations twice in each layer, over the network between pods",
            "use a tensor that divides trainer.gpusPerReplica",
        )
        return
    context = trainer.parallelism.context * tensor
    if own and trainer.parallelism.context > 1 and own % context:
        yield Violation(
            "spec.trainer.parallelism.context",
            f"the {context} ranks that share a row do not all fit in one pod of {own} GPUs; they exchange the row "
            "twice in each layer, over the network between pods",
            "choose context (times tensor) so that it divides trainer.gpusPerReplica",
        )
