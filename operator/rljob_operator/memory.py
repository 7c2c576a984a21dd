"""What the executor remembers of a job between two looks, beside what the API server keeps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime

from rljob_api.status import DriverStatus
from rljob_operator.observed import ClusterView, GroupView


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
    own: set[str] = field(default_factory=set)
    """Paths of objects that are known to be the job's."""
    sizes: tuple[str, tuple[GroupView, ...]] | None = None
    """UID and groups of the newest cluster."""
    sized_since: datetime | None = None
    """Since when they have been as they are."""

    def note_sizes(self, clusters: Sequence[ClusterView], now: datetime) -> None:
        """Takes the sizes of the newest cluster's groups as they are now."""
        sizes = (clusters[-1].uid, clusters[-1].groups) if clusters else None
        if sizes != self.sizes:
            self.sizes, self.sized_since = sizes, now
