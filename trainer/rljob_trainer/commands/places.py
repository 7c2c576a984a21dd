"""Where a job's state is kept: below ``checkpoint.uri``, in a folder of the job's own."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from rljob_api import RLJob
from rljob_api.cluster import PVC
from rljob_api.resolved import ResolvedJob
from rljob_trainer.storage import is_address

SCRATCH = Path("/tmp/rljob")
"""On a cluster: what is not kept, and the working copy of what is kept in a bucket."""


@dataclass(frozen=True, slots=True)
class Places:
    """``output`` is the run's folder; ``state`` an address of which that is a working copy, or None."""

    output: Path
    state: str | None

    @property
    def kept(self) -> str:
        """Where the state is, for the next attempt."""
        return self.state or str(self.output)


def on_cluster(job: RLJob | ResolvedJob) -> Places:
    """``<checkpoint.uri>/<namespace>/<name>-<uid>``; the claim in the job file has become a path by now."""
    uri, own = job.spec.checkpoint.uri, _own(job)
    if uri is not None and is_address(uri):
        return Places(SCRATCH / own, f"{uri.rstrip('/')}/{own}")
    return Places((SCRATCH if uri is None else Path(uri)) / own, None)


def on_this_machine(job: RLJob | ResolvedJob, output: Path | None, base: Path) -> Places:
    """``output`` is what the user asked for; else ``checkpoint.uri``, if that is a folder, or ``runs/<name>``.

    A claim means nothing here: the state stays in the output folder. ``base``: where relative paths start.
    """
    uri, own = job.spec.checkpoint.uri, _own(job)
    here = output or Path("runs") / job.metadata.name
    if uri is None or uri.startswith(PVC):
        return Places(here, None)
    if is_address(uri):
        return Places(here, f"{uri.rstrip('/')}/{own}")
    return Places(output or base / Path(uri).expanduser() / own, None)


def _own(job: RLJob | ResolvedJob) -> str:
    namespace = os.environ.get("RLJOB_NAMESPACE", job.metadata.namespace or "default")
    name = os.environ.get("RLJOB_NAME", job.metadata.name)
    return f"{namespace}/{name}-{os.environ.get('RLJOB_UID', 'local')}"
