"""What tests read of a pool that scores (reward models, judges) in a driver's status."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from driver_client import Client

from rljob_api.status import ReplicaStatus, ScoringPoolStatus


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
