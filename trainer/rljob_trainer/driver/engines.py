"""The engines of a run: where they live, and how weights reach them.

placement   engine   lives in                      weights
separate    both     actors of their own           broadcast, bucket by bucket
colocated   torch    the learner ranks' processes  shared (one rank), or gathered beside each rank
colocated   vllm     actors on the same devices    handed over on the device (CPU: broadcast)

Colocated engines and ranks take turns with a GPU's memory: ``turns.py``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from rljob_api import cluster
from rljob_api.pod_template.of_job import cpus_of_ray
from rljob_trainer.driver.together import together
from rljob_trainer.learner.bundles import Bundles
from rljob_trainer.learner.environment import rank_environment
from rljob_trainer.learner.options import GroupOptions
from rljob_trainer.learner.protocol import RankedLearner
from rljob_trainer.learner.settings import LearnerSettings
from rljob_trainer.models.folder import ModelFolder
from rljob_trainer.pools.activity import Report
from rljob_trainer.pools.engine_count import EngineCount
from rljob_trainer.pools.homes import Homes
from rljob_trainer.pools.pool import MadeAgain, RolloutPool
from rljob_trainer.pools.size import engine_count, in_hand, max_concurrent, response_lengths
from rljob_trainer.publish import colocated
from rljob_trainer.publish.canaries import Resend
from rljob_trainer.publish.engines_turn import EnginesTurn
from rljob_trainer.publish.lost_processes import wait_until_gone
from rljob_trainer.publish.publication import Admits, Holds, WeightPublication
from rljob_trainer.publish.quiet import Publication
from rljob_trainer.publish.turns import SharedDevices, Turns, takes_turns
from rljob_trainer.rollout.actor import EngineSpec
from rljob_trainer.rollout.handle import RayEngine
from rljob_trainer.rollout.shelf import Shelf
from rljob_trainer.waits import Taken, Waits
from rljob_trainer.weights import allocator

if TYPE_CHECKING:
    from rljob_api.resolved import ResolvedJob, ResolvedSpec

_DETERMINISTIC_ENGINE = {"VLLM_BATCH_INVARIANT": "1"}
"""vLLM's log-probs do not depend on what else is in a batch then."""

Starting = Coroutine[Any, Any, RayEngine]


def at_any_time(who: str, what: str, seconds: float) -> AbstractAsyncContextManager[object]:
    """The turn of those whom nobody can disturb."""
    return nullcontext()


@dataclass(frozen=True, slots=True)
class PoolTold:
    """Who is told what becomes of engines and requests."""

    worked: Report | None = None
    """When each engine had work, and under which version."""
    made_again: MadeAgain | None = None
    """Which requests are made again for want of their engine."""


NOBODY_TOLD = PoolTold()


@dataclass(frozen=True, slots=True)
class Engines:
    """The pool, and what belongs to it."""

    pool: RolloutPool
    publication: Publication
    turns: Turns | None = None
    undisturbed: Taken = at_any_time
    """``async with undisturbed(who, what, seconds)``: inside, no weights are on their way."""
    count: EngineCount | None = None
    """Changes the number of engines while the run is under way; None where it is fixed."""
    resend: Resend | None = None
    """Gives one engine its weights once more; None for those that have none of their own."""
    admit_by: Callable[[Admits], None] | None = None
    """Adds a look at each engine that comes late, before it serves; None where none comes."""

    async def close(self) -> None:
        await self.pool.close()


def inside_ranks(spec: ResolvedSpec) -> bool:
    """Whether the engines live in the learner ranks' processes."""
    return spec.placement == "colocated" and spec.rollout.engine == "torch"


def on_nodes(role: str, by_role: bool) -> dict[str, Any]:
    """Ray's options of an actor that belongs on the nodes of a role, where nodes have one."""
    return {"label_selector": {cluster.ROLE_LABEL: role}} if by_role else {}


