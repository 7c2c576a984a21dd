"""``job.yaml`` of an output folder: the job with everything filled in, which runs again as it lies there."""

from __future__ import annotations

import glob
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from rljob_api.resolved import ResolvedJob


def write_job(path: Path, job: ResolvedJob, base: Path) -> None:
    """Relative paths start at the job file's folder ``base``; this file lies in another, so here they are absolute."""
    document = job.document()
    for holder, name in _sources(document["spec"]):
        if isinstance(source := holder.get(name), str):
            holder[name] = _from_anywhere(source, base)
    path.write_text(yaml.safe_dump(document, sort_keys=False, allow_unicode=True))


def _sources(spec: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str]]:
    """Where a job names files: the maps and the fields in them."""
    model, data = spec["model"], spec["data"]
    yield model, "source"
    yield model, "tokenizer"
    yield model.get("random", {}).get("tokenizer", {}), "source"
    yield data["train"], "source"
    for held_out in data.get("validation", ()):
        yield held_out, "source"


def _from_anywhere(source: str, base: Path) -> str:
    """What names no file here (an address, a hub id) stays as it is."""
    if "://" in source:
        return source
    path = base.resolve() / Path(source).expanduser()
    return str(path) if path.exists() or glob.glob(str(path)) else source
