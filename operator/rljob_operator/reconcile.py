"""The decision: from what one look has found to what is to be done, said and looked at next. Pure and level-based.

    observed, now  ->  reconcile  ->  actions, status, requeue_after, events

Nothing is remembered between two calls but what the job's status and the cluster's annotations say, so it doesn't
matter how often it is called, what was missed, or when the operator was replaced. The stages, in order:

    deleted?  finished?  valid?  KubeRay?  namespace?  too late?  old clusters gone?  suspend?  volumes?  pause?
    cluster?  groups?  admitted?  head?  pools?  crash loop?  refused?  attempt
"""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta

from rljob_api import pod_policy
from rljob_operator import attempts, crash_loops, kuberay_limits, names, progress, refusals, storage
from rljob_operator.actions import (
    ApplyConfigMap,
    CheckPods,
    CreateCluster,
    DeleteJob,
    NoteGeneration,
    PassPriority,
    RestoreGroups,
    StopDriver,
)
from rljob_operator.conditions import Reason, Type
from rljob_operator.deadlines import too_late
from rljob_operator.draft import Decision, Draft
from rljob_operator.endings import free, new_incarnation, remove_stuck_pods
from rljob_operator.objects import ray_cluster
from rljob_operator.observed import ClusterView, Observed
from rljob_operator.pools import pools
from rljob_operator.queueing import NOT_SEEN
from rljob_operator.readiness import Readiness, pool_status, readiness, unserved
from rljob_operator.resizing import reshape, resize, restore, tell
from rljob_operator.settings import Settings

COMPLETE = (Reason.POOLS_READY.title, Reason.POOL_DEGRADED.title)
"""Reasons of ClusterReady that say that the pools have been complete at their present size."""
ORPHAN = "orphan"
"""The finalizer of `kubectl delete --cascade=orphan`."""


def reconcile(observed: Observed, now: datetime, settings: Settings) -> Decision:
    """Decides about one job. Never raises for anything that the world may contain."""
    job = observed.job
    if job.deleting and ORPHAN in job.finalizers:
        # Whoever deletes it so wants what it owns to live on.
        return Decision()
    stored, job = job.status, replace(job, status=job.status.not_after(now))
    draft = Draft(replace(observed, job=job), stored, now, settings)
    if job.deleting:
        return _leave(draft)
    if job.status.is_true(Type.FINISHED):
        return _rest(draft)
    if job.job is None:
        problems = "; ".join(job.problems)
        draft.say(Type.ACCEPTED, False, Reason.INVALID_SPEC, problems)
        if observed.clusters:
            # A label can make it so while it runs: its pods are left alone, but how they are to be asked is not known.
            problems += "; running pods are kept, but not monitored until this is corrected"
        draft.say(Type.RUNNING, None if observed.clusters else False, Reason.INVALID_SPEC, problems)
        return draft.decision()
    for kind in (Type.SUCCEEDED, Type.FAILED, Type.FINISHED):
        draft.say(kind, False, Reason.NOT_FINISHED)
    if observed.kuberay:
        draft.say(Type.ACCEPTED, True, Reason.VALID)
        _live(draft)
    else:
        draft.say(Type.ACCEPTED, False, Reason.KUBERAY_MISSING)
        draft.say(Type.RUNNING, False, Reason.PENDING, Reason.KUBERAY_MISSING.meaning)
        draft.wake_in(settings.kuberay_retry_seconds)
    if not _finishes(draft):
        progress.checkpoint_condition(draft)
    _count(draft)
    return draft.decision()


def _leave(draft: Draft) -> Decision:
    """A job that is being deleted, and that somebody's finalizer keeps: Kubernetes would only remove what it owns once
    that is gone. There is nothing else to undo, hence no finalizer of ours."""
    if draft.job.status.is_true(Type.FINISHED):
        free(draft)
    else:
        _let_go(draft, f"its finalizers: {', '.join(draft.job.finalizers)}")
    if draft.job.job is not None:
        _count(draft)
    return draft.decision()


