"""What the status says of the pools that score: reward models, judges."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from rljob_api.status import EngineState, ReplicaStatus, ScoringPoolStatus
from rljob_trainer.rewards.standing import ReplicaState, ScorerStanding, ScoringPool
from rljob_trainer.telemetry import prometheus
from rljob_trainer.telemetry.figures import duration

_STATES: Mapping[ReplicaState, EngineState] = {"starting": "starting", "serving": "serving", "leaving": "draining"}
_MANY = 128
"""From here on replicas are listed without a sentence each: the operator reads 64 KiB."""


@dataclass(frozen=True, slots=True)
class ScoringWords:
    """How a kind of pool is spoken of."""

    does: str
    what: str
    """What it has in hand."""
    starts: str
    """What a replica waits for that comes up."""
    gauge: str
    """Of replicas in ``/metrics``."""
    gauge_of_work: str
    replicas: str


REWARD_MODELS = ScoringWords(
    "scores",
    "samples",
    "a slot in the cluster, its process and its models",
    "rljob_reward_models",
    "rljob_reward_model_samples",
    "the reward models",
)
JUDGES = ScoringWords(
    "answers",
    "questions",
    "a slot in the cluster, its process and its model",
    "rljob_judges",
    "rljob_judge_questions",
    "the judge",
)


def scoring_pool_status(pool: ScoringPool, words: ScoringWords) -> ScoringPoolStatus:
    """The pool as it is now."""
    standings = pool.standings()
    replicas = [_replica(standing, words, brief=len(standings) > _MANY) for standing in standings]
    replicas += [
        ReplicaStatus(name=gone.name, pod=gone.pod, state="drained", safe_to_delete=True) for gone in pool.drained
    ]
    return ScoringPoolStatus(
        desired=pool.wanted,
        ready=sum(standing.state == "serving" for standing in standings),
        waiting=pool.waiting,
        replicas=tuple(replicas),
    )


def _replica(standing: ScorerStanding, words: ScoringWords, *, brief: bool) -> ReplicaStatus:
    doing = f"waits for {words.what}"
    if standing.state == "starting":
        doing = f"waits for {words.starts}"
    elif standing.running:
        doing = f"{words.does} {standing.running} {words.what} for {duration(standing.seconds)}"
    return ReplicaStatus(
        name=standing.name,
        pod=standing.pod,
        state=_STATES[standing.state],
        running=standing.running,
        doing="" if brief else doing,
    )


def exposition(pool: ScoringPool, words: ScoringWords, labels: Mapping[str, str]) -> Iterator[str]:
    """What ``GET /metrics`` says of the pool."""
    states: dict[str, float] = {}
    for standing in pool.standings():
        states[_STATES[standing.state]] = states.get(_STATES[standing.state], 0) + 1
    running = float(sum(standing.running for standing in pool.standings()))
    rows = {"waiting": float(pool.waiting), "running": running}
    yield prometheus.gauge(words.gauge, f"replicas of {words.replicas} by state", states, "state", labels)
    yield prometheus.gauge(words.gauge_of_work, f"{words.what} at {words.replicas} by state", rows, "state", labels)