def learner_options(spec: ResolvedSpec, by_role: bool = False) -> GroupOptions:
    """What Ray is asked for, for each rank. Those with GPUs live in bundles (``learner/bundles.py``), where colocated
    with those whose devices the same engine takes. ``by_role``: Ray's nodes carry the label that says what they are
    for."""
    gpus, threads = spec.trainer.gpus_per_replica, None
    if spec.trainer.compile:
        # torch would count the node's CPUs.
        threads = max(1, (cpus_of_ray("spec.trainer.pod", spec.trainer.pod, gpus) or 1) // max(1, gpus))
    told = spec.trainer.env
    env = rank_environment(on_gpu=gpus > 0, deterministic=spec.deterministic, compile_threads=threads, told=told)
    resources: dict[str, Any] = {"num_cpus": 1, "runtime_env": {"env_vars": env}}
    nodes = on_nodes(cluster.TRAINER, by_role)
    bundle: dict[str, float] = {}
    together = 1
    if spec.trainer.gpus_per_replica:
        engines = 1 if spec.placement == "colocated" and not inside_ranks(spec) else 0
        together = spec.rollout.parallelism.tensor if engines else 1
        resources["num_gpus"] = 1
        bundle = {"CPU": together + engines, "GPU": together}
    else:
        resources |= nodes
    return GroupOptions(
        resources=resources,
        bundle=bundle,
        together=together,
        nodes=nodes.get("label_selector", {}),
        start_seconds=float(spec.deadlines.start_seconds),
        call_seconds=float(spec.deadlines.progress_seconds),
    )


def learner_lanes(spec: ResolvedSpec, cores: int | None) -> Literal[1, 2]:
    """Threads that an update may be spread over. ``cores``: of the host that ranks and engines share; None: they don't.

    One where the second core is an engine's, from which two lanes would take what they give to the learner, and where
    the ranks have been told to use a single thread.
    """
    at_once = spec.pipeline.mode != "sync" and spec.placement == "separate" and not spec.rollout.gpus_per_replica
    engines = engine_count(spec) if at_once else 0
    too_few = cores is not None and cores - engines < 2
    return 1 if too_few or spec.trainer.env.get("OMP_NUM_THREADS") == "1" else 2


def _engines_have_gpus(spec: ResolvedSpec) -> bool:
    return bool(spec.trainer.gpus_per_replica if spec.placement == "colocated" else spec.rollout.gpus_per_replica)


def engine_spec(job: ResolvedJob, model: ModelFolder, *, version: int = 0) -> EngineSpec:
    """How each engine is built. Its context holds the longest prompt and response of training and validation."""
    spec = job.spec
    rollout, lora = spec.rollout, spec.model.lora
    longest = max(response_lengths(spec).values())
    return EngineSpec(
        kind=rollout.engine,
        folder=str(model.path),
        address=model.address,
        dtype=LearnerSettings.from_job(job, model.path).dtype,
        device="cuda" if _engines_have_gpus(spec) else "cpu",
        max_context=min(model.context_length, spec.data.max_prompt_tokens + longest),
        max_concurrent=max_concurrent(rollout),
        version=version,
        tensor_parallel=rollout.parallelism.tensor,
        seed=spec.seed,
        keep_cache=spec.pipeline.mode != "sync" and spec.pipeline.partial_rollout == "keepCache",
        adapter_rank=lora.rank if lora is not None and lora.publish == "adapter" else None,
        own_process=rollout.multiprocessing,
        start_seconds=float(spec.deadlines.start_seconds),
        tells_experts=spec.algorithm.routing_replay,
        engine_args=dict(rollout.engine_args),
    )


async def start_engines(
    job: ResolvedJob,
    model: ModelFolder,
    learner: RankedLearner,
    holds: Holds,
    *,
    shelf: Shelf,
    waits: Waits,
    told: PoolTold = NOBODY_TOLD,
    by_role: bool = False,
    actors: Sequence[RayEngine] = (),
) -> Engines:
    """Starts the engines with the model folder's weights as version 0. ``holds``: see ``WeightPublication``.
    ``shelf``: where finished responses wait. ``told``: who is told what becomes of engines and requests. ``actors``:
    what ``start_actors`` has started already.

    Raises ``EngineError`` and ``DeadlineError`` naming the engine.
    """
    if inside_ranks(job.spec):
        return await _inside_ranks(job, model, learner, shelf, waits, told)
    return await start_pool(
        job, model, learner, holds, shelf=shelf, waits=waits, told=told, by_role=by_role, actors=actors
    )


async def start_actors(
    job: ResolvedJob,
    model: ModelFolder,
    *,
    waits: Waits,
    by_role: bool = False,
    learner: RankedLearner | None = None,
) -> list[RayEngine]:
    """Starts all engines of ``job`` as actors of their own, side by side; when one fails the others are ended.
    ``learner``: beside whose ranks they live, where they are colocated.

    Raises ``EngineError`` and ``DeadlineError`` naming the engine.
    """
    start = _starter(job, model, waits, by_role, learner)
    return await together(*(start(str(number)) for number in range(engine_count(job.spec))))


def _starter(
    job: ResolvedJob, model: ModelFolder, waits: Waits, by_role: bool, learner: RankedLearner | None = None
) -> Callable[[str], Starting]:
    """Starts an engine of a name as an actor of its own. ``learner``: on whose devices colocated engines live."""
    built = engine_spec(job, model)
    seconds = float(job.spec.deadlines.start_seconds)

    async def start(name: str) -> RayEngine:
        with waits.wait(f"engine {name}", "a slot in the cluster, its process and its model", seconds):
            beside = None if learner is None else learner.bundles
            options = engine_options(job.spec, by_role, beside, name)
            return await RayEngine.start(name, built, seconds=seconds, **options)

    return start


def _homes(spec: ResolvedSpec) -> Homes:
    """vLLM computes what is running anew after an update, unless it is told to keep it."""
    keeps = spec.rollout.engine != "vllm" or spec.pipeline.partial_rollout == "keepCache"
    return Homes(recomputes=not keeps)


async def _inside_ranks(
    job: ResolvedJob, model: ModelFolder, learner: RankedLearner, shelf: Shelf, waits: Waits, told: PoolTold
) -> Engines:
    pool = RolloutPool(
        fixed_dispatch=job.spec.pipeline.mode == "sync",
        max_outstanding=1 << 20,
        shelf=shelf,
        worked=told.worked,
        made_again=told.made_again,
        homes=_homes(job.spec),
    )
    turns = _turns(job.spec, pool, learner, EnginesTurn(waits), waits)
    if turns is not None:
        await turns.at_start()
    await learner.run(colocated.start_engine, engine_spec(job, model))
    for number in range(learner.ranks):
        pool.add(RayEngine(str(number), _beside(learner, number), kill=lambda: None))
    publication = colocated.ColocatedPublication(learner, pool, waits)
    # Where a rank has the whole actor the engine samples from the learner's own weights.
    return Engines(pool, publication, turns, resend=None if learner.has_live_model else publication.resend)


def _turns(
    spec: ResolvedSpec, pool: RolloutPool, learner: RankedLearner, engines_turn: EnginesTurn, waits: Waits
) -> SharedDevices | None:
    if not takes_turns(spec):
        return None
    return SharedDevices(
        pool,
        learner,
        engines_turn,
        waits,
        seconds=learner.call_seconds,
        engines_sleep=spec.rollout.free_cache_engine,
        actor_stays=inside_ranks(spec) and learner.has_live_model,
        gone=lambda place: learner.run(wait_until_gone, place),
    )


def _beside(learner: RankedLearner, rank: int) -> Callable[..., Any]:
    """Calls of the engine in a rank's process."""
    return lambda method, *args, **kwargs: learner.run_at(rank, colocated.call_engine, method, *args, **kwargs)


async def start_pool(
    job: ResolvedJob,
    model: ModelFolder,
    learner: RankedLearner | None,
    holds: Holds,
    *,
    shelf: Shelf | None = None,
    waits: Waits | None = None,
    told: PoolTold = NOBODY_TOLD,
    by_role: bool = False,
    actors: Sequence[RayEngine] = (),
) -> Engines:
    """Engines in actors of their own. Without a learner (evaluation) they keep the folder's weights. ``actors``: those
    that run already; without any they are started."""
    spec = job.spec
    built = engine_spec(job, model)
    waits = waits or Waits()
    start = _starter(job, model, waits, by_role, learner)
    engines_turn = EnginesTurn(waits, start_seconds=float(spec.deadlines.start_seconds))
    starts = 0

    async def replacement(name: str) -> RayEngine:
        nonlocal starts
        starts += 1
        return await start(f"{name.partition('.')[0]}.{starts}")

    pool = RolloutPool(
        fixed_dispatch=spec.pipeline.mode == "sync",
        max_outstanding=in_hand(built.max_concurrent),
        replace=replacement if learner is not None else None,
        starting=engines_turn.starting,
        shelf=shelf,
        worked=told.worked,
        made_again=told.made_again,
        homes=_homes(spec),
    )
    turns = None if learner is None else _turns(spec, pool, learner, engines_turn, waits)
    try:
        if turns is not None:
            await turns.at_start()
        for engine in actors or await start_actors(job, model, waits=waits, by_role=by_role, learner=learner):
            pool.add(engine)
        names = [engine.name for engine in pool.engines]
        if learner is None:
            pool.activate(names)
            return Engines(pool, _Nothing())
        publication = WeightPublication(
            learner,
            pool,
            bucket_bytes=spec.weights.bucket_megabytes << 20,
            seconds=float(spec.deadlines.progress_seconds),
            host=None if "RAY_ADDRESS" in os.environ else "127.0.0.1",
            # NCCL refuses two processes on one GPU.
            backend="nccl" if built.device == "cuda" and spec.placement == "separate" else "gloo",
            beside=ranks_beside if built.device == "cuda" and spec.placement == "colocated" else None,
            holds=holds,
            replacement=None if turns is None else turns.wait_for_replacement,
            engines_turn=engines_turn,
            waits=waits,
        )
        pool.bring_up_by(publication.bring_up)
    except BaseException:
        await pool.close()
        raise
    between = publication.between
    if spec.placement == "colocated":
        return Engines(
            pool, publication, turns, undisturbed=between, resend=publication.resend, admit_by=publication.admit_by
        )
    count = EngineCount(pool, len(names), start=start, bring_up=publication.bring_up, between=between)
    return Engines(
        pool,
        publication,
        undisturbed=between,
        count=count,
        resend=publication.resend,
        admit_by=publication.admit_by,
    )


def ranks_beside(name: str, size: int) -> range:
    """The ranks whose ``size`` devices a colocated engine has. The name of engine i, and of the one that replaces it,
    begins with i."""
    first = int(name.partition(".")[0]) * size
    return range(first, first + size)


def engine_options(spec: ResolvedSpec, by_role: bool, beside: Bundles | None, name: str) -> dict[str, Any]:
    """What Ray is asked for, for one engine. ``beside``: the ranks' bundles. Engine i shares the devices of the ranks
    in bundle i, in their order."""
    own = dict(_DETERMINISTIC_ENGINE) if spec.deterministic and _engines_have_gpus(spec) else {}
    variables = own | spec.rollout.env | _allocator(spec)
    options: dict[str, Any] = {"num_cpus": 1, "runtime_env": {"env_vars": variables}}
    if spec.placement == "separate":
        options |= on_nodes(cluster.ROLLOUT, by_role)
        if spec.rollout.gpus_per_replica:
            options["num_gpus"] = spec.rollout.gpus_per_replica
    elif not spec.trainer.gpus_per_replica:
        options |= on_nodes(cluster.TRAINER, by_role)
    elif beside is None:
        # Nobody else is on the devices (evaluation).
        options |= on_nodes(cluster.TRAINER, by_role)
        options["num_gpus"] = spec.rollout.parallelism.tensor
    else:
        # Ray has given the devices to the ranks. It leaves the variable alone where no GPU is asked for.
        size = spec.rollout.parallelism.tensor
        ranks = ranks_beside(name, size)
        options |= beside.options(ranks[0])
        options["runtime_env"]["env_vars"]["CUDA_VISIBLE_DEVICES"] = ",".join(beside.devices[rank] for rank in ranks)
    return options


def _allocator(spec: ResolvedSpec) -> dict[str, str]:
    """What torch's allocator is told in an engine that takes turns with ranks: what ``rollout.env`` says, else nothing.
    In their pod it would be told what the ranks are, and what sleeps cannot be in expandable segments."""
    if spec.placement != "colocated" or not spec.trainer.gpus_per_replica:
        return {}
    told = next((spec.rollout.env[name] for name in allocator.NAMES if name in spec.rollout.env), "")
    return dict.fromkeys(allocator.NAMES, told)


class _Nothing:
    """The publication of engines whose weights never change."""

    async def publish(self, version: int) -> dict[str, float]:
        return {}
