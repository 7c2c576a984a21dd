"""What does not work in a cluster's pods, or works differently than on one machine, although the job is valid."""

from __future__ import annotations

import json
from collections.abc import Iterator

from rljob_api.locations import READ, STATE, locations
from rljob_api.pod_policy import PodPolicy, disallowed
from rljob_api.pod_template.of_job import ray_container
from rljob_api.resolved import ResolvedJob
from rljob_api.rules.variables import reserved_variable
from rljob_api.violations import Violation

_FILES = (".json", ".jsonl", ".parquet", ".csv", ".txt", ".py")
_PLACES = "pvc://claim/path or s3://bucket/path"


def refused(job: ResolvedJob) -> Iterator[Violation]:
    """What the operator refuses to make pods for."""
    if job.spec.model.random is not None and job.spec.checkpoint.uri is None:
        yield Violation(
            "spec.checkpoint.uri",
            "the head pod creates the random model, and the other pods need a place to load it from",
            f"set {_PLACES}",
        )


def cluster_notes(job: ResolvedJob) -> Iterator[Violation]:
    """What the operator makes pods for all the same: they would fail, or be worse off than somebody may think."""
    yield from _paths_of_one_machine(job)
    yield from _code_that_is_not_there(job)
    yield from _keys_that_nobody_sets(job)
    if job.spec.checkpoint.uri is None and job.spec.model.random is None:
        yield Violation(
            "spec.checkpoint.uri",
            "is not set, so a job that is suspended or loses its head pod starts over, and its trained weights are "
            "lost with its pods",
            f"set {_PLACES}",
        )
    yield from _pods_without_size(job)
    yield from disallowed(job, PodPolicy())


def _paths_of_one_machine(job: ResolvedJob) -> Iterator[Violation]:
    for place in locations(job.spec, (*READ, *STATE)):
        value = place.value
        # Up to two names may be an id of the hub.
        beside = value.startswith((".", "~")) or value.endswith(_FILES) or value.count("/") > 1
        if "://" not in value and not value.startswith("/") and (beside or place.field in STATE):
            yield Violation(
                place.path,
                f"{value} is a path of this machine, and no pod has it",
                f"copy it to a volume or a bucket, and write {_PLACES}",
            )


def _code_that_is_not_there(job: ResolvedJob) -> Iterator[Violation]:
    spec, environment = job.spec, job.spec.rollout.environment
    named = {
        f"spec.reward.functions[{index}].function": item.function for index, item in enumerate(spec.reward.functions)
    }
    named["spec.rollout.environment.function"] = environment.function
    for index, tool in enumerate(environment.tools):
        named[f"spec.rollout.environment.tools[{index}].function"] = tool.function
    named["spec.trainer.backend"] = spec.trainer.backend if ":" in spec.trainer.backend else None
    for path, function in named.items():
        if function is not None and not spec.code:
            yield Violation(
                path,
                f"no pod has the module {function.partition(':')[0]} unless it is in the image",
                "mount it by spec.code (a ConfigMap or a claim), or build it into the image",
            )
    if files := [part for part in environment.command if part.endswith(".py") and not part.startswith("/")]:
        yield Violation(
            "spec.rollout.environment.command",
            f"{files[0]} is next to the job file on this machine, and no pod has it",
            "write its path in the image or in a volume",
        )


def _keys_that_nobody_sets(job: ResolvedJob) -> Iterator[Violation]:
    ray = ray_container("spec.head.pod", job.spec.head.pod, {}, 0)
    if ray is None or ray.get("envFrom") is not None:
        return
    there = {entry.text("name") for entry in ray.items("env")}
    for index, function in enumerate(job.spec.reward.functions):
        name = None if function.judge is None else function.judge.api_key_env
        if name is None or name in there:
            continue
        path = f"spec.reward.functions[{index}].judge.apiKeyEnv"
        if any(reserved_variable(path, name)):
            yield Violation(path, f"no pod may set {name}, which belongs to rljob or Ray", "use another name")
        else:
            yield Violation(
                path,
                f"the head pod has no variable {name} unless it is in the image",
                "set it in spec.head.pod.env, from a Secret (valueFrom.secretKeyRef)",
            )


def _pods_without_size(job: ResolvedJob) -> Iterator[Violation]:
    spec = job.spec
    pools = {
        "rollout": None if spec.placement == "colocated" else spec.rollout,
        "trainer": spec.trainer,
        "rewardModel": spec.reward_model,
        "judge": spec.judge,
        "head": spec.head,
    }
    pods = {f"spec.{name}.pod": pool.pod for name, pool in pools.items() if pool is not None}
    paths = [
        f"{path}.resources"
        for path, pod in pods.items()
        if not (pod.resources.requests or pod.resources.limits or "resources" in json.dumps(pod.template))
    ]
    if paths:
        yield Violation(
            ", ".join(paths),
            "request neither CPU nor memory, so Kubernetes also places these pods on full nodes, and evicts them first "
            "when memory runs out",
            "set requests for cpu and memory, and a memory limit (rljob plan JOB --memory computes them)",
        )
