"""Carries out what `reconcile` decides: asks, writes the status, acts, reports. Decides nothing itself.

The order makes every crash harmless: the status is written before the actions (what is about to be destroyed is
recorded first), actions run in order and stop at the first failure, and the next look starts from what is true by then.
Only the first cluster of a job that nobody has looked at yet comes before its status: there is nothing that could be
lost, and the API server takes as long for a status as for a cluster.
"""

from __future__ import annotations

import asyncio
import logging
import random
import re
import time
from collections.abc import Callable, Coroutine
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from rljob_api import API_VERSION, KIND, ResolvedJob
from rljob_operator import actions as do
from rljob_operator import api_server, events, names, objects
from rljob_operator.answers import AnswerError
from rljob_operator.api_server import ApiError, ApiServer
from rljob_operator.draft import Decision
from rljob_operator.edited_groups import restoring
from rljob_operator.entrypoint import driver_command, driver_environment
from rljob_operator.head import Head, Heads
from rljob_operator.memory import Memory
from rljob_operator.observed import DriverView, JobView, Observed, RayView
from rljob_operator.own_objects import OwnObjects, taken
from rljob_operator.questions import Questions, questions
from rljob_operator.queueing import QueueView
from rljob_operator.reconcile import reconcile
from rljob_operator.refusals import NAMESPACE_ENDS
from rljob_operator.settings import Settings
from rljob_operator.status import JobStatus
from rljob_operator.store import Key, Store
from rljob_operator.tokens import KeyRing, TokenKey
from rljob_operator.work_queue import RetryError

log = logging.getLogger(__name__)

NEW_SECONDS = 10.0
"""So old is a job at most whose missing status is taken to mean that nobody has looked at it."""


class NotLeadingError(RetryError):
    """This replica lost its lease, or the claim of the namespace, in the middle of the work."""


