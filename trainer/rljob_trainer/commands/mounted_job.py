"""A job as the operator hands it to its pods: the mounted file, where claims are, and where the job's state belongs."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rljob_api import cluster, load_jobs
from rljob_api.locations import READ, STATE, locations
from rljob_api.resolved import ResolvedJob
from rljob_trainer.checkpoints.finding import holds_checkpoints
from rljob_trainer.commands.job_file import checked_job
from rljob_trainer.commands.places import on_cluster
from rljob_trainer.driver.run import RunOptions
from rljob_trainer.errors import DeadlineError, JobFileError

if TYPE_CHECKING:
    from rljob_trainer.control.http import Listening

_MOUNT_SECONDS = 180.0
"""How long the kubelet may take to bring a changed ConfigMap into the pod (a minute or two by default)."""


def mounted_job(file: Path, generation: int, storage: Path, *, patience: float = _MOUNT_SECONDS) -> ResolvedJob:
    """The job of ``file`` with every ``pvc://claim/path`` as the path below ``storage``.

    Waits until the file has the generation or a newer one. Raises ``DeadlineError`` when it doesn't get it,
    ``JobFileError`` when it cannot be read, and ``JobInvalid``.
    """
    deadline = time.monotonic() + patience
    while True:
        document = _read(file)
        found = _generation(document)
        if found >= generation:
            break
        if time.monotonic() > deadline:
            raise DeadlineError(
                f"{file} still has generation {found} after {patience:.0f} s, but generation {generation} is required; "
                "check that the ConfigMap is not mounted with subPath, which prevents updates"
            )
        time.sleep(1.0)
    for place in locations(document.get("spec", {}), (*READ, *STATE)):
        place.rewrite(cluster.pod_path(place.value, str(storage)))
    job = load_jobs(json.dumps(document, indent=1) + "\n")[0]
    if job.spec.restore is not None and holds_checkpoints(on_cluster(job).kept):
        # It goes on from its own: what it began with may be gone by now.
        job = job.model_copy(update={"spec": job.spec.model_copy(update={"restore": None})})
    # Modules of custom rewards come from spec.code, which is on the interpreter's path.
    return checked_job(job, file.parent, code=[Path(entry) for entry in sys.path if entry])


def options_of(job: ResolvedJob, args: argparse.Namespace, listening: Listening) -> RunOptions:
    """How `rljob drive` runs the job. Raises ``JobFileError`` outside of a Ray cluster."""
    if "RAY_ADDRESS" not in os.environ:
        raise JobFileError("rljob drive must run as a Ray job (RAY_ADDRESS is not set); use rljob run instead")
    places = on_cluster(job)
    return RunOptions(
        output=places.output,
        base=args.file.parent,
        restore=None if job.spec.restore is None else job.spec.restore.from_,
        state=places.state,
        listening=listening,
        attempt=args.attempt,
        generation=args.generation,
        by_role=True,
        storage=args.storage,
        keeps_state=job.spec.checkpoint.uri is not None,
    )


def _read(file: Path) -> dict[str, Any]:
    try:
        document = json.loads(file.read_text())
    except OSError as error:
        raise JobFileError(f"{file} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise JobFileError(f"{file} is not valid JSON written by the operator: {error}") from error
    if not isinstance(document, dict):
        raise JobFileError(f"{file} is not JSON written by the operator: it is not an object")
    return document


def _generation(document: dict[str, Any]) -> int:
    annotations = (document.get("metadata") or {}).get("annotations") or {}
    text = str(annotations.get(cluster.GENERATION_ANNOTATION, "0"))
    return int(text) if text.isdigit() else 0
