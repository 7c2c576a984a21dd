"""Rules about placement, spec.rollout, spec.trainer, and what all pools of engines have in common."""

from __future__ import annotations

from collections.abc import Iterator

from rljob_api.engine_args import ENGINE_ARGS, SET_BY_RLJOB
from rljob_api.memory.accelerators import BEFORE_AMPERE, COMPUTE_MAJOR, MAJORS_BEFORE_AMPERE, PRODUCT, before_ampere
from rljob_api.problems import did_you_mean
from rljob_api.rules import cel
from rljob_api.rules.cel import ENGINE_POOLS, SPEC, TRAINER, Cel, one_of, text
from rljob_api.rules.registry import Job, rule
from rljob_api.violations import Violation

_FITS = "parallelism.tensor must equal gpusPerReplica; change one of them"
_POOLED = "colocated engines use the trainer's devices and have no pool of their own; remove it"


@rule(
    cel=[
        *(
            Cel(SPEC, f"!{cel.IS_COLOCATED} || !has(self.rollout.{field})", _POOLED, f".rollout.{field}")
            for field in ("replicas", "minReplicas", "maxReplicas")
        ),
        Cel(SPEC, f"!{cel.IS_COLOCATED} || self.rollout.gpusPerReplica == 0", _POOLED, ".rollout.gpusPerReplica"),
    ]
)
def colocated_engines_are_sized_by_the_trainer(job: Job) -> Iterator[Violation]:
    rollout = job.spec.rollout
    if job.resolved.placement != "colocated":
        return
    given = {
        "replicas": rollout.replicas,
        "minReplicas": rollout.min_replicas,
        "maxReplicas": rollout.max_replicas,
        "gpusPerReplica": rollout.gpus_per_replica or None,
    }
    for name, value in given.items():
        if value is not None:
            yield Violation(
                f"spec.rollout.{name}",
                "colocated engines use the trainer's devices and have no pool of their own",
                "remove it, or set placement: separate",
            )


@rule(
    cel=Cel(
        SPEC,
        "!has(self.placement) || self.placement != 'colocated' || self.pipeline.mode == 'sync'",
        "colocated engines and trainer take turns, which only mode sync allows; set placement: separate",
        ".placement",
    )
)
def colocated_engines_need_turns(job: Job) -> Iterator[Violation]:
    if job.spec.placement == "colocated" and job.spec.pipeline.mode != "sync":
        yield Violation(
            "spec.placement",
            f"colocated engines and trainer take turns, but in mode {job.spec.pipeline.mode} both work at once",
            "set placement: separate, or pipeline.mode: sync",
        )


@rule(
    cel=Cel(
        SPEC,
        f"!{cel.IS_COLOCATED} || self.trainer.gpusPerReplica % self.rollout.parallelism.tensor == 0",
        "parallelism.tensor must divide trainer.gpusPerReplica; choose a divisor",
        ".rollout.parallelism",
    )
)
def colocated_engines_fill_the_ranks(job: Job) -> Iterator[Violation]:
    size, gpus = job.spec.rollout.parallelism.tensor, job.spec.trainer.gpus_per_replica
    if job.resolved.placement == "colocated" and gpus % size:
        yield Violation(
            "spec.rollout.parallelism",
            f"a colocated engine uses tensor = {size} GPUs of one trainer pod, which does not divide "
            f"trainer.gpusPerReplica = {gpus}",
            "choose a divisor",
        )


@rule(
    cel=[
        Cel(
            SPEC,
            f"{cel.IS_COLOCATED} || self.rollout.gpusPerReplica == 0 || "
            "self.rollout.gpusPerReplica == self.rollout.parallelism.tensor",
            _FITS,
            ".rollout.parallelism",
        ),
        Cel(
            ("spec", "judge"),
            "(self.gpusPerReplica == 0 ? 1 : self.gpusPerReplica) == self.parallelism.tensor",
            _FITS,
            ".parallelism",
        ),
    ]
)
def engine_parallelism_fits_its_gpus(job: Job) -> Iterator[Violation]:
    for path, pool in job.engines:
        if path == "spec.rollout" and job.resolved.placement != "separate":
            continue
        size, gpus = pool.parallelism.tensor, pool.gpus_per_replica
        if (gpus and size != gpus) or (path == "spec.judge" and size > 1 and not gpus):
            yield Violation(
                f"{path}.parallelism",
                f"tensor = {size} needs {size} GPUs, but {path.removeprefix('spec.')}.gpusPerReplica is {gpus}",
                f"set gpusPerReplica: {size}, or change parallelism",
            )


