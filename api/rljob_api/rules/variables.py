"""Rules about environment variables: those that are not the job's to set, and those that say something else than the
job's fields do, or than the other pool."""

from __future__ import annotations

import re
from collections.abc import Iterator

from rljob_api.nccl import ALIKE, settings_alike
from rljob_api.pod_template.of_job import ray_container
from rljob_api.rules import cel
from rljob_api.rules.cel import PODS, POOLS, SPEC, Cel, one_of, text
from rljob_api.rules.registry import Job, rule
from rljob_api.spec.pools import RolloutSpec, TrainerSpec
from rljob_api.violations import Violation

CORE_PROCESS = "VLLM_ENABLE_V1_MULTIPROCESSING"
"""Where vLLM's core runs says rollout.multiprocessing; an engine that is told otherwise does not start."""
RESERVED_ENV = (
    *("RAY_", "RLJOB_", "KUBERAY_", "MASTER_", "CUDA_VISIBLE_DEVICES", "RANK", "WORLD_SIZE", "LOCAL_RANK"),
    CORE_PROCESS,
)
REMEDIES = {CORE_PROCESS: "remove it; rollout.multiprocessing: true runs vLLM's core in its own process"}
"""Where something else does what the variable would."""
BATCH_INVARIANT = "VLLM_BATCH_INVARIANT"
ALLOCATOR_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""The variables that torch's allocator for GPUs reads; the first that is set counts."""
_EXPANDABLE = r"expandable_segments\s*:\s*[Tt]rue"


def _free_name(name: str) -> str:
    """CEL: whether a variable of that name may be set."""
    prefixes = [taken for taken in RESERVED_ENV if taken.endswith("_")]
    whole = [taken for taken in RESERVED_ENV if not taken.endswith("_")]
    return f"!({name} in {one_of(whole)}) && {one_of(prefixes)}.all(p, !{name}.startsWith(p))"


@rule(
    cel=[
        *(
            Cel(
                ("spec", pool),
                f"!has(self.env) || self.env.all(k, {_free_name('k')})",
                "rljob or Ray sets this variable; remove it",
                ".env",
            )
            for pool in POOLS
        ),
        *(Cel((*pod, "env", "[]"), _free_name("self.name"), "is set by rljob or Ray", ".name") for pod in PODS),
    ]
)
def environment_leaves_ours_alone(job: Job) -> Iterator[Violation]:
    names = [(f"{path}.env.{name}", name) for path, pool in job.pools for name in pool.env]
    for path, pod in job.pods:
        names += [(f"{path}.env[{index}].name", entry.name) for index, entry in enumerate(pod.env)]
    for path, name in names:
        yield from reserved_variable(path, name)


def reserved_variable(path: str, name: str) -> Iterator[Violation]:
    """What is wrong with setting a variable of that name, if anything."""
    if any(name == taken or (taken.endswith("_") and name.startswith(taken)) for taken in RESERVED_ENV):
        yield Violation(path, f"{name} is set by rljob or Ray", REMEDIES.get(name, "remove it"))


@rule(
    cel=[
        Cel(
            ("spec", pool),
            "!has(self.env) || !has(self.pod.env) || self.pod.env.all(e, !(e.name in self.env))",
            f"a variable is also set in spec.{pool}.env; keep one of them",
            ".pod.env",
        )
        for pool in POOLS
    ]
)
def variables_are_set_in_one_place(job: Job) -> Iterator[Violation]:
    for path, pool in job.pools:
        for index, entry in enumerate(pool.pod.env):
            if entry.name in pool.env:
                yield Violation(f"{path}.pod.env[{index}].name", f"is also set in {path}.env", "keep one of them")