def _let_go(draft: Draft, message: str) -> None:
    """Gives everything up for good without an end of the job: it won't be there much longer."""
    draft.close_attempt(Reason.DELETING)
    draft.say(Type.RUNNING, False, Reason.DELETING, message)
    draft.say(Type.CLUSTER_READY, False, Reason.CLUSTER_FREED)
    draft.say(Type.PROGRESSING, False, Reason.NOT_RUNNING)
    free(draft)


def _finishes(draft: Draft) -> bool:
    said = draft.said(Type.FINISHED)
    return said is not None and said.is_true


def _rest(draft: Draft) -> Decision:
    """A finished job: its clusters go, later itself."""
    free(draft)
    ttl = None
    if draft.job.job is not None:
        ttl = draft.job.job.spec.ttl_seconds_after_finished
    ended = draft.status.end_time
    if ttl is not None and ended is not None:
        end_of_life = ended + timedelta(seconds=ttl)
        if draft.now >= end_of_life:
            draft.do(DeleteJob(draft.job.uid))
        else:
            draft.wake_at(end_of_life)
    if draft.job.job is not None:
        _count(draft)
    return draft.decision()


def _live(draft: Draft) -> None:
    """A job that is neither finished nor wrong."""
    if refusals.namespace_ends(draft):
        _let_go(draft, f"the namespace {draft.job.namespace} is being deleted")
        return
    current = _current(draft)
    for cluster in draft.observed.clusters:
        if cluster.incarnation < draft.status.incarnation:
            draft.remove(cluster)
    if too_late(draft, current):
        return
    if draft.resolved.spec.suspend:
        _suspend(draft, current)
        return
    draft.set(suspend_time=None)
    draft.say(Type.SUSPENDED, False, Reason.NOT_SUSPENDED)
    if current is not None:
        _operate(draft, current)
    elif draft.said(Type.RUNNING) is None:
        _create(draft)


def _current(draft: Draft) -> ClusterView | None:
    """The cluster of the newest incarnation. One that somebody else deleted counts as lost."""
    clusters = draft.observed.clusters
    incarnation = max([draft.status.incarnation, *(cluster.incarnation for cluster in clusters)])
    draft.set(incarnation=incarnation)
    current = next((cluster for cluster in clusters if cluster.incarnation == incarnation), None)
    if current is not None and not current.deleting:
        attempts.adopt(draft, current)
        return current
    last = draft.status.last
    # Ended attempts count too: on a second cluster of that name nobody could tell whether one of them is still alive.
    begun = last is not None and last.incarnation == incarnation
    if current is not None or begun:
        new_incarnation(draft, current, Reason.HEAD_LOST, "the cluster was deleted")
    return None


