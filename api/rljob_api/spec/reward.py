"""spec.reward: what a response is worth."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rljob_api.spec.base import FreeForm, FunctionPath, Listed, SourceName, SpecModel
from rljob_api.spec.environment import SandboxSpec
from rljob_api.spec.judge import JudgeSpec
from rljob_api.spec.reward_model import RewardModelSpec

RewardType = Literal[
    "gsm8k",
    "math",
    "exactMatch",
    "multipleChoice",
    "jsonSchema",
    "codeTests",
    "reasoningGym",
    "pattern",
    "length",
    "environment",
    "judge",
    "rewardModel",
    "custom",
]


class RewardFunction(SpecModel):
    """One term of the reward; a sample's score is the weighted sum of those that apply to its source."""

    type: RewardType = Field(
        description="gsm8k: the number after #### (or the last one) is the answer. math: the last boxed expression is "
        "equivalent to it. exactMatch: the text is the answer. multipleChoice: the letter it "
        "states is. jsonSchema: it is JSON that a schema allows. codeTests: its program passes tests, in a sandbox. "
        "reasoningGym: what the problem's own scoring says, for tasks of that type. "
        "pattern: a regular expression occurs. length: linear in "
        "the response's tokens. environment: what the program or agent of rollout.environment has returned. judge: "
        "what another model says of it. rewardModel: the score of a model with a head. custom: your Python function."
    )
    name: SourceName | None = Field(default=None, description="Name in metrics. Default: the type.")
    weight: float = Field(default=1.0, ge=-1000, le=1000, description="Factor of this term.")
    sources: Annotated[Listed[SourceName], Field(max_length=32)] = Field(
        default=(), description="Names of the data sources it applies to. Default: all."
    )
    function: FunctionPath | None = Field(
        default=None,
        description="custom: module:function. It gets what it names among prompt, response, answer, source, tokens, "
        "finish, conversation, returned and the columns of the row, and returns a number (at most 1e15 in size); it "
        "may be async. Functions written for verl (data_source, solution_str, ground_truth, extra_info) and TRL "
        "(prompts, completions, columns) are told by these names.",
    )
    pattern: Annotated[str, Field(min_length=1, max_length=1024)] | None = Field(
        default=None, description="pattern: the regular expression (Python syntax)."
    )
    judge: JudgeSpec | None = Field(default=None, description="judge: who is asked, what, and how often.")
    reward_model: RewardModelSpec | None = Field(
        default=None, description="rewardModel: which, and how it is computed."
    )
    params: FreeForm = Field(
        default={}, description="Further keyword arguments of the function, e.g. {partial: true} for exactMatch."
    )


class Overlong(SpecModel):
    """Soft punishment of long responses (DAPO, arXiv 2503.14476, equation 13)."""

    buffer_tokens: int = Field(
        ge=1, le=16777216, description="The punishment grows linearly over this many tokens before maxResponseTokens."
    )
    penalty: float = Field(default=1.0, gt=0, le=1000, description="Punishment at maxResponseTokens.")


class RewardClip(SpecModel):
    """Bounds of a sample's reward."""

    low: float = Field(ge=-1000000, le=1000000, description="Smallest.")
    high: float = Field(ge=-1000000, le=1000000, description="Largest.")


class Reward(SpecModel):
    """What a response is worth."""

    functions: Annotated[Listed[RewardFunction], Field(min_length=1, max_length=32)] = Field(
        description="The terms of the reward."
    )
    overlong: Overlong | None = Field(default=None, description="Soft punishment of long responses. Default: none.")
    clip: RewardClip | None = Field(default=None, description="Bounds for what is trained on. Default: none.")
    normalize: bool = Field(default=False, description="Train on (reward - mean) / deviation of the batch.")
    timeout_seconds: int = Field(
        default=20, ge=1, le=86400, description="Longest time for scoring one sample, all functions together."
    )
    on_error: Literal["fail", "score", "drop"] = Field(
        default="fail",
        description="When a function raises, exceeds the time or loses its process twice, or a judge gives no score: "
        "fail stops the run and names the sample, score gives the sample errorScore and counts it, drop leaves its "
        "whole group out of training (in a validation it is fail).",
    )
    error_score: float = Field(default=0.0, ge=-1000000, le=1000000, description="The score that onError: score gives.")
    workers: int = Field(default=2, ge=1, le=1024, description="Processes that score samples.")
    sandbox: SandboxSpec | None = Field(
        default=None,
        description="Where the tests of codeTests and the scoring of reasoningGym run. Default: one that is isolated "
        "as well as this machine can.",
    )
