"""A job's memory on each kind of GPU and in each kind of pod, and the one change that makes fit what does not."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import combinations

from rljob_api.memory import parts
from rljob_api.memory.activations import FLOAT
from rljob_api.memory.inputs import MemoryInputs
from rljob_api.memory.parts import MemoryHolder, Moment
from rljob_api.memory.shape import CPU_FAMILIES, ModelShape, numbers
from rljob_api.resolved import ResolvedJob

CONTEXT_BYTES = 512 << 20
"""What CUDA and its libraries take of a GPU in each process: an estimate (an H100 shows 0.5 GiB)."""
NCCL_BYTES = 512 << 20
"""NCCL's buffers in a process that meets others: an estimate."""
_MOST_RANKS = 1024
_MOST_GPUS_OF_A_POD = 8
_SMALL_CHUNK = 512
_LOWEST_SHARE = 0.2


@dataclass(frozen=True, slots=True)
class FieldSetting:
    """A field of the job file and what it is set to."""

    path: str
    value: str

    def __str__(self) -> str:
        return f"{self.path}: {self.value}"


@dataclass(frozen=True, slots=True)
class JobChange:
    """Fields that change together."""

    settings: tuple[FieldSetting, ...]
    inputs: MemoryInputs

    def __str__(self) -> str:
        return " and ".join(map(str, self.settings))


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """What ``plan_memory`` returns."""

    inputs: MemoryInputs
    devices: tuple[MemoryHolder, ...]
    remedies: Mapping[str, JobChange]
    """By the name of a device that something does not fit on: the first of ``changes`` after which all of it does. A
    device for which none is enough has none."""

    @property
    def fits(self) -> bool:
        """False where a capacity is known and exceeded."""
        return not any(device.missing for device in self.devices)


def untold(job: ResolvedJob, shape: ModelShape | None = None, critic_shape: ModelShape | None = None) -> str | None:
    """What of a job keeps its memory from being told, by the shapes of its model and of its critic's own, or whatever
    these are; None: nothing does."""
    on_cpus = not job.spec.trainer.gpus_per_replica
    for field, each in (("model", shape), ("algorithm.critic.model", critic_shape)):
        if each is not None and each.family not in CPU_FAMILIES and on_cpus:
            return f"spec.{field}: the CPU memory of {each.family} layers cannot be predicted"
    if job.spec.model.lora is not None and not job.spec.trainer.gpus_per_replica:
        return "spec.model.lora: the CPU memory of adapters on a frozen model cannot be predicted"
    if job.spec.trainer.backend != "fsdp2":
        return f"spec.trainer.backend: the memory of {job.spec.trainer.backend} cannot be predicted"
    return None


def plan_memory(
    job: ResolvedJob, shape: ModelShape, memory: int | None = None, *, critic_shape: ModelShape | None = None
) -> MemoryPlan:
    """``memory``: bytes of every GPU of the job; None: as the pools' node selectors say. ``critic_shape``: of
    ``algorithm.critic.model``, which a job that has one has to come with. Of a job without anything that is
    ``untold``."""
    critic = job.spec.algorithm.critic
    assert (critic is not None and critic.model is not None) is (critic_shape is not None)
    return plan_inputs(MemoryInputs.of(job, shape, memory, critic_shape=critic_shape))


def plan_inputs(inputs: MemoryInputs) -> MemoryPlan:
    """The plan of a job by its numbers."""
    found = devices(inputs)
    remedies: dict[str, JobChange] = {}
    for device in found:
        if not device.missing:
            continue
        candidates = changes(inputs) if device.on_gpus else _larger_pods(inputs, device)
        for change in candidates:
            after = {other.name for other in devices(change.inputs) if other.missing}
            if device.name not in after:
                remedies[device.name] = change
                break
    return MemoryPlan(inputs, found, remedies)


