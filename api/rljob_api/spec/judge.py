"""spec.reward.functions[].judge: a language model that scores responses, behind an OpenAI-compatible endpoint or on the
job's own engines (spec.judge)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rljob_api.spec.base import BaseUrl, EnvName, Listed, LongText, ShortText, SpecModel

PLACEHOLDERS = ("prompt", "response", "answer")
"""What a template may name in braces."""

Template = Annotated[str, Field(min_length=1, max_length=16384)]


class JudgeLabel(SpecModel):
    """What the judge may say, and its score."""

    label: Annotated[str, Field(min_length=1, max_length=64)] = Field(description="The words; capitals don't matter.")
    score: float = Field(ge=-1000000, le=1000000, description="What they are worth.")


class JudgeParser(SpecModel):
    """How a score is read from what the judge says. An answer that does not fit has no score."""

    type: Literal["number", "pattern", "json", "label"] = Field(
        default="number",
        description="number: the one number in the last line (of 7/10 the first, where high is 10). pattern: what the "
        "group of a regular expression finds last. json: a field of a JSON object. label: the last line, behind its "
        "last colon, is one of labels.",
    )
    pattern: Annotated[str, Field(min_length=1, max_length=1024)] | None = Field(
        default=None, description="pattern: with exactly one group (Python syntax)."
    )
    field: ShortText | None = Field(default=None, description="json: its name; true and false are high and low.")
    labels: Annotated[Listed[JudgeLabel], Field(max_length=16)] = Field(
        default=(), description="label, and instead of numbers pattern and json: what may be said."
    )
    low: float = Field(default=0.0, ge=-1000000, le=1000000, description="Smallest number that is taken.")
    high: float = Field(default=10.0, ge=-1000000, le=1000000, description="Largest.")
    scale: bool = Field(default=True, description="Numbers become (number - low) / (high - low).")


class JudgeSpec(SpecModel):
    """Another model's opinion: of an endpoint, asked over HTTP (POST baseUrl/chat/completions), or of spec.judge."""

    base_url: BaseUrl | None = Field(
        default=None,
        description="Such as https://api.example.com/v1; without user, password and query. Default: spec.judge is "
        "asked, a pool of the job's own.",
    )
    model: ShortText | None = Field(default=None, description="As the endpoint calls it; with baseUrl alone.")
    api_key_env: EnvName | None = Field(
        default=None,
        description="Environment variable of the driver with the API key (on a cluster head.pod.env, from a Secret). "
        "Default: no key is sent.",
    )
    template: Template = Field(
        description="The question, with {response} and perhaps {prompt} and {answer}. Each is put between marks that "
        "it cannot contain; other braces are text."
    )
    system: LongText | None = Field(default=None, description="System message, before what is said of the marks.")
    parser: JudgeParser = Field(default=JudgeParser(), description="How a score is read from its answer.")
    temperature: float = Field(default=0.0, ge=0, le=2, description="Of the judge.")
    max_tokens: int = Field(default=1024, ge=1, le=1048576, description="Longest answer; a longer one has no score.")
    concurrency: int | None = Field(
        default=None,
        ge=1,
        le=4096,
        description="Requests at once. Default: 16 of an endpoint, of spec.judge as many as its engines take.",
    )
    requests_per_minute: int | None = Field(
        default=None, ge=1, le=1000000, description="Most requests begun in any 60 seconds. Default: no limit."
    )
    tokens_per_minute: int | None = Field(
        default=None,
        ge=1,
        le=1000000000,
        description="Most tokens in any 60 seconds: those of questions and answers, estimated from the text and "
        "maxTokens until the endpoint has counted. Default: no limit.",
    )
    request_seconds: int = Field(
        default=60,
        ge=1,
        le=86400,
        description="Longest time of one request; of spec.judge: the longest in which it answers none.",
    )
    deadline_seconds: int = Field(
        default=600,
        ge=1,
        le=86400,
        description="How long an endpoint that fails, is busy or away is asked again, later each time; then onError.",
    )
    attempts: int = Field(
        default=3, ge=1, le=100, description="How often a question is asked whose answer cannot be read."
    )
    cache: bool = Field(
        default=True,
        description="Remembers scores: a question that was answered is not asked again, after a kill neither.",
    )
    most_requests: int | None = Field(
        default=None, ge=1, le=1000000000, description="Requests of the whole run; then onError. Default: no limit."
    )
    most_tokens: int | None = Field(
        default=None,
        ge=1,
        le=1000000000000,
        description="Tokens of the whole run, as the endpoint counts them; then onError. Default: no limit.",
    )


def plain_label(text: str) -> str:
    """A label, or what a judge said, as they are compared: small letters, without what surrounds the words."""
    return " ".join(text.casefold().split()).strip(" *_`\"'.!()[]{}<>#")
