"""spec.rollout.environment: what turns a prompt into an episode."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rljob_api.spec.base import Fallback, FreeForm, FunctionPath, Listed, ShortText, SpecModel

EnvironmentType = Literal["singleTurn", "tools", "custom"]
CallFormat = Literal["hermes", "codeFence", "llama", "pythonic"]

ToolName = Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[A-Za-z_][A-Za-z0-9_-]*$")]


class ToolSpec(SpecModel):
    """Something that the model may call."""

    type: Literal["calculator", "custom"] = Field(
        description="calculator: evaluates an arithmetic expression. custom: your Python function."
    )
    name: ToolName | None = Field(
        default=None, description="As the model calls it. Default: calculator, or the function's name."
    )
    function: FunctionPath | None = Field(
        default=None,
        description="custom: module:function. The model's arguments come as keyword arguments; what it returns (text, "
        "or anything JSON can hold) is the observation. It may be async; one that is not runs in a thread.",
    )
    description: ShortText | None = Field(
        default=None, description="For the model. Default: the first paragraph of the function's docstring."
    )

    @property
    def label(self) -> str:
        """As the model calls it."""
        return self.name or (self.function or self.type).rpartition(":")[2]


class EnvironmentSpec(SpecModel):
    """What a prompt and the model come to: one answer, or turns with tools or a program of yours between them."""

    type: EnvironmentType = Field(
        default="singleTurn",
        description="singleTurn: the model answers once. tools: it may call tools and goes on with what they say. "
        "custom: your program asks the model as often as it likes.",
    )
    function: FunctionPath | None = Field(
        default=None,
        description="custom: module:function of an async function (task, model, world), or of a class with such a "
        "method named episode, or with reset and step.",
    )
    params: FreeForm = Field(
        default={}, description="custom: keyword arguments of the function, or of the class when it is made."
    )
    tools: Annotated[Listed[ToolSpec], Field(max_length=64)] = Field(
        default=(), description="tools: what may be called."
    )
    call_format: Annotated[CallFormat | None, Fallback("hermes")] = Field(
        default=None,
        description="tools: how a call is written. hermes: JSON between <tool_call> tags (Qwen, Hermes). codeFence: a "
        "```python block, for the one tool there is (ReTool). llama: JSON with name and parameters. pythonic: a list "
        "of Python calls.",
    )
    max_turns: Annotated[int | None, Fallback(8)] = Field(
        default=None, ge=1, le=1024, description="Answers of the model in one episode; then it is cut."
    )
    max_turn_tokens: int | None = Field(
        default=None,
        ge=1,
        le=16777216,
        description="Longest answer, tokens. Default: what is left of rollout.maxResponseTokens, which bounds an "
        "episode with all that it observes.",
    )
    max_observation_tokens: int | None = Field(
        default=None,
        ge=1,
        le=16777216,
        description="tools: longest observation, tokens; of a longer one the middle is left out. Default: unbounded.",
    )
    call_seconds: Annotated[int | None, Fallback(60)] = Field(
        default=None, ge=1, le=86400, description="tools: longest time of one call; then the model is told so."
    )
