"""The feed of one run, which reads beside the event loop: data may lie on storage that does not answer.

It also looks one prompt ahead, which tells at a step's boundary whether any is left, so that the last step is known to
be the last. What was read and not handed out never shows in the state: a resumed run starts with it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from datetime import datetime
from typing import Any, Protocol

from rljob_trainer.aside import aside
from rljob_trainer.checkpoints.checkpoint import Checkpoint, driver_state
from rljob_trainer.episodes.episode import Prompt
from rljob_trainer.errors import CheckpointError


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


class PromptSource(Protocol):
    """What the prompts are read from (``data.feed.PromptFeed``); its calls may wait for files."""

    def next(self) -> Prompt | None: ...

    def state_dict(self) -> dict[str, Any]: ...


class RunFeed:
    """A ``pipeline.parts.Feed`` over a feed that may block."""

    def __init__(self, feed: PromptSource) -> None:
        self._feed = feed
        self._ahead: deque[tuple[Prompt | None, dict[str, Any]]] = deque()
        """Prompts that were read and not handed out, each with the position behind it; None is the data's end."""
        self._position: dict[str, Any] | None = None
        """Behind the last prompt that was handed out; None: nothing was read yet."""
        self._reading = asyncio.Lock()

    async def begin(self) -> None:
        """Notes where the feed stands, which reads some rows of the data."""
        self._position = await aside(self._feed.state_dict)

    async def prepare(self, prompts: int) -> bool:
        if self._has(prompts):
            return True
        async with self._reading:
            if (missing := prompts - len(self._ahead)) > 0 and not self._has(prompts):
                self._ahead.extend(await aside(lambda: self._read(missing)))
        return False

    def next(self) -> Prompt | None:
        if not self._ahead:
            self._ahead.extend(self._read(1))
        prompt, position = self._ahead[0]
        if prompt is not None:  # the end stays where it is
            self._position = position
            self._ahead.popleft()
        return prompt

    async def exhausted(self) -> bool:
        """Whether ``next`` would return None."""
        while not await self.prepare(1):
            pass
        return self._ahead[0][0] is None

    def state_dict(self) -> dict[str, Any]:
        """The position behind the prompts that ``next`` has returned."""
        return self._feed.state_dict() if self._position is None else self._position

    def _has(self, prompts: int) -> bool:
        return len(self._ahead) >= prompts or bool(self._ahead and self._ahead[-1][0] is None)

    def _read(self, prompts: int) -> list[tuple[Prompt | None, dict[str, Any]]]:
        """The next ``prompts`` prompts, or those that are left and None."""
        if self._position is None:
            self._position = self._feed.state_dict()
        read: list[tuple[Prompt | None, dict[str, Any]]] = []
        while len(read) < prompts and not (read and read[-1][0] is None):
            prompt = self._feed.next()
            read.append((prompt, self._feed.state_dict()))
        return read
