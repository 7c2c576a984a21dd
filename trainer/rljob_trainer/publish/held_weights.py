"""Which versions' weights the learner has, for whoever wants to send them to an engine."""

from __future__ import annotations

from collections.abc import Collection


class HeldWeights:
    """What the trainer says of the learner's weights, and publications read."""

    def __init__(self, *, keeps_first: bool = False) -> None:
        """``keeps_first``: the learner keeps a copy of the weights that a version begins with until its last pull."""
        self._keeps_first = keeps_first
        self._updating = False
        """Whether they are being changed, or were when that was cut off."""
        self._present: int | None = 0
        """The version that the learner's weights are, or are being published as; None between an update and that."""
        self._first: int | None = None
        """The version that the last update belonged to, with whose weights it began."""
        self._before: int | None = 0
        """What ``_present`` was when the update began."""

    @property
    def versions(self) -> Collection[int]:
        """That of the learner's present weights, and that of those which it kept when the last version began. Between
        two pulls of a version only the latter; none while it updates.

        Which of them engines are to have is the pool's to say: when a publication is through, the kept ones are the
        former version's.
        """
        if self._updating:
            return ()
        versions = (self._present, self._first if self._keeps_first else None)
        return [version for version in versions if version is not None]

    @property
    def updating(self) -> bool:
        """Whether the learner's weights are being changed, or were when that was cut off."""
        return self._updating

    def update_begins(self) -> None:
        """From now on they are of no version."""
        self._before, self._present, self._updating = self._present, None, True

    def update_given_up(self) -> None:
        """They are what they were before ``update_begins``."""
        self._present, self._updating = self._before, False

    def updated(self, version: int) -> None:
        """A batch of ``version`` has been trained; that version began with weights that may be kept."""
        self._first, self._updating = version, False

    def replaced(self) -> None:
        """Others are being read, and nothing is kept of these."""
        self._present = self._first = None

    def published_as(self, version: int) -> None:
        """They are ``version`` from now on."""
        self._present = version