def _create(draft: Draft) -> None:
    """Creates the next cluster once nothing is left of the previous ones: two drivers must never run at once."""
    left = [cluster.name for cluster in draft.observed.clusters]
    pods = [pod.name for pod in draft.observed.pods if not pod.ended]
    if left or pods:
        remove_stuck_pods(draft, set())
        message = f"waiting for {', '.join([*left, *pods][:5])} to end"
        draft.say(Type.CLUSTER_READY, False, Reason.REPLACING_CLUSTER, message)
        before = draft.job.status.by_type.get(Type.RUNNING.title)
        if before is None:
            draft.say(Type.RUNNING, False, Reason.PENDING, message)
        draft.wake_in(draft.settings.start_poll_seconds)
        return
    job, incarnation = draft.job, draft.status.incarnation
    # Which key its tokens derive from makes no difference here.
    cluster = ray_cluster(draft.resolved, job.fingerprint, job.uid, job.generation, incarnation, "", draft.settings)
    disallowed = map(str, pod_policy.disallowed(draft.resolved, draft.settings.pod_policy))
    problems = [*storage.problems(draft.resolved), *disallowed, *kuberay_limits.problems(cluster)]
    if problems:
        draft.say(Type.ACCEPTED, False, Reason.INVALID_SPEC, "; ".join(problems))
        draft.say(Type.RUNNING, False, Reason.INVALID_SPEC, "; ".join(problems))
        return
    obstacle = next((found for found in _obstacles(draft) if found.lasting), None)
    if obstacle is not None:
        # Pods would wait for the volume while they hold their GPUs.
        for kind in (Type.ACCEPTED, Type.CLUSTER_READY, Type.RUNNING):
            draft.say(kind, False, obstacle.reason, obstacle.sentence)
        draft.say(Type.PROGRESSING, False, Reason.NOT_RUNNING)
        return
    last = draft.status.last
    if last is not None and last.reason == Reason.POD_ERROR.title and attempts.is_pausing(draft):
        # On any other cluster of the job these pods would crash as well.
        draft.say(Type.CLUSTER_READY, False, Reason.POD_ERROR, last.message)
        draft.say(Type.PROGRESSING, False, Reason.NOT_RUNNING)
        return
    draft.do(CheckPods(draft.status.incarnation), CreateCluster(draft.status.incarnation))
    rejection = draft.observed.rejection
    if rejection:
        draft.say(Type.CLUSTER_READY, False, Reason.CLUSTER_REJECTED, rejection)
    else:
        draft.say(Type.CLUSTER_READY, False, Reason.CREATING_CLUSTER)
    draft.say(Type.RUNNING, False, Reason.PENDING, rejection)
    draft.say(Type.PROGRESSING, False, Reason.NOT_RUNNING)


def _operate(draft: Draft, cluster: ClusterView) -> None:
    """A job with its cluster."""
    _follow_spec(draft, cluster)
    _keep_groups(draft, cluster)
    if not _admitted(draft, cluster) or attempts.head_lost(draft, cluster):
        return
    ready = _cluster_ready(draft, cluster)
    if crash_loops.start_failed(draft, cluster, ready) or refusals.given_up(draft, cluster, ready):
        return
    attempts.advance(draft, cluster, ready)
    if _finishes(draft) or draft.status.incarnation != cluster.incarnation:
        return
    _resize(draft, cluster)
    remove_stuck_pods(draft, {cluster.name})


def _follow_spec(draft: Draft, cluster: ClusterView) -> None:
    """Brings a changed job file to the pods, and says which changes they can't follow."""
    job = draft.job
    if cluster.generation != job.generation:
        draft.do(ApplyConfigMap(), NoteGeneration(cluster.name, cluster.generation, job.generation))
    elif draft.observed.surroundings_due:
        attempts.keep_surroundings(draft, cluster)
    # Kueue follows it on what is admitted and runs, too.
    priority = draft.resolved.metadata.labels.get(names.PRIORITY_LABEL)
    if priority != cluster.priority:
        draft.do(PassPriority(cluster.name, cluster.priority, priority))
    if cluster.spec_hash != job.fingerprint:
        draft.say(Type.ACCEPTED, True, Reason.NEEDS_NEW_INCARNATION)


def _keep_groups(draft: Draft, cluster: ClusterView) -> None:
    """Has worker groups put back that somebody took out: KubeRay would replace none of their pods any more."""
    missing = tuple(pool.name for pool in pools(draft.resolved) if cluster.group(pool.name) is None)
    # Otherwise the job file speaks of the next incarnation, which may have other pools.
    if missing and cluster.spec_hash == draft.job.fingerprint:
        draft.do(RestoreGroups(cluster.name, cluster.version, cluster.incarnation, missing))


