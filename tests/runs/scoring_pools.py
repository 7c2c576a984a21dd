"""What tests read of a pool that scores (reward models, judges) in a driver's status."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from driver_client import Client

from rljob_api.status import ReplicaStatus, ScoringPoolStatus

_UNHURRIED = """
import asyncio

async def score(response):
    await asyncio.sleep(1)
    return 0.0
"""


def unhurried(folder: Path) -> dict[str, Any]:
    """A reward function beside the job file in ``folder`` that adds nothing to a score, after a second: a run that
    goes on while pods come and go leaves the processors to them."""
    (folder / "unhurried.py").write_text(_UNHURRIED)
    return {"type": "custom", "function": "unhurried:score"}


@dataclass(frozen=True)
class SeenPool:
    """One pool as its driver tells of it."""

    client: Client
    kind: Literal["reward_model", "judge"]

    @property
    def status(self) -> ScoringPoolStatus:
        pools = self.client.status().pools
        pool = pools.reward_model if self.kind == "reward_model" else pools.judge
        assert pool is not None
        return pool

    @property
    def serving(self) -> dict[str | None, ReplicaStatus]:
        """The replicas that take work, by their pods."""
        return {replica.pod: replica for replica in self.status.replicas if replica.state == "serving"}

    @property
    def waits(self) -> str:
        """What it is said to wait for."""
        who = f"the {self.kind.replace('_', ' ')} pool"
        return "".join(wait.reason for wait in self.client.status().beside if wait.who == who)

    @property
    def safe_to_delete(self) -> list[str | None]:
        """Pods that nothing uses any more."""
        return [replica.pod for replica in self.status.replicas if replica.safe_to_delete]
