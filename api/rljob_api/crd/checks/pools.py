"""CEL for the rules about placement, spec.rollout and spec.trainer."""

from __future__ import annotations

from collections.abc import Iterator

from rljob_api.crd import expressions as cel
from rljob_api.crd.checks.check import PODS, SPEC, TRAINER, Check
from rljob_api.crd.expressions import one_of
from rljob_api.rules.pools import RESERVED_ENV


def checks() -> Iterator[Check]:
    """In the order of the rules."""
    colocated = "colocated engines take the trainer's devices and have no pool of their own; remove it"
    for field in ("replicas", "minReplicas", "maxReplicas"):
        yield Check(
            "colocated_engines_are_sized_by_the_trainer",
            SPEC,
            f"!{cel.IS_COLOCATED} || !has(self.rollout.{field})",
            colocated,
            f".rollout.{field}",
        )
    yield Check(
        "colocated_engines_are_sized_by_the_trainer",
        SPEC,
        f"!{cel.IS_COLOCATED} || self.rollout.gpusPerReplica == 0",
        colocated,
        ".rollout.gpusPerReplica",
    )
    yield Check(
        "colocated_engines_need_turns",
        SPEC,
        "!has(self.placement) || self.placement != 'colocated' || self.pipeline.mode == 'sync'",
        "colocated engines and trainer take turns, which only mode sync does; set placement: separate",
        ".placement",
    )
    engine = "self.rollout.parallelism.tensor"
    yield Check(
        "colocated_engines_fill_the_ranks",
        SPEC,
        f"!{cel.IS_COLOCATED} || self.trainer.gpusPerReplica % {engine} == 0",
        "parallelism.tensor must divide trainer.gpusPerReplica; choose a divisor",
        ".rollout.parallelism",
    )
    yield Check(
        "engine_parallelism_fits_its_gpus",
        SPEC,
        f"{cel.IS_COLOCATED} || self.rollout.gpusPerReplica == 0 || self.rollout.gpusPerReplica == {engine}",
        "parallelism.tensor must equal gpusPerReplica; change one of them",
        ".rollout.parallelism",
    )
    for field, sign, remedy in (
        ("minReplicas", "<=", "is more than replicas; lower it, or raise replicas"),
        ("maxReplicas", ">=", "is less than replicas; raise it, or lower replicas"),
    ):
        yield Check(
            "replicas_lie_between_least_and_most",
            SPEC,
            f"{cel.IS_COLOCATED} || !has(self.rollout.{field}) || self.rollout.{field} {sign} {cel.REPLICAS}",
            remedy,
            f".rollout.{field}",
        )
    yield Check(
        "torch_engine_runs_on_one_device",
        ("spec", "rollout"),
        "self.engine != 'torch' || self.parallelism.tensor == 1",
        "the torch engine runs on one device; set it to 1, or use engine: vllm",
        ".parallelism.tensor",
    )
    for field, value in (("topP", "1.0"), ("topK", "0")):
        yield Check(
            "training_samples_from_the_whole_distribution",
            ("spec", "rollout", "sampling"),
            f"self.{field} == {value}",
            f"training on a cut distribution needs its renormalisation; leave it at {value}",
            f".{field}",
        )
    ways = "self.parallelism"
    yield Check(
        "trainer_parallelism_fits_its_ranks",
        TRAINER,
        f"{ways}.replicate * {cel.shards('self')} == {cel.ranks('self')}",
        "replicate x shard must equal the ranks (replicas x gpusPerReplica); shard may be left out",
        ".parallelism",
    )
    message = "is set by rljob or Ray themselves; remove it"
    for pool in ("rollout", "trainer"):
        yield Check(
            "environment_leaves_ours_alone",
            ("spec", pool),
            f"!has(self.env) || self.env.all(k, {_free_name('k')})",
            f"a variable {message}",
            ".env",
        )
        yield Check(
            "variables_are_set_in_one_place",
            ("spec", pool),
            "!has(self.env) || !has(self.pod.env) || self.pod.env.all(e, !(e.name in self.env))",
            f"a variable is set in spec.{pool}.env too; keep one of them",
            ".pod.env",
        )
    for pod in PODS:
        yield Check("environment_leaves_ours_alone", (*pod, "env", "[]"), _free_name("self.name"), message, ".name")


def _free_name(name: str) -> str:
    prefixes = [taken for taken in RESERVED_ENV if taken.endswith("_")]
    whole = [taken for taken in RESERVED_ENV if not taken.endswith("_")]
    return f"!({name} in {one_of(whole)}) && {one_of(prefixes)}.all(p, !{name}.startsWith(p))"