def _larger_pods(inputs: MemoryInputs, device: MemoryHolder) -> Iterator[JobChange]:
    needed = -(-device.peak.total // (1 << 30))
    setting = FieldSetting("spec.trainer.pod.resources.limits.memory", f"{needed}Gi")
    yield JobChange((setting,), replace(inputs, trainer_host=needed << 30))


# --- what is where ----------------------------------------------------------------------------------------------------


def devices(inputs: MemoryInputs) -> tuple[MemoryHolder, ...]:
    """GPUs by what works on them, and the host memory of the trainer's pods."""
    found: list[MemoryHolder] = []
    if inputs.colocated and inputs.trainer_gpus:
        found.append(_shared(inputs))
    else:
        found.append(_trainer(inputs))
        found.append(_engine(inputs))
    if inputs.trainer_gpus:
        found.append(_host(inputs))
    return tuple(found)


def _context(inputs: MemoryInputs) -> dict[str, int]:
    return {parts.CONTEXT: CONTEXT_BYTES + (NCCL_BYTES if inputs.ranks > 1 else 0)}


def _trainer(inputs: MemoryInputs) -> MemoryHolder:
    moments = list(inputs.rank().all())
    if not inputs.trainer_gpus:
        return MemoryHolder(
            "trainer rank (host memory)", inputs.ranks, inputs.trainer_host, tuple(moments), on_gpus=False
        )
    moments.append(Moment("publication", {**inputs.rank().at_rest(), parts.BUCKETS: _sending(inputs)}))
    held = _context(inputs)
    return MemoryHolder(
        "trainer GPU", inputs.ranks, inputs.trainer_memory, tuple(moment.beside(held) for moment in moments)
    )


def _engine(inputs: MemoryInputs) -> MemoryHolder:
    engine = inputs.engine()
    moment = engine.sampling()
    if not inputs.engine_gpus:
        return MemoryHolder("engine (host memory)", inputs.engines, None, (moment,), on_gpus=False)
    receiving = Moment("publication", {**moment.parts, parts.BUCKETS: _buckets(inputs)})
    held = {parts.CONTEXT: CONTEXT_BYTES}
    return MemoryHolder(
        "engine GPU",
        inputs.engines * inputs.tensor,
        inputs.engine_memory,
        (moment.beside(held), receiving.beside(held)),
        tuple(_cache_notes(inputs)),
        short=engine.short,
    )


def _shared(inputs: MemoryInputs) -> MemoryHolder:
    """A rank and an engine take turns (rljob_trainer/publish/turns.py): the learner works while the engine's weights
    and cache are gone, the engine samples while the learner rests in host memory, and between them new weights go over.
    What sleep does not free, graphs and both processes' contexts, is always there."""
    rank, engine = inputs.rank(), inputs.engine()
    sampling = engine.sampling()
    held = _context(inputs)
    held[parts.CONTEXT] += CONTEXT_BYTES
    # Engines that never sleep keep all they have.
    asleep = {parts.GRAPHS: engine.graphs} if inputs.engines_sleep else dict(sampling.parts)
    moments = [moment.beside(asleep) for moment in rank.all()]
    kept = {
        parts.GRAPHS: engine.graphs,
        parts.ENGINE_WEIGHTS: engine.weights,
        parts.ENGINE_ADAPTER: engine.slot,
    }
    buckets = _sending(inputs) + _buckets(inputs)
    publication = Moment("publication", {**rank.weights(), parts.BUCKETS: buckets})
    moments += [publication.beside(kept if inputs.engines_sleep else sampling.parts), sampling]
    return MemoryHolder(
        "shared GPU",
        inputs.ranks,
        inputs.trainer_memory,
        tuple(moment.beside(held) for moment in moments),
        tuple(_cache_notes(inputs)),
        short=engine.short,
    )


def _cache_notes(inputs: MemoryInputs) -> Iterator[str]:
    engine = inputs.engine()
    longest = engine.longest_at_once
    if longest is None:
        needed = engine.token * engine.context
        yield f"one sequence of {engine.context} tokens takes {gib(needed)} GiB of KV cache"
    elif longest < 1:
        yield f"the KV cache is too small for one sequence of {engine.context} tokens, so vLLM would not start"
    else:
        yield (
            f"the KV cache holds {int(longest)} sequences of {engine.context} tokens at once "
            f"(maxConcurrent {engine.sequences})"
        )


def _buckets(inputs: MemoryInputs) -> int:
    """The parameter that is being gathered, and what travels: a bucket, or a parameter that is larger than one."""
    largest = inputs.itemsize * inputs.shape.largest
    travels = inputs.itemsize * inputs.shape.largest_published
    if inputs.adapter is not None and inputs.adapter.alone:
        largest = travels = inputs.itemsize * max(map(math.prod, inputs.adapter.layer_tensors(inputs.shape)))
    whole = largest if inputs.rank().spread else 0
    return whole + max(inputs.bucket, travels)


def _sending(inputs: MemoryInputs) -> int:
    """On the learner's side: where an adapter is added to the model, a matrix's part of the sum in float64 and float32
    besides what travels."""
    buckets = _buckets(inputs)
    if inputs.adapter is None or inputs.adapter.alone:
        return buckets
    matrices = inputs.adapter.layers(inputs.shape).values()
    return max(buckets, inputs.bucket + 3 * FLOAT * max(map(math.prod, matrices), default=0))


def _host(inputs: MemoryInputs) -> MemoryHolder:
    """Host memory of one of the trainer's pods. A rank that is one of several reads the model layer by layer as it is
    cut up; a rank alone, and one that puts an adapter beside it, in one piece."""
    rank, shapes = inputs.rank(), inputs.trained_shapes
    read = FLOAT * max(shape.parameters for shape in shapes)  # one after the other
    if inputs.adapter is not None:
        read = inputs.itemsize * inputs.shape.parameters
    elif rank.spread:
        read = 2 * max(max(numbers(shape.layer_tensors()), numbers(shape.outer_tensors())) for shape in shapes)
    moments = [Moment("start", {parts.LOADING: inputs.trainer_gpus * read})]
    own = rank.at_rest()
    resting = 0
    if inputs.colocated:
        resting = sum(own.values())
    elif inputs.offload:
        resting = sum(own.values()) - sum(rank.weights().values())
    if inputs.keeps_anchor:
        resting += own[parts.MASTERS]
    moments.append(Moment("at rest", {parts.OFFLOADED: inputs.trainer_gpus * resting}))
    engine = inputs.engine()
    if inputs.colocated and inputs.engines_sleep and engine.adapter is not None:
        # It has the model from its own folder, and nobody sends it again.
        moments.append(Moment("engines asleep", {parts.ENGINE_WEIGHTS: inputs.trainer_gpus * engine.weights}))
    return MemoryHolder(
        "trainer pod's host memory", inputs.trainer_pods, inputs.trainer_host, tuple(moments), on_gpus=False
    )


# --- what would help --------------------------------------------------------------------------------------------------


def changes(inputs: MemoryInputs) -> Iterator[JobChange]:
    """One after the other, those first that cost least; none changes what is learned. What takes more devices comes
    after all that takes none, and fewer ranks before more."""
    yield from _smaller_passes(inputs)
    yield from _engine_shares(inputs)
    if inputs.colocated:
        yield from _engine_devices(inputs)
    yield from _other_layouts(inputs)
    together = list(_savings_together(inputs))
    yield from together
    for saved in together:
        yield from (_after(saved, layout) for layout in _other_layouts(saved.inputs))
    if not inputs.colocated:
        yield from _engine_devices(inputs)
    nothing = JobChange((), inputs)
    sets = [nothing, *(made for save in _SAVINGS if (made := save(inputs)) is not None), *together]
    factor = 2
    while inputs.trainer_gpus and factor * inputs.ranks <= _MOST_RANKS:
        for saved in sets:
            yield from (_after(saved, more) for more in _more_ranks(saved.inputs, factor))
        factor *= 2


def _after(first: JobChange, second: JobChange) -> JobChange:
    return JobChange((*first.settings, *second.settings), second.inputs)


def _savings_together(inputs: MemoryInputs) -> Iterator[JobChange]:
    """Two of them, whichever, and then all."""
    for saves in (*combinations(_SAVINGS, 2), _SAVINGS):
        change = JobChange((), inputs)
        made = 0
        for save in saves:
            if (more := save(change.inputs)) is not None:
                change = _after(change, more)
                made += 1
        if made == 2 or (saves is _SAVINGS and made > 2):
            yield change


def _smaller_passes(inputs: MemoryInputs) -> Iterator[JobChange]:
    if (change := _chunk(inputs)) is not None:
        yield change
    longest = inputs.prompt + inputs.response
    tokens = inputs.micro_batch_tokens
    while (tokens := tokens // 2) > longest:
        yield _rows(inputs, tokens)
    for save in (_shortest_rows, _checkpointing, _offload, _sleep):
        if (change := save(inputs)) is not None:
            yield change


def _chunk(inputs: MemoryInputs) -> JobChange | None:
    smaller = replace(inputs, chunk=_SMALL_CHUNK)
    if inputs.rank().head_chunk <= _SMALL_CHUNK:
        return None
    return JobChange((FieldSetting("spec.trainer.logProbChunkTokens", str(_SMALL_CHUNK)),), smaller)


def _rows(inputs: MemoryInputs, tokens: int) -> JobChange:
    return JobChange(
        (FieldSetting("spec.trainer.microBatchTokens", str(tokens)),), replace(inputs, micro_batch_tokens=tokens)
    )


def _shortest_rows(inputs: MemoryInputs) -> JobChange | None:
    longest = inputs.prompt + inputs.response
    return _rows(inputs, longest) if inputs.micro_batch_tokens > longest else None


def _checkpointing(inputs: MemoryInputs) -> JobChange | None:
    if inputs.checkpointing:
        return None
    return JobChange(
        (FieldSetting("spec.trainer.activationCheckpointing", "true"),), replace(inputs, checkpointing=True)
    )


def _offload(inputs: MemoryInputs) -> JobChange | None:
    if not inputs.rank().reference_shard or inputs.offload or not inputs.trainer_gpus:
        return None
    return JobChange((FieldSetting("spec.trainer.offload", "true"),), replace(inputs, offload=True))


def _sleep(inputs: MemoryInputs) -> JobChange | None:
    if not inputs.colocated or inputs.engines_sleep:
        return None
    return JobChange((FieldSetting("spec.rollout.freeCacheEngine", "true"),), replace(inputs, engines_sleep=True))


_SAVINGS = (_chunk, _shortest_rows, _checkpointing, _offload, _sleep)
"""What saves memory and takes no further device."""


def _engine_shares(inputs: MemoryInputs) -> Iterator[JobChange]:
    if not inputs.vllm or not inputs.engine_gpus:
        return
    steps = [round(inputs.share - 0.05 * step, 2) for step in range(1, 16)]
    steps += [share for share in (0.9, 0.92) if share > inputs.share]
    for share in steps:
        if share >= _LOWEST_SHARE:
            setting = FieldSetting("spec.rollout.engineArgs.gpu_memory_utilization", f"{share:g}")
            yield JobChange((setting,), replace(inputs, share=share))


def _engine_devices(inputs: MemoryInputs) -> Iterator[JobChange]:
    """More GPUs for each engine, of the ranks' where they share them."""
    if not inputs.vllm or not inputs.engine_gpus:
        return
    tensor = 2 * inputs.tensor
    while tensor <= inputs.shape.heads and inputs.shape.heads % tensor == 0 and tensor <= 8:
        settings = [FieldSetting("spec.rollout.parallelism.tensor", str(tensor))]
        if inputs.colocated:
            if inputs.trainer_gpus % tensor:
                return
        else:
            settings.append(FieldSetting("spec.rollout.gpusPerReplica", str(tensor)))
        yield JobChange(tuple(settings), replace(inputs, tensor=tensor, engine_gpus=tensor))
        tensor *= 2


def _other_layouts(inputs: MemoryInputs) -> Iterator[JobChange]:
    """Other layouts of as many ranks: one set of shards in place of copies, or ranks that share rows or layers."""
    if not inputs.trainer_gpus:
        return
    if inputs.replicate > 1:
        yield _spread(replace(inputs, replicate=1), inputs)
    context = 2 * inputs.context_ranks
    while _together(inputs, context, inputs.tensor_ranks):
        yield _spread(replace(inputs, context_ranks=context), inputs)
        context *= 2
    tensor = 2 * inputs.tensor_ranks
    divisible = inputs.adapter is None and not any(shape.experts for shape in inputs.trained_shapes)  # not divided
    while (
        divisible
        and all(shape.kv_heads % tensor == 0 for shape in inputs.trained_shapes)
        and _together(inputs, inputs.context_ranks, tensor)
    ):
        yield _spread(replace(inputs, tensor_ranks=tensor), inputs)
        tensor *= 2


def _more_ranks(inputs: MemoryInputs, factor: int) -> Iterator[JobChange]:
    """So many times the ranks, among which the weights are cut: in the same pod if it is one, or in more pods."""
    gpus, pods = factor * inputs.trainer_gpus, factor * inputs.trainer_pods
    if inputs.trainer_pods == 1 and gpus <= _MOST_GPUS_OF_A_POD:
        own = FieldSetting("spec.trainer.gpusPerReplica", str(gpus))
        yield _spread(replace(inputs, trainer_gpus=gpus, replicate=1), inputs, own)
    own = FieldSetting("spec.trainer.replicas", str(pods))
    yield _spread(replace(inputs, trainer_pods=pods, replicate=1), inputs, own)


def _together(inputs: MemoryInputs, context: int, tensor: int) -> bool:
    """Whether so many ranks of a pod can compute rows together."""
    each = context * tensor
    fits = inputs.trainer_gpus % each == 0 and inputs.ranks % (each * inputs.replicate) == 0
    return fits and all(shape.heads % each == 0 for shape in inputs.trained_shapes)


def _spread(after: MemoryInputs, before: MemoryInputs, *first: FieldSetting) -> JobChange:
    """With the fields of trainer.parallelism that the new layout needs: a shard that the job gives would be wrong."""
    new, old = after.layout, before.layout
    place = "spec.trainer.parallelism"
    settings = list(first)
    for name, value, former in (
        ("context", new.context, old.context),
        ("tensor", new.tensor, old.tensor),
        ("replicate", new.replicate, old.replicate),
        ("shard", new.shard, old.shard),
    ):
        if value != former:
            settings.append(FieldSetting(f"{place}.{name}", str(value)))
    return JobChange(tuple(settings), after)


def gib(size: int) -> str:
    """Bytes in GiB, with a digit behind the point, or two where it is little."""
    value = size / (1 << 30)
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"