class Executor:
    """One look at one job, from the store and the pods to the API server.

    Args:
        keys: from which tokens derive; asked anew each time, since keys may be added.
        may_act: whether this replica leads and its installation has the namespace; asked again before every write.
    """

    def __init__(
        self,
        api: ApiServer,
        heads: Heads,
        store: Store,
        keys: Callable[[], KeyRing],
        settings: Settings,
        *,
        may_act: Callable[[str], bool] = lambda _namespace: True,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._api = api
        self._heads = heads
        self._own = OwnObjects(api, settings)
        self._store = store
        self._keys = keys
        self._settings = settings
        self._may_act = may_act
        self._now = now
        self._memories: dict[Key, Memory] = {}
        self._talking: set[Key] = set()
        """Jobs whose driver was asked at their last look."""
        self._kuberay = True
        self._events = events.Poster(api)
        self.on_decision: Callable[[JobView, Decision], None] = lambda _job, _decision: None

    async def look(self, key: Key) -> float | None:
        """Looks at a job, acts, and says in how many seconds to look again (None: when something happens).

        After a write of the job's status or cluster that is at once, since the store knows it before the watch does.

        Raises:
            RetryError: something passing was in the way.
        """
        if not self._may_act(key[0]):
            return None
        job = self._store.job(key)
        if job is None:
            self._memories.pop(key, None)
            self._talking.discard(key)
            return None
        memory = self._memories.get(key)
        if memory is None or memory.uid != job.uid:
            memory = self._memories[key] = Memory(job.uid)
            # Not all at once when the operator starts.
            memory.surroundings_due = time.monotonic() + random.uniform(0, self._settings.sweep_seconds)
        memory.changed = False
        observed = await self._observe(key, job, memory)
        decision = reconcile(observed, self._now(), self._settings)
        try:
            # Only what is recorded is announced; otherwise the next look would announce it again.
            if self._is_new(observed):
                await self._begin(job, decision, memory)
                await self._events.post(job, decision.events)
            else:
                await self._write_status(job, decision.status, memory)
                await _together(self._act(job, decision, memory), self._events.post(job, decision.events))
        except ApiError as error:
            # Somebody else wrote first: what he wrote is on its way here.
            raise RetryError(str(error), soon=error.conflict and not error.already_exists) from error
        except AnswerError as error:
            raise RetryError(f"the head pod: {error}") from error
        finally:
            self.on_decision(job, decision)
        if memory.changed:
            return 0.0
        if decision.requeue_after is not None:
            return decision.requeue_after
        return self._settings.resync_seconds * random.uniform(0.8, 1.2)

    async def _observe(self, key: Key, job: JobView, memory: Memory) -> Observed:
        if not self._kuberay:
            await self._look_for_kuberay()
        clusters = self._store.clusters(key, job.uid)
        memory.note_sizes(clusters, self._now())
        pods = self._store.pods(key)
        observed = Observed(
            job=job,
            clusters=clusters,
            pods=pods,
            claims=self._store.claims(key),
            queue=self._store.queue(clusters[-1].uid) if clusters else QueueView(),
            kuberay=self._kuberay,
            rejection=memory.rejection or memory.surroundings_rejection,
            surroundings_due=time.monotonic() >= memory.surroundings_due or memory.keeps_waiting(pods, self._now()),
            sized_since=memory.sized_since,
        )
        asked = questions(observed)
        if asked is None:
            self._talking.discard(key)
            return observed
        self._talking.add(key)
        try:
            head = self._head(job, asked.cluster, asked.incarnation)
        except AnswerError as error:
            return replace(observed, ray=RayView(False, problem=str(error), refused=error.refused))
        return await self._ask(observed, asked, head, memory)

    async def _ask(self, observed: Observed, asked: Questions, head: Head, memory: Memory) -> Observed:
        submission = names.submission(observed.job.name, asked.attempt)
        try:
            if asked.leftovers:
                return replace(observed, ray=RayView(True, leftovers=await head.leftovers()))
            found = await head.job(submission)
        except AnswerError as error:
            return replace(observed, ray=RayView(False, problem=f"Ray's dashboard: {error}", refused=error.refused))
        lines = await self._last_lines(observed.job, head, submission) if found is not None and found.over else ()
        observed = replace(observed, ray=RayView(True, job=found, lines=lines))
        if found is None or found.state == "PENDING":
            return observed
        if found.state == "RUNNING":
            try:
                memory.answer, memory.silent_since = await head.status(), None
            except AnswerError as error:
                if error.refused:
                    return replace(observed, ray=RayView(False, problem=str(error), refused=True))
                memory.silent_since = memory.silent_since or self._now()
                return replace(observed, driver=DriverView(problem=str(error), silent_since=memory.silent_since))
        return replace(observed, driver=DriverView(status=memory.answer))

    async def _last_lines(self, job: JobView, head: Head, submission: str) -> tuple[str, ...]:
        """What a driver said last. It has ended, whatever is wrong with its log: a job must not wait for that."""
        try:
            return await head.lines(submission)
        except AnswerError as error:
            log.info("%s/%s: the log of %s cannot be read: %s", job.namespace, job.name, submission, error)
            return ()

    async def _look_for_kuberay(self) -> None:
        try:
            await self._api.get("/apis/ray.io/v1")
        except ApiError as error:
            if not error.not_found:
                raise RetryError(str(error)) from error
            self._kuberay = False
        else:
            self._kuberay = True

    async def _write_status(self, job: JobView, status: JobStatus | None, memory: Memory) -> None:
        if status is None:
            return
        clock = time.monotonic()
        only_progress = status.is_only_progress(job.status)
        if only_progress and clock - memory.progress_written < self._progress_pause():
            return
        self._check_leading(job.namespace)
        # The version makes the server refuse a status that was computed from an older object.
        metadata = {"name": job.name, "namespace": job.namespace, "resourceVersion": job.version}
        body = {"apiVersion": API_VERSION, "kind": KIND, "metadata": metadata, "status": status.document()}
        path = api_server.jobs(job.namespace, job.name, "status")
        self._store.put_job(await self._api.apply(path, body, names.STATUS_MANAGER))
        memory.changed |= not only_progress
        memory.progress_written = clock

    def _progress_pause(self) -> float:
        """Seconds between two writes of a job's progress: longer, where otherwise all jobs together wrote too much."""
        settings = self._settings
        return max(settings.progress_write_seconds, len(self._talking) / settings.progress_writes_per_second)

    def _is_new(self, observed: Observed) -> bool:
        """Whether nobody has looked at the job yet.

        One without a status that is some seconds old may have one which the watch hasn't brought: then writing the
        status first, with the version that it was computed from, is what protects it.
        """
        job = observed.job
        unseen = job.status.observed_generation == 0 and not observed.clusters
        return unseen and (self._now() - job.created).total_seconds() < NEW_SECONDS

    async def _begin(self, job: JobView, decision: Decision, memory: Memory) -> None:
        failure = None
        try:
            await self._act(job, decision, memory)
        except ApiError as error:
            # What was wanted is said nevertheless; the next look says what became of it.
            failure = error
        await self._write_status(job, decision.status, memory)
        if failure is not None:
            raise failure

    async def _act(self, job: JobView, decision: Decision, memory: Memory) -> None:
        before, memory.rejection = memory.rejection, ""
        try:
            for action in decision.actions:
                await self._perform(action, job, memory)
        except ApiError as error:
            if not memory.rejection:
                # An answer that is none leaves it open whether this would be refused again.
                memory.rejection = _refusal(error) if error.refused else before
            raise
        memory.changed |= bool(before)

    async def _perform(self, action: do.Action, job: JobView, memory: Memory) -> None:
        self._check_leading(job.namespace)
        space, resolved = job.namespace, job.job
        match action:
            case do.ApplyConfigMap() if resolved is not None:
                await self._own.write_job_file(job, resolved, memory)
            case do.CheckPods() if resolved is not None:
                await self._check_pods(action, job, resolved, memory)
            case do.CreateCluster() if resolved is not None:
                await self._create_cluster(action, job, resolved, memory)
            case (
                do.NoteGeneration()
                | do.BeginAttempt()
                | do.NoteFirstCrash()
                | do.PassPriority()
                | do.ResizeGroup()
                | do.ReshapeGroup()
                | do.ClearRemoved()
            ):
                path = api_server.clusters(space, action.cluster)
                self._store.put_cluster(await self._api.patch(path, do.cluster_patch(action)))
                memory.changed = True
            case do.RestoreGroups() if resolved is not None:
                await self._restore_groups(action, job, resolved, memory)
            case do.KeepSurroundings() if resolved is not None:
                await self._keep_surroundings(action, job, resolved, memory)
            case do.DeleteCluster():
                await self._api.delete(api_server.clusters(space, action.name), action.uid)
            case do.RemovePod():
                await self._api.delete(api_server.core(space, "pods", action.name), action.uid, at_once=True)
            case do.DeleteJob():
                await self._api.delete(api_server.jobs(space, job.name), action.uid)
            case do.SubmitDriver():
                await self._head_of(job, action).submit(
                    names.submission(job.name, action.attempt),
                    driver_command(action.attempt, action.generation),
                    driver_environment(job, action.attempt, action.incarnation),
                    {"rljob.dev/job": f"{space}/{job.name}", "rljob.dev/uid": job.uid},
                )
            case do.StopDriver():
                # Whatever comes of it, what follows (the pods go) must not wait for a pod's answer.
                try:
                    await self._head_of(job, action).stop(names.submission(job.name, action.attempt))
                except AnswerError as error:
                    log.info("%s/%s: the driver could not be stopped: %s", space, job.name, error)
            case do.TellDriver():
                try:
                    await self._head_of(job, action).tell(action.desired)
                except AnswerError as error:
                    log.info("%s/%s: the command could not be sent to the driver: %s", space, job.name, error)

    async def _check_pods(self, action: do.CheckPods, job: JobView, resolved: ResolvedJob, memory: Memory) -> None:
        cluster = objects.ray_cluster(
            resolved, job.fingerprint, job.uid, job.generation, action.incarnation, "", self._settings
        )
        for template in objects.pod_templates(resolved, cluster):
            try:
                await self._api.would_create(api_server.core(job.namespace, "podtemplates"), template)
            except ApiError as error:
                if error.status == 403 and NAMESPACE_ENDS not in error.message:
                    # Older roles don't allow this, or a quota counts the kind; neither says anything about the pods.
                    log.info("%s/%s: the pods cannot be checked: %s", job.namespace, job.name, error)
                    return
                if error.refused:
                    role = template["metadata"]["name"].removeprefix(f"{job.name}-")
                    memory.rejection = f"the API server refuses the pods of {role}: {_after_the_name(error.message)}"
                raise

    async def _create_cluster(
        self, action: do.CreateCluster, job: JobView, resolved: ResolvedJob, memory: Memory
    ) -> None:
        tokens = self._keys().newest.tokens(job.uid, action.incarnation)
        cluster = objects.ray_cluster(
            resolved, job.fingerprint, job.uid, job.generation, action.incarnation, tokens.key, self._settings
        )
        name = cluster["metadata"]["name"]
        await _together(
            self._own.write_job_file(job, resolved, memory),
            self._own.write_tokens(job, resolved, action.incarnation, tokens),
            self._own.guard_pods(job, resolved, action.incarnation, memory),
        )
        try:
            # Created, not applied: should there be one already, nothing in it must change.
            created = await self._api.create(api_server.clusters(job.namespace), cluster)
        except ApiError as error:
            if error.not_found:
                # No such kind, or a namespace that is being removed.
                await self._look_for_kuberay()
            if error.refused:
                memory.rejection = _why_refused(error.message)
            if error.already_exists and not await self._own.is_own(job, api_server.clusters(job.namespace, name)):
                memory.rejection = taken(cluster)
            raise
        self._store.put_cluster(created)
        memory.changed = True

    async def _restore_groups(
        self, action: do.RestoreGroups, job: JobView, resolved: ResolvedJob, memory: Memory
    ) -> None:
        key = self._made_under(job, action.cluster)
        cluster = objects.ray_cluster(
            resolved, job.fingerprint, job.uid, job.generation, action.incarnation, key, self._settings
        )
        groups = [group for group in cluster["spec"]["workerGroupSpecs"] if group["groupName"] in action.missing]
        path = api_server.clusters(job.namespace, action.cluster)
        self._store.put_cluster(await self._api.patch(path, do.groups_patch(action.version, groups)))
        memory.changed = True
        await self._put_back(job, f"worker groups of {action.cluster}: {', '.join(action.missing)}")

    async def _keep_surroundings(
        self, action: do.KeepSurroundings, job: JobView, resolved: ResolvedJob, memory: Memory
    ) -> None:
        """What cannot be written is told and not tried again before its time: pods that run do without."""
        memory.surroundings_due = time.monotonic() + self._settings.sweep_seconds * random.uniform(0.8, 1.0)
        memory.surroundings_kept = self._now()
        work = [self._own.guard_pods(job, resolved, action.incarnation, memory)]
        if action.job_file:
            work += [
                self._own.write_job_file(job, resolved, memory),
                self._keep_groups(action, job, resolved, memory),
            ]
        key = self._key_of(job, action.cluster)
        if key is not None:
            tokens = key.tokens(job.uid, action.incarnation)
            work.append(self._own.write_tokens(job, resolved, action.incarnation, tokens))
        memory.surroundings_rejection = ""
        restored: list[str] = []

        async def keep(part: Coroutine[Any, Any, str]) -> None:
            if what := await part:
                restored.append(what)

        try:
            await _together(*map(keep, work))
        except ApiError as error:
            # What is told of it counts until the next time, whatever becomes of other actions.
            memory.surroundings_rejection = memory.rejection or (_refusal(error) if error.refused else "")
            memory.rejection = ""
            log.warning("%s/%s: objects that its pods need cannot be maintained: %s", job.namespace, job.name, error)
        if restored:
            await self._put_back(job, "; ".join(sorted(restored)))

    async def _keep_groups(
        self, action: do.KeepSurroundings, job: JobView, resolved: ResolvedJob, memory: Memory
    ) -> str:
        """Puts back what somebody has changed in the groups of a cluster: the next pod would be made from it. Returns
        what that was."""
        path = api_server.clusters(job.namespace, action.cluster)
        there = await self._api.get(path)
        if there["spec"].get("suspend"):
            # Kueue puts its own changes back when it takes the cluster's quota; until then they may be under way.
            return ""
        made = objects.ray_cluster(
            resolved,
            job.fingerprint,
            job.uid,
            job.generation,
            action.incarnation,
            self._made_under(job, action.cluster),
            self._settings,
        )
        operations = restoring(made, there)
        if not operations:
            return ""
        changed = ", ".join(operation["path"].removeprefix("/spec/") for operation in operations[1:])
        self._store.put_cluster(await self._api.patch(path, operations))
        memory.changed = True
        return f"in {action.cluster}: {changed}"

    async def _put_back(self, job: JobView, what: str) -> None:
        """Tells of it: somebody has changed it, and may wonder."""
        log.info("%s/%s: restored %s", job.namespace, job.name, what)
        await self._events.post(job, [do.Event("Normal", "PutBack", f"restored to the operator's version: {what}")])

    def _head_of(self, job: JobView, action: do.SubmitDriver | do.StopDriver | do.TellDriver) -> Head:
        return self._head(job, action.cluster, action.incarnation)

    def _head(self, job: JobView, cluster: str, incarnation: int) -> Head:
        """The head pod of a cluster, with the tokens that it was made with.

        Raises:
            AnswerError: the key from which they derive was lost.
        """
        key = self._key_of(job, cluster)
        if key is None:
            made_under = self._made_under(job, cluster) or "(not named)"
            problem = f"the operator no longer has the token key {made_under} that {cluster} was created with"
            raise AnswerError(problem, refused=True)
        return self._heads.head(job.namespace, cluster, key.tokens(job.uid, incarnation))

    def _key_of(self, job: JobView, cluster: str) -> TokenKey | None:
        """The key from which a cluster's tokens derive; None: it was lost."""
        return self._keys().find(self._made_under(job, cluster))

    def _made_under(self, job: JobView, cluster: str) -> str:
        clusters = self._store.clusters((job.namespace, job.name), job.uid)
        return next((found.token_key for found in clusters if found.name == cluster), "")

    def _check_leading(self, namespace: str) -> None:
        if not self._may_act(namespace):
            raise NotLeadingError("this replica is no longer the leader, or the namespace belongs to another operator")


async def _together(*work: Coroutine[Any, Any, object]) -> None:
    """All of it at the same time and to its end; then the first error, if there was one."""
    for result in await asyncio.gather(*work, return_exceptions=True):
        if isinstance(result, BaseException):
            raise result


def _refusal(error: ApiError) -> str:
    return f"the API server refuses what the job needs next: {error.message}"


def _why_refused(message: str) -> str:
    """What is wrong with a cluster. Of what rljob itself writes an API server knows everything but with an old CRD."""
    unknown = re.findall(r'unknown field "(spec\.[^"]+)"', message)
    # A field within a pod template may be of the job's own.
    missing = next((path for path in unknown if ".template." not in path), None)
    if missing is not None:
        return f"KubeRay is too old: its RayCluster has no {missing}; install 1.6 or newer, including its CRDs"
    return f"the API server refuses the cluster: {_after_the_name(message)}"


def _after_the_name(message: str) -> str:
    """What is wrong, without the kind and name of an object that nobody has made."""
    for before in (" is invalid: ", "strict decoding error: ", " cannot be handled as a PodTemplate: "):
        message = message.partition(before)[2] or message
    return message
