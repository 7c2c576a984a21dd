"""A world made of plain data around `reconcile`: API server, KubeRay, kubelets, Ray and drivers, all without a clock.

The operator in it can stop after any single write. What it has decided but not written is lost, as with kill -9.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Any

from rljob_api import check, resolve
from rljob_api.resolved import ResolvedJob
from rljob_api.status import (
    Desired,
    DriverStatus,
    End,
    LastCheckpoint,
    Pools,
    ReplicaStatus,
    RolloutStatus,
    ScoringPoolStatus,
    TrainerStatus,
)
from rljob_operator import actions as do
from rljob_operator.draft import Decision
from rljob_operator.objects import ray_cluster, spec_hash
from rljob_operator.observed import (
    ClaimView,
    ClusterView,
    DriverView,
    JobView,
    Observed,
    PodView,
    RayJobView,
    RayView,
)
from rljob_operator.pools import pools
from rljob_operator.questions import questions
from rljob_operator.queueing import QueueView
from rljob_operator.reconcile import reconcile
from rljob_operator.settings import Settings
from rljob_operator.status import JobStatus
from rljob_operator.tokens import TokenKey
from rljob_operator.views import cluster_view

START = datetime(2026, 1, 1, tzinfo=UTC)
SETTINGS = Settings()
KEY = TokenKey(b"k" * 64)


def job_spec(**sections: Any) -> dict[str, Any]:
    """The spec of a small job with two engines and one trainer pod."""
    spec: dict[str, Any] = {
        "model": {"source": "s3://models/tiny"},
        "data": {"train": {"source": "s3://data/train.jsonl"}, "prompt": "question", "answer": "answer"},
        "reward": {"functions": [{"type": "gsm8k"}]},
        "algorithm": {"preset": "grpo"},
        "placement": "separate",
        "rollout": {"replicas": 2, "minReplicas": 1, "maxReplicas": 8},
        "trainer": {"replicas": 1},
        "checkpoint": {"uri": "/state"},
        "retry": {"limit": 2, "backoffSeconds": 10, "maxBackoffSeconds": 600},
    }
    for name, value in sections.items():
        spec[name] = {**spec.get(name, {}), **value} if isinstance(value, dict) else value
    return spec


@lru_cache(maxsize=256)
def read(document: str) -> tuple[str, ResolvedJob | None, tuple[str, ...]]:
    """Fingerprint, job and problems of a document, which is looked at hundreds of times before it changes."""
    job, violations = check(json.loads(document))
    problems = tuple(str(violation) for violation in violations)
    if job is None or problems:
        return "", None, problems
    return spec_hash(job.spec), resolve(job), ()


@dataclass
class Driver:
    """A driver on some head."""

    attempt: int
    head: str
    state: str = "RUNNING"
    exit_code: int | None = None
    generation: int = 0
    step: int = 0
    desired: Desired | None = None
    replicas: int = 2
    """Engines that the job file asked for when it began."""
    scorers: int = 0
    """Replicas of the reward models that the job file asked for when it began."""
    judges: int = 0
    """The same of the judge's engines."""
    used: set[str] = field(default_factory=set)
    """Pods on which it ever started an engine or a reward model."""
    drained: set[str] = field(default_factory=set)
    end: End | None = None
    lines: tuple[str, ...] = ()


