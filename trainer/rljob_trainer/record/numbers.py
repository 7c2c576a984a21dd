"""Version numbers are announced before they are used: in the fence's file, and in the ledger."""

from __future__ import annotations

from rljob_trainer.record.fence import Fence
from rljob_trainer.record.ledger import Ledger
from rljob_trainer.waits import Waits


class VersionNumbers:
    """The numbers that this attempt publishes weights under; each is used once in a run, whatever becomes of it."""

    def __init__(self, fence: Fence, ledger: Ledger, waits: Waits) -> None:
        self._fence, self._ledger, self._waits = fence, ledger, waits

    async def announce(self, version: int, step: int) -> None:
        """``version`` is about to be published after ``step`` steps. Raises ``FencedError`` when this is no longer the
        newest attempt, and ``CheckpointError`` and ``OutputError`` when the number cannot be written down in time."""
        ledger, patience = self._ledger, self._ledger.patience_seconds
        with self._waits.wait("trainer", "the number of a version to be recorded", patience):
            await self._fence.announce_patiently(version, patience)
        with self._waits.wait("trainer", f"{ledger.path} to accept the number of a version", patience):
            await ledger.announce(version, step)
