"""The end of an episode before its program's: because its group is to be trained now.

A program waits in calls of ours, and for things of its own. The first are interrupted at once, and raise
``EpisodeOverError``, as do all that it makes from then on. Whatever else it waits for has a moment to come to its end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_PARTING_SECONDS = 1.0
"""What a program has for its end."""


class EpisodeOverError(Exception):
    """Nothing more is asked in this episode: it has had its turns, or the next one has no room, or its group is to be
    trained now. It ends as one that was cut; a program that has something to do then may catch this, do it, and
    return."""


class NoRoomError(EpisodeOverError):
    """What the model is asked to go on from leaves no room for an answer. Another context may be shorter."""


class Curfew:
    """Whether an episode is over, and who has to learn of it."""

    def __init__(self) -> None:
        self.is_over = False
        self.has_cut = False
        """Whether the program was told so: it may have come to its end by itself."""
        self.asking = 0
        """Questions to the model that are not answered."""
        self._in_calls: set[asyncio.Task[Any]] = set()
        self._program: asyncio.Task[Any] | None = None
        self._interrupted: set[asyncio.Task[Any]] = set()
        self._parting: asyncio.TimerHandle | None = None

    def end(self) -> None:
        """The episode is over."""
        if self.is_over:
            return
        self.is_over = True
        for task in self._in_calls:
            self._interrupt(task)
        if self._program is not None:
            self._part()

    def _part(self) -> None:
        self._parting = asyncio.get_running_loop().call_later(_PARTING_SECONDS, self._has_parted)

    def _has_parted(self) -> None:
        if self.asking:  # an answer that is ended comes soon, and belongs to the episode
            self._part()
        elif self._program is not None:
            self._interrupt(self._program)

    def check(self) -> None:
        """Raises ``EpisodeOverError`` when it is over."""
        if self.is_over:
            self.has_cut = True
            raise EpisodeOverError("the episode's group must be trained now")

    @contextmanager
    def program(self) -> Iterator[None]:
        """Inside, the present task runs the episode's program. Raises ``EpisodeOverError``."""
        self._program = asyncio.current_task()
        try:
            with self._told(self._program):
                yield
        finally:
            self._program = None
            if self._parting is not None:
                self._parting.cancel()

    @contextmanager
    def question(self) -> Iterator[None]:
        """Inside, the model is asked."""
        self.asking += 1
        try:
            yield
        finally:
            self.asking -= 1

    @contextmanager
    def call(self) -> Iterator[None]:
        """Inside, the present task waits in a call of ours. Raises ``EpisodeOverError``."""
        self.check()
        task = asyncio.current_task()
        assert task is not None
        self._in_calls.add(task)
        try:
            with self._told(task):
                yield
        finally:
            self._in_calls.discard(task)

    def _interrupt(self, task: asyncio.Task[Any]) -> None:
        self._interrupted.add(task)
        task.cancel()

    @contextmanager
    def _told(self, task: asyncio.Task[Any] | None) -> Iterator[None]:
        """Takes back the cancellation that was this curfew's, and no other one."""
        try:
            yield
        except asyncio.CancelledError:
            if task not in self._interrupted:
                raise
            self._interrupted.remove(task)
            if task.uncancel():
                raise
            self.check()
        else:
            if task in self._interrupted:  # what was interrupted has returned all the same
                self._interrupted.remove(task)
                task.uncancel()
