"""Rules about the job's name, checkpoints, validation, retries and deadlines."""

from __future__ import annotations

import re
from collections.abc import Iterator

from rljob_api.cluster import PVC
from rljob_api.locations import READ, STATE, locations, place_in_schema
from rljob_api.rules.cel import ROOT, SPEC, Cel, one_of, text
from rljob_api.rules.registry import Job, rule
from rljob_api.spec.job import MAX_NAME
from rljob_api.violations import Violation

STATE_PLACES = r"(pvc://|s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/|$))"
"""How addresses of state begin. Models and data are read from other stores too. Names of buckets are as S3 has them."""
RESERVED_NAMES = ("head", "headgroup", "rljob", "rljob-operator")


@rule(not_in_cel="bounds of metadata.name stand in the schema")
def name_leaves_room_for_children(job: Job) -> Iterator[Violation]:
    name = job.metadata.name
    if len(name) > MAX_NAME:
        yield Violation(
            "metadata.name",
            f"has {len(name)} characters, but pod names are derived from it",
            f"use at most {MAX_NAME}",
        )


@rule(not_in_cel="bounds of metadata.name stand in the schema")
def name_is_a_dns_label(job: Job) -> Iterator[Violation]:
    # Services are named after the job, and theirs must start with a letter and have no dots.
    name = job.metadata.name
    if not re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name):
        yield Violation(
            "metadata.name",
            f'"{name}" cannot be part of a host name',
            "use lower-case letters, digits and '-', starting with a letter",
        )


@rule(
    cel=Cel(
        ROOT,
        f"!(self.metadata.name in {one_of(RESERVED_NAMES)})",
        "the name is reserved; choose another",
        ".metadata.name",
    )
)
def name_is_not_reserved(job: Job) -> Iterator[Violation]:
    if job.metadata.name in RESERVED_NAMES:
        yield Violation("metadata.name", f'"{job.metadata.name}" is reserved', "choose another name")


@rule(
    cel=Cel(
        SPEC,
        "!has(self.validation.every) || (has(self.data.validation) && size(self.data.validation) > 0)",
        "there is no data to validate on; add data.validation, or remove it",
        ".validation.every",
    )
)
def validation_has_data(job: Job) -> Iterator[Violation]:
    if job.spec.validation.every is not None and not job.spec.data.validation:
        yield Violation("spec.validation.every", "there is no data to validate on", "add data.validation, or remove it")


@rule(
    cel=[
        Cel(
            at,
            f"!has(self.{field}) || !self.{field}.matches('^[A-Za-z][A-Za-z0-9+.-]*://') || "
            f"self.{field}.matches({text(f'^{STATE_PLACES}')})",
            "checkpoints cannot be kept there; use pvc://claim/path, s3://bucket/path (3 to 63 of a-z 0-9 - .) or a "
            "folder",
            f".{field}",
        )
        for at, field in map(place_in_schema, STATE)
    ]
)
def locations_have_known_schemes(job: Job) -> Iterator[Violation]:
    for place in locations(job.spec, STATE):
        path, location = place.path, place.value
        scheme = re.match(r"([A-Za-z][A-Za-z0-9+.\-]*)://", location)
        if not scheme or re.match(STATE_PLACES, location):
            continue
        if scheme[0] == "s3://":
            bucket = location.removeprefix("s3://").partition("/")[0]
            yield Violation(
                path,
                f'"{bucket}" is not a bucket name, which has 3 to 63 lower-case letters, digits, "-" and ".", with a '
                "letter or digit at both ends",
                "write s3://bucket/path",
            )
        else:
            yield Violation(
                path,
                f'checkpoints cannot be kept in "{scheme[0]}..."',
                "use pvc://claim/path, s3://bucket/path, or a folder for rljob run",
            )


@rule(
    cel=[
        Cel(
            at,
            f"!has(self.{field}) || !self.{field}.startsWith('pvc://') || "
            f"(self.{field}.matches('^pvc://[a-z0-9]([-a-z0-9.]*[a-z0-9])?(/|$)') && "
            f"!self.{field}.matches('(^|/)[.][.](/|$)'))",
            "is not a path in a volume; write pvc://claim/path, without ..",
            f".{field}",
        )
        for at, field in map(place_in_schema, (*STATE, *READ))
    ]
)
def volume_locations_name_a_claim(job: Job) -> Iterator[Violation]:
    for place in locations(job.spec, (*STATE, *READ)):
        if place.value.startswith(PVC):
            claim = place.value.removeprefix(PVC).partition("/")[0]
            if not re.fullmatch(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?", claim):
                problem = f'"{claim}" is not a PersistentVolumeClaim name'
                yield Violation(place.path, problem, "write pvc://claim/path")
            elif ".." in place.value.split("/"):
                yield Violation(place.path, "leaves its volume", "write the path without ..")


@rule(
    cel=Cel(
        ("spec", "retry"),
        "self.backoffSeconds <= self.maxBackoffSeconds",
        "is more than maxBackoffSeconds; lower it, or raise maxBackoffSeconds",
        ".backoffSeconds",
    )
)
def backoff_grows(job: Job) -> Iterator[Violation]:
    retry = job.spec.retry
    if retry.backoff_seconds > retry.max_backoff_seconds:
        yield Violation(
            "spec.retry.backoffSeconds",
            f"{retry.backoff_seconds} is more than maxBackoffSeconds = {retry.max_backoff_seconds}",
            "lower it, or raise maxBackoffSeconds",
        )


@rule(
    cel=[
        Cel(
            ("spec", "deadlines"),
            f"!has(self.runSeconds) || self.{field} <= self.runSeconds",
            "is more than runSeconds, so it never takes effect; lower it",
            f".{field}",
        )
        for field in ("startSeconds", "progressSeconds")
    ]
)
def parts_of_the_run_fit_its_deadline(job: Job) -> Iterator[Violation]:
    deadlines = job.spec.deadlines
    whole = deadlines.run_seconds
    if whole is None:
        return
    for name, value in (("startSeconds", deadlines.start_seconds), ("progressSeconds", deadlines.progress_seconds)):
        if value > whole:
            yield Violation(
                f"spec.deadlines.{name}",
                f"{value} is more than runSeconds = {whole}, so it never takes effect",
                f"lower it to at most {whole}",
            )
