"""Rules about the job's name."""

from __future__ import annotations

import re
from collections.abc import Iterator

from rljob_api.rules.registry import Job, rule
from rljob_api.spec.job import MAX_NAME
from rljob_api.violations import Violation

RESERVED_NAMES = ("head", "headgroup", "rljob", "rljob-operator")


@rule
def name_leaves_room_for_children(job: Job) -> Iterator[Violation]:
    name = job.metadata.name
    if len(name) > MAX_NAME:
        yield Violation(
            "metadata.name",
            f"has {len(name)} characters, and the names of pods are made from it",
            f"use at most {MAX_NAME}",
        )


@rule
def name_is_a_dns_label(job: Job) -> Iterator[Violation]:
    # Services are named after the job, and theirs must start with a letter and have no dots.
    name = job.metadata.name
    if not re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name):
        yield Violation(
            "metadata.name",
            f'"{name}" cannot be part of a host name',
            "use lower-case letters, digits and '-', starting with a letter",
        )


@rule
def name_is_not_reserved(job: Job) -> Iterator[Violation]:
    if job.metadata.name in RESERVED_NAMES:
        yield Violation("metadata.name", f'"{job.metadata.name}" is reserved', "choose another name")
