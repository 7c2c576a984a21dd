"""Rules about spec.reward.functions[].rewardModel and spec.rewardModel, the pool that computes it."""

from __future__ import annotations

from collections.abc import Iterator

from rljob_api.rules.cel import FUNCTION, SPEC, Cel
from rljob_api.rules.registry import Job, rule
from rljob_api.violations import Violation


@rule(
    cel=Cel(
        FUNCTION,
        "(self.type == 'rewardModel') == has(self.rewardModel)",
        "is required by type rewardModel, and only there; set its source",
        ".rewardModel",
    )
)
def reward_models_have_a_source(job: Job) -> Iterator[Violation]:
    for index, function in enumerate(job.spec.reward.functions):
        path = f"spec.reward.functions[{index}].rewardModel"
        if function.type == "rewardModel" and function.reward_model is None:
            yield Violation(path, "is required by type rewardModel", "set its source, a path or hub id")
        if function.type != "rewardModel" and function.reward_model is not None:
            yield Violation(path, f"does not apply to type {function.type}", "remove it, or use type: rewardModel")


@rule(not_in_cel="the content of params is hidden from CEL")
def reward_models_have_no_params(job: Job) -> Iterator[Violation]:
    for index, function in enumerate(job.spec.reward.functions):
        if function.type == "rewardModel" and function.params:
            yield Violation(
                f"spec.reward.functions[{index}].params",
                "does not apply to type rewardModel",
                "put its settings below rewardModel",
            )


@rule(
    cel=Cel(
        SPEC,
        "!has(self.rewardModel) || self.reward.functions.exists(f, f.type == 'rewardModel')",
        "no function of reward.functions has type rewardModel; remove the pool, or add one",
        ".rewardModel",
    )
)
def pools_of_reward_models_have_work(job: Job) -> Iterator[Violation]:
    if job.spec.reward_model is not None and not any(f.type == "rewardModel" for f in job.spec.reward.functions):
        yield Violation(
            "spec.rewardModel", "no function of reward.functions has type rewardModel", "remove the pool, or add one"
        )


@rule(
    cel=Cel(
        SPEC,
        "!has(self.rewardModel) || self.reward.functions.all(f, !has(f.rewardModel) || f.rewardModel.workers == 1)",
        "workers run next to the driver, but the reward model runs in the pool spec.rewardModel; remove them",
        ".reward.functions",
    )
)
def reward_models_in_a_pool_have_no_workers(job: Job) -> Iterator[Violation]:
    if job.spec.reward_model is None:
        return
    for index, function in enumerate(job.spec.reward.functions):
        if function.reward_model is not None and function.reward_model.workers != 1:
            yield Violation(
                f"spec.reward.functions[{index}].rewardModel.workers",
                "are processes next to the driver, but the reward model runs in the pool spec.rewardModel",
                "remove it, and set spec.rewardModel.replicas",
            )
