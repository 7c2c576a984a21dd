"""The pools of a job as a list: what each asks for. Everything that treats pools alike goes through here."""

from __future__ import annotations

from dataclasses import dataclass

from rljob_api import ResolvedJob
from rljob_api.spec.pod import Pod
from rljob_operator import names


@dataclass(frozen=True)
class Role:
    """One kind of pod of a job: the head or a pool."""

    name: str
    pod: Pod
    env: dict[str, str]
    gpus_per_pod: int = 0


@dataclass(frozen=True)
class WorkerGroup:
    """One worker group of the RayCluster."""

    role: Role
    replicas: int
    least: int
    """Replicas with which training can go on."""
    most: int
    resizable: bool = False
    """Whether the driver takes more replicas, and gives some back, while the job runs."""
    hosts: int = 1
    """Pods of one replica."""

    @property
    def name(self) -> str:
        return self.role.name

    @property
    def lower_bound(self) -> int:
        """KubeRay's, which only clamps what is asked for; the job's own bounds are kept by the API."""
        return 0 if self.resizable else self.replicas


def pools(job: ResolvedJob) -> list[WorkerGroup]:
    """The job's pools. With placement colocated the trainer's carries the engines too."""
    spec = job.spec
    trainer = WorkerGroup(
        role=Role(names.TRAINER, spec.trainer.pod, dict(spec.trainer.env), spec.trainer.gpus_per_replica),
        replicas=spec.trainer.replicas,
        least=spec.trainer.replicas,
        most=spec.trainer.replicas,
    )
    return [*_engines(job), trainer, *_scoring(job)]


def _engines(job: ResolvedJob) -> list[WorkerGroup]:
    rollout = job.spec.rollout
    if job.spec.placement == "colocated":
        return []
    engines = WorkerGroup(
        role=Role(names.ROLLOUT, rollout.pod, dict(rollout.env), rollout.gpus_per_replica),
        replicas=rollout.replicas,
        least=min(rollout.min_replicas, rollout.replicas),
        most=max(rollout.max_replicas, rollout.replicas),
        resizable=True,
    )
    return [engines]


def _scoring(job: ResolvedJob) -> list[WorkerGroup]:
    """Reward models and judges, of a job that has pools for them."""
    spec = job.spec
    return [
        WorkerGroup(
            role=Role(name, pool.pod, dict(pool.env), pool.gpus_per_replica),
            replicas=pool.replicas,
            least=1,
            most=pool.replicas,
            resizable=True,
        )
        for name, pool in ((names.REWARD_MODEL, spec.reward_model), (names.JUDGE, spec.judge))
        if pool is not None
    ]
