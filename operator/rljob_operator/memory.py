"""What the executor remembers of a job between two looks, beside what the API server keeps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Self

from rljob_api.status import DriverStatus
from rljob_operator import names
from rljob_operator.observed import ClusterView, GroupView, PodView

WAITING = timedelta(seconds=15)
"""So long after it was made a pod that is not ready is late: images that have to be pulled take longer, and looking
once for what may be missing costs three calls."""


@dataclass(frozen=True)
class Mark:
    """By what an object is known again that the operator has written."""

    uid: str = ""
    applied: str = ""
    """When an apply of the operator's has changed it last; empty: not since it was created, or not known."""

    @classmethod
    def of(cls, written: Mapping[str, Any]) -> Self:
        metadata = written["metadata"]
        applied = (
            str(entry.get("time", ""))
            for entry in metadata.get("managedFields") or ()
            if (entry.get("manager"), entry.get("operation")) == (names.FIELD_MANAGER, "Apply")
        )
        return cls(str(metadata["uid"]), next(applied, ""))

    def put_back(self, before: Mark) -> bool:
        """Whether somebody had deleted or changed the object that was written as `before`."""
        anew = bool(before.uid) and self.uid != before.uid
        return anew or (bool(before.applied) and self.applied != before.applied)


@dataclass
class Memory:
    """What is remembered of a job between two looks. Losing it costs nothing but a little patience."""

    uid: str
    rejection: str = ""
    """Why the API server refused an action of the last look."""
    surroundings_rejection: str = ""
    """Why it refused something beside the cluster when that was looked after last."""
    changed: bool = False
    """This look has written what the next one decides on; the watch will bring no news of it."""
    progress_written: float = 0.0
    answer: DriverStatus | None = None
    """The driver's last answer: its last words are read after it has gone."""
    silent_since: datetime | None = None
    surroundings_due: float = 0.0
    """When (time.monotonic) to see next whether somebody has deleted what the pods need beside the cluster."""
    surroundings_kept: datetime | None = None
    """When that was seen to last."""
    own: dict[str, Mark] = field(default_factory=dict)
    """Objects that are known to be the job's, by path, as they were written last."""
    sizes: tuple[str, tuple[GroupView, ...]] | None = None
    """UID and groups of the newest cluster."""
    sized_since: datetime | None = None
    """Since when they have been as they are."""

    def keeps_waiting(self, pods: Sequence[PodView], now: datetime) -> bool:
        """Whether a pod has been waiting for a while, for something beside the cluster perhaps that was deleted since
        that was seen to last: a node has no job file or token to mount then."""
        waits = [pod.created for pod in pods if not (pod.ready or pod.ended or pod.deleting_since)]
        late = [created + WAITING for created in waits if created + WAITING <= now]
        return bool(late) and (self.surroundings_kept is None or self.surroundings_kept < max(late))

    def note_sizes(self, clusters: Sequence[ClusterView], now: datetime) -> None:
        """Takes the sizes of the newest cluster's groups as they are now."""
        sizes = (clusters[-1].uid, clusters[-1].groups) if clusters else None
        if sizes != self.sizes:
            self.sizes, self.sized_since = sizes, now
