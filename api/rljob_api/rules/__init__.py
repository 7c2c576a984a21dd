"""The rules that concern more than one field, or more than a type and bounds can say.

A rule is one decorated function, and all that is known of it stands together::

    @rule(
        cel=Cel(
            RANDOM,                                            # where the API server checks it
            "self.hiddenSize % self.heads == 0",               # what has to be true there
            "must divide hiddenSize; choose heads that divide it",
            ".heads",                                          # the field that is blamed
        )
    )
    def heads_divide_hidden_size(job: Job) -> Iterator[Violation]:
        ...                                                    # the same in Python, with the values in the message

Two judges hold a job against it. ``rljob validate``, ``run``, ``plan`` and the operator call the function. The API
server evaluates the CEL (https://kubernetes.io/docs/reference/using-api/cel/), which ``rljob_api.crd`` writes into the
CustomResourceDefinition, so that ``kubectl apply`` refuses what ``rljob validate`` refuses. Each has its own message:
ours has the values, while a message of the API server is a fixed text. A rule that applies at several places has one
``Cel`` for each. A rule that CEL can't express says why in ``not_in_cel``; the operator reports it by the condition
Accepted=False. With both, CEL expresses the rule for most jobs, and ``not_in_cel`` says for which not.

That both say the same of the same job is a test: tests/api has a job that keeps each rule and one that breaks it, and
tests/integration sends those and thousands of generated ones to both. The CEL of a job may cost only so much, and the
CRD only so many bytes; ``cel.brief`` helps with the second.

One file holds the rules of one topic. ``TOPICS`` gives the order in which violations are told, and in which entries
stand in the CRD.
"""

from __future__ import annotations

from collections.abc import Mapping

from rljob_api.rules import (
    algorithm,
    correction,
    data,
    environment,
    estimators,
    judge,
    kubernetes,
    lifecycle,
    lora,
    model,
    pipeline,
    pods,
    pools,
    reward,
    reward_model,
    templates,
    variables,
    volumes,
)
from rljob_api.rules.registry import Job, JobRule
from rljob_api.spec.job import RLJob
from rljob_api.violations import Violation

__all__ = ["RULES", "Job", "Rule", "broken"]

TOPICS = (
    *(model, lora, data, reward, judge, reward_model, algorithm, estimators, correction, pipeline),
    *(pools, variables, environment, volumes, pods, lifecycle, templates, kubernetes),
)
RULES: Mapping[str, JobRule] = {
    name: entry for topic in TOPICS for name, entry in vars(topic).items() if isinstance(entry, JobRule)
}


def broken(job: RLJob) -> list[Violation]:
    """Every violation of every rule, in the order of the rules."""
    seen = Job(job)
    return [violation for judge in RULES.values() for violation in judge(seen)]
