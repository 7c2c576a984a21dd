"""What all spec models share: strictness, the classes of change, and the text and list types the fields are made of.

Nothing here knows a particular field. Everything is bounded, because a Kubernetes structural schema is made from these
models: no unions but int-or-string quantities, no optional-and-null (null means absent), choices by a plain enum field.

Models are named after their section. Where the trainer has a class for the thing itself, the section's name ends in
Spec: ``OptimizerSpec`` says what an optimizer shall be like.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, JsonValue, model_validator
from pydantic.alias_generators import to_camel

ChangeClass = Literal["live", "suspended", "never"]


@dataclass(frozen=True, slots=True)
class Change:
    """When a field of an existing job may be changed. Written on a field, it holds for everything below it."""

    when: ChangeClass

    @property
    def sentence(self) -> str:
        return {
            "live": "may be changed while the job runs",
            "suspended": "may be changed while the job is suspended",
            "never": "cannot be changed after creation",
        }[self.when]


LIVE = Change("live")
SUSPENDED = Change("suspended")
NEVER = Change("never")


@dataclass(frozen=True, slots=True)
class Fallback:
    """What an absent field stands for when no preset says otherwise.

    Such a field is None by default, and not this value, because there are rules about whether it was written. The
    description ends with it ("Default: 1."), ``rljob_api.resolve`` fills it in, and the rules' CEL reads it.
    """

    value: Any

    @property
    def sentence(self) -> str:
        said = str(self.value).lower() if isinstance(self.value, bool) else f"{self.value}"
        if isinstance(self.value, float):
            said = f"{self.value:g}".replace("e-0", "e-")
        return f"Default: {said}."


@dataclass(frozen=True, slots=True)
class Preserve:
    """Marks a field whose content is passed through unchecked (unknown fields are kept by the API server)."""


@dataclass(frozen=True, slots=True)
class MapKeys:
    """Marks a list of objects that Kubernetes merges by these keys; their values must be unique in the list."""

    keys: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Format:
    """Marks what a document has as text in a format of OpenAPI, such as date-time (RFC 3339)."""

    name: str
    longest: int
    """Most characters."""


@dataclass(frozen=True, slots=True)
class IntOrString:
    """Marks text that may be written as a whole number too (a Kubernetes quantity)."""


class SpecModel(BaseModel):
    """Base of all models: frozen, no unknown fields, no conversion between types, NaN and infinity refused.

    YAML names are camelCase, Python names snake_case. A key whose value is null counts as absent,
    as for the API server.
    """

    model_config = ConfigDict(
        alias_generator=to_camel,
        validate_by_name=True,
        validate_by_alias=True,
        strict=True,
        frozen=True,
        extra="forbid",
        allow_inf_nan=False,
        protected_namespaces=(),
    )

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, value: Any) -> Any:
        if isinstance(value, dict):
            # A name that doesn't exist is wrong whatever its value.
            return {k: v for k, v in value.items() if v is not None or k not in cls._names()}
        return value

    @classmethod
    @cache
    def _names(cls) -> frozenset[str]:
        fields = cls.model_fields.items()
        return frozenset(name for field, info in fields for name in (field, info.alias or to_camel(field)))

    @classmethod
    @cache
    def fallbacks(cls) -> Mapping[str, Any]:
        """What absent fields stand for (``Fallback``), by their Python names."""
        return {
            name: mark.value
            for name, info in cls.model_fields.items()
            for mark in info.metadata
            if isinstance(mark, Fallback)
        }

    def document(self) -> dict[str, Any]:
        """The model as plain data with YAML names, without what was left at its default."""
        return self.model_dump(mode="json", by_alias=True, exclude_defaults=True)


def _without_nulls(value: Any) -> Any:
    return {name: item for name, item in value.items() if item is not None} if isinstance(value, dict) else value


NullIsAbsent = BeforeValidator(_without_nulls)
"""Marks a map by free names: an entry whose value is null counts as absent, as for the API server."""

T = TypeVar("T")
Listed = Annotated[tuple[T, ...], Field(strict=False)]
"""An immutable list. (strict=False only lets a YAML list become a tuple; the items stay strict.)"""


def _quantity_text(value: Any) -> Any:
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


Quantity = Annotated[
    str,
    BeforeValidator(_quantity_text),
    Field(
        max_length=32,
        pattern=r"^[+]?([0-9]+|[0-9]+\.[0-9]*|\.[0-9]+)(([KMGTPE]i)|[numkMGTPE]|([eE][+-]?[0-9]{1,18}))?$",
    ),
    IntOrString(),
]
"""A Kubernetes quantity: 4, 500m, 16Gi."""

DNS_LABEL = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"
DNS_SUBDOMAIN = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$"
ENV_NAME = r"^[A-Za-z_][A-Za-z0-9_]*$"

DnsLabel = Annotated[str, Field(min_length=1, max_length=63, pattern=DNS_LABEL)]
DnsName = Annotated[str, Field(min_length=1, max_length=253, pattern=DNS_SUBDOMAIN)]
QueueName = Annotated[str, Field(min_length=1, max_length=63, pattern=DNS_SUBDOMAIN)]
"""Name of a Kueue queue, which is the value of a label too."""
EnvName = Annotated[str, Field(min_length=1, max_length=128, pattern=ENV_NAME)]
SourceName = Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9]([A-Za-z0-9_.\-/]*[A-Za-z0-9])?$")]
"""Name of a data source or reward part, as it appears in metric names."""
ShortText = Annotated[str, Field(min_length=1, max_length=253)]
Location = Annotated[str, Field(min_length=1, max_length=1024)]
"""A path, hub id or URI."""
_PORT = r"(6553[0-5]|655[0-2]\d|65[0-4]\d{2}|6[0-4]\d{3}|[1-5]\d{4}|[1-9]\d{0,3})".replace(r"\d", "[0-9]")
_HOST = r"([A-Za-z0-9._\-]+|\[[0-9A-Fa-f:.]+\])"
BaseUrl = Annotated[
    str,
    Field(min_length=8, max_length=1024, pattern=rf"^https?://{_HOST}(:{_PORT})?(/[A-Za-z0-9._~%\-/]*)?$"),
]
"""No user, password or query: what is secret is no part of a job."""
LongText = Annotated[str, Field(max_length=16384)]
IN_MODULE = r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*:[A-Za-z_][A-Za-z0-9_]*"
FunctionPath = Annotated[str, Field(min_length=3, max_length=253, pattern=rf"^{IN_MODULE}$")]
"""``module:function`` (dots allowed in the module)."""
LABEL_NAME = r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
LabelKey = Annotated[
    str,
    Field(min_length=1, max_length=317, pattern=rf"^({DNS_SUBDOMAIN[1:-1]}/)?{LABEL_NAME}$"),
]
LabelValue = Annotated[str, Field(max_length=63, pattern=rf"^({LABEL_NAME})?$")]
_NAME_PART = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_DOMAIN_PART = r"(?:[a-zA-Z0-9]|[a-zA-Z0-9][a-zA-Z0-9-]*[a-zA-Z0-9])"
_DOMAIN = rf"(?:{_DOMAIN_PART}(?:\.{_DOMAIN_PART})*|\[[a-fA-F0-9:]+\])(?::[0-9]+)?"
_DIGEST = r"(?:sha256:[a-f0-9]{64}|sha384:[a-f0-9]{96}|sha512:[a-f0-9]{128})"
_TAG = r":[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}"
IMAGE = rf"^(?:{_DOMAIN}/)?{_NAME_PART}(?:/{_NAME_PART})*(?:{_TAG})?(?:@{_DIGEST})?$"
"""Reference to an image: [domain/]path[:tag][@digest] (grammar of github.com/distribution/reference)."""
EnvMap = Annotated[dict[EnvName, Annotated[str, Field(max_length=4096)]], Field(max_length=64), NullIsAbsent]
FreeForm = Annotated[dict[str, JsonValue], Field(max_length=64), Preserve()]
"""An object whose content is somebody else's schema."""
