"""The pool of engines that judge, of a job that has one: where they live, and how each is built."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rljob_api import cluster
from rljob_api.pod_template.of_job import cpus_of_ray
from rljob_trainer.driver.engines import on_nodes
from rljob_trainer.pools.judge_engines import EngineSupply, JudgeEngines, ServedJudge, served_judge
from rljob_trainer.pools.size import in_hand, max_concurrent
from rljob_trainer.rollout.actor import EngineSpec
from rljob_trainer.rollout.handle import EngineHandle, RayEngine
from rljob_trainer.waits import Waits

if TYPE_CHECKING:
    from rljob_api.resolved import ResolvedSpec
    from rljob_api.spec.pools import JudgePool


def judge_count(spec: ResolvedSpec) -> int:
    """Engines that judge; 0: the job has no pool of them."""
    return 0 if spec.judge is None else spec.judge.replicas


def judge_options(pool: JudgePool, by_role: bool) -> dict[str, Any]:
    """What Ray is asked for, for one engine. On a cluster it has all CPUs of its pod, so that each pod has one, and Ray
    gives it as many threads; on one machine one, as everything else."""
    cpus = cpus_of_ray("spec.judge.pod", pool.pod, pool.gpus_per_replica) if by_role else None
    options: dict[str, Any] = {"num_cpus": cpus or 1, "runtime_env": {"env_vars": dict(pool.env)}}
    if pool.gpus_per_replica:
        options["num_gpus"] = pool.gpus_per_replica
    return options | on_nodes(cluster.JUDGE, by_role)


def judge_spec(pool: JudgePool, judge: ServedJudge, *, seed: int, start_seconds: float) -> EngineSpec:
    """How each engine is built."""
    on_gpu = pool.gpus_per_replica > 0
    dtype = pool.model.dtype
    return EngineSpec(
        kind=pool.engine,
        folder="",
        files=judge.files,
        dtype=("bfloat16" if on_gpu else "float32") if dtype == "auto" else dtype,
        device="cuda" if on_gpu else "cpu",
        max_context=judge.context,
        max_concurrent=max_concurrent(pool),
        tensor_parallel=pool.parallelism.tensor,
        seed=seed,
        start_seconds=start_seconds,
        engine_args=dict(pool.engine_args),
    )


def judges_of(
    spec: ResolvedSpec, base: Path, waits: Waits, now: datetime | None = None, *, by_role: bool = False
) -> JudgeEngines | None:
    """The pool, with nothing started yet; None: the job has none. ``base``: where a relative path starts. ``now``: the
    date in questions that have one (None: the present one). ``by_role``: Ray's nodes say what they are for."""
    pool = spec.judge
    if pool is None:
        return None
    seconds = float(spec.deadlines.start_seconds)
    options = judge_options(pool, by_role)

    async def start(name: str, judge: ServedJudge) -> EngineHandle:
        built = judge_spec(pool, judge, seed=spec.seed, start_seconds=seconds)
        return await RayEngine.start(name, built, seconds=seconds, **options)

    supply = EngineSupply(
        load=lambda: served_judge(pool, base.resolve(), now),
        start=start,
        in_hand=in_hand(max_concurrent(pool)),
        patience_seconds=seconds,
    )
    return JudgeEngines(pool.replicas, supply, waits)