@dataclass
class World:
    """Everything there is. Methods named after who does something."""

    spec: dict[str, Any] = field(default_factory=job_spec)
    labels: dict[str, str] = field(default_factory=dict)
    generation: int = 1
    status: JobStatus = field(default_factory=JobStatus)
    clusters: dict[str, ClusterView] = field(default_factory=dict)
    pods: dict[str, PodView] = field(default_factory=dict)
    drivers: list[Driver] = field(default_factory=list)
    now: datetime = START
    config_generation: int = 0
    job_deleted: bool = False
    finalizers: tuple[str, ...] = ()
    reachable: bool = True
    refuses: bool = False
    """Heads do not take the operator's token."""
    silent_since: datetime | None = None
    """Since when drivers leave the operator's questions unanswered."""
    leftovers: int = 0
    checkpoint_step: int | None = None
    claims: dict[str, ClaimView] = field(default_factory=dict)
    queue: QueueView = field(default_factory=QueueView)
    removed: list[str] = field(default_factory=list)
    """Worker pods that KubeRay removed on purpose, in order."""
    submissions: list[int] = field(default_factory=list)
    """Attempts as Ray accepted them, in order."""
    last: Decision = field(default_factory=Decision)
    surroundings_due: bool = False
    unseen: set[str] = field(default_factory=set)
    """Pods that the operator's watch has not brought yet."""
    quota: int | None = None
    """Pods that the namespace may have; more are refused."""
    kept: list[str] = field(default_factory=list)
    """Clusters whose surroundings were made anew."""
    _numbers: int = 0
    _sizes: tuple[Any, ...] = ()
    _sized: datetime = START
    """What `Observed.sized_since` is made of."""

    # The operator

    def observed(self) -> Observed:
        document = {
            "apiVersion": "rljob.dev/v1alpha1",
            "kind": "RLJob",
            "metadata": {"name": "job", "namespace": "space", "labels": dict(self.labels)},
            "spec": self.spec,
        }
        fingerprint, job, problems = read(json.dumps(document))
        view = JobView(
            namespace="space",
            name="job",
            uid="uid",
            generation=self.generation,
            version="1",
            created=START,
            document=self.spec,
            fingerprint=fingerprint,
            job=job,
            problems=problems,
            # Through the document and back, as over the API server: nothing may be remembered otherwise.
            status=JobStatus.read(self.status.document()),
            deleting=self.job_deleted,
            finalizers=self.finalizers,
        )
        sizes = tuple(cluster.groups for cluster in self.clusters.values())
        if sizes != self._sizes:
            self._sizes, self._sized = sizes, self.now
        observed = Observed(
            view,
            tuple(self.clusters.values()),
            tuple(pod for name, pod in self.pods.items() if name not in self.unseen),
            claims=tuple(self.claims.values()),
            queue=self.queue,
            surroundings_due=self.surroundings_due,
            sized_since=self._sized,
        )
        asked = questions(observed)
        if asked is None:
            return observed
        if not self.reachable:
            return replace(observed, ray=RayView(False, problem="no answer"))
        if self.refuses:
            return replace(observed, ray=RayView(False, problem="does not take the operator's token", refused=True))
        if asked.leftovers:
            return replace(observed, ray=RayView(True, leftovers=self.leftovers))
        driver = self.driver_on(asked.cluster, asked.attempt)
        if driver is None:
            return replace(observed, ray=RayView(True))
        found = RayJobView(f"job-a{driver.attempt}", driver.state, "", driver.exit_code)  # type: ignore[arg-type]
        observed = replace(observed, ray=RayView(True, job=found, lines=driver.lines if found.over else ()))
        if self.silent_since is not None and not found.over:
            return replace(observed, driver=DriverView(problem="no answer within 5 s", silent_since=self.silent_since))
        return replace(observed, driver=DriverView(self.answer(driver)))

    def look(self, writes: int | None = None) -> Decision:
        """The operator looks once; with `writes` it is killed after that many writes."""
        decision = self.last = reconcile(self.observed(), self.now, SETTINGS)
        steps: list[Any] = [decision.status] if decision.status is not None else []
        steps += decision.actions
        for step in steps[:writes]:
            if isinstance(step, JobStatus):
                self.status = step
            elif not self._perform(step):
                break
        return decision

    def _perform(self, action: do.Action) -> bool:
        """Carries out one action; False: refused, so the rest is left."""
        match action:
            case do.ApplyConfigMap():
                self.config_generation = self.generation
            case do.CreateCluster():
                return self._create(action.incarnation)
            case do.KeepSurroundings():
                assert self.config_generation == self.clusters[action.cluster].generation
                self.kept.append(action.cluster)
            case do.DeleteCluster():
                if action.name in self.clusters:
                    self.clusters[action.name] = replace(self.clusters[action.name], deleting=True)
            case do.RemovePod():
                self.pods.pop(action.name, None)
            case do.NoteGeneration():
                cluster = self.clusters[action.cluster]
                if cluster.generation != action.before:
                    return False
                self.clusters[cluster.name] = replace(cluster, generation=action.after)
            case do.BeginAttempt():
                cluster = self.clusters[action.cluster]
                if cluster.attempt != action.before:
                    return False
                self.clusters[cluster.name] = replace(cluster, attempt=action.attempt, attempt_head=action.head_uid)
            case do.NoteFirstCrash():
                cluster = self.clusters[action.cluster]
                if cluster.attempt != action.attempt:
                    return False
                # As the annotation has it: in whole seconds.
                self.clusters[cluster.name] = replace(cluster, first_crash=action.time.replace(microsecond=0))
            case do.ResizeGroup():
                return self._resize(action)
            case do.ReshapeGroup():
                self._change_group(action.cluster, action.group, hosts=action.hosts, suspended=False)
            case do.PassPriority():
                self.clusters[action.cluster] = replace(self.clusters[action.cluster], priority=action.after)
            case do.RestoreGroups():
                return self._restore(action)
            case do.ClearRemoved():
                self._change_group(action.cluster, action.group, removing=())
            case do.SubmitDriver():
                return self._submit(action)
            case do.StopDriver():
                driver = self.driver_on(action.cluster, action.attempt)
                if driver is not None and driver.state == "RUNNING":
                    driver.state = "STOPPED"
            case do.TellDriver():
                driver = self.driver_on(action.cluster, action.desired.attempt)
                if driver is not None and driver.state == "RUNNING":
                    driver.desired, driver.generation = action.desired, action.desired.generation
            case do.DeleteJob():
                self.job_deleted = True
        return True

    def _create(self, incarnation: int) -> bool:
        self.config_generation = self.generation
        job = self.observed().job
        assert job.job is not None
        document = ray_cluster(job.job, job.fingerprint, job.uid, self.generation, incarnation, KEY.id, SETTINGS)
        name = document["metadata"]["name"]
        if name in self.clusters:
            return False
        document["metadata"]["uid"] = self._name("cluster")
        self.clusters[name] = cluster_view(document)
        return True

    def _resize(self, action: do.ResizeGroup) -> bool:
        group = self.clusters[action.cluster].group(action.group)
        if group is None or group.replicas != action.before:
            return False
        self._change_group(
            action.cluster,
            action.group,
            replicas=action.replicas,
            least=action.least,
            most=action.most,
            removing=action.removing,
        )
        return True

    def _restore(self, action: do.RestoreGroups) -> bool:
        view, job = self.clusters[action.cluster], self.observed().job
        if view.version != action.version or job.job is None:
            return False
        document = ray_cluster(job.job, job.fingerprint, job.uid, self.generation, action.incarnation, KEY.id, SETTINGS)
        made = [group for group in cluster_view(document).groups if group.name in action.missing]
        self.clusters[action.cluster] = replace(view, groups=(*view.groups, *made))
        return True

    def _change_group(self, cluster: str, name: str, **changes: Any) -> None:
        view = self.clusters[cluster]
        groups = tuple(replace(group, **changes) if group.name == name else group for group in view.groups)
        self.clusters[cluster] = replace(view, groups=groups)

    def _submit(self, action: do.SubmitDriver) -> bool:
        head = self.head_of(action.cluster)
        if head is None or not self.reachable:
            return False
        if self.driver_on(action.cluster, action.attempt) is None:
            replicas = self.spec["rollout"]["replicas"]
            scorers, judges = (
                self.spec[pool].get("replicas", 1) if pool in self.spec else 0 for pool in ("rewardModel", "judge")
            )
            sizes = {"replicas": replicas, "scorers": scorers, "judges": judges}
            self.drivers.append(Driver(action.attempt, head.uid, generation=action.generation, **sizes))
            self.submissions.append(action.attempt)
        return True

    # KubeRay and kubelets

    def kuberay(self) -> None:
        """Creates and removes pods until each cluster has what its spec says; garbage of deleted clusters goes too."""
        for name in [name for name, cluster in self.clusters.items() if cluster.deleting]:
            del self.clusters[name]
        for pod in list(self.pods.values()):
            if pod.cluster not in self.clusters or pod.ended:
                self._end_pod(pod.name)
        for cluster in self.clusters.values():
            if cluster.suspended:
                for name in [pod.name for pod in self.pods.values() if pod.cluster == cluster.name]:
                    self._end_pod(name)
                continue
            if self.head_of(cluster.name, ready=False) is None:
                self._new_pod(cluster.name, "head")
            for group in cluster.groups:
                mine = sorted(
                    pod.name for pod in self.pods.values() if (pod.cluster, pod.group) == (cluster.name, group.name)
                )
                for pod_name in [pod_name for pod_name in mine if pod_name in group.removing]:
                    self._remove(pod_name)
                    mine.remove(pod_name)
                # As `utils.GetWorkerGroupDesiredReplicas` of KubeRay has it.
                wanted = group.least if group.replicas < group.least else min(group.replicas, group.most)
                wanted *= not group.suspended
                # Which ones it takes that nobody named is its own affair; here always the oldest.
                for pod_name in mine[: max(0, len(mine) - wanted)]:
                    self._remove(pod_name)
                for _ in range(wanted - len(mine)):
                    self._new_pod(cluster.name, group.name)

    def _remove(self, name: str) -> None:
        self._end_pod(name)
        self.removed.append(name)

    def _end_pod(self, name: str) -> None:
        pod = self.pods.pop(name)
        for driver in self.drivers:
            if driver.head == pod.uid and driver.state == "RUNNING":
                driver.state = "GONE"

    def _new_pod(self, cluster: str, group: str) -> None:
        if self.quota is not None and len(self.pods) >= self.quota:
            return
        name = self._name(f"{cluster}-{group}")
        self.pods[name] = PodView(name, f"uid-{name}", cluster, group, ready=False, created=self.now)

    def kubelet(self) -> None:
        """All pods become ready."""
        for name, pod in self.pods.items():
            if not pod.ended:
                self.pods[name] = replace(pod, ready=True)

    # Kueue

    def hold(self, message: str = "waits for quota: insufficient unused quota", *, taken_back: bool = False) -> None:
        """Kueue stops the clusters, or does not start them."""
        self.queue = QueueView(True, taken_back, message)
        self.clusters = {name: replace(cluster, suspended=True) for name, cluster in self.clusters.items()}

    def admit(self) -> None:
        """Kueue starts the clusters."""
        self.queue = QueueView(True)
        self.clusters = {name: replace(cluster, suspended=False) for name, cluster in self.clusters.items()}

    def lose_pod(self, name: str, *, disrupted: bool = False, message: str = "") -> None:
        """A pod ends by itself; with a message, because its container crashed."""
        trouble = "crash" if message else None
        self.pods[name] = replace(
            self.pods[name], ready=False, ended=True, disrupted=disrupted, trouble=trouble, message=message
        )
        for driver in self.drivers:
            if driver.head == self.pods[name].uid and driver.state == "RUNNING":
                driver.state = "GONE"

    # Ray and drivers

    def head_of(self, cluster: str, *, ready: bool = True) -> PodView | None:
        heads = (pod for pod in self.pods.values() if (pod.cluster, pod.group) == (cluster, "head"))
        return next((pod for pod in heads if not pod.ended and (pod.ready or not ready)), None)

    def driver_on(self, cluster: str, attempt: int) -> Driver | None:
        head = self.head_of(cluster)
        if head is None:
            return None
        return next((d for d in self.drivers if (d.head, d.attempt) == (head.uid, attempt)), None)

    def running(self) -> list[Driver]:
        return [driver for driver in self.drivers if driver.state == "RUNNING"]

    def drive(self) -> None:
        """Running drivers do what was asked of them, and a step."""
        for driver in self.running():
            driver.step += 1
            wanted = driver.desired
            if wanted is not None and wanted.suspend:
                self.end(driver, "suspended", 75)
            elif wanted is not None:
                self._drain(driver, self.engines(driver), wanted.rollout_replicas)
                self._drain(driver, self.scorers(driver), wanted.reward_model_replicas)
                self._drain(driver, self.judges(driver), wanted.judge_replicas)

    def _drain(self, driver: Driver, pods: list[str], wanted: int | None) -> None:
        while wanted is not None and len(pods) - len(driver.drained & set(pods)) > wanted:
            driver.drained.add(next(name for name in pods if name not in driver.drained))

    def end(self, driver: Driver, kind: Any, code: int) -> None:
        driver.end = End(kind=kind, reason=f"ends with {code}", exit_code=code, time=self.now)
        driver.state, driver.exit_code = ("SUCCEEDED" if code == 0 else "FAILED"), code

    def engines(self, driver: Driver) -> list[str]:
        """Pods on which it has engines."""
        told = driver.desired.rollout_replicas if driver.desired is not None else None
        return self._used(driver, "rollout", driver.replicas if told is None else told)

    def scorers(self, driver: Driver) -> list[str]:
        """Pods on which it has reward models."""
        told = driver.desired.reward_model_replicas if driver.desired is not None else None
        return self._used(driver, "reward-model", driver.scorers if told is None else told)

    def judges(self, driver: Driver) -> list[str]:
        """Pods on which it has engines that judge."""
        told = driver.desired.judge_replicas if driver.desired is not None else None
        return self._used(driver, "judge", driver.judges if told is None else told)

    def _used(self, driver: Driver, group: str, wanted: int) -> list[str]:
        head = next((pod for pod in self.pods.values() if pod.uid == driver.head), None)
        if head is None:
            return []
        found = (p for p in self.pods.values() if (p.cluster, p.group) == (head.cluster, group) and p.ready)
        ready = sorted(pod.name for pod in found)
        for name in ready:
            if len(driver.used & set(ready) - driver.drained) < wanted:
                driver.used.add(name)
        return [name for name in ready if name in driver.used]

    def answer(self, driver: Driver) -> DriverStatus:
        engines, scorers, judges = (
            tuple(
                ReplicaStatus(name=name, pod=name, state="serving", safe_to_delete=name in driver.drained)
                for name in names
            )
            for names in (self.engines(driver), self.scorers(driver), self.judges(driver))
        )
        checkpoint = None
        if self.checkpoint_step is not None:
            checkpoint = LastCheckpoint(uri="/state", step=self.checkpoint_step, time=self.now)
        return DriverStatus(
            generation=driver.generation,
            attempt=driver.attempt,
            time=self.now,
            step=driver.step,
            pools=Pools(
                rollout=RolloutStatus(desired=len(engines), ready=len(engines), engines=engines),
                trainer=TrainerStatus(desired=1, ready=1),
                reward_model=ScoringPoolStatus(desired=len(scorers), ready=len(scorers), replicas=scorers)
                if "rewardModel" in self.spec
                else None,
                judge=ScoringPoolStatus(desired=len(judges), ready=len(judges), replicas=judges)
                if "judge" in self.spec
                else None,
            ),
            checkpoint=checkpoint,
            end=driver.end,
        )

    # The user

    def edit(self, **sections: Any) -> None:
        for name, value in sections.items():
            self.spec[name] = {**self.spec.get(name, {}), **value} if isinstance(value, dict) else value
        self.generation += 1

    # Time and settling

    def wait(self, seconds: float) -> None:
        self.now += timedelta(seconds=seconds)

    def settle(self, rounds: int = 60, seconds: float = 5.0, *, train: bool = True) -> None:
        """Everybody does their part for a while."""
        for _ in range(rounds):
            self.look()
            self.kuberay()
            self.kubelet()
            if train:
                self.drive()
            self.wait(seconds)

    def reason(self, kind: str) -> str:
        found = self.status.by_type.get(kind)
        return found.reason if found is not None else ""

    def value(self, kind: str) -> str:
        found = self.status.by_type.get(kind)
        return found.status if found is not None else ""

    def wanted_pods(self) -> int:
        job = self.observed().job.job
        assert job is not None
        return 1 + sum(pool.replicas * pool.hosts for pool in pools(job))

    def _name(self, prefix: str) -> str:
        self._numbers += 1
        return f"{prefix}-{self._numbers}"