@rule(
    cel=[
        Cel(
            SPEC,
            f"{cel.IS_COLOCATED} || !has(self.rollout.minReplicas) || self.rollout.minReplicas <= {cel.REPLICAS}",
            "is more than replicas; lower it, or raise replicas",
            ".rollout.minReplicas",
        ),
        Cel(
            SPEC,
            f"{cel.IS_COLOCATED} || !has(self.rollout.maxReplicas) || self.rollout.maxReplicas >= {cel.REPLICAS}",
            "is less than replicas; raise it, or lower replicas",
            ".rollout.maxReplicas",
        ),
    ]
)
def replicas_lie_between_least_and_most(job: Job) -> Iterator[Violation]:
    rollout = job.resolved.rollout
    if job.resolved.placement != "separate":
        return
    if rollout.min_replicas > rollout.replicas:
        yield Violation(
            "spec.rollout.minReplicas",
            f"{rollout.min_replicas} is more than replicas = {rollout.replicas}",
            "lower it, or raise replicas",
        )
    if rollout.max_replicas < rollout.replicas:
        yield Violation(
            "spec.rollout.maxReplicas",
            f"{rollout.max_replicas} is less than replicas = {rollout.replicas}",
            "raise it, or lower replicas",
        )


@rule(
    cel=[
        Cel(
            ("spec", pool),
            "self.engine != 'torch' || self.parallelism.tensor == 1",
            "the torch engine runs on one device; set it to 1, or use engine: vllm",
            ".parallelism.tensor",
        )
        for pool in ENGINE_POOLS
    ]
)
def torch_engine_runs_on_one_device(job: Job) -> Iterator[Violation]:
    for path, pool in job.engines:
        if pool.engine == "torch" and pool.parallelism.tensor > 1:
            yield Violation(
                f"{path}.parallelism.tensor",
                "the torch engine runs on one device",
                "set it to 1, or use engine: vllm",
            )


@rule(not_in_cel="the content of engineArgs is hidden from CEL")
def engine_args_are_for_vllm(job: Job) -> Iterator[Violation]:
    for path, pool in job.engines:
        if pool.engine == "torch" and pool.engine_args:
            yield Violation(f"{path}.engineArgs", "the torch engine accepts none", "remove them, or use engine: vllm")


@rule(not_in_cel="the content of engineArgs is hidden from CEL")
def engine_args_exist(job: Job) -> Iterator[Violation]:
    for path, pool in job.engines:
        for name in pool.engine_args:
            if name in ENGINE_ARGS or name in SET_BY_RLJOB:
                continue
            close = did_you_mean(name, ENGINE_ARGS)
            yield Violation(
                f"{path}.engineArgs.{name}",
                "vLLM's EngineArgs have no such argument",
                f"did you mean {close}?" if close else "see vLLM's documentation of EngineArgs",
            )


@rule(not_in_cel="the content of engineArgs is hidden from CEL")
def engine_args_leave_ours_alone(job: Job) -> Iterator[Violation]:
    for path, pool in job.engines:
        for name in pool.engine_args:
            if name in SET_BY_RLJOB:
                instead = SET_BY_RLJOB[name] if path == "spec.rollout" else "remove it; see spec.judge"
                yield Violation(f"{path}.engineArgs.{name}", "is set by rljob itself", instead or "remove it")


@rule(
    cel=[
        Cel(
            ("spec", "rollout", "sampling"),
            f"self.{field} == {value}",
            f"truncated sampling in training makes the importance ratios wrong; leave it at {value}",
            f".{field}",
        )
        for field, value in (("topP", "1.0"), ("topK", "0"))
    ]
)
def training_samples_from_the_whole_distribution(job: Job) -> Iterator[Violation]:
    sampling = job.spec.rollout.sampling
    reason = "truncated sampling in training changes the distribution, so the importance ratios would be wrong"
    if sampling.top_p != 1:
        yield Violation("spec.rollout.sampling.topP", reason, "leave it at 1 (validation sets may use their own)")
    if sampling.top_k != 0:
        yield Violation("spec.rollout.sampling.topK", reason, "leave it at 0 (validation sets may use their own)")


