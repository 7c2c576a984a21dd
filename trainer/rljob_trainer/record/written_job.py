"""``job.yaml`` of an output folder: the job with everything filled in, which runs again as it lies there."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from rljob_api.resolved import ResolvedJob
from rljob_trainer.telemetry.run_folder import writing


def write_job(path: Path, job: ResolvedJob, base: Path) -> None:
    """Relative paths start at the job file's folder ``base``; this file lies in another, so here they are absolute.
    Raises ``OutputError``."""
    _write_for_owner(path, yaml.safe_dump(document_anywhere(job, base), sort_keys=False, allow_unicode=True))


def document_anywhere(job: ResolvedJob, base: Path) -> dict[str, Any]:
    """The job as plain data, with absolute paths of the files and folders that are there."""
    document: dict[str, Any] = job.document()
    for holder, name in sources_of(document["spec"]):
        if isinstance(source := holder.get(name), str):
            holder[name] = _from_anywhere(source, base)
    return document


def _write_for_owner(path: Path, text: str) -> None:
    """Only the owner may read it: values of ``env`` may be keys and passwords."""
    with writing(path):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            os.fchmod(descriptor, 0o600)  # one that an earlier run has left, before there is anything in it
            file.write(text)


def sources_of(spec: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str]]:
    """Where a job names files: the maps and the fields in them."""
    model, data = spec["model"], spec["data"]
    yield model, "source"
    yield model, "tokenizer"
    yield model.get("random", {}).get("tokenizer", {}), "source"
    yield data["train"], "source"
    for part in data["train"].get("parts", ()):
        yield part, "source"
    for held_out in data.get("validation", ()):
        yield held_out, "source"
    for function in spec["reward"]["functions"]:
        yield function.get("rewardModel", {}), "source"
    yield spec.get("judge", {}).get("model", {}), "source"
    yield spec["algorithm"].get("critic", {}).get("model", {}), "source"


def _from_anywhere(source: str, base: Path) -> str:
    """What names no file here (an address, a hub id) stays as it is."""
    if "://" in source:
        return source
    path = base.resolve() / Path(source).expanduser()
    return str(path) if path.exists() or glob.glob(str(path)) else source
