"""Rules about pod settings and code; those about volumes and about templates have files of their own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rljob_api.pod_template.paths import LEAVES, descending
from rljob_api.pod_template.quantities import known
from rljob_api.rules import cel
from rljob_api.rules.cel import PODS, SPEC, Cel, is_absent, text
from rljob_api.rules.registry import Job, exactly_one, rule
from rljob_api.violations import Violation

CODE = ("spec", "code", "[]")
RESERVED_DOMAINS = ("rljob.dev", "ray.io", "kueue.x-k8s.io")
_DOMAINS = "|".join(domain.replace(".", r"\.") for domain in RESERVED_DOMAINS)
_IN_RESERVED_DOMAIN = text(rf"^([^/]*\.)?({_DOMAINS})/")


@rule(
    cel=[
        *(
            Cel(
                (*pod, "env", "[]"),
                "!has(self.value) || !has(self.valueFrom)",
                "has both value and valueFrom; keep one of them",
            )
            for pod in PODS
        ),
        *(
            Cel(
                (*pod, "env", "[]", "valueFrom"),
                cel.exactly_one("self.secretKeyRef", "self.configMapKeyRef", "self.fieldRef"),
                "needs exactly one of secretKeyRef, configMapKeyRef and fieldRef",
            )
            for pod in PODS
        ),
    ]
)
def variables_have_one_value(job: Job) -> Iterator[Violation]:
    for path, pod in job.pods:
        for index, entry in enumerate(pod.env):
            where = f"{path}.env[{index}]"
            if entry.value is not None and entry.value_from is not None:
                yield Violation(where, "has both value and valueFrom", "keep one of them")
            if entry.value_from is not None:
                sources = dict(entry.value_from)
                names = ("secretKeyRef", "configMapKeyRef", "fieldRef")
                yield from exactly_one(f"{where}.valueFrom", names, tuple(sources.values()))


def _repeated(path: str, names: list[str]) -> Iterator[Violation]:
    for index, name in enumerate(names):
        if name in names[:index]:
            yield Violation(f"{path}[{index}]", f'"{name}" is listed twice', "keep one of them")


@rule(not_in_cel="the list is a map by name: the API server itself refuses duplicates")
def variables_differ(job: Job) -> Iterator[Violation]:
    for path, pod in job.pods:
        yield from _repeated(f"{path}.env", [entry.name for entry in pod.env])


@rule(not_in_cel="the list is a map by name: the API server itself refuses duplicates")
def pull_secrets_differ(job: Job) -> Iterator[Violation]:
    for path, pod in job.pods:
        yield from _repeated(f"{path}.imagePullSecrets", [entry.name for entry in pod.image_pull_secrets])


@rule(
    cel=[
        Cel((*pod, "tolerations", "[]"), expression, message, field)
        for pod in PODS
        for expression, message, field in (
            (
                "self.operator != 'Exists' || !has(self.value) || self.value == ''",
                "does not apply to operator Exists; remove it",
                ".value",
            ),
            (
                "self.operator != 'Equal' || (has(self.key) && self.key != '')",
                "is required by operator Equal; add it, or use operator: Exists",
                ".key",
            ),
            (
                "!has(self.tolerationSeconds) || (has(self.effect) && self.effect == 'NoExecute')",
                "applies only to effect NoExecute; set that",
                ".tolerationSeconds",
            ),
        )
    ]
)
def tolerations_are_complete(job: Job) -> Iterator[Violation]:
    for path, pod in job.pods:
        for index, toleration in enumerate(pod.tolerations):
            where = f"{path}.tolerations[{index}]"
            if toleration.operator == "Exists" and toleration.value:
                yield Violation(f"{where}.value", "does not apply to operator Exists", "remove it")
            if toleration.operator == "Equal" and not toleration.key:
                yield Violation(f"{where}.key", "is required by operator Equal", "add it, or use operator: Exists")
            if toleration.toleration_seconds is not None and toleration.effect != "NoExecute":
                yield Violation(
                    f"{where}.tolerationSeconds", "applies only to effect NoExecute", "set effect: NoExecute"
                )


@rule(
    cel=[
        Cel(
            pod,
            f"!has(self.resources.{kind}) || !(self.gpuResource in self.resources.{kind})",
            "gpusPerReplica sets the number of GPUs (the head uses none); remove them here",
            f".resources.{kind}",
        )
        for pod in PODS
        for kind in ("requests", "limits")
    ]
)
def gpus_are_counted_once(job: Job) -> Iterator[Violation]:
    for path, pod in job.pods:
        for kind, resources in (("requests", pod.resources.requests), ("limits", pod.resources.limits)):
            if pod.gpu_resource in resources:
                head = path.startswith("spec.head")
                yield Violation(
                    f"{path}.resources.{kind}[{pod.gpu_resource}]",
                    "the head uses no GPU" if head else "gpusPerReplica sets the number of GPUs",
                    "remove it" if head else "set gpusPerReplica instead",
                )


_SHARED = "quantity(string(self.sharedMemory))"
_LIMIT = "self.resources.limits"


@rule(
    cel=[
        entry
        for pod in PODS
        for entry in (
            Cel(
                pod,
                f"!has(self.sharedMemory) || {_SHARED}.isGreaterThan(quantity('0'))",
                "0 means unlimited in Kubernetes; remove it (30 % of the memory limit), or set a size",
                ".sharedMemory",
            ),
            Cel(
                pod,
                f"!has(self.sharedMemory) || !has({_LIMIT}) || !('memory' in {_LIMIT}) || "
                f"!{_SHARED}.isGreaterThan(quantity(string({_LIMIT}['memory'])))",
                "exceeds the memory limit, which it counts against; lower it, or raise resources.limits.memory",
                ".sharedMemory",
            ),
        )
    ]
)
def shared_memory_fits_its_pod(job: Job) -> Iterator[Violation]:
    """/dev/shm is a memory-backed emptyDir: what lies there counts against the container's limit, and a pod beyond it
    is killed. To a size limit of 0 the kubelet says: none."""
    for path, pod in job.pods:
        shared = None if pod.shared_memory is None else known(pod.shared_memory)
        if shared is None:
            continue
        limit = pod.resources.limits.get("memory")
        most = None if limit is None else known(limit)
        where = f"{path}.sharedMemory"
        if shared <= 0:
            remedy = "remove it (the default is 30 % of the memory limit), or set a size"
            yield Violation(where, f"{pod.shared_memory} means unlimited in Kubernetes, not no shared memory", remedy)
        elif most is not None and shared > most:
            yield Violation(
                where,
                f"{pod.shared_memory} exceeds the memory limit of {limit}, which it counts against",
                "lower it, or raise resources.limits.memory",
            )


OF_KUEUE = "kueue.x-k8s.io/"
ELASTIC_ANNOTATION = "kueue.x-k8s.io/elastic-job"
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
PRIORITY_LABEL = "kueue.x-k8s.io/priority-class"


@rule(
    cel=[
        Cel(
            pod,
            f"!has(self.{kind}) || self.{kind}.all(k, !k.matches({_IN_RESERVED_DOMAIN}))",
            f"the domains {', '.join(RESERVED_DOMAINS)} are reserved; use your own domain",
            f".{kind}",
        )
        for pod in PODS
        for kind in ("labels", "annotations")
    ]
)
def own_labels_have_own_domains(job: Job) -> Iterator[Violation]:
    for path, pod in job.pods:
        yield from names_in_reserved_domains(f"{path}.labels", pod.labels)
        yield from names_in_reserved_domains(f"{path}.annotations", pod.annotations)


def names_in_reserved_domains(path: str, names: Iterable[str]) -> Iterator[Violation]:
    """What is wrong with labels or annotations of these names, if anything."""
    for name in names:
        if is_reserved(name):
            yield Violation(f"{path}[{name}]", f"{name.partition('/')[0]} is reserved", "use your own domain")


def is_reserved(name: str) -> bool:
    """Whether the name of a label or annotation is in a reserved domain: KubeRay and Kueue take orders from theirs, and
    the operator finds pods by its own."""
    domain, slash, _ = name.partition("/")
    return bool(slash) and any(domain == taken or domain.endswith("." + taken) for taken in RESERVED_DOMAINS)


@rule(
    cel=[
        Cel(
            SPEC,
            f"has(self.queueName) || {is_absent(pod[1])}!has(self.{'.'.join(pod[1:])}.topology)",
            "needs Kueue, but the job has no queue; set spec.queueName, or use affinity",
            f".{'.'.join(pod[1:])}.topology",
        )
        for pod in PODS
    ]
)
def topology_needs_a_queue(job: Job) -> Iterator[Violation]:
    for path, pod in job.pods:
        if pod.topology is not None and job.spec.queue_name is None:
            yield Violation(
                f"{path}.topology", "needs Kueue, but the job has no queue", "set spec.queueName, or use affinity"
            )


@rule(not_in_cel="rules see no labels of the object itself")
def labels_of_kueue_are_understood(job: Job) -> Iterator[Violation]:
    """Kueue's own integrations read labels and annotations of a job; what isn't passed on would be dropped without a
    word."""
    queue = job.spec.queue_name
    for name, value in job.metadata.labels.items():
        path = f"metadata.labels[{name}]"
        if not name.startswith(OF_KUEUE) or name == PRIORITY_LABEL:
            continue
        if name != QUEUE_LABEL:
            yield Violation(path, "is not passed to the job's cluster", f"remove it; {PRIORITY_LABEL} is passed")
        elif queue != value:
            said = f"spec.queueName is {queue}" if queue else "the job's queue is spec.queueName, which is not set"
            yield Violation(path, f"names the queue {value}, but {said}", f"set spec.queueName: {value}, or remove it")
    for name in job.metadata.annotations:
        if name.startswith(OF_KUEUE):
            resized = "placement: separate, rewardModel or judge"
            elastic = f"{name} is set automatically on the RayCluster if the job can be resized ({resized})"
            yield Violation(
                f"metadata.annotations[{name}]",
                "is not passed to the job's cluster",
                f"remove it; {elastic if name == ELASTIC_ANNOTATION else 'set spec.*.pod.topology for a topology'}",
            )


@rule(
    cel=[
        Cel(CODE, "has(self.configMap) != has(self.pvc)", "needs exactly one of configMap and pvc"),
        Cel(CODE, "!has(self.path) || has(self.pvc)", "applies only to pvc; remove it", ".path"),
    ]
)
def code_has_one_origin(job: Job) -> Iterator[Violation]:
    for index, code in enumerate(job.spec.code):
        path = f"spec.code[{index}]"
        yield from exactly_one(path, ("configMap", "pvc"), (code.config_map, code.pvc))
        if code.path is not None and code.pvc is None:
            yield Violation(f"{path}.path", "applies only to pvc", "remove it")


@rule(
    cel=Cel(CODE, f"!has(self.path) || !self.path.matches({text(LEAVES)})", "must be relative and without ..", ".path")
)
def code_stays_in_its_volume(job: Job) -> Iterator[Violation]:
    for index, code in enumerate(job.spec.code):
        yield from descending(f"spec.code[{index}].path", code.path or "")


@rule(
    cel=Cel(
        SPEC,
        "!has(self.code) || self.code.all(c, self.code.filter(d, d == c).size() == 1)",
        "one entry is listed twice; keep one of them",
        ".code",
    )
)
def code_is_mounted_once(job: Job) -> Iterator[Violation]:
    seen = set()
    for index, code in enumerate(job.spec.code):
        key = (code.config_map, code.pvc, code.path)
        if key in seen:
            yield Violation(f"spec.code[{index}]", "is listed twice", "keep one of them")
        seen.add(key)
