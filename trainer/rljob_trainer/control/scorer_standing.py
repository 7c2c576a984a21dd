"""What the status says of the pool of reward models."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rljob_api.status import EngineState, ReplicaStatus, RewardModelStatus
from rljob_trainer.rewards.reward_model.scorers import ReplicaState, Scorers, ScorerStanding
from rljob_trainer.telemetry import prometheus
from rljob_trainer.telemetry.figures import duration

_STATES: Mapping[ReplicaState, EngineState] = {"starting": "starting", "serving": "serving", "leaving": "draining"}
_MANY = 128
"""From here on replicas are listed without a sentence each: the operator reads 64 KiB."""


def reward_model_status(scorers: Scorers) -> RewardModelStatus:
    """The pool as it is now."""
    standings = scorers.standings()
    replicas = [_replica(standing, brief=len(standings) > _MANY) for standing in standings]
    replicas += [
        ReplicaStatus(name=gone.name, pod=gone.pod, state="drained", safe_to_delete=True) for gone in scorers.drained
    ]
    return RewardModelStatus(
        desired=scorers.wanted,
        ready=sum(standing.state == "serving" for standing in standings),
        waiting=scorers.waiting,
        replicas=tuple(replicas),
    )


def _replica(standing: ScorerStanding, *, brief: bool) -> ReplicaStatus:
    doing = "waits for samples"
    if standing.state == "starting":
        doing = "waits for a place in the cluster, its process and its models"
    elif standing.running:
        doing = f"scores {standing.running} samples for {duration(standing.seconds)}"
    return ReplicaStatus(
        name=standing.name,
        pod=standing.pod,
        state=_STATES[standing.state],
        running=standing.running,
        doing="" if brief else doing,
    )


def exposition(scorers: Scorers, labels: Mapping[str, str]) -> Iterator[str]:
    """What ``GET /metrics`` says of the pool."""
    states: dict[str, float] = {}
    for standing in scorers.standings():
        states[_STATES[standing.state]] = states.get(_STATES[standing.state], 0) + 1
    running = float(sum(standing.running for standing in scorers.standings()))
    rows = {"waiting": float(scorers.waiting), "running": running}
    yield prometheus.gauge("rljob_reward_models", "replicas of the reward models by state", states, "state", labels)
    yield prometheus.gauge("rljob_reward_model_samples", "samples before the reward models", rows, "state", labels)