@rule(
    cel=Cel(
        SPEC,
        f"!self.deterministic || self.rollout.engine != 'vllm' || !{cel.ENGINES_HAVE_GPUS} || "
        f"!has(self.rollout.env) || !('{BATCH_INVARIANT}' in self.rollout.env) || "
        f"self.rollout.env['{BATCH_INVARIANT}'] == '1'",
        f"{BATCH_INVARIANT} disables for the engines what deterministic requires; remove it, or deterministic",
        ".rollout.env",
    )
)
def deterministic_engines_stay_so(job: Job) -> Iterator[Violation]:
    rollout = job.spec.rollout
    said = rollout.env.get(BATCH_INVARIANT, "1")
    if job.spec.deterministic and job.has_vllm_on_gpus and said != "1":
        yield Violation(
            f"spec.rollout.env.{BATCH_INVARIANT}",
            f'"{said}" disables for the engines what deterministic: true requires',
            "remove it, or remove deterministic",
        )


@rule(
    cel=Cel(
        SPEC,
        f"!{cel.IS_COLOCATED} || self.rollout.engine != 'vllm' || self.trainer.gpusPerReplica == 0 || "
        "!has(self.rollout.env) || "
        + " && ".join(
            f"(!('{name}' in self.rollout.env) || !self.rollout.env['{name}'].matches({text(_EXPANDABLE)}))"
            for name in ALLOCATOR_SETTINGS
        ),
        "the memory of a sleeping engine cannot be in expandable segments; remove that (ranks use them anyway)",
        ".rollout.env",
    )
)
def engines_that_sleep_have_no_expandable_segments(job: Job) -> Iterator[Violation]:
    """vLLM takes what it gives back in its sleep from a memory pool of its own, which torch cannot make of them."""
    if job.resolved.placement != "colocated" or not job.has_vllm_on_gpus:
        return
    for name in ALLOCATOR_SETTINGS:
        if re.search(_EXPANDABLE, job.spec.rollout.env.get(name, "")):
            yield Violation(
                f"spec.rollout.env.{name}",
                "the memory of a sleeping engine cannot be in expandable segments",
                "remove expandable_segments (ranks on GPUs use them unless trainer.env says otherwise)",
            )


@rule(not_in_cel="variables may stand in pod.template, whose content is hidden from CEL")
def nccl_is_told_the_same_in_both_pools(job: Job) -> Iterator[Violation]:
    """Weights go from ranks to engines by NCCL where both have GPUs of their own. The group that they form compares the
    same settings when it begins, which is after both models were loaded."""
    spec = job.spec
    if job.resolved.placement != "separate" or not (spec.trainer.gpus_per_replica and spec.rollout.gpus_per_replica):
        return
    trainer, rollout = _told("spec.trainer", spec.trainer), _told("spec.rollout", spec.rollout)
    if trainer is None or rollout is None:
        return
    both = [settings_alike({name: value for name, (_, value) in told.items() if value}) for told in (trainer, rollout)]
    for name in ALIKE:
        values = [settings.get(name) for settings in both]
        unknown = any(name in told and told[name][1] is None for told in (trainer, rollout))
        if unknown or values[0] == values[1]:
            continue
        path, _ = trainer[name] if values[0] is not None else rollout[name]
        said = [f"is {value}" if value is not None else "is not set" for value in values]
        yield Violation(
            path,
            f"{name} {said[0]} for the ranks and {said[1]} for the engines: NCCL needs the same in both, or they "
            "wait for each other forever",
            "set it to the same value in trainer.env and rollout.env, or remove it",
        )


def _told(path: str, pool: RolloutSpec | TrainerSpec) -> dict[str, tuple[str, str | None]] | None:
    """The variables that the job gives to Ray's container in the pods of a pool: where each stands, and its value, or
    None where that is elsewhere. None: so are the names of some."""
    container = ray_container(f"{path}.pod", pool.pod, pool.env, pool.gpus_per_replica)
    if container is None or container.get("envFrom") is not None:
        return None
    told = {}
    for entry in container.items("env"):
        elsewhere = entry.get("valueFrom") is not None
        told[entry.text("name")] = (entry.path, None if elsewhere else entry.text("value"))
    return told
