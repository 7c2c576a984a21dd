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
    """One term of the reward. A sample's score is the weighted sum of the terms for its source."""

    type: RewardType = Field(
        description="gsm8k: the number after #### (or the last one) is the answer. math: the last boxed expression "
        "is equivalent to it. exactMatch: the text is the answer. multipleChoice: the stated letter is. jsonSchema: "
        "JSON that matches a schema. codeTests: its program passes tests, in a sandbox. reasoningGym: the problem's "
        "own scoring, for such tasks. pattern: a regular expression matches. length: linear in response tokens. "
        "environment: returned by the program or agent of rollout.environment. judge: another model's verdict. "
        "rewardModel: the score of a model with a head. custom: your Python function."
    )
    name: SourceName | None = Field(default=None, description="Name in metrics. Default: the type.")
    weight: float = Field(default=1.0, ge=-1000, le=1000, description="Weight of this term.")
    sources: Annotated[Listed[SourceName], Field(max_length=32)] = Field(
        default=(), description="Data sources that it applies to. Default: all."
    )
    function: FunctionPath | None = Field(
        default=None,
        description="custom: module:function. Arguments are matched by parameter name: prompt, response, answer, "
        "source, tokens, finish, conversation, returned and the row's columns. It returns a number (at most 1e15 in "
        "size) and may be async. Functions for verl (data_source, solution_str, ground_truth, extra_info) and TRL "
        "(prompts, completions, columns) are recognized by these names.",
    )
    pattern: Annotated[str, Field(min_length=1, max_length=1024)] | None = Field(
        default=None, description="pattern: the regular expression (Python syntax)."
    )
    judge: JudgeSpec | None = Field(default=None, description="judge: which model to ask, what, and how often.")
    reward_model: RewardModelSpec | None = Field(default=None, description="rewardModel: which model, and how it runs.")
    params: FreeForm = Field(
        default={}, description="Extra keyword arguments of the function, e.g. {partial: true} for exactMatch."
    )


class Overlong(SpecModel):
    """Soft penalty for long responses (DAPO, arXiv 2503.14476, equation 13)."""

    buffer_tokens: int = Field(
        ge=1,
        le=16777216,
        description="The penalty grows linearly over this many tokens before maxResponseTokens.",
    )
    penalty: float = Field(default=1.0, gt=0, le=1000, description="Penalty at maxResponseTokens.")


class RewardClip(SpecModel):
    """Bounds of a sample's reward."""

    low: float = Field(ge=-1000000, le=1000000, description="Minimum.")
    high: float = Field(ge=-1000000, le=1000000, description="Maximum.")


class Reward(SpecModel):
    """What a response is worth."""

    functions: Annotated[Listed[RewardFunction], Field(min_length=1, max_length=32)] = Field(
        description="The terms of the reward."
    )
    overlong: Overlong | None = Field(default=None, description="Soft penalty for long responses. Default: none.")
    clip: RewardClip | None = Field(default=None, description="Bounds of the reward that is trained on. Default: none.")
    normalize: bool = Field(default=False, description="Train on (reward - mean) / deviation of the batch.")
    timeout_seconds: int = Field(
        default=20, ge=1, le=86400, description="Timeout for scoring one sample, all functions together."
    )
    on_error: Literal["fail", "score", "drop"] = Field(
        default="fail",
        description="If a function raises, times out or loses its process twice, or a judge gives no score. fail: "
        "stop the run and name the sample. score: use errorScore and count it. drop: do not train on the whole group "
        "(in validation: fail).",
    )
    error_score: float = Field(default=0.0, ge=-1000000, le=1000000, description="The score for onError: score.")
    workers: int = Field(default=2, ge=1, le=1024, description="Processes that score samples.")
    sandbox: SandboxSpec | None = Field(
        default=None,
        description="Where codeTests and reasoningGym scoring run. Default: the best isolation this machine supports.",
    )