def _admitted(draft: Draft, cluster: ClusterView) -> bool:
    queue, name = draft.observed.queue, draft.resolved.spec.queue_name
    if cluster.suspended or queue.taken_back:
        _wait_in_queue(draft, cluster)
        return False
    if name is None:
        draft.say(Type.ADMITTED, True, Reason.NO_QUEUE)
    elif queue.known:
        draft.say(Type.ADMITTED, True, Reason.ADMITTED_BY_QUEUE)
    else:
        message = f"spec.queueName is {name}, but Kueue has made no Workload for the cluster: it runs without admission"
        draft.say(Type.ADMITTED, True, Reason.NO_QUEUE, message)
    if draft.status.start_time is None:
        draft.set(start_time=draft.now)
    return True


def _wait_in_queue(draft: Draft, cluster: ClusterView) -> None:
    """Kueue holds the cluster back, or has stopped it. Only Kueue writes `spec.suspend`; the job waits."""
    message = draft.observed.queue.message or (NOT_SEEN if not draft.observed.queue.known else "")
    attempts.quota_taken_back(draft, cluster, message)
    last = draft.status.last
    begun = last is not None and last.reason == Reason.QUOTA_TAKEN_BACK.title
    reason = Reason.QUOTA_TAKEN_BACK if begun else Reason.WAITING_FOR_QUOTA
    for kind in (Type.ADMITTED, Type.RUNNING, Type.CLUSTER_READY):
        draft.say(kind, False, reason, message)
    draft.say(Type.PROGRESSING, False, Reason.NOT_RUNNING)
    # Asking for less, or for more, while waiting changes what is waited for.
    _resize(draft, cluster)
    remove_stuck_pods(draft, {cluster.name})


def _cluster_ready(draft: Draft, cluster: ClusterView) -> Readiness:
    before = draft.job.status.by_type.get(Type.CLUSTER_READY.title)
    was_complete = before is not None and before.reason in COMPLETE
    ready = readiness(_scheduled(draft, cluster), cluster, pools(draft.resolved), was_complete)
    if ready.reason in (Reason.UNSCHEDULABLE, Reason.WAITING_FOR_PODS):
        obstacle = next(iter(_obstacles(draft)), None)
        if obstacle is not None:
            ready = replace(ready, reason=obstacle.reason, sentence=f"{obstacle.sentence}; {ready.sentence}")
    queue = draft.observed.queue
    if queue.message and ready.reason in (Reason.WAITING_FOR_PODS, Reason.POOL_DEGRADED, Reason.SCHEDULING_GATED):
        # A larger size waits for quota while the job goes on with what it has.
        ready = replace(ready, reason=Reason.WAITING_FOR_QUOTA, sentence=f"{queue.message}; {ready.sentence}")
    if ready.reason is Reason.WAITING_FOR_PODS and before is not None and before.reason == Reason.POD_ERROR.title:
        # A pod that crashed is replaced at once, and its successor knows nothing of it: what was said of it stays
        # until the pods are ready.
        draft.say(Type.CLUSTER_READY, ready.enough, Reason.POD_ERROR, before.message)
    else:
        draft.say(Type.CLUSTER_READY, ready.enough, ready.reason, ready.sentence)
    return ready


def _scheduled(draft: Draft, cluster: ClusterView) -> Observed:
    """What was observed, with the pods in trouble that a scheduler should have looked at by now."""
    patience = timedelta(seconds=draft.settings.scheduler_seconds)
    for pod in draft.observed.pods_of(cluster.name):
        if pod.scheduler and draft.now < pod.created + patience:
            draft.wake_at(pod.created + patience)
    pods = tuple(unserved(pod, patience, draft.now) for pod in draft.observed.pods)
    return replace(draft.observed, pods=pods)


def _obstacles(draft: Draft) -> list[storage.Obstacle]:
    return storage.obstacles(draft.resolved, {claim.name: claim for claim in draft.observed.claims})


