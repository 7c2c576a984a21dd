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
    """A label and its score."""

    label: Annotated[str, Field(min_length=1, max_length=64)] = Field(description="The words; case does not matter.")
    score: float = Field(ge=-1000000, le=1000000, description="Score for this label.")


class JudgeParser(SpecModel):
    """How to read a score from the judge's answer. An answer that does not match has no score."""

    type: Literal["number", "pattern", "json", "label"] = Field(
        default="number",
        description="number: the only number in the last line (for 7/10 the first, if high is 10). pattern: the last "
        "match of a regular expression's group. json: a field of a JSON object. label: the last line, after its last "
        "colon, is one of labels.",
    )
    pattern: Annotated[str, Field(min_length=1, max_length=1024)] | None = Field(
        default=None, description="pattern: with exactly one group (Python syntax)."
    )
    field: ShortText | None = Field(default=None, description="json: field name; true counts as high, false as low.")
    labels: Annotated[Listed[JudgeLabel], Field(max_length=16)] = Field(
        default=(), description="Labels to accept; for pattern and json they replace numbers."
    )
    low: float = Field(default=0.0, ge=-1000000, le=1000000, description="Smallest accepted number.")
    high: float = Field(default=10.0, ge=-1000000, le=1000000, description="Largest accepted number.")
    scale: bool = Field(default=True, description="Map numbers to (number - low) / (high - low).")


class JudgeSpec(SpecModel):
    """A model that scores responses: at an HTTP endpoint (POST baseUrl/chat/completions), or in the pool spec.judge."""

    base_url: BaseUrl | None = Field(
        default=None,
        description="E.g. https://api.example.com/v1, without user, password or query. Default: the job's own pool, "
        "spec.judge.",
    )
    model: ShortText | None = Field(default=None, description="Model name at the endpoint; only with baseUrl.")
    api_key_env: EnvName | None = Field(
        default=None,
        description="The driver's environment variable with the API key (on a cluster head.pod.env, from a Secret). "
        "Default: no key is sent.",
    )
    template: Template = Field(
        description="The question, with {response} and optionally {prompt} and {answer}. Each is enclosed in markers "
        "that it cannot contain. Other braces are literal."
    )
    system: LongText | None = Field(
        default=None, description="System message, placed before the explanation of the markers."
    )
    parser: JudgeParser = Field(default=JudgeParser(), description="How to read a score from the answer.")
    temperature: float = Field(default=0.0, ge=0, le=2, description="Sampling temperature.")
    max_tokens: int = Field(
        default=1024, ge=1, le=1048576, description="Maximum answer length; longer answers have no score."
    )
    concurrency: int | None = Field(
        default=None,
        ge=1,
        le=4096,
        description="Concurrent requests. Default: 16 for an endpoint, as many as the engines take for spec.judge.",
    )
    requests_per_minute: int | None = Field(
        default=None, ge=1, le=1000000, description="Maximum requests started in any 60 seconds. Default: unlimited."
    )
    tokens_per_minute: int | None = Field(
        default=None,
        ge=1,
        le=1000000000,
        description="Maximum tokens (questions and answers) in any 60 seconds, estimated from the text and maxTokens "
        "until the endpoint reports its count. Default: unlimited.",
    )
    request_seconds: int = Field(
        default=60,
        ge=1,
        le=86400,
        description="Timeout of one request. For spec.judge: maximum time without any answer.",
    )
    deadline_seconds: int = Field(
        default=600,
        ge=1,
        le=86400,
        description="How long to retry, with backoff, an endpoint that fails, is busy or unreachable; then onError.",
    )
    attempts: int = Field(default=3, ge=1, le=100, description="How often to ask if the answer cannot be parsed.")
    cache: bool = Field(
        default=True,
        description="Cache scores: answered questions are not asked again, even after a kill.",
    )
    most_requests: int | None = Field(
        default=None, ge=1, le=1000000000, description="Request budget of the run; then onError. Default: unlimited."
    )
    most_tokens: int | None = Field(
        default=None,
        ge=1,
        le=1000000000000,
        description="Token budget of the run, as counted by the endpoint; then onError. Default: unlimited.",
    )


def plain_label(text: str) -> str:
    """A label, or what a judge said, as they are compared: small letters, without what surrounds the words."""
    return " ".join(text.casefold().split()).strip(" *_`\"'.!()[]{}<>#")
