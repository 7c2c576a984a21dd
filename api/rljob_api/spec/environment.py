"""spec.rollout.environment: what turns a prompt into an episode."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rljob_api.spec.base import BaseUrl, Fallback, FreeForm, FunctionPath, Listed, Location, ShortText, SpecModel

EnvironmentType = Literal["singleTurn", "tools", "custom", "agent"]
CallFormat = Literal["hermes", "codeFence", "llama", "pythonic"]
ToolType = Literal["python", "calculator", "search", "custom"]
StopwordsLanguage = Literal[
    "danish",
    "dutch",
    "english",
    "french",
    "german",
    "italian",
    "norwegian",
    "portuguese",
    "russian",
    "spanish",
    "swedish",
    "turkish",
]

ToolName = Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[A-Za-z_][A-Za-z0-9_-]*$")]


CommandPart = Annotated[str, Field(min_length=1, max_length=1024)]


class CorpusSpec(SpecModel):
    """Passages that a tool finds by the words of a query, ranked by BM25."""

    source: Location = Field(description="The passages, one a row; as data.train.source.")
    split: ShortText | None = Field(default=None, description="Split of a Hugging Face data set.")
    text: ShortText = Field(default="text", description="The column with a passage's text.")
    title: ShortText | None = Field(
        default=None, description="The column with its title, whose words are found too. Default: passages have none."
    )
    passages: int = Field(default=3, ge=1, le=100, description="Passages that a call returns, the best first.")
    passage_characters: int | None = Field(
        default=None, ge=1, le=1000000, description="What a call returns of a longer text is cut. Default: unbounded."
    )
    stopwords: StopwordsLanguage | None = Field(
        default=None, description="Leaves out the commonest words of a language (bm25s' lists). Default: none are."
    )
    k1: float = Field(default=1.5, ge=0, le=10, description="How much further occurrences of a word in a text count.")
    b: float = Field(default=0.75, ge=0, le=1, description="How much is taken off for the length of a text.")


class ToolSpec(SpecModel):
    """Something that the model may call."""

    type: ToolType = Field(
        description="python: runs a program that the model writes, in a sandbox. calculator: evaluates an arithmetic "
        "expression. search: finds passages of a corpus. custom: your Python function, which runs in the driver and "
        "not in the sandbox."
    )
    name: ToolName | None = Field(
        default=None, description="As the model calls it. Default: the type, or the function's name."
    )
    function: FunctionPath | None = Field(
        default=None,
        description="custom: module:function. The model's arguments come as keyword arguments; what it returns (text, "
        "or anything JSON can hold) is the observation. It may be async; one that is not runs in a thread.",
    )
    corpus: CorpusSpec | None = Field(default=None, description="search: what it looks in, and how.")
    description: ShortText | None = Field(
        default=None, description="For the model. Default: the first paragraph of the function's docstring."
    )

    concurrency: int | None = Field(
        default=None,
        ge=1,
        le=65536,
        description="custom: calls at once, over all episodes; further ones wait, which callSeconds does not count. "
        "Default: unbounded.",
    )

    @property
    def label(self) -> str:
        """The name by which the model calls it."""
        return self.name or (self.function or self.type).rpartition(":")[2]


class SandboxSpec(SpecModel):
    """Where programs run that the model writes: beside the driver, in processes of their own, or at a service."""

    url: BaseUrl | None = Field(
        default=None,
        description="A service with SandboxFusion's interface (POST url/run_code), which runs them in place of this "
        "machine and contains and limits them in its own way. Default: none.",
    )
    deadline_seconds: int = Field(
        default=600,
        ge=1,
        le=86400,
        description="url: how long a service that fails, is busy or away is asked again, later each time; then the "
        "run ends.",
    )
    isolation: Literal["auto", "namespaces", "landlock", "none"] = Field(
        default="auto",
        description="What holds them. auto: namespaces where the machine lets us make them, else landlock; refused "
        "where neither works. none: nothing does, for toys that are trusted.",
    )
    workers: int | None = Field(
        default=None,
        ge=1,
        le=1024,
        description="Programs that run at once. Default: 2 beside the driver, where 32 is the most, 16 at a service.",
    )
    memory_megabytes: int = Field(
        default=512,
        ge=32,
        le=1048576,
        description="Of one program (MiB). A service is told it, and heeds it if it is newer than June 2025.",
    )
    processes: int = Field(default=32, ge=1, le=1024, description="Processes and threads of one program.")


class EnvironmentSpec(SpecModel):
    """What a prompt and the model come to: one answer, or turns with tools or a program of yours between them."""

    type: EnvironmentType = Field(
        default="singleTurn",
        description="singleTurn: the model answers once. tools: it may call tools and goes on with what they say. "
        "custom: your program asks the model as often as it likes. agent: a program that knows nothing of rljob asks "
        "it through an OpenAI-compatible endpoint.",
    )
    function: FunctionPath | None = Field(
        default=None,
        description="custom: module:function of an async function (task, model, world), or of a class with such a "
        "method named episode, or with reset and step. agent: of a function (task, client), which runs in "
        "processes of its own and returns the reward.",
    )
    command: Annotated[Listed[CommandPart], Field(max_length=64)] = Field(
        default=(),
        description="agent, in place of function: a program and its arguments, run for each episode in the job file's "
        "folder. It has OPENAI_BASE_URL, OPENAI_API_KEY and OPENAI_MODEL in its environment and the task as JSON on "
        "its standard input; the last line of its standard output is the reward, as JSON.",
    )
    params: FreeForm = Field(
        default={},
        description="custom, agent: keyword arguments of the function, or of the class when it is made; a command has "
        "them in its task.",
    )
    tools: Annotated[Listed[ToolSpec], Field(max_length=64)] = Field(
        default=(), description="tools: what may be called."
    )
    call_format: Annotated[CallFormat | None, Fallback("hermes")] = Field(
        default=None,
        description="tools, agent: how a call is written. hermes: JSON between <tool_call> tags (Qwen, Hermes). "
        "codeFence: a ```python block, for the one tool there is (ReTool). llama: JSON with name and parameters. "
        "pythonic: a list of Python calls.",
    )
    sandbox: SandboxSpec | None = Field(
        default=None, description="Of the tool python. Default: one that is isolated as well as this machine can."
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
    max_calls: int | None = Field(
        default=None,
        ge=1,
        le=65536,
        description="tools: calls in one episode; what the model calls then is not called, and it is told so. Default: "
        "unbounded.",
    )
    max_calls_per_turn: Annotated[int | None, Fallback(8)] = Field(
        default=None,
        ge=1,
        le=65536,
        description="tools: calls in one answer; further ones are not made, and the model is told so.",
    )
    call_seconds: Annotated[int | None, Fallback(60)] = Field(
        default=None,
        ge=1,
        le=86400,
        description="tools: longest time of one call, or of one program; then the model is told so.",
    )
    agents: Annotated[int | None, Fallback(16)] = Field(
        default=None,
        ge=1,
        le=4096,
        description="agent: how many run at once, each in a process of its own; of an async function 32 in each.",
    )
    agent_seconds: Annotated[int | None, Fallback(600)] = Field(
        default=None,
        ge=1,
        le=604800,
        description="agent: longest time of one, not counting how long it waits for the model; then its episode is "
        "cut.",
    )
