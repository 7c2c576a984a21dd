"""Rules about checkpoints, validation, retries and deadlines."""

from __future__ import annotations

import re
from collections.abc import Iterator

from rljob_api.rules.registry import Job, rule
from rljob_api.violations import Violation

STATE_PLACES = r"(pvc://|s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/|$))"
"""How addresses of state begin. Models and data are read from other stores too. Names of buckets are as S3 has them."""


@rule
def validation_has_data(job: Job) -> Iterator[Violation]:
    if job.spec.validation.every is not None and not job.spec.data.validation:
        yield Violation("spec.validation.every", "there is no data to validate on", "add data.validation, or remove it")


@rule
def locations_have_known_schemes(job: Job) -> Iterator[Violation]:
    places = {"spec.checkpoint.uri": job.spec.checkpoint.uri}
    if job.spec.restore is not None:
        places["spec.restore.from"] = job.spec.restore.from_
    for path, location in places.items():
        scheme = re.match(r"([A-Za-z][A-Za-z0-9+.\-]*)://", location or "")
        if not scheme or re.match(STATE_PLACES, location or ""):
            continue
        if scheme[0] == "s3://":
            bucket = (location or "").removeprefix("s3://").partition("/")[0]
            yield Violation(
                path,
                f'"{bucket}" is not the name of a bucket: those have 3 to 63 lower-case letters, digits, "-" and ".", '
                "with a letter or digit at both ends",
                "write s3://bucket/path",
            )
        else:
            yield Violation(
                path,
                f'state can\'t be kept in "{scheme[0]}..."',
                "use pvc://claim/path, s3://bucket/path, or a folder for rljob run",
            )


@rule
def volume_locations_name_a_claim(job: Job) -> Iterator[Violation]:
    spec = job.spec
    places: list[tuple[str, str | None]] = [
        ("spec.model.source", spec.model.source),
        ("spec.checkpoint.uri", spec.checkpoint.uri),
        ("spec.restore.from", spec.restore.from_ if spec.restore else None),
    ]
    places += [(f"{path}.source", part.source) for path, part in job.train_parts]
    places += [(f"spec.data.validation[{i}].source", part.source) for i, part in enumerate(spec.data.validation)]
    for path, location in places:
        if location and location.startswith("pvc://"):
            claim = location.removeprefix("pvc://").partition("/")[0]
            if not re.fullmatch(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?", claim):
                yield Violation(path, f'"{claim}" is not the name of a PersistentVolumeClaim', "write pvc://claim/path")
            elif ".." in location.split("/"):
                yield Violation(path, "leaves its volume", "write the path without ..")


@rule
def backoff_grows(job: Job) -> Iterator[Violation]:
    retry = job.spec.retry
    if retry.backoff_seconds > retry.max_backoff_seconds:
        yield Violation(
            "spec.retry.backoffSeconds",
            f"{retry.backoff_seconds} is more than maxBackoffSeconds = {retry.max_backoff_seconds}",
            "lower it, or raise maxBackoffSeconds",
        )


@rule
def parts_of_the_run_fit_its_deadline(job: Job) -> Iterator[Violation]:
    deadlines = job.spec.deadlines
    whole = deadlines.run_seconds
    if whole is None:
        return
    for name, value in (("startSeconds", deadlines.start_seconds), ("progressSeconds", deadlines.progress_seconds)):
        if value > whole:
            yield Violation(
                f"spec.deadlines.{name}",
                f"{value} is more than runSeconds = {whole}, so it never counts",
                f"lower it to at most {whole}",
            )


@rule
def stop_comes_before_the_deadline(job: Job) -> Iterator[Violation]:
    seconds, whole = job.resolved.stop.seconds, job.spec.deadlines.run_seconds
    if seconds is not None and whole is not None and seconds >= whole:
        yield Violation(
            "spec.stop.seconds",
            f"{seconds} is not less than deadlines.runSeconds = {whole}, so the job would fail instead of ending",
            "lower it, or raise deadlines.runSeconds",
        )
