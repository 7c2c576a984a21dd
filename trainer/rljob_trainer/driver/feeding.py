"""The feed of one run with a look ahead, which tells at a step's boundary whether any prompt is left, so that the last
step is known to be the last. It never shows in the state: a resumed run starts with the prompt that was looked at.
"""

from __future__ import annotations

from rljob_trainer.pipeline.parts import Feed
from rljob_trainer.samples import Prompt


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
