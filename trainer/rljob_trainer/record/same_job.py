"""A run goes on with the job that it began with: what the API server sees to on a cluster, for a run on one machine."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rljob_api import JobInvalid, load_jobs, resolve
from rljob_api.crd.changes import immutable
from rljob_api.locations import READ, locations
from rljob_api.resolved import ResolvedJob
from rljob_trainer.errors import JobFileError
from rljob_trainer.record.written_job import document_anywhere


def check_unchanged(written: Path, job: ResolvedJob, base: Path, report: Callable[[str], None]) -> None:
    """Compares ``job``, whose relative paths start at ``base``, with a run's ``job.yaml``, in the fields that no job
    on a cluster may change either. Raises ``JobFileError`` naming those that differ.

    A file or folder may have been moved, so of its path only the last part counts: what is in it is compared with the
    checkpoint. A ``job.yaml`` that this version cannot read is told to ``report``, and nothing is compared.
    """
    try:
        (before,) = load_jobs(written)
    except (OSError, ValueError, JobInvalid) as problem:
        reason = str(problem).partition("\n")[0]
        report(f"{written} cannot be read ({reason}), so it is unknown whether this job started the run")
        return
    then, now = (_comparable(resolved, base) for resolved in (resolve(before), job))
    changed = [
        f"spec.{'.'.join(field)}"
        for path in immutable()
        for field in _differences(_at(then, path), _at(now, path), path)
    ]
    if changed:
        raise JobFileError(
            f"{written.parent} holds a run of another job: {', '.join(changed)} cannot be changed once a run has "
            f"started. Set it as in {written}, use another --output for this job (with --resume {written.parent} it "
            "starts from this run's newest checkpoint), or start over with --resume never"
        )


def _comparable(job: ResolvedJob, base: Path) -> dict[str, Any]:
    document = document_anywhere(job, base)
    for place in locations(document["spec"], READ):
        if os.path.isabs(place.value):
            place.rewrite(os.path.basename(place.value))
    spec: dict[str, Any] = document["spec"]
    return spec


def _at(value: Any, path: tuple[str, ...]) -> Any:
    for name in path:
        value = value.get(name) if isinstance(value, dict) else None
    return value


def _differences(then: Any, now: Any, path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """The smallest fields in which two values differ; lists count as one."""
    if isinstance(then, dict) and isinstance(now, dict):
        for name in sorted(then.keys() | now.keys()):
            yield from _differences(then.get(name), now.get(name), (*path, name))
    elif then != now:
        yield path
