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
    """Passages to search by keywords, ranked by BM25."""

    source: Location = Field(description="Passages, one per row; as data.train.source.")
    split: ShortText | None = Field(default=None, description="Split of a Hugging Face data set.")
    text: ShortText = Field(default="text", description="Column with the passage text.")
    title: ShortText | None = Field(
        default=None, description="Column with the title, which is searched too. Default: no titles."
    )
    passages: int = Field(default=3, ge=1, le=100, description="Passages that a call returns, best first.")
    passage_characters: int | None = Field(
        default=None, ge=1, le=1000000, description="Longer texts are cut in what a call returns. Default: unlimited."
    )
    stopwords: StopwordsLanguage | None = Field(
        default=None, description="Ignore a language's most common words (lists of bm25s). Default: none."
    )
    k1: float = Field(default=1.5, ge=0, le=10, description="Weight of repeated words in a text.")
    b: float = Field(default=0.75, ge=0, le=1, description="Length normalisation.")


class ToolSpec(SpecModel):
    """Something that the model can call."""

    type: ToolType = Field(
        description="python: runs the model's program in a sandbox. calculator: evaluates an arithmetic expression. "
        "search: finds passages in a corpus. custom: your Python function, run in the driver, not in the sandbox."
    )
    name: ToolName | None = Field(
        default=None, description="Name the model calls it by. Default: the type or function name."
    )
    function: FunctionPath | None = Field(
        default=None,
        description="custom: module:function. It gets the model's arguments as keyword arguments and returns the "
        "observation (text or anything JSON can hold). It may be async; otherwise it runs in a thread.",
    )
    corpus: CorpusSpec | None = Field(default=None, description="search: what to search, and how.")
    description: ShortText | None = Field(
        default=None, description="For the model. Default: the first paragraph of the function's docstring."
    )

    concurrency: int | None = Field(
        default=None,
        ge=1,
        le=65536,
        description="custom: concurrent calls, over all episodes. Others wait; callSeconds excludes the wait. "
        "Default: unlimited.",
    )

    @property
    def label(self) -> str:
        """The name by which the model calls it."""
        return self.name or (self.function or self.type).rpartition(":")[2]


class SandboxSpec(SpecModel):
    """Where the model's programs run: next to the driver in separate processes, or at a service."""

    url: BaseUrl | None = Field(
        default=None,
        description="SandboxFusion-compatible service (POST url/run_code) that runs programs instead of this "
        "machine, with its own isolation and limits. Default: none.",
    )
    deadline_seconds: int = Field(
        default=600,
        ge=1,
        le=86400,
        description="url: how long to retry, with backoff, a service that fails, is busy or unreachable before the "
        "run ends.",
    )
    isolation: Literal["auto", "namespaces", "landlock", "none"] = Field(
        default="auto",
        description="auto: namespaces where the machine allows them, else landlock; an error if neither works. none: "
        "no isolation; only for toys that you trust.",
    )
    workers: int | None = Field(
        default=None,
        ge=1,
        le=1024,
        description="Concurrent programs. Default: 2 next to the driver (at most 32), 16 at a service.",
    )
    memory_megabytes: int = Field(
        default=512,
        ge=32,
        le=1048576,
        description="Memory of one program (MiB). A service enforces it if newer than June 2025.",
    )
    processes: int = Field(default=32, ge=1, le=1024, description="Processes and threads per program.")


class EnvironmentSpec(SpecModel):
    """How a prompt becomes an episode: one answer, or several turns with tools or your program."""

    type: EnvironmentType = Field(
        default="singleTurn",
        description="singleTurn: the model answers once. tools: it may call tools and continues with their results. "
        "custom: your program queries the model as often as it likes. agent: an unmodified program queries it "
        "through an OpenAI-compatible endpoint.",
    )
    function: FunctionPath | None = Field(
        default=None,
        description="custom: module:function of an async function (task, model, world), or of a class with such a "
        "method named episode, or with reset and step. agent: of a function (task, client) that runs in its own "
        "processes and returns the reward.",
    )
    command: Annotated[Listed[CommandPart], Field(max_length=64)] = Field(
        default=(),
        description="agent, instead of function: a program with arguments, run per episode in the job file's folder. "
        "It gets OPENAI_BASE_URL, OPENAI_API_KEY and OPENAI_MODEL as environment variables and the task as JSON on "
        "stdin. The last line of stdout is the reward, as JSON.",
    )
    params: FreeForm = Field(
        default={},
        description="custom, agent: keyword arguments for the function or the class constructor; a command gets them "
        "in its task.",
    )
    tools: Annotated[Listed[ToolSpec], Field(max_length=64)] = Field(
        default=(), description="tools: what the model can call."
    )
    call_format: Annotated[CallFormat | None, Fallback("hermes")] = Field(
        default=None,
        description="tools, agent: format of a call. hermes: JSON in <tool_call> tags (Qwen, Hermes). codeFence: a "
        "```python block, for a single tool (ReTool). llama: JSON with name and parameters. pythonic: a list of "
        "Python calls.",
    )
    sandbox: SandboxSpec | None = Field(
        default=None, description="For the python tool. Default: the best isolation this machine supports."
    )
    max_turns: Annotated[int | None, Fallback(8)] = Field(
        default=None, ge=1, le=1024, description="Model answers per episode, which is then truncated."
    )
    max_turn_tokens: int | None = Field(
        default=None,
        ge=1,
        le=16777216,
        description="Maximum answer length, tokens. Default: the rest of rollout.maxResponseTokens, which limits the "
        "episode including observations.",
    )
    max_observation_tokens: int | None = Field(
        default=None,
        ge=1,
        le=16777216,
        description="tools: maximum observation length, tokens. Longer ones lose their middle. Default: unlimited.",
    )
    max_calls: int | None = Field(
        default=None,
        ge=1,
        le=65536,
        description="tools: calls per episode. Further ones are not made, and the model is told. Default: unlimited.",
    )
    max_calls_per_turn: Annotated[int | None, Fallback(8)] = Field(
        default=None,
        ge=1,
        le=65536,
        description="tools: calls per answer. Further ones are not made, and the model is told.",
    )
    call_seconds: Annotated[int | None, Fallback(60)] = Field(
        default=None,
        ge=1,
        le=86400,
        description="tools: timeout of one call or program. The model is told.",
    )
    agents: Annotated[int | None, Fallback(16)] = Field(
        default=None,
        ge=1,
        le=4096,
        description="agent: concurrent agent processes. An async function runs 32 episodes in each.",
    )
    agent_seconds: Annotated[int | None, Fallback(600)] = Field(
        default=None,
        ge=1,
        le=604800,
        description="agent: timeout per episode, not counting waits for the model. The episode is then truncated.",
    )