@rule(
    cel=Cel(
        TRAINER,
        f"self.parallelism.replicate * {cel.shards('self')} * self.parallelism.context * self.parallelism.tensor == "
        f"{cel.ranks('self')}",
        "replicate x shard x context x tensor must equal the ranks (replicas x gpusPerReplica); shard may be omitted",
        ".parallelism",
    )
)
def trainer_parallelism_fits_its_ranks(job: Job) -> Iterator[Violation]:
    trainer, ways = job.resolved.trainer, job.resolved.trainer.parallelism
    if ways.ranks != trainer.ranks:
        yield Violation(
            "spec.trainer.parallelism",
            f"replicate x shard x context x tensor = {ways.replicate} x {ways.shard} x {ways.context} x {ways.tensor} "
            f"= {ways.ranks} ranks, but replicas x gpusPerReplica give {trainer.ranks}",
            "change parallelism (shard may be omitted), replicas or gpusPerReplica",
        )


@rule(
    cel=Cel(
        SPEC,
        "!self.rollout.multiprocessing || self.rollout.engine == 'vllm'",
        "only vLLM has a core that can run in its own process; remove it, or set rollout.engine: vllm",
        ".rollout.multiprocessing",
    )
)
def multiprocessing_is_vllm_s(job: Job) -> Iterator[Violation]:
    if job.spec.rollout.multiprocessing and job.spec.rollout.engine != "vllm":
        yield Violation(
            "spec.rollout.multiprocessing",
            "only vLLM has a core that can run in its own process",
            "remove it, or set rollout.engine: vllm",
        )


@rule(
    cel=Cel(
        SPEC,
        "!self.trainer.compile || self.trainer.backend == 'fsdp2'",
        "only trainer.backend: fsdp2 supports compile; use that, or remove compile",
        ".trainer.compile",
    )
)
def layers_are_compiled_by_fsdp2(job: Job) -> Iterator[Violation]:
    backend = job.spec.trainer.backend
    if job.spec.trainer.compile and backend != "fsdp2":
        yield Violation(
            "spec.trainer.compile",
            f"trainer.backend: {backend} does not support compile",
            "use trainer.backend: fsdp2, or remove compile",
        )


@rule(
    cel=Cel(
        SPEC,
        "!self.trainer.compile || self.trainer.parallelism.tensor == 1",
        "compile does not support tensor parallelism; remove compile, or use parallelism.tensor: 1",
        ".trainer.compile",
    )
)
def compiled_layers_are_whole(job: Job) -> Iterator[Violation]:
    if job.spec.trainer.compile and job.spec.trainer.parallelism.tensor > 1:
        yield Violation(
            "spec.trainer.compile",
            "compile does not support tensor parallelism (parallelism.tensor)",
            "remove compile, or use parallelism.tensor: 1",
        )


def _young(pool: str) -> str:
    """CEL of spec: whether a pool's node selector, where it tells, asks for GPUs of compute capability 8.0 or newer."""
    s, product, major = f"self.{pool}.pod.nodeSelector", text(PRODUCT), text(COMPUTE_MAJOR)
    return (
        f"self.{pool}.gpusPerReplica == 0 || !has({s}) || "
        f"(!({product} in {s}) || !{s}[{product}].matches({text(BEFORE_AMPERE)})) && "
        f"(!({major} in {s}) || !({s}[{major}] in {one_of(MAJORS_BEFORE_AMPERE)}))"
    )


@rule(
    cel=[
        Cel(
            SPEC,
            f"!self.deterministic || self.rollout.engine != 'vllm' || {other}{cel.IS_COLOCATED} || {_young(pool)}",
            "vLLM's batch-invariant mode (deterministic) needs compute capability 8.0; choose other nodes",
            f".{pool}.pod.nodeSelector",
        )
        for pool, other in (("trainer", "!"), ("rollout", ""))
    ]
)
def deterministic_engines_have_kernels(job: Job) -> Iterator[Violation]:
    """The engine itself looks at its GPU where no label tells (``vllm_arguments.py``)."""
    if not job.spec.deterministic or not job.has_vllm_on_gpus:
        return
    name, pod = ("trainer", job.spec.trainer.pod)
    if job.resolved.placement == "separate":
        name, pod = ("rollout", job.spec.rollout.pod)
    if (label := before_ampere(pod)) is not None:
        yield Violation(
            f"spec.{name}.pod.nodeSelector",
            "deterministic: true needs vLLM's batch-invariant mode, which requires compute capability 8.0 (A100) or "
            f"more, but GPUs of {label} have less",
            "choose nodes with newer GPUs, or remove deterministic",
        )
