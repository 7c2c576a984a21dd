"""Where a learner's ranks live, and how long they are waited for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

_COLLECTIVE_SLACK_SECONDS = 120.0
"""For how much longer than any call the ranks' collectives wait: torch ends a process whose collective is late, and
then nobody learns whom it waited for."""
RUN_SLACK_SECONDS = 30.0
"""For how much longer than its own deadlines (``call_seconds``) a function is waited for that runs in the ranks for
others: its error names who is late, and ours would end the learner."""


@dataclass(frozen=True, slots=True)
class GroupOptions:
    """How ranks are placed and how long to wait for them."""

    resources: Mapping[str, Any] = field(default_factory=lambda: {"num_cpus": 1})
    """Ray options of each actor: num_cpus, num_gpus, runtime_env ..."""
    bundle: Mapping[str, float] = field(default_factory=dict)
    """What is reserved for ``together`` ranks and whoever shares their devices, on as few nodes as can be; empty:
    nothing is."""
    together: int = 1
    """Ranks that one bundle is for: those whose devices one engine takes."""
    nodes: Mapping[str, str] = field(default_factory=dict)
    """Labels of the nodes on which bundles may be."""
    start_seconds: float = 600.0
    """From the request to models that are ready."""
    call_seconds: float = 3600.0
    """Longest single call (an update, a score, a save)."""

    @property
    def collective_seconds(self) -> float:
        """After how long a collective of the ranks is given up: later than every wait of ours."""
        return max(self.start_seconds, self.call_seconds + RUN_SLACK_SECONDS) + _COLLECTIVE_SLACK_SECONDS