def _resize(draft: Draft, cluster: ClusterView) -> None:
    last = draft.status.last
    running = last is not None and last.ended is None
    answer = attempts.answer_of(draft, cluster.attempt)
    understood = answer if answer is not None and answer.generation >= draft.job.generation else None
    # Otherwise the job file speaks of the next incarnation.
    of_this = cluster.spec_hash == draft.job.fingerprint
    standings = []
    for pool in pools(draft.resolved):
        if of_this and reshape(draft, cluster, pool):
            continue
        if pool.resizable:
            standings.append(resize(draft, cluster, pool, understood, running))
        elif of_this:
            restore(draft, cluster, pool)
    tell(draft, [standing for standing in standings if standing is not None])


def _suspend(draft: Draft, cluster: ClusterView | None) -> None:
    """Checkpoint, then free the pods. The driver gets its time for the checkpoint; the pods go in any case."""
    since = draft.status.suspend_time or draft.now
    draft.set(suspend_time=since, resize_time=None)
    draft.say(Type.RESIZING, False, Reason.AT_SIZE)
    if cluster is None:
        _suspended(draft)
        return
    deadline = since + timedelta(seconds=draft.settings.suspend_grace_seconds)
    last, ray = draft.status.last, draft.observed.ray
    begun = last is not None and last.ended is None and cluster.attempt == last.number
    if begun and not cluster.suspended:
        assert last is not None
        if attempts.head_lost(draft, cluster):
            return
        running = ray is None or not ray.reachable or (ray.job is not None and ray.job.state == "RUNNING")
        if ray is not None and ray.job is not None and ray.job.over:
            attempts.judge(draft, cluster, ray.job)
            if _finishes(draft):
                return
        elif running and draft.now < deadline:
            _follow_spec(draft, cluster)
            draft.say(Type.RUNNING, True, Reason.SUSPENDING, f"attempt {last.number} is saving its checkpoint")
            draft.say(Type.SUSPENDED, False, Reason.SUSPENDING)
            attempts.talk(draft, cluster)
            draft.wake_at(deadline)
            return
        else:
            draft.do(StopDriver(cluster.name, cluster.incarnation, cluster.attempt))
    draft.close_attempt(Reason.JOB_SUSPENDED)
    draft.set(incarnation=cluster.incarnation + 1)
    draft.remove(cluster)
    draft.say(Type.SUSPENDED, False, Reason.SUSPENDING, "the pods are being freed")
    draft.say(Type.RUNNING, False, Reason.SUSPENDING, "the pods are being freed")
    draft.say(Type.CLUSTER_READY, False, Reason.CLUSTER_FREED)
    draft.say(Type.PROGRESSING, False, Reason.NOT_RUNNING)
    draft.wake_in(draft.settings.start_poll_seconds)


def _suspended(draft: Draft) -> None:
    """Waits until the pods are gone; then the job is suspended."""
    draft.say(Type.CLUSTER_READY, False, Reason.CLUSTER_FREED)
    draft.say(Type.PROGRESSING, False, Reason.NOT_RUNNING)
    left = [cluster.name for cluster in draft.observed.clusters] + [
        pod.name for pod in draft.observed.pods if not pod.ended
    ]
    if left:
        remove_stuck_pods(draft, set())
        message = f"waiting for {', '.join(left[:5])} to end"
        draft.say(Type.SUSPENDED, False, Reason.SUSPENDING, message)
        draft.say(Type.RUNNING, False, Reason.SUSPENDING, message)
        draft.wake_in(draft.settings.start_poll_seconds)
    else:
        draft.say(Type.SUSPENDED, True, Reason.JOB_SUSPENDED)
        draft.say(Type.RUNNING, False, Reason.JOB_SUSPENDED)


def _count(draft: Draft) -> None:
    """`status.pools` and `status.ready`."""
    incarnation = draft.status.incarnation
    current = next((c for c in draft.observed.clusters if c.incarnation == incarnation and not c.deleting), None)
    counted = {pool.name: pool_status(draft.observed, draft.job.name, current, pool) for pool in pools(draft.resolved)}
    ready, desired = (sum(pool.ready for pool in counted.values()), sum(pool.desired for pool in counted.values()))
    draft.set(pools=counted, ready=f"{ready}/{desired}")
