"""What a rule is, and what it sees of a job: the job as written and as resolved, because presets and defaults count
too. Rules know no files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from rljob_api.method import EstimatorMethod, PolicyLossMethod
from rljob_api.methods import ESTIMATORS, POLICY_LOSSES
from rljob_api.resolution import resolve
from rljob_api.resolved import ResolvedSpec
from rljob_api.rules.cel import Cel
from rljob_api.spec.data import TrainPart
from rljob_api.spec.job import Metadata, RLJob, Spec
from rljob_api.spec.pod import Pod
from rljob_api.spec.pools import JudgePool, RewardModelPool, RolloutSpec, TrainerSpec
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
        """The spec as it is written."""
        return self.job.spec

    @cached_property
    def resolved(self) -> ResolvedSpec:
        """The spec with presets and defaults filled in."""
        return resolve(self.job).spec

    @property
    def has_no_template(self) -> bool:
        """Whether there can be no chat template, as far as the job file says."""
        model = self.spec.model
        by_characters = model.random is not None and model.random.tokenizer.characters is not None
        return by_characters and model.chat_template is None

    @property
    def estimator(self) -> EstimatorMethod:
        return ESTIMATORS[self.resolved.algorithm.advantage.estimator]

    @property
    def policy_loss(self) -> PolicyLossMethod:
        return POLICY_LOSSES[self.resolved.algorithm.policy_loss.type]

    @property
    def has_vllm_on_gpus(self) -> bool:
        """Whether the engines that sample are vLLM's and have GPUs, colocated ones those of the ranks."""
        spec = self.spec
        pool = spec.trainer if self.resolved.placement == "colocated" else spec.rollout
        return spec.rollout.engine == "vllm" and pool.gpus_per_replica > 0

    @property
    def pods(self) -> list[tuple[str, Pod]]:
        """Pod settings of the pools and the head, with their paths."""
        spec = self.spec
        return [*((f"{path}.pod", pool.pod) for path, pool in self.pools), ("spec.head.pod", spec.head.pod)]

    @property
    def pools(self) -> list[tuple[str, RolloutSpec | TrainerSpec | RewardModelPool | JudgePool]]:
        """The settings of the pools, with their paths."""
        spec = self.spec
        found: list[tuple[str, RolloutSpec | TrainerSpec | RewardModelPool | JudgePool | None]] = [
            ("spec.rollout", spec.rollout),
            ("spec.trainer", spec.trainer),
            ("spec.rewardModel", spec.reward_model),
            ("spec.judge", spec.judge),
        ]
        return [(path, pool) for path, pool in found if pool is not None]

    @property
    def engines(self) -> list[tuple[str, RolloutSpec | JudgePool]]:
        """The settings of the pools of engines, with their paths."""
        judge = self.spec.judge
        return [("spec.rollout", self.spec.rollout), *([] if judge is None else [("spec.judge", judge)])]

    @property
    def train_parts(self) -> list[tuple[str, TrainPart]]:
        """Training sources with their paths."""
        train = self.spec.data.train
        if train.parts:
            return [(f"spec.data.train.parts[{index}]", part) for index, part in enumerate(train.parts)]
        return [("spec.data.train", train.sources[0])]


Predicate = Callable[[Job], Iterator[Violation]]


@dataclass(frozen=True)
class JobRule:
    """One rule as both judges know it; called, it yields the violations that it finds in a job."""

    name: str
    predicate: Predicate
    cel: tuple[Cel, ...]
    """What the API server checks, which is the same rule, at each place where it applies."""
    not_in_cel: str
    """Why CEL says nothing of it or, where ``cel`` has entries, not all of it; empty: CEL says all of it."""

    def __call__(self, job: Job) -> Iterator[Violation]:
        return self.predicate(job)


def rule(*, cel: Cel | Iterable[Cel] = (), not_in_cel: str = "") -> Callable[[Predicate], JobRule]:
    """Makes a predicate the rule of its name. A rule without CEL has to say why."""

    def made(predicate: Predicate) -> JobRule:
        entries = (cel,) if isinstance(cel, Cel) else tuple(cel)
        if not entries and not not_in_cel:
            raise ValueError(f"the rule {predicate.__name__} has neither CEL nor a reason why not")
        return JobRule(predicate.__name__, predicate, entries, not_in_cel)

    return made


def exactly_one(path: str, names: Sequence[str], given: Sequence[object]) -> Iterator[Violation]:
    """A violation unless exactly one of several fields is there."""
    present = [name for name, value in zip(names, given, strict=True) if value]
    listed = " and ".join(names) if len(names) == 2 else ", ".join(names)
    if not present:
        yield Violation(path, f"needs one of {listed}", f"set {names[0]}, or another of them")
    elif len(present) > 1:
        yield Violation(path, f"has {' and '.join(present)}, but allows only one of them", f"keep one of {listed}")
