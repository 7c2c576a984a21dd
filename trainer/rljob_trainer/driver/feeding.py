"""The feed of one run with a look ahead, which tells at a step's boundary whether any prompt is left, so that the last
step is known to be the last. It never shows in the state: a resumed run starts with the prompt that was looked at.
"""

from __future__ import annotations

from datetime import datetime

from rljob_trainer.checkpoints.checkpoint import Checkpoint, driver_state
from rljob_trainer.errors import CheckpointError
from rljob_trainer.pipeline.parts import Feed
from rljob_trainer.samples import Prompt


def date_of_prompts(checkpoint: Checkpoint | None) -> datetime:
    """The date that chat templates write into all prompts of a run (Llama 3.2's has "Today Date"): that of its
    beginning, also after midnight and after a resume, else prompts would not be those that they were. Of another run's
    checkpoint too, since its data and its open groups go on. Raises ``CheckpointError``.
    """
    if checkpoint is None:
        return datetime.now()
    try:
        date = driver_state(checkpoint.files()).get("feed", {}).get("date")
        return datetime.now() if date is None else datetime.fromisoformat(date)
    except (AttributeError, TypeError, ValueError) as error:
        raise CheckpointError(f"checkpoint {checkpoint.place} was written by another version: {error!r}") from error


class RunFeed:
    """A ``pipeline.parts.Feed`` over another one."""

    def __init__(self, feed: Feed) -> None:
        self._feed = feed
        self._peeked: Prompt | None = None
        self._state_before_peek: dict[str, object] | None = None

    def next(self) -> Prompt | None:
        if self._state_before_peek is not None:
            prompt, self._peeked, self._state_before_peek = self._peeked, None, None
            return prompt
        return self._feed.next()

    @property
    def exhausted(self) -> bool:
        """Whether ``next`` would return None."""
        if self._state_before_peek is None:
            self._state_before_peek = self._feed.state_dict()
            self._peeked = self._feed.next()
        return self._peeked is None

    def state_dict(self) -> dict[str, object]:
        """The position behind the prompts that ``next`` has returned."""
        return self._feed.state_dict() if self._state_before_peek is None else self._state_before_peek
