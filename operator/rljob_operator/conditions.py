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

    ACCEPTED = ("Accepted", "The job file makes sense and can be carried out.")
    ADMITTED = ("Admitted", "The queue has given the job its quota; always True without a queue.")
    CLUSTER_READY = ("ClusterReady", "The head and enough pods of each pool are ready.")
    RUNNING = ("Running", "The driver runs. Its reason is what `kubectl get rlj` prints as the status.")
    PROGRESSING = ("Progressing", "The driver answers and training moves on.")
    RESIZING = ("Resizing", "A pool is on its way to another size.")
    WEIGHTS_FRESH = ("WeightsFresh", "No sample in training is older than the job allows.")
    CHECKPOINT_AVAILABLE = ("CheckpointAvailable", "There is a checkpoint from which a retry goes on.")
    SUSPENDED = ("Suspended", "The job is suspended and its pods are freed.")
    SUCCEEDED = ("Succeeded", "Training reached its end.")
    FAILED = ("Failed", "The job is given up.")
    FINISHED = ("Finished", "The job has ended, either way.")


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
        "The job file asks for something impossible.",
        "Correct the field that the message names and apply the file again.",
    )
    NEEDS_NEW_INCARNATION = (
        "NeedsNewIncarnation",
        "The job file changed in a way that the running pods cannot follow.",
        "Suspend the job and resume it (spec.suspend): the new pods have the new settings and training continues.",
    )
    KUBERAY_MISSING = (
        "KubeRayMissing",
        "The cluster has no RayCluster resource.",
        "Install KubeRay 1.6 or newer, its CRDs included.",
    )
    VOLUME_MISSING = (
        "VolumeMissing",
        "A PersistentVolumeClaim that the job names does not exist or has lost its volume.",
        "Create the claim that the message names, in the job's namespace; the job goes on by itself.",
    )
    VOLUME_NOT_SHARED = (
        "VolumeNotShared",
        "A PersistentVolumeClaim cannot be mounted by all pods of the job.",
        "Use a claim with the access mode that the message names.",
    )
    # Admitted
    NO_QUEUE = ("NoQueue", "The job uses no queue.", "Nothing.")
    ADMITTED_BY_QUEUE = ("AdmittedByQueue", "The queue has admitted the job.", "Nothing.")
    WAITING_FOR_QUOTA = (
        "WaitingForQuota",
        "The queue has not admitted the job yet.",
        "Wait, ask for less, or look at the queue: `kubectl describe workload` in the job's namespace.",
    )
    QUOTA_TAKEN_BACK = (
        "QuotaTakenBack",
        "The queue has taken the job's quota back; the job goes on from its last checkpoint once it is admitted again.",
        "Nothing; the message says for whom or why. A higher priority or another queue keeps it from happening.",
    )
    # ClusterReady
    CREATING_CLUSTER = ("CreatingCluster", "The Ray cluster is being created.", "Nothing.")
    POOLS_READY = ("PoolsReady", "The head and enough pods of each pool are ready.", "Nothing.")
    WAITING_FOR_PODS = ("WaitingForPods", "Pods are starting.", "Nothing; the message says which pods are awaited.")
    UNSCHEDULABLE = (
        "Unschedulable",
        "Pods find no node.",
        "Add nodes, ask for fewer GPUs, or correct nodeSelector and tolerations; the message quotes the scheduler.",
    )
    SCHEDULER_MISSING = (
        "SchedulerMissing",
        "No scheduler has looked at a pod for half a minute.",
        "Correct schedulerName in the pool's pod.template, or install or start the scheduler that the message names.",
    )
    SCHEDULING_GATED = (
        "SchedulingGated",
        "Pods have scheduling gates, and are not scheduled before these are removed.",
        "Look at whoever removes the gates that the message names: Kueue's go with quota, others are in pod.template.",
    )
    QUOTA_REFUSED = (
        "QuotaRefused",
        "The API server refuses pods because of a ResourceQuota of the namespace.",
        "Wait for room, ask for less, have the quota raised, or set what it asks for (requests, limits): the message "
        "quotes it. A start that is refused for spec.deadlines.startSeconds has failed.",
    )
    POD_SECURITY_REFUSED = (
        "PodSecurityRefused",
        "The namespace's Pod Security standard does not allow the pods.",
        "Correct the fields of the pod that the message names, or use a namespace that allows them. A start that is "
        "refused for spec.deadlines.startSeconds has failed.",
    )
    PODS_REFUSED = (
        "PodsRefused",
        "The API server refuses pods: an admission policy or webhook, a limit range, or something that is missing.",
        "Read the message, which quotes it. A start that is refused for spec.deadlines.startSeconds has failed.",
    )
    VOLUME_UNBOUND = (
        "VolumeUnbound",
        "Pods wait for a PersistentVolumeClaim that has no volume yet.",
        "Nothing, unless it stays: then look at the claim that the message names: `kubectl describe pvc`.",
    )
    IMAGE_ERROR = (
        "ImageError",
        "A pod's image cannot be pulled.",
        "Check spec.image and the pool's imagePullSecrets.",
    )
    POD_ERROR = (
        "PodError",
        "A pod cannot start or crashed. Pods that keep crashing before the driver starts are a failed attempt.",
        "Look at the pod that the message names: `kubectl describe pod`, `kubectl logs --previous`.",
    )
    POOL_DEGRADED = (
        "PoolDegraded",
        "A pool that was complete has lost pods; replacements are on their way.",
        "Nothing, unless it stays: then look at the pods that the message names.",
    )
    CLUSTER_REJECTED = (
        "ClusterRejected",
        "The API server refused an object of the job.",
        "Read the message: quota, admission policies, wrong pod fields, a KubeRay older than 1.6 are the usual causes.",
    )
    REPLACING_CLUSTER = (
        "ReplacingCluster",
        "The previous incarnation of the cluster is being removed before a new one is created.",
        "Nothing, unless it stays: then look for pods that do not terminate.",
    )
    CLUSTER_FREED = ("ClusterFreed", "The pods are freed.", "Nothing.")
    # Running
    PENDING = ("Pending", "The job has been seen and nothing is running yet.", "Nothing.")
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
        "The driver ended because there is no space left where it must write. Retries would fail alike and are not "
        "counted: the next one begins after spec.retry.maxBackoffSeconds, for spec.deadlines.startSeconds at most.",
        "Make room where the message says (spec.checkpoint.uri, or the head's disk); the job goes on by itself. If it "
        "has failed, create it again: restore.from continues.",
    )
    HEAD_LOST = (
        "HeadLost",
        "The head pod was lost; the job goes on in a new cluster from its last checkpoint.",
        "Nothing. If it repeats: give the head more memory (spec.head.pod.resources).",
    )
    RAY_UNREACHABLE = (
        "RayUnreachable",
        "The cluster is ready but its dashboard does not answer the operator.",
        "Check network policies between the operator's namespace and the job's (port 8265 of the head).",
    )
    TOKEN_REFUSED = (
        "TokenRefused",
        "The pods of the job do not take the operator's token. They are left alone, and training goes on unobserved.",
        "Put back the key that the message names (gitops.md, token keys), or have the pods replaced: suspend the job, "
        "and resume it from its last checkpoint.",
    )
    LEFTOVER_PROCESSES = (
        "LeftoverProcesses",
        "Processes of a failed attempt did not end, so the pods are replaced.",
        "Nothing.",
    )
    SUSPENDING = ("Suspending", "The driver saves a checkpoint before the pods are freed.", "Nothing.")
    JOB_SUSPENDED = ("Suspended", "The job is suspended.", "Set spec.suspend to false to continue.")
    NOT_SUSPENDED = ("NotSuspended", "The job is not suspended.", "Nothing.")
    DELETING = (
        "Deleting",
        "The job is being deleted: its pods are freed, and finalizers that others have put on it keep it.",
        "Nothing, unless it stays: then ask whoever is to remove the finalizers that the message names.",
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
        "The driver refused the job file (exit code 64); trying again would not help.",
        "Correct what the message names and create the job again.",
    )
    BAD_DATA = (
        "BadData",
        "The driver refused the data (exit code 65); trying again would not help.",
        "Correct the data set, the prompt or the reward that the message names and create the job again.",
    )
    BAD_CHECKPOINT = (
        "BadCheckpoint",
        "The driver refused the checkpoint that it was to go on from (exit code 66); trying again would not help.",
        "Put back what the message names and create the job again with the same output, or with another restore.from "
        "or output.",
    )
    START_DEADLINE_EXCEEDED = (
        "StartDeadlineExceeded",
        "The first step was not done within spec.deadlines.startSeconds.",
        "See ClusterReady for what was missing, or allow more time.",
    )
    RUN_DEADLINE_EXCEEDED = (
        "RunDeadlineExceeded",
        "The job took longer than spec.deadlines.runSeconds.",
        "Allow more time; restore.from continues from the last checkpoint.",
    )
    # Progressing
    MOVING = ("Moving", "Training moves on.", "Nothing.")
    WAITING = ("Waiting", "The driver waits, and says for what.", "Read the message.")
    NO_ANSWER = (
        "NoAnswer",
        "The driver does not answer the operator.",
        "Nothing at once; check network policies (the driver's port on the head) and the head pod's logs.",
    )
    STALLED = (
        "Stalled",
        "Nothing was finished for longer than spec.deadlines.progressSeconds; the attempt is stopped and retried.",
        "Read what the driver waited for; allow more time if that wait is normal.",
    )
    NOT_RUNNING = ("NotRunning", "No driver runs.", "Nothing.")
    # Resizing
    AT_SIZE = ("AtSize", "The pools have the sizes that the job asks for.", "Nothing.")
    ADDING = ("AddingReplicas", "Pods are added to a pool.", "Nothing; ClusterReady says what they wait for.")
    DRAINING = ("Draining", "Replicas finish or hand back their samples before their pods go.", "Nothing.")
    REMOVING = ("RemovingReplicas", "Drained pods are being removed.", "Nothing.")
    # WeightsFresh
    WITHIN_BOUND = ("WithinBound", "Every sample is within the job's bound of age.", "Nothing.")
    STALENESS_EXCEEDED = (
        "StalenessExceeded",
        "Samples older than the job allows were trained on.",
        "Report it: the driver should never let this happen.",
    )
    # CheckpointAvailable
    COMMITTED = ("Committed", "A checkpoint is complete.", "Nothing.")
    NOT_SAVED = (
        "NotSaved",
        "The newest checkpoint could not be written; it is tried again when the next is due.",
        "Read the message. Make room in spec.checkpoint.uri or correct who may write there: until then a retry, or a "
        "resumed job, goes on from the checkpoint before, or from the beginning.",
    )
    NONE_YET = ("NoneYet", "No checkpoint has been written yet.", "Nothing.")
    NO_STORAGE = (
        "NoStorage",
        "The job has no spec.checkpoint.uri: suspending and retrying start again from the beginning.",
        "Set spec.checkpoint.uri to a volume or bucket if losing the progress would hurt.",
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
