"""What a rule is: one sentence about several fields of a valid-looking job, and the violations it finds.

A rule sees the job as written and the job as resolved, because presets and defaults count too. Rules know no files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

from rljob_api.method import EstimatorMethod, PolicyLossMethod
from rljob_api.methods import ESTIMATORS, POLICY_LOSSES
from rljob_api.resolution import resolve
from rljob_api.resolved import ResolvedSpec
from rljob_api.spec.data import TrainPart
from rljob_api.spec.job import Metadata, RLJob, Spec
from rljob_api.spec.pod import Pod
from rljob_api.violations import Violation


@dataclass(frozen=True)
class Job:
    """What a rule looks at."""

    job: RLJob

    @property
    def metadata(self) -> Metadata:
        return self.job.metadata

    @property
    def spec(self) -> Spec:
        """As written."""
        return self.job.spec

    @cached_property
    def resolved(self) -> ResolvedSpec:
        """With presets and defaults filled in."""
        return resolve(self.job).spec

    @property
    def estimator(self) -> EstimatorMethod:
        return ESTIMATORS[self.resolved.algorithm.advantage.estimator]

    @property
    def policy_loss(self) -> PolicyLossMethod:
        return POLICY_LOSSES[self.resolved.algorithm.policy_loss.type]

    @property
    def pods(self) -> list[tuple[str, Pod]]:
        """Pod settings of the pools and the head, with their paths."""
        spec = self.spec
        return [
            ("spec.rollout.pod", spec.rollout.pod),
            ("spec.trainer.pod", spec.trainer.pod),
            ("spec.head.pod", spec.head.pod),
        ]

    @property
    def train_parts(self) -> list[tuple[str, TrainPart]]:
        """Training sources with their paths."""
        train = self.spec.data.train
        if train.parts:
            return [(f"spec.data.train.parts[{index}]", part) for index, part in enumerate(train.parts)]
        return [("spec.data.train", train.sources[0])]


Rule = Callable[[Job], Iterator[Violation]]
RULES: dict[str, Rule] = {}


def rule(function: Rule) -> Rule:
    """Registers a rule under its function's name."""
    if function.__name__ in RULES:
        raise ValueError(f"there are two rules called {function.__name__}")
    RULES[function.__name__] = function
    return function


def broken(job: RLJob) -> list[Violation]:
    """Every violation of every rule, in the order of the rules."""
    seen = Job(job)
    return [violation for check in RULES.values() for violation in check(seen)]
