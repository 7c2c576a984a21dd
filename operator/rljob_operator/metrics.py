"""The operator's Prometheus metrics: how it works, and how the jobs are."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from rljob_operator.conditions import Type
from rljob_operator.draft import Decision
from rljob_operator.observed import JobView

SHOWN = (
    Type.ADMITTED,
    Type.CLUSTER_READY,
    Type.RUNNING,
    Type.PROGRESSING,
    Type.WEIGHTS_FRESH,
    Type.SUSPENDED,
    Type.SUCCEEDED,
    Type.FAILED,
)
PROGRESS = {
    "step": ("rljob_step", "Steps done."),
    "totalSteps": ("rljob_steps_wanted", "Steps after which the job ends."),
    "reward": ("rljob_reward", "Mean reward of the last step."),
    "maxAge": ("rljob_sample_age", "Largest age of samples in the last step, in policy versions."),
    "ageBound": ("rljob_sample_age_bound", "Largest age that the job allows, in policy versions."),
    "stepSeconds": ("rljob_step_seconds", "Time of a step."),
    "tokensPerSecond": ("rljob_tokens_per_second", "Response tokens of all engines per second."),
    "trainerIdle": ("rljob_trainer_idle_ratio", "Share of time that the trainer waits."),
    "rolloutIdle": ("rljob_rollout_idle_ratio", "Share of time that an engine has no request, mean."),
}
"""Fields of status.progress, and the gauges that show them."""


class Metrics:
    """All metrics, on a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        labels = ("namespace", "job")
        self.looks = Counter("rljob_reconcile", "Looks at a job.", ("result",), registry=self.registry)
        self.seconds = Histogram("rljob_reconcile_seconds", "Time of one look.", registry=self.registry)
        self.queue = Gauge("rljob_queue_depth", "Jobs that wait for a look.", registry=self.registry)
        self.queue_wait = Gauge("rljob_queue_wait_seconds", "Longest present wait for a look.", registry=self.registry)
        self.leads = Gauge("rljob_leader", "1: this replica acts.", registry=self.registry)
        self.condition = Gauge(
            "rljob_condition", "1: the condition is True; 0: it is not.", (*labels, "condition"), registry=self.registry
        )
        self.progress = {
            field: Gauge(name, meaning, labels, registry=self.registry) for field, (name, meaning) in PROGRESS.items()
        }
        self.attempt = Gauge("rljob_attempt", "Number of the attempt.", labels, registry=self.registry)
        self.failures = Gauge("rljob_failures", "Failures since the last checkpoint.", labels, registry=self.registry)
        self.pool = Gauge("rljob_pool_replicas", "Replicas.", (*labels, "pool", "state"), registry=self.registry)
        self._shown: dict[tuple[str, str], set[str]] = {}

    def take(self, job: JobView, decision: Decision) -> None:
        """Shows a job as it is after a look."""
        status = decision.status or job.status
        labels = (job.namespace, job.name)
        for kind in SHOWN:
            # What nobody has said yet is not false: a job whose samples have no age yet is not stale.
            if kind.title in status.conditions:
                self.condition.labels(*labels, kind.title).set(status.is_true(kind))
        for field, gauge in self.progress.items():
            if field in status.progress:
                gauge.labels(*labels).set(float(status.progress[field]))
        self.attempt.labels(*labels).set(status.attempt)
        self.failures.labels(*labels).set(status.failures)
        for name, pool in status.pools.items():
            self.pool.labels(*labels, name, "desired").set(pool.desired)
            self.pool.labels(*labels, name, "ready").set(pool.ready)
        self._shown[labels] = set(status.pools)

    def forget_all(self) -> None:
        """Removes the series of all jobs: another replica leads and shows them."""
        for labels in list(self._shown):
            self.forget(*labels)

    def forget(self, namespace: str, name: str) -> None:
        """Removes the series of a job that is gone."""
        labels = (namespace, name)
        pools = self._shown.pop(labels, None)
        if pools is None:
            return
        for gauge in (*self.progress.values(), self.attempt, self.failures):
            _remove(gauge, *labels)
        for kind in SHOWN:
            _remove(self.condition, *labels, kind.title)
        for pool in pools:
            for state in ("desired", "ready"):
                _remove(self.pool, *labels, pool, state)


def _remove(gauge: Gauge, *labels: str) -> None:
    try:
        gauge.remove(*labels)
    except KeyError:
        # A job that never ran has no step and no reward.
        return
