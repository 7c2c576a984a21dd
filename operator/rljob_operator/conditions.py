"""What an RLJob's status can say: the closed lists of condition types and reasons, each reason with its remedy.

Users write alerts against these words, so they don't change. `docs/operator/conditions.md` is generated from this file.
All conditions are positive: True is good news, except `Failed`, which says that the job is given up.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from enum import Enum

from rljob_api.job_status import Condition, ConditionValue

LONGEST_MESSAGE = 1024


class Type(Enum):
    """Condition types, in the order in which they are shown."""

    def __init__(self, title: str, meaning: str) -> None:
        self.title = title
        self.meaning = meaning

    ACCEPTED = ("Accepted", "The job file is valid and can be run.")
    ADMITTED = ("Admitted", "The queue has admitted the job; always True without a queue.")
    CLUSTER_READY = ("ClusterReady", "The head and enough pods of each pool are ready.")
    RUNNING = ("Running", "The driver runs. Its reason is what `kubectl get rlj` prints as the status.")
    PROGRESSING = ("Progressing", "The driver answers and training makes progress.")
    RESIZING = ("Resizing", "A pool is being resized.")
    WEIGHTS_FRESH = ("WeightsFresh", "No sample in training exceeds the job's maximum age.")
    CHECKPOINT_AVAILABLE = ("CheckpointAvailable", "There is a checkpoint from which a retry resumes.")
    SUSPENDED = ("Suspended", "The job is suspended and its pods are deleted.")
    SUCCEEDED = ("Succeeded", "Training reached its end.")
    FAILED = ("Failed", "The job has failed and is not retried.")
    FINISHED = ("Finished", "The job has succeeded or failed.")


class Reason(Enum):
    """Reasons, with what they mean and what to do about them."""

    def __init__(self, title: str, meaning: str, remedy: str) -> None:
        self.title = title
        self.meaning = meaning
        self.remedy = remedy

    # Accepted
    VALID = ("Valid", "The job file is accepted.", "Nothing.")
    INVALID_SPEC = (
        "InvalidSpec",
        "The job file is invalid or cannot be run.",
        "Correct the field named in the message and apply the file again.",
    )
    NEEDS_NEW_INCARNATION = (
        "NeedsNewIncarnation",
        "The job file changed in a way that needs new pods.",
        "Suspend and resume the job (spec.suspend): the new pods use the new settings and training continues.",
    )
    KUBERAY_MISSING = (
        "KubeRayMissing",
        "The cluster has no RayCluster CRD.",
        "Install KubeRay 1.6 or newer with its CRDs.",
    )
    VOLUME_MISSING = (
        "VolumeMissing",
        "A PersistentVolumeClaim of the job does not exist or has lost its volume.",
        "Create the claim named in the message in the job's namespace; the job then continues by itself.",
    )
    VOLUME_NOT_SHARED = (
        "VolumeNotShared",
        "A PersistentVolumeClaim cannot be mounted by all pods of the job.",
        "Use a claim with the access mode named in the message.",
    )
    # Admitted
    NO_QUEUE = ("NoQueue", "The job uses no queue.", "Nothing.")
    ADMITTED_BY_QUEUE = ("AdmittedByQueue", "The queue has admitted the job.", "Nothing.")
    WAITING_FOR_QUOTA = (
        "WaitingForQuota",
        "The queue has not admitted the job yet.",
        "Wait, request less, or check the queue: `kubectl describe workload` in the job's namespace.",
    )
    QUOTA_TAKEN_BACK = (
        "QuotaTakenBack",
        "The queue preempted the job; it resumes from its last checkpoint once it is readmitted.",
        "Nothing; the message says for whom or why. A higher priority or another queue prevents it.",
    )
    # ClusterReady
    CREATING_CLUSTER = ("CreatingCluster", "The Ray cluster is being created.", "Nothing.")
    POOLS_READY = ("PoolsReady", "The head and enough pods of each pool are ready.", "Nothing.")
    WAITING_FOR_PODS = (
        "WaitingForPods",
        "Pods are starting, also those of a pool that grows.",
        "Nothing; the message names the missing pods.",
    )
    UNSCHEDULABLE = (
        "Unschedulable",
        "No node can run the pods.",
        "Add nodes, request fewer GPUs, or correct nodeSelector and tolerations; the message quotes the scheduler.",
    )
    SCHEDULER_MISSING = (
        "SchedulerMissing",
        "No scheduler has handled a pod for half a minute.",
        "Correct schedulerName in the pool's pod.template, or install or start the scheduler named in the message.",
    )
    SCHEDULING_GATED = (
        "SchedulingGated",
        "Pods have scheduling gates and cannot be scheduled until these are removed.",
        "Check what should remove the gates named in the message: Kueue removes its own; others are from pod.template.",
    )
    QUOTA_REFUSED = (
        "QuotaRefused",
        "The API server refuses pods because of a ResourceQuota of the namespace.",
        "Wait for free quota, request less, raise the quota, or set what it requires (requests, limits): the message "
        "quotes it. A start that is refused for spec.deadlines.startSeconds has failed.",
    )
    POD_SECURITY_REFUSED = (
        "PodSecurityRefused",
        "The namespace's Pod Security standard does not allow the pods.",
        "Correct the pod fields named in the message, or use a namespace that allows them. A start that is "
        "refused for spec.deadlines.startSeconds has failed.",
    )
    PODS_REFUSED = (
        "PodsRefused",
        "The API server refuses pods: an admission policy or webhook, a limit range, or a missing object.",
        "Read the message, which quotes it. A start that is refused for spec.deadlines.startSeconds has failed.",
    )
    VOLUME_UNBOUND = (
        "VolumeUnbound",
        "Pods wait for a PersistentVolumeClaim that has no volume yet.",
        "Nothing. If it persists, check the claim named in the message: `kubectl describe pvc`.",
    )
    IMAGE_ERROR = (
        "ImageError",
        "A pod's image cannot be pulled.",
        "Check spec.image and the pool's imagePullSecrets.",
    )
    POD_ERROR = (
        "PodError",
        "A pod cannot start or crashed. Pods that keep crashing before the driver starts count as a failed attempt.",
        "Check the pod named in the message: `kubectl describe pod`, `kubectl logs --previous`.",
    )
    POOL_DEGRADED = (
        "PoolDegraded",
        "A complete pool has lost pods; they are being replaced.",
        "Nothing. If it persists, check the pods named in the message.",
    )
    CLUSTER_REJECTED = (
        "ClusterRejected",
        "The API server refused an object of the job.",
        "Read the message. Usual causes: quota, admission policies, wrong pod fields, KubeRay older than 1.6.",
    )
    REPLACING_CLUSTER = (
        "ReplacingCluster",
        "The previous Ray cluster is being deleted before a new one is created.",
        "Nothing. If it persists, look for pods that do not terminate.",
    )
    CLUSTER_FREED = ("ClusterFreed", "The pods are deleted.", "Nothing.")
    # Running
    PENDING = ("Pending", "The operator has seen the job; nothing is running yet.", "Nothing.")
    STARTING = ("Starting", "The cluster is ready and the driver is being started.", "Nothing.")
    TRAINING = ("Training", "The driver runs.", "Nothing.")
    DRIVER_FAILED = (
        "DriverFailed",
        "The driver ended with an error.",
        "Read the attempt's message and its last lines in status.attempts.",
    )
    BACKING_OFF = (
        "BackingOff",
        "The last attempt failed and the next one starts after a pause.",
        "Read the message for the cause; spec.retry sets pause and limit.",
    )
    NO_SPACE = (
        "NoSpace",
        "The driver ended because there is no space left where it must write. Retries do not count towards the limit: "
        "the next one starts after spec.retry.maxBackoffSeconds, for at most spec.deadlines.startSeconds.",
        "Free space where the message says (spec.checkpoint.uri, or the head's disk); the job then continues. If "
        "it has failed, create it again with restore.from.",
    )
    HEAD_LOST = (
        "HeadLost",
        "The head pod was lost; the job resumes in a new cluster from its last checkpoint.",
        "Nothing. If it recurs although nobody takes the pod away (see the message), give the head more memory "
        "(spec.head.pod.resources).",
    )
    RAY_UNREACHABLE = (
        "RayUnreachable",
        "The cluster is ready but its dashboard does not answer the operator.",
        "Check network policies between the operator's namespace and the job's (port 8265 of the head).",
    )
    TOKEN_REFUSED = (
        "TokenRefused",
        "The job's pods refuse the operator's token. They are left alone, and training continues unobserved.",
        "Restore the key named in the message (gitops.md, token keys), or replace the pods: suspend the job and resume "
        "it from its last checkpoint.",
    )
    LEFTOVER_PROCESSES = (
        "LeftoverProcesses",
        "Processes of a failed attempt did not end, so the pods are replaced.",
        "Nothing.",
    )
    SUSPENDING = ("Suspending", "The driver saves a checkpoint before the pods are deleted.", "Nothing.")
    JOB_SUSPENDED = ("Suspended", "The job is suspended.", "Set spec.suspend to false to continue.")
    NOT_SUSPENDED = ("NotSuspended", "The job is not suspended.", "Nothing.")
    DELETING = (
        "Deleting",
        "The job or its namespace is being deleted. Its pods are deleted; finalizers set by others may keep it.",
        "Nothing. If it persists, find what should remove the finalizers named in the message, or those in the "
        "namespace.",
    )
    COMPLETED = ("Completed", "Training reached its end.", "Nothing.")
    NOT_FINISHED = ("NotFinished", "The job has not ended.", "Nothing.")
    # Failed
    RETRY_LIMIT_EXCEEDED = (
        "RetryLimitExceeded",
        "More attempts failed since the last checkpoint than spec.retry.limit allows.",
        "Read messages and last lines in status.attempts, correct the cause, and create the job again (restore.from "
        "continues).",
    )
    BAD_JOB_FILE = (
        "BadJobFile",
        "The driver refused the job file (exit code 64); a retry would not help.",
        "Correct what the message names and create the job again.",
    )
    BAD_DATA = (
        "BadData",
        "The driver refused the data (exit code 65); a retry would not help.",
        "Correct the data set, the prompt or the reward that the message names and create the job again.",
    )
    BAD_CHECKPOINT = (
        "BadCheckpoint",
        "The driver refused the checkpoint to resume from (exit code 66); a retry would not help.",
        "Restore what the message names and create the job again with the same output, or with another restore.from "
        "or output.",
    )
    START_DEADLINE_EXCEEDED = (
        "StartDeadlineExceeded",
        "The first step was not done within spec.deadlines.startSeconds.",
        "Check ClusterReady for what was missing, or allow more time.",
    )
    RUN_DEADLINE_EXCEEDED = (
        "RunDeadlineExceeded",
        "The job took longer than spec.deadlines.runSeconds.",
        "Allow more time; restore.from continues from the last checkpoint.",
    )
    # Progressing
    MOVING = ("Moving", "Training makes progress.", "Nothing.")
    WAITING = ("Waiting", "The driver is waiting.", "Read the message.")
    NO_ANSWER = (
        "NoAnswer",
        "The driver does not answer the operator.",
        "Wait. If it persists, check network policies (the driver's port on the head) and the head pod's logs.",
    )
    STALLED = (
        "Stalled",
        "No progress for longer than spec.deadlines.progressSeconds; the attempt is stopped and retried.",
        "Check what the driver was waiting for; allow more time if that wait is normal.",
    )
    NOT_RUNNING = ("NotRunning", "No driver runs.", "Nothing.")
    # Resizing
    AT_SIZE = ("AtSize", "The pools have the requested sizes.", "Nothing.")
    ADDING = ("AddingReplicas", "Pods are being added to a pool.", "Nothing; ClusterReady says what they wait for.")
    DRAINING = ("Draining", "Replicas finish or return their samples before their pods are deleted.", "Nothing.")
    REMOVING = ("RemovingReplicas", "Drained pods are being removed.", "Nothing.")
    # WeightsFresh
    WITHIN_BOUND = ("WithinBound", "Every sample is within the job's maximum age.", "Nothing.")
    STALENESS_EXCEEDED = (
        "StalenessExceeded",
        "Samples older than the job allows were trained on.",
        "Report it: the driver should never let this happen.",
    )
    # CheckpointAvailable
    COMMITTED = ("Committed", "A checkpoint is complete.", "Nothing.")
    NOT_SAVED = (
        "NotSaved",
        "The newest checkpoint could not be written; the next attempt is when the next one is due.",
        "Read the message. Free space in spec.checkpoint.uri or correct its write permissions. Until then a retried or "
        "resumed job continues from the previous checkpoint, or starts from the beginning.",
    )
    NONE_YET = ("NoneYet", "No checkpoint has been written yet.", "Nothing.")
    NO_STORAGE = (
        "NoStorage",
        "The job has no spec.checkpoint.uri: resumes and retries start from the beginning.",
        "Set spec.checkpoint.uri to a volume or bucket to keep the progress.",
    )


def condition(kind: Type, value: bool | None, reason: Reason, message: str = "") -> Condition:
    """A condition without time and generation; `merge` gives it both. Without a message the reason's meaning stands."""
    status: ConditionValue = "Unknown" if value is None else "True" if value else "False"
    text = message or reason.meaning
    if len(text) > LONGEST_MESSAGE:
        text = text[: LONGEST_MESSAGE - 1] + "…"
    return Condition(type=kind.title, status=status, reason=reason.title, message=text)


def merge(
    before: Mapping[str, Condition], fresh: Iterable[Condition], generation: int, now: datetime
) -> tuple[Condition, ...]:
    """The conditions after this look: `since` moves only when the status of a condition changes."""
    found = {item.type: item for item in fresh}
    merged: list[Condition] = []
    for kind in Type:
        item = found.get(kind.title)
        old = before.get(kind.title)
        if item is None:
            if old is not None:
                merged.append(old)
            continue
        since = old.since if old is not None and old.status == item.status else now
        merged.append(item.changed(observed_generation=generation, since=since))
    return tuple(merged)


def parse_time(text: object) -> datetime | None:
    """The time in an RFC 3339 text; None for anything else."""
    if not isinstance(text, str):
        return None
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return None
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)
