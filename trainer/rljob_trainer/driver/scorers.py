"""The pool of reward models of a job that has one: where its replicas live."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rljob_api import cluster
from rljob_api.pod_template.of_job import cpus_of_ray
from rljob_trainer.driver.engines import on_nodes
from rljob_trainer.rewards.reward_model.actor import ActorReplica
from rljob_trainer.rewards.reward_model.replica import ScorerReplica
from rljob_trainer.rewards.reward_model.scorers import ReplicaSupply, Scorers
from rljob_trainer.waits import Waits

if TYPE_CHECKING:
    from rljob_api.resolved import ResolvedSpec
    from rljob_api.spec.pools import RewardModelPool

_REMEDY = "if it may have run out of memory, give spec.rewardModel.pod more, or lower rewardModel.batchTokens"


def scorer_count(spec: ResolvedSpec) -> int:
    """Replicas of the reward models; 0: they have no pool."""
    return 0 if spec.reward_model is None else spec.reward_model.replicas


def scorer_options(pool: RewardModelPool, by_role: bool) -> dict[str, Any]:
    """What Ray is asked for, for one replica. On a cluster it has all CPUs of its pod, so that each pod has one, and
    Ray gives it as many threads; on one machine one, as everything else."""
    cpus = cpus_of_ray("spec.rewardModel.pod", pool.pod, pool.gpus_per_replica) if by_role else None
    options: dict[str, Any] = {"num_cpus": cpus or 1, "runtime_env": {"env_vars": dict(pool.env)}}
    if pool.gpus_per_replica:
        options["num_gpus"] = pool.gpus_per_replica
    return options | on_nodes(cluster.REWARD_MODEL, by_role)


def scorers_of(spec: ResolvedSpec, waits: Waits, *, by_role: bool = False) -> Scorers | None:
    """The pool, with nothing started yet; None: the job has none. ``by_role``: Ray's nodes say what they are for."""
    pool = spec.reward_model
    if pool is None:
        return None
    device = "cuda" if pool.gpus_per_replica else "cpu"
    options = scorer_options(pool, by_role)
    start_seconds = float(spec.deadlines.start_seconds)
    call_seconds = float(spec.deadlines.progress_seconds)

    async def start(name: str) -> ScorerReplica:
        return await ActorReplica.start(device, options, start_seconds=start_seconds, call_seconds=call_seconds)

    return Scorers(pool.replicas, ReplicaSupply(start, "the reward model pool", _REMEDY, start_seconds), waits)
