"""``job.yaml`` of an output folder: the job with everything filled in, which runs again as it lies there."""

from __future__ import annotations

import glob
import os
from pathlib import Path
from typing import Any

import yaml

from rljob_api.locations import READ, locations
from rljob_api.resolved import ResolvedJob
from rljob_trainer.telemetry.run_folder import writing


def write_job(path: Path, job: ResolvedJob, base: Path) -> None:
    """Relative paths start at the job file's folder ``base``; this file lies in another, so here they are absolute.
    Raises ``OutputError``."""
    _write_for_owner(path, yaml.safe_dump(document_anywhere(job, base), sort_keys=False, allow_unicode=True))


def document_anywhere(job: ResolvedJob, base: Path) -> dict[str, Any]:
    """The job as plain data, with absolute paths of the files and folders that are there."""
    document: dict[str, Any] = job.document()
    for place in locations(document["spec"], READ):
        place.rewrite(_from_anywhere(place.value, base))
    return document


def _write_for_owner(path: Path, text: str) -> None:
    """Only the owner may read it: values of ``env`` may be keys and passwords."""
    with writing(path):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            os.fchmod(descriptor, 0o600)  # one that an earlier run has left, before there is anything in it
            file.write(text)


def _from_anywhere(source: str, base: Path) -> str:
    """What names no file here (an address, a hub id) stays as it is."""
    if "://" in source:
        return source
    path = base.resolve() / Path(source).expanduser()
    return str(path) if path.exists() or glob.glob(str(path)) else source
