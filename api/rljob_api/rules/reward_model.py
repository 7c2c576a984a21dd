"""Rules about spec.reward.functions[].rewardModel."""

from __future__ import annotations

from collections.abc import Iterator

from rljob_api.rules.cel import FUNCTION, Cel
from rljob_api.rules.registry import Job, rule
from rljob_api.violations import Violation


@rule(
    cel=Cel(
        FUNCTION,
        "(self.type == 'rewardModel') == has(self.rewardModel)",
        "belongs to type rewardModel, which needs it; write its source",
        ".rewardModel",
    )
)
def reward_models_have_a_source(job: Job) -> Iterator[Violation]:
    for index, function in enumerate(job.spec.reward.functions):
        path = f"spec.reward.functions[{index}].rewardModel"
        if function.type == "rewardModel" and function.reward_model is None:
            yield Violation(path, "is required by type rewardModel", "write its source, a path or hub id")
        if function.type != "rewardModel" and function.reward_model is not None:
            yield Violation(path, f"has no meaning for type {function.type}", "remove it, or use type: rewardModel")


@rule(not_in_cel="the content of params is hidden from CEL")
def reward_models_have_no_params(job: Job) -> Iterator[Violation]:
    for index, function in enumerate(job.spec.reward.functions):
        if function.type == "rewardModel" and function.params:
            yield Violation(
                f"spec.reward.functions[{index}].params",
                "has no meaning for type rewardModel",
                "write its settings below rewardModel",
            )
